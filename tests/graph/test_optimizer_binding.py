"""Bindings to optimizers: a change of state or hyper-parameters after capture is followed exactly, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import StaleGraph, capture
from tests.graph.training_programs import Program, followed_or_refused, run, twins

# -- optimizers ------------------------------------------------------------------------------------

OPTIMIZERS = pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw", "adamw, tensor lr"])


@pytest.mark.parametrize(
    ("kind", "zero"),
    [("sgd", None), ("sgd", False), ("momentum", True), ("adamw", None), ("adamw, tensor lr", True)],
)
def test_a_captured_step_equals_eagers(backend: str, device: torch.device, kind: str, zero: bool | None) -> None:
    program, twin, graphed = twins(kind, zero, backend=backend)
    assert all(p.grad is None for p in program.model.parameters())
    for _ in range(3):
        run(program, graphed, twin)


@OPTIMIZERS
def test_a_changed_learning_rate_is_followed_or_refused(backend: str, device: torch.device, kind: str) -> None:
    program, twin, graphed = twins(kind, True, backend=backend)
    run(program, graphed, twin)
    for p in (program, twin):
        lr = p.optimizer.param_groups[0]["lr"]
        p.optimizer.param_groups[0]["lr"] = lr.fill_(0.5) if isinstance(lr, Tensor) else 0.5
    followed_or_refused(program, graphed, twin, "['lr'] was 0.1 at capture and is 0.5 now")
    for p in (program, twin):
        lr = p.optimizer.param_groups[0]["lr"]
        p.optimizer.param_groups[0]["lr"] = lr.fill_(0.1) if isinstance(lr, Tensor) else 0.1
    run(program, graphed, twin)  # restored: matches again


@pytest.mark.parametrize(
    ("kind", "change"),
    [("sgd", "nothing"), ("sgd", "another rate in it"), ("sgd", "another rate later"), ("momentum", "nothing"),
     ("adamw", "nothing"), ("adamw, tensor lr", "another rate in it")],
)  # fmt: skip
def test_a_loaded_optimizer_state_is_followed_or_refused(
    backend: str, device: torch.device, kind: str, change: str
) -> None:
    program, twin, graphed = twins(kind, True, backend=backend)
    run(program, graphed, twin)
    state = copy.deepcopy(twin.optimizer.state_dict())
    for entry in state["state"].values():
        for value in entry.values():
            if isinstance(value, Tensor):
                value.add_(1)
    if change == "another rate in it":
        state["param_groups"][0]["lr"] = state["param_groups"][0]["lr"] * 5
    for p in (program, twin):
        p.optimizer.load_state_dict(copy.deepcopy(state))
        if change == "another rate later":
            p.optimizer.param_groups[0]["lr"] = p.optimizer.param_groups[0]["lr"] * 5
    followed_or_refused(program, graphed, twin, "")


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_an_added_parameter_group_is_followed_or_refused(backend: str, device: torch.device, kind: str) -> None:
    program, twin, graphed = twins(kind, False, backend=backend)
    run(program, graphed, twin)
    extras = []
    for p in (program, twin):
        extras.append(nn.Parameter(torch.ones(3)))
        extras[-1].grad = torch.ones(3)
        p.optimizer.add_param_group({"params": [extras[-1]], "lr": 0.1})
    x, seed = torch.randn(3, 4), 1
    torch.manual_seed(seed)
    try:
        graphed(x)
    except StaleGraph:
        return
    torch.manual_seed(seed)
    extras[1].grad = torch.ones(3)
    twin.step(x)
    assert torch.equal(*extras)


def test_a_changed_hyper_parameter_is_followed_or_refused(backend: str, device: torch.device) -> None:
    program, twin, graphed = twins("momentum", True, backend=backend)
    for p in (program, twin):
        p.optimizer.param_groups[0]["momentum"] = 0.5
    followed_or_refused(program, graphed, twin, "'momentum'")


def test_eager_policy_follows_every_change(backend: str, device: torch.device) -> None:
    program, twin, graphed = twins("adamw", True, backend=backend, on_mismatch="eager")
    run(program, graphed, twin)
    state = copy.deepcopy(twin.optimizer.state_dict())
    for p in (program, twin):
        p.optimizer.load_state_dict(copy.deepcopy(state))
        p.optimizer.param_groups[0]["lr"] = 0.5
    run(program, graphed, twin)
    assert graphed.record.eager_runs.total() == 1


def test_recapture_policy_follows_every_change(backend: str, device: torch.device) -> None:
    program, twin, graphed = twins("adamw", True, backend=backend, on_mismatch="recapture")
    for rate in (0.1, 0.5, 0.5, 0.2):
        for p in (program, twin):
            p.optimizer.param_groups[0]["lr"] = rate
        run(program, graphed, twin)
    assert graphed.record.captures == 3
    assert graphed.record.replays == 4
    assert not graphed.record.eager_runs


# -- custom optimizers -----------------------------------------------------------------------------


class Sign(torch.optim.Optimizer):
    """An optimizer with its rate and a tensor in plain attributes, which counts its steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.rate, self.decay, self.steps, self.tokens_seen = 0.1, torch.tensor(0.9), 0, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(self.decay).sub_(p.grad.sign() * self.rate)


def signed(backend: str) -> tuple[Program, Program, Any]:
    program = Program("sgd", True)
    program.optimizer = Sign(program.model.parameters())
    twin = copy.deepcopy(program)
    twin.optimizer = Sign(twin.model.parameters())
    return program, twin, capture(program.step, (torch.randn(3, 4),), backend=backend)


def test_changed_attributes_of_a_custom_optimizer_are_followed_or_refused(backend: str, device: torch.device) -> None:
    program, twin, graphed = signed(backend)
    run(program, graphed, twin)
    program.optimizer.tokens_seen += 100
    program.optimizer.steps += 1
    program.optimizer.decay.fill_(0.8)
    twin.optimizer.decay.fill_(0.8)
    run(program, graphed, twin)
    program.optimizer.rate = 0.5
    with pytest.raises(StaleGraph, match=r"Sign\.rate was 0\.1 at capture and is 0\.5 now"):
        graphed(torch.randn(3, 4))
    program.optimizer.rate = 0.1
    program.optimizer.decay = torch.tensor(0.5)
    with pytest.raises(StaleGraph, match=r"Sign\.decay was replaced"):
        graphed(torch.randn(3, 4))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("change", ["appended", "removed", "replaced"])
def test_a_parameter_list_changed_in_place_is_refused(
    backend: str, device: torch.device, kind: str, change: str
) -> None:
    program, twin, graphed = twins(kind, True, backend=backend)
    run(program, graphed, twin)
    entries = program.optimizer.param_groups[0]["params"]
    if change == "appended":
        entries.append(nn.Parameter(torch.ones(3)))
    elif change == "removed":
        entries.pop()
    else:
        entries[0] = nn.Parameter(torch.ones_like(entries[0]))
    with pytest.raises(StaleGraph, match=r"the entries of .*param_groups\[0\]\['params'\] changed since capture"):
        graphed(torch.randn(3, 4))


def test_a_hook_added_to_an_optimizer_is_refused(backend: str, device: torch.device) -> None:
    program, twin, graphed = twins("sgd", True, backend=backend)
    run(program, graphed, twin)
    program.optimizer.register_step_post_hook(lambda *args: None)
    with pytest.raises(StaleGraph, match=r"step post hook .* was added to SGD"):
        graphed(torch.randn(3, 4))
