"""The eager backend runs the callable itself, with the checks and counts of a graph."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from rollgraph.graph import make_graphed_callables


class Counter(nn.Module):
    """Returns how often it has run, which no recording could follow."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        self.runs += 1
        return x * 2, self.runs


def test_a_callable_returns_the_constants_of_its_own_run() -> None:
    module = Counter()
    make_graphed_callables(module, (torch.randn(2),), backend="eager")
    for _ in range(3):
        _, returned = module(torch.randn(2))
        assert returned == module.runs


def test_equal_microbatches_of_a_schedule_add_up_their_gradients() -> None:
    layer = nn.Linear(4, 4)
    twin = copy.deepcopy(layer)
    sample = (torch.randn(2, 4, requires_grad=True),)
    first, second = make_graphed_callables((layer,), (sample,), order=[1, 1, -1, -1], backend="eager")
    inputs = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    outputs = [first(inputs[0]), second(inputs[1])]
    for output in outputs:
        output.sum().backward()
    for tensor in inputs:
        twin(tensor).sum().backward()
    assert torch.equal(layer.weight.grad, twin.weight.grad)
