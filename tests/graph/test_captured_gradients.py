"""The gradients that a captured function writes equal eager's, whatever they were before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rollgraph.graph import StaleGraph, capture
from tests.graph.training_programs import Program, assert_equal, followed_or_refused, run, twins


@pytest.mark.parametrize("at_capture", ["none", "existing"])
def test_gradients_equal_eagers_whatever_they_were_before(backend: str, device: torch.device, at_capture: str) -> None:
    program = Program("sgd", None, False)
    if at_capture == "existing":
        for p in program.model.parameters():
            p.grad = torch.full_like(p, 0.25)
    twin = copy.deepcopy(program)
    for p, q in zip(program.model.parameters(), twin.model.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    graphed = capture(program.step, (torch.randn(3, 4),), backend=backend)
    assert_equal(program, twin)
    run(program, graphed, twin)
    run(program, graphed, twin)  # accumulates
    for set_to_none in (True, False, True):
        for p in (program, twin):
            p.optimizer.zero_grad(set_to_none=set_to_none)
        run(program, graphed, twin)
    for p in (program, twin):  # some None, some not
        p.model.first.weight.grad = None
        p.model.last.bias.grad.mul_(3)
    run(program, graphed, twin)


@pytest.mark.parametrize("zero", [None, True, False])
def test_a_gradient_assigned_by_the_user_is_followed_or_refused(
    backend: str, device: torch.device, zero: bool | None
) -> None:
    program, twin, graphed = twins("sgd", zero, backend=backend)
    run(program, graphed, twin)
    assigned = torch.ones(8, 4)
    program.model.first.weight.grad, twin.model.first.weight.grad = assigned, assigned.clone()
    followed_or_refused(program, graphed, twin, "gradient of a parameter of shape (8, 4)")
    for p in (program, twin):
        p.optimizer.zero_grad(set_to_none=True)
    twin.model.load_state_dict(program.model.state_dict())
    run(program, graphed, twin)


@pytest.mark.parametrize("at_capture", ["none", "existing"])
def test_a_kept_gradient_is_not_overwritten(backend: str, device: torch.device, at_capture: str) -> None:
    """`kept = p.grad; p.grad = None; step()` does not touch `kept` in eager. A graph has one buffer, so it raises."""
    program = Program("sgd", None, False)
    if at_capture == "existing":
        for p in program.model.parameters():
            p.grad = torch.zeros_like(p)
    graphed = capture(program.step, (torch.randn(3, 4),), backend=backend)
    graphed(torch.randn(3, 4))
    kept = program.model.last.bias.grad
    value = kept.clone()
    program.optimizer.zero_grad(set_to_none=True)
    with pytest.raises(StaleGraph, match="still referenced"):
        graphed(torch.randn(3, 4))
    assert torch.equal(kept, value)
    del kept
    graphed(torch.randn(3, 4))


def test_only_the_functions_own_gradients_are_touched(backend: str, device: torch.device) -> None:
    program, bystander = Program("sgd", None, False), nn.Linear(4, 4)
    bystander.weight.grad = torch.ones(4, 4)
    program.model.first.requires_grad_(False)
    graphed = capture(program.step, (torch.randn(3, 4),), backend=backend)
    graphed(torch.randn(3, 4))
    assert torch.equal(bystander.weight.grad, torch.ones(4, 4))
    assert bystander.bias.grad is None
    assert program.model.first.weight.grad is None
    assert program.model.last.weight.grad is not None
