"""Gradients that must not get lost: inputs that newly require grad, and parameters used late."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import (
    CaptureError,
    ReplayMismatch,
    capture,
    make_graphed_callables,
)
from tests.graph.refusals import Net, gradients, graph, refused


def _assert_gradient_or_refusal(x: Tensor, expected: Tensor, call: Callable[[], None]) -> None:
    try:
        call()
    except ReplayMismatch:
        assert x.grad is None
    else:
        assert x.grad is not None
        assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("case", ["module", "frozen module", "function without a backward", "other output"])
def test_an_input_that_newly_requires_grad_gets_a_gradient_or_an_error(
    backend: str, device: torch.device, case: str
) -> None:
    w, x = torch.ones(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    if case == "other output":  # only the output of the newly differentiable input reaches the loss
        sample = (torch.randn(3, 4, requires_grad=True), torch.randn(3, 4))
        function = graph("callable", lambda a, b: (a * 2, b * 2), *sample, backend=backend)
        _assert_gradient_or_refusal(
            x, torch.full_like(x, 2), lambda: (function(w, x)[1] * w).sum().backward(inputs=[x, w])
        )
        return
    target: Any = nn.Linear(4, 4) if "module" in case else (lambda x: x * 2)
    if case == "frozen module":
        target.requires_grad_(False)
    eager = copy.deepcopy(target)
    (expected,) = torch.autograd.grad(eager(x).sum(), x)
    graphed = graph("callable", target, torch.randn(3, 4), backend=backend)
    _assert_gradient_or_refusal(x, expected, lambda: (graphed(x) * w).sum().backward())
    assert torch.equal(graphed(x.detach()), eager(x))


def test_a_backward_refused_for_a_new_input_changes_no_gradient(backend: str, device: torch.device) -> None:
    net = Net()
    net.first.bias.grad = torch.ones(4)
    graphed = graph("callable", net, torch.randn(3, 4), backend=backend)
    x = torch.randn(3, 4, requires_grad=True)
    out = graphed(x)
    with refused(ReplayMismatch, net, match="requires grad, but did not at capture"):
        out.sum().backward()
    assert x.grad is None


def test_a_captured_function_refuses_an_input_that_requires_grad(backend: str, device: torch.device) -> None:
    x = torch.randn(3, requires_grad=True)
    graphed = graph("capture", lambda x: x * 2, torch.randn(3), backend=backend)
    with refused(ReplayMismatch, match="requires grad"):
        graphed(x)
    with refused(CaptureError, match="requires grad"):
        graph("capture", lambda x: x * 2, x, backend=backend)
    with torch.no_grad():
        assert torch.equal(graph("capture", lambda x: x * 2, x, backend=backend)(x), x * 2)


class LateParameter(nn.Module):
    """Uses `late` only after `skip` calls, so its gradient is None in that many warm-up runs."""

    def __init__(self, skip: int) -> None:
        super().__init__()
        self.early = nn.Parameter(torch.ones(3))
        self.late = nn.Parameter(torch.ones(3))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        self.skip -= 1
        if self.skip >= 0:
            return x * self.early
        return x * self.early + x.exp() * self.late


@pytest.mark.parametrize(("warmup", "skip"), [(1, 1), (3, 1), (3, 3)])
def test_a_parameter_without_a_gradient_in_warm_up_is_not_dropped(
    backend: str, device: torch.device, warmup: int, skip: int
) -> None:
    net, x = LateParameter(skip), torch.randn(3)
    if skip == warmup:  # no warm-up run had its gradient, so the capture is refused
        with pytest.raises(CaptureError, match="warm-up runs"):
            make_graphed_callables(net, (x,), num_warmup_iters=warmup, allow_unused_input=True, backend=backend)
        return
    make_graphed_callables(net, (x,), num_warmup_iters=warmup, allow_unused_input=True, backend=backend)
    net(x).sum().backward()
    assert torch.equal(net.late.grad, x.exp())
    assert torch.equal(net.early.grad, x)


@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_capture_does_not_drop_a_parameter_without_a_first_gradient(
    backend: str, device: torch.device, warmup: int
) -> None:
    net, x = LateParameter(1), torch.randn(3)

    def step(x: Tensor) -> Tensor:
        loss = net(x).sum()
        loss.backward()
        return loss

    try:
        graphed = capture(step, (x,), warmup=warmup, backend=backend)
    except CaptureError:  # allowed: capture refuses, and nothing is lost
        assert gradients(net) == [None, None]
        return
    for _ in range(2):
        graphed(x)
    assert torch.equal(net.early.grad, x * 2)
    assert net.late.grad is not None
    assert torch.equal(net.late.grad, x.exp() * 2)
