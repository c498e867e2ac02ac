"""Conjugate and negative views, in recordings and across the autograd boundary."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rollgraph.graph import capture
from rollgraph.graph import make_graphed_callables as graph
from tests.graph.comparisons import equal, example, second_example

# -- what can be recorded --------------------------------------------------------------------------


def _write_through_conjugate(z: Tensor) -> Any:
    z = z.clone()
    z.conj().mul_(2 + 1j)
    z.conj().imag.add_(1)  # a negative view
    return z, z.conj()


def _reshaped_conjugate(z: Tensor) -> Any:
    view = (z * 2).conj()
    view.t_()
    return view, view * 1


def _replaced_data(z: Tensor) -> Any:
    product, view = z * 2, (z * 3).conj()
    product.data = view
    return product * 1j, view


BITS: dict[str, Callable[[Tensor], Any]] = {
    "kept and used": lambda z: (lambda w: (w, (w * w.conj()).real))(torch.fft.fft(z)),
    "conjugate returned": lambda z: (z * 2).conj(),
    "both returned": lambda z: (lambda w: (w, w.conj(), w.conj().imag, w.real))(z * 2),
    "negative returned": lambda z: (z * 2).conj().imag,
    "negative view": lambda z: (lambda w: (w, torch._neg_view(w), torch._neg_view(w.conj()) * 1))(z * 2),
    "conjugate of a view": lambda z: (lambda w: (w, w[1:].t().conj(), w.conj()[:, ::2] + 1))(z * 2),
    "conjugate twice": lambda z: (lambda w: (w, w.conj().conj() * 1, w.conj().t().conj()))(z * 2),
    "adjoint": lambda z: (lambda w: (w, w.mH, w.mH @ w))(z * 2),
    "of the input": lambda z: (z.conj(), z.mH @ z, z.conj().imag),
    "of a constant": lambda z: (z.conj() @ torch.full((4, 4), 1 + 2j, dtype=z.dtype).conj(), z),
    "cat and stack": lambda z: (lambda w: (w, torch.cat([w, w.conj()]), torch.stack([w.conj().imag, w.imag])))(z * 2),
    "resolved": lambda z: (lambda w: (w, w.conj().resolve_conj(), w.conj().imag.resolve_neg()))(z * 2),
    "sorted": lambda z: (lambda w: (w, w.conj().imag.sort().values))(z * 2),
    "written": _write_through_conjugate,
    "t_": _reshaped_conjugate,
    "data": _replaced_data,
}  # fmt: skip


def _complex(make: Callable[[], Tensor]) -> Tensor:
    return torch.complex(make().double(), make().double().t() * 3)


@pytest.mark.parametrize("name", BITS)
def test_conjugate_and_negative_views_are_replayed(backend: str, device: torch.device, name: str) -> None:
    function = BITS[name]
    with torch.no_grad():
        graphed = capture(function, (_complex(example),), backend=backend)
        for make in (second_example, example, second_example):
            assert equal(graphed(_complex(make)), function(_complex(make)))
            assert equal(graphed(_complex(make).conj()), function(_complex(make).conj())), "the input is a view itself"


@pytest.mark.parametrize("name", [name for name in BITS if name not in ("written", "data")])
def test_gradients_pass_conjugate_and_negative_views(backend: str, device: torch.device, name: str) -> None:
    """The backward saves such views, receives them as gradients, and creates them."""
    weight = nn.Parameter(_complex(example).exp())
    twin = copy.deepcopy(weight)

    def loss_of(tree: Any) -> Tensor:
        leaves = [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor) and t.requires_grad]
        return sum((t * t.conj()).real.sum() + (t * 1j).real.sum() for t in leaves)

    def function(z: Tensor) -> Any:
        return BITS[name](z * weight * weight.conj().sin())

    graphed = graph(function, (_complex(example).requires_grad_(),), backend=backend)
    for make in (second_example, example):
        x, twin_x = _complex(make).requires_grad_(), _complex(make).requires_grad_()
        outputs, expected = graphed(x), BITS[name](twin_x * twin * twin.conj().sin())
        assert equal(outputs, expected)
        loss_of(outputs).backward()
        loss_of(expected).backward()
        torch.testing.assert_close(x.grad, twin_x.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(weight.grad, twin.grad, rtol=1e-12, atol=1e-12)


def test_a_captured_step_with_conjugate_views_equals_eager(backend: str, device: torch.device) -> None:
    """Forward and backward are one recording: autograd unpacks what it saved as another tensor object."""
    weight, outside = nn.Parameter(_complex(example).exp()), _complex(second_example)
    twin, view = copy.deepcopy(weight), outside.conj()

    def step(weight: Tensor, z: Tensor) -> Any:
        product = (z @ weight).conj()
        shifted = product.imag * view.imag + (product.mH @ view).real
        loss = (shifted.square() + (product * product.conj()).real).sum()
        loss.backward()
        return loss, product.detach(), shifted.detach()

    graphed = capture(lambda z: step(weight, z), (_complex(example),), backend=backend)
    for make in (second_example, example):
        assert equal(graphed(_complex(make)), step(twin, _complex(make)))
        torch.testing.assert_close(weight.grad, twin.grad, rtol=1e-12, atol=1e-12)
        outside.mul_(1 + 0.5j)  # read through its view
