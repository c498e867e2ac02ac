"""Helpers for tests of refused calls: a small model, and a check that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import (
    capture,
    make_graphed_callables,
)

BOTH = pytest.mark.parametrize("how", ["callable", "capture"])


class Net(nn.Module):
    """A square layer, a buffer and a layer without bias: one of each kind of state that can move."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale)


def graph(how: str, target: Any, *sample: Any, **options: Any) -> Any:
    """Graph `target` as a callable or as a captured function; call the result, also if `target` is a module."""
    if how == "callable":
        return make_graphed_callables(target, sample, **options)
    return capture(target, sample, **options)


def snapshot(*modules: nn.Module) -> list[Any]:
    """The values of parameters and buffers, their gradients, and the RNG states."""
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    grads = [(t.grad, None if t.grad is None else t.grad.clone()) for t in tensors]
    rng = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        rng += torch.cuda.get_rng_state_all()
    return [[t.detach().clone() for t in tensors], grads, rng]


@contextmanager
def refused(kind: type[Exception], *modules: nn.Module, match: str | None = None) -> Iterator[None]:
    """Check that the body raises `kind` and leaves parameters, buffers, gradients and RNG unchanged."""
    values, grads, rng = snapshot(*modules)
    with pytest.raises(kind, match=match):
        yield
    values_now, grads_now, rng_now = snapshot(*modules)
    assert all(map(torch.equal, values, values_now))
    for (held, value), (held_now, _) in zip(grads, grads_now, strict=True):
        assert held_now is held
        assert held is None or torch.equal(held, value)
    assert all(map(torch.equal, rng, rng_now))


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


def same(left: Any, right: Any) -> bool:
    return (left is None and right is None) or torch.equal(left, right)
