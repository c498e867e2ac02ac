"""Gradients that are added to their buffers as they arrive: the same bits, and few of them alive at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rollgraph.graph import capture
from rollgraph.sharding import add_gradients

LAYERS = 12
WIDTH = 24


class Tied(nn.Module):
    """A chain of layers between an embedding and a head that are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Parameter(torch.randn(30, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed[ids]
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return (hidden @ self.embed.t()).logsumexp(-1).sum()


class Lifetimes(TorchDispatchMode):
    """How many of the gradients that are added to `buffers` are alive at once, whenever an operation runs."""

    def __init__(self, buffers: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._addresses = {buffer.data_ptr() for buffer in buffers}
        self._made: dict[int, StorageWeakRef] = {}
        self._alive: list[set[int]] = []  # at each operation, the storages made by then that are in use
        self._gradients: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (result,) if isinstance(result, Tensor) else ():
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made:  # its reference keeps the key from being used again
                self._made[storage._cdata] = StorageWeakRef(storage)
        if func is torch.ops.aten.add_.Tensor and args[0].data_ptr() in self._addresses:
            self._gradients.add(args[1].untyped_storage()._cdata)
        self._alive.append({key for key, reference in self._made.items() if not reference.expired()})
        return result

    @property
    def most(self) -> int:
        assert len(self._gradients) >= LAYERS
        return max(len(alive & self._gradients) for alive in self._alive)


def make_buffers(model: nn.Module) -> dict[Tensor, Tensor]:
    return {parameter: torch.zeros(parameter.shape) for parameter in model.parameters()}


def all_at_once(loss: Tensor, buffers: dict[Tensor, Tensor]) -> None:
    for buffer, gradient in zip(buffers.values(), torch.autograd.grad(loss, list(buffers)), strict=True):
        buffer.add_(gradient)


@pytest.mark.parametrize("backend", ["eager", "tape"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_bits_of_autograds_and_few_are_alive_at_once(backend: Any, dtype: torch.dtype) -> None:
    model = Tied().to(dtype)
    found: list[list[Tensor]] = []
    most: list[int] = []
    for add in (add_gradients, all_at_once):
        buffers = make_buffers(model)

        def step(ids: Tensor, add: Callable[..., None] = add, buffers: dict[Tensor, Tensor] = buffers) -> None:
            add(model(ids), buffers)

        graph = capture(step, (torch.zeros(7, dtype=torch.long),), backend=backend)
        assert not any(buffer.any() for buffer in buffers.values())
        for seed in range(2):  # the second call accumulates
            ids = torch.randint(30, (7,), generator=torch.Generator().manual_seed(seed))
            lifetimes = Lifetimes(list(buffers.values()))
            with lifetimes:
                graph(ids)
        found.append(list(buffers.values()))
        most.append(lifetimes.most)
        assert all(parameter.grad is None and not parameter._backward_hooks for parameter in model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert found[0][0].abs().max() > 0
    assert most[0] <= 4  # of one layer, and of the embedding
    assert most[1] == len(found[1])  # the measure sees them all if they come all at once


def test_a_backward_that_fails_leaves_no_hook() -> None:
    model = Tied()
    buffers = make_buffers(model)
    buffers[nn.Parameter(torch.ones(2))] = torch.zeros(2)  # the loss does not depend on it
    with pytest.raises(RuntimeError, match="not have been used"):
        add_gradients(model(torch.arange(5)), buffers)
    assert all(not parameter._backward_hooks for parameter in buffers)
