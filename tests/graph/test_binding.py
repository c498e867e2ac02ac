"""What a graph is bound to: whatever the program does to it after capture is followed exactly, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import GraphPool, StaleGraph, capture, make_graphed_callables


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def optimizers(kind: str) -> Callable[[Any], torch.optim.Optimizer]:
    return {
        "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
        "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True, capturable=True),
        "adamw, tensor lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.1), fused=True, capturable=True),
    }[kind]


class Program:
    """A model, an optimizer and one training step over them, with or without its own zero_grad."""

    def __init__(self, kind: str = "sgd", zero: bool | None = None, steps: bool = True) -> None:
        self.model = Model()
        self.optimizer = optimizers(kind)(self.model.parameters())
        self.zero, self.steps = zero, steps

    def step(self, x: Tensor) -> Tensor:
        if self.zero is not None:
            self.optimizer.zero_grad(set_to_none=self.zero)
        loss = self.model(x).square().mean()
        loss.backward()
        if self.steps:
            self.optimizer.step()
        return loss


def twins(*args: Any, backend: str, **options: Any) -> tuple[Program, Program, Any]:
    """Two equal programs and the captured step of the first."""
    program = Program(*args)
    twin = copy.deepcopy(program)
    return program, twin, capture(program.step, (torch.randn(3, 4),), backend=backend, **options)


def assert_equal(program: Program, twin: Program) -> None:
    left, right = program.model.state_dict(), twin.model.state_dict()
    assert all(torch.equal(left[key], right[key]) for key in left)
    for p, q in zip(program.model.parameters(), twin.model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)
    states = (list(program.optimizer.state.values()), list(twin.optimizer.state.values()))
    for mine, theirs in zip(*states, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(
            torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k])) for k in mine if mine[k] is not None
        )


def run(program: Program, graphed: Any, twin: Program) -> None:
    """One replay and one eager step from the same random state; everything is equal afterwards."""
    x, seed = torch.randn(3, 4), int(torch.randint(1 << 30, ()))
    torch.manual_seed(seed)
    loss = graphed(x).clone()
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    assert torch.equal(loss, twin.step(x))
    assert torch.equal(torch.get_rng_state(), after)
    assert_equal(program, twin)


def followed_or_refused(program: Program, graphed: Any, twin: Program, reason: str) -> None:
    """The change was made to both: the replay does what eager does, or it is StaleGraph and nothing changed."""
    before = copy.deepcopy([*program.model.state_dict().values()])
    grads = [p.grad if p.grad is None else p.grad.clone() for p in program.model.parameters()]
    try:
        run(program, graphed, twin)
    except StaleGraph as error:
        refused = str(error)
    else:
        return
    assert reason in refused
    assert all(map(torch.equal, before, program.model.state_dict().values()))
    for value, p in zip(grads, program.model.parameters(), strict=True):
        assert (value is None) == (p.grad is None)
        assert value is None or torch.equal(value, p.grad)


# -- optimizers ------------------------------------------------------------------------------------

OPTIMIZERS = pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw", "adamw, tensor lr"])


@pytest.mark.parametrize(
    ("kind", "zero"),
    [("sgd", None), ("sgd", False), ("momentum", True), ("adamw", None), ("adamw, tensor lr", True)],
)
def test_a_captured_step_is_eagers_step(backend: str, device: torch.device, kind: str, zero: bool | None) -> None:
    program, twin, graphed = twins(kind, zero, backend=backend)
    assert all(p.grad is None for p in program.model.parameters())
    for _ in range(3):
        run(program, graphed, twin)


@OPTIMIZERS
def test_a_learning_rate_changed_after_capture(backend: str, device: torch.device, kind: str) -> None:
    program, twin, graphed = twins(kind, True, backend=backend)
    run(program, graphed, twin)
    for p in (program, twin):
        lr = p.optimizer.param_groups[0]["lr"]
        p.optimizer.param_groups[0]["lr"] = lr.fill_(0.5) if isinstance(lr, Tensor) else 0.5
    followed_or_refused(program, graphed, twin, "['lr'] was 0.1 at capture and is 0.5 now")
    for p in (program, twin):
        lr = p.optimizer.param_groups[0]["lr"]
        p.optimizer.param_groups[0]["lr"] = lr.fill_(0.1) if isinstance(lr, Tensor) else 0.1
    run(program, graphed, twin)  # put back: fits again


@pytest.mark.parametrize(
    ("kind", "then"),
    [("sgd", "nothing"), ("sgd", "another rate in it"), ("sgd", "another rate later"), ("momentum", "nothing"),
     ("adamw", "nothing"), ("adamw, tensor lr", "another rate in it")],
)  # fmt: skip
def test_an_optimizer_state_loaded_after_capture(backend: str, device: torch.device, kind: str, then: str) -> None:
    program, twin, graphed = twins(kind, True, backend=backend)
    run(program, graphed, twin)
    state = copy.deepcopy(twin.optimizer.state_dict())
    for entry in state["state"].values():
        for value in entry.values():
            if isinstance(value, Tensor):
                value.add_(1)
    if then == "another rate in it":
        state["param_groups"][0]["lr"] = state["param_groups"][0]["lr"] * 5
    for p in (program, twin):
        p.optimizer.load_state_dict(copy.deepcopy(state))
        if then == "another rate later":
            p.optimizer.param_groups[0]["lr"] = p.optimizer.param_groups[0]["lr"] * 5
    followed_or_refused(program, graphed, twin, "")


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_parameter_group_added_after_capture(backend: str, device: torch.device, kind: str) -> None:
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


def test_a_hyper_parameter_changed_after_capture(backend: str, device: torch.device) -> None:
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


# -- parameters and modules ------------------------------------------------------------------------


def _freeze(program: Program) -> None:
    program.model.first.weight.requires_grad_(False)


def _eval(program: Program) -> None:
    program.model.eval()


def _eval_sub_module(program: Program) -> None:
    program.model.norm.eval()


def _eval_without_tensors(program: Program) -> None:
    program.model.drop.eval()


def _buffer(program: Program) -> None:
    program.model.norm.running_mean = torch.ones(8)


def _module(program: Program) -> None:
    program.model.last = copy.deepcopy(program.model.last)
    program.model.last.weight.data.mul_(2)


def _module_without_tensors(program: Program) -> None:
    program.model.drop = nn.Identity()


def _data(program: Program) -> None:
    program.model.last.bias.data = program.model.last.bias.data * 2


def _remove_parameter(program: Program) -> None:
    program.model.last.bias = None


CHANGES = pytest.mark.parametrize(
    "change",
    [_freeze, _eval, _eval_sub_module, _eval_without_tensors, _buffer, _module, _module_without_tensors, _data,
     _remove_parameter],
)  # fmt: skip


@CHANGES
def test_a_captured_step_after_a_change(backend: str, device: torch.device, change: Callable[[Program], None]) -> None:
    program, twin, graphed = twins("sgd", True, backend=backend)
    run(program, graphed, twin)
    for p in (program, twin):
        change(p)
    followed_or_refused(program, graphed, twin, "")


@CHANGES
@pytest.mark.parametrize("target", ["module", "function"])
def test_a_graphed_callable_after_a_change(
    backend: str, device: torch.device, change: Callable[[Program], None], target: str
) -> None:
    program = Program("sgd", None)
    twin = copy.deepcopy(program)
    if target == "module":
        make_graphed_callables(program.model, (torch.randn(3, 4),), backend=backend)
    else:
        inner = program.model
        program.model = make_graphed_callables(lambda x: inner(x), (torch.randn(3, 4),), backend=backend)
        program.model.state_dict, program.model.parameters = inner.state_dict, inner.parameters
    run(program, program.step, twin)
    if target == "function":
        outer, program.model = program.model, inner
        change(program)
        program.model = outer
    else:
        change(program)
    change(twin)
    followed_or_refused(program, program.step, twin, "")


def test_training_mode_toggled_and_toggled_back(backend: str, device: torch.device) -> None:
    pool, model, x = GraphPool(), Model(), torch.randn(3, 4)
    twin = copy.deepcopy(model)
    make_graphed_callables(model, (torch.randn(3, 4),), pool=pool, backend=backend)
    for training in (True, False, False, True):
        for m in (model, twin):
            m.train(training)
        rows = x if training else x[:1]  # the other mode takes whatever the original takes
        torch.manual_seed(1)
        out = model(rows)
        torch.manual_seed(1)
        expected = twin(rows)
        assert torch.equal(out, expected)
        out.sum().backward()
        expected.sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    record = pool.report().graphs[0]
    assert record.replays == 2
    assert record.eager_runs == {"called in the other training mode": 2}


# -- gradients of a captured function --------------------------------------------------------------


@pytest.mark.parametrize("at_capture", ["none", "existing"])
def test_gradients_in_every_state_equal_eagers(backend: str, device: torch.device, at_capture: str) -> None:
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
def test_a_gradient_assigned_by_the_user(backend: str, device: torch.device, zero: bool | None) -> None:
    program, twin, graphed = twins("sgd", zero, backend=backend)
    run(program, graphed, twin)
    mine = torch.ones(8, 4)
    program.model.first.weight.grad, twin.model.first.weight.grad = mine, mine.clone()
    followed_or_refused(program, graphed, twin, "gradient of a parameter of shape (8, 4)")
    for p in (program, twin):
        p.optimizer.zero_grad(set_to_none=True)
    twin.model.load_state_dict(program.model.state_dict())
    run(program, graphed, twin)


@pytest.mark.parametrize("at_capture", ["none", "existing"])
def test_a_kept_gradient_is_not_overwritten(backend: str, device: torch.device, at_capture: str) -> None:
    """`kept = p.grad; p.grad = None; step()` leaves `kept` alone in eager; a graph has one buffer, and says so."""
    program = Program("sgd", None, False)
    if at_capture == "existing":
        for p in program.model.parameters():
            p.grad = torch.zeros_like(p)
    graphed = capture(program.step, (torch.randn(3, 4),), backend=backend)
    graphed(torch.randn(3, 4))
    kept = program.model.last.bias.grad
    value = kept.clone()
    program.optimizer.zero_grad(set_to_none=True)
    with pytest.raises(StaleGraph, match="still held"):
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
