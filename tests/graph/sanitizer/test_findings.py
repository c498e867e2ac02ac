"""Findings beyond the gallery, the lines that they name, and the end of the sanitizer's block."""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import ReplayMismatch, capture, make_graphed_callables, sanitize
from rollgraph.graph.backend import current_observer
from rollgraph.graph.sanitizer.snapshot import ProgramSnapshot
from rollgraph.graph.tape import TapeRecording

# -- the block -------------------------------------------------------------------------------------


def test_the_block_leaves_nothing_behind() -> None:
    engine = torch.autograd._engine_run_backward
    with sanitize():
        inside = capture(lambda x: x + 1, (torch.zeros(2),))
        inside(torch.zeros(2))
    assert current_observer.get() is None
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    assert torch.autograd._engine_run_backward is engine
    outside = capture(lambda x: x + 1, (torch.zeros(2),))
    assert type(outside._variants[0].recording) is TapeRecording
    assert torch.equal(inside(torch.ones(2)), torch.full((2,), 2.0))  # still replays, unobserved


def test_other_exceptions_pass_through() -> None:
    with pytest.raises(ZeroDivisionError), sanitize():
        _ = 1 / 0
    assert current_observer.get() is None
    assert torch._C._len_torch_dispatch_stack() == 0


def test_findings_end_with_the_block() -> None:
    with sanitize() as findings:
        graph = capture(lambda x: x * 2, (torch.ones(2),))
    with pytest.raises(ReplayMismatch):
        graph(torch.ones(3))
    assert not len(findings)


# -- comparison with eager -------------------------------------------------------------------------


def test_backwards_are_compared_too() -> None:
    factors = [1.0]

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * torch.tensor(factors)

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Scale.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    with sanitize() as findings:
        layer = make_graphed_callables(Layer(), (torch.ones(1, requires_grad=True),))
        for _ in range(2):
            layer(torch.ones(1, requires_grad=True)).sum().backward()
            factors[0] += 1
    assert [f.kind for f in findings] == ["differs"]


@pytest.mark.gpu
def test_a_replay_that_differs_is_reported_on_cuda() -> None:
    scale = [1.0]

    def f(x: Tensor) -> Tensor:
        y = x + 1
        return y * sum(scale)

    with sanitize() as findings:
        graph = capture(f, (torch.ones(2, device="cuda"),))
        scale[0] = 2.0
        graph(torch.ones(2, device="cuda"))
    differs = [finding for finding in findings if finding.kind == "differs"]
    assert [finding.where.line for finding in differs] == [f.__code__.co_firstlineno + 2]


def test_a_nondeterministic_kernel_is_noted_and_not_compared() -> None:
    state = iter(range(1000))

    @torch.library.custom_op("rollgraph_tests::noisy", mutates_args=())
    def noisy(x: Tensor) -> Tensor:
        return x + next(state)

    with sanitize() as findings:
        capture(lambda x: noisy(x), (torch.zeros(2),))(torch.zeros(2))
    assert not len(findings), findings
    assert len(findings.notes) == 1


@pytest.mark.parametrize("draw", ["rng.random()", "next(numbers)", "own.random()"])
def test_python_values_that_differ_from_run_to_run_are_constants(draw: str) -> None:
    names = {"rng": numpy.random.default_rng(0), "numbers": iter(range(1000)), "own": random.Random(0)}
    with sanitize() as findings:
        capture(eval(f"lambda x: x * {draw}", names), (torch.ones(2),))(torch.ones(2))
    assert [finding.kind for finding in findings] == ["constant"]


def test_a_value_that_makes_no_difference_is_a_note() -> None:
    config = {"debug": False, "steps": 0}

    def f(x: Tensor) -> Tensor:
        if config["debug"]:
            x = x + config["steps"]
        return x * 2

    with sanitize() as findings:
        graph = capture(f, (torch.ones(2),))
        for _ in range(3):
            config["steps"] += 1
            graph(torch.ones(2))
    assert not len(findings), findings
    assert len(findings.notes) == 1


class TellsApart(nn.Module):
    """Behaves differently during capture, when new leaves stand in for its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.held = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 if self.held[0] is self.weight else 2
        return x * self.weight * factor


def test_replays_are_compared_with_the_untouched_module() -> None:
    with sanitize() as findings:
        model = make_graphed_callables(TellsApart(), (torch.ones(4),))
        model(torch.ones(4)).sum().backward()
    assert findings.items[0].kind == "differs"


# -- captures --------------------------------------------------------------------------------------


def test_all_host_reads_are_reported_at_once() -> None:
    def f(x: Tensor) -> Tensor:
        a = x.sum().item()
        b = x.mean().tolist()
        return x * a * b

    with sanitize() as findings:
        capture(f, (torch.randn(3),))
    first = f.__code__.co_firstlineno
    assert [(finding.kind, finding.where.line) for finding in findings] == [
        ("host-read", first + 1),
        ("host-read", first + 2),
    ]


def test_a_host_read_in_an_optimizer_names_the_line_of_its_step() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with sanitize() as findings:
        capture(step, (torch.randn(2, 4),))
    assert {(finding.kind, finding.where.line) for finding in findings} == {
        ("host-read", step.__code__.co_firstlineno + 3)
    }


@pytest.mark.parametrize(("args", "kind"), [((torch.ones(2), 2.0), "constant"), ((torch.ones(3), 1.0), "mismatch")])
def test_a_refused_call_is_classified_by_its_error(args: Any, kind: str) -> None:
    with sanitize() as findings:
        capture(lambda x, scale: x * scale, (torch.ones(2), 1.0))(*args)
    assert [finding.kind for finding in findings] == [kind]


def test_an_argument_that_the_program_keeps_is_an_escape() -> None:
    history = []

    def f(x: Tensor) -> Tensor:
        history.append(x)
        return x * 2

    with sanitize() as findings:
        capture(f, (torch.ones(2),))
    assert [(finding.kind, finding.where.line) for finding in findings] == [("escape", f.__code__.co_firstlineno)]


def test_a_tensor_back_at_its_captured_address_has_not_moved() -> None:
    model = nn.Linear(4, 2)
    captured, second, third = model.weight.data, torch.zeros(2, 4), torch.zeros(2, 4)
    snapshot = ProgramSnapshot(model, [model], [])
    for data, moved in (
        (captured, []),
        (second, ["Linear.weight"]),
        (second, []),  # each move is reported once
        (captured, []),
        (third, ["Linear.weight"]),
        (second, ["Linear.weight"]),
    ):
        model.weight.data = data
        assert list(snapshot.moved_tensors()) == moved


def test_a_tensor_in_a_local_variable_is_not_an_orphan() -> None:
    box = [torch.ones(4)]
    reference = weakref.ref(box[0])
    with sanitize() as findings:
        graph = capture(lambda x: x * reference(), (torch.ones(4),))
        mask = box.pop()
        graph(torch.ones(4))
        assert not len(findings), findings
        del mask
        graph(torch.ones(4))
    assert [finding.kind for finding in findings] == ["orphan"]


LINES = {
    "an argument that is written": """
def f(x):
    y = x * 2
    x.add_(1)  # <-
    return y
""",
    "a parameter that is replaced": """
model = nn.Linear(2, 2)
def f(x):
    new = torch.ones(2, 2)
    y = model(x)
    model.weight = nn.Parameter(new)  # <-
    return y.detach()
""",
    "memory that is replaced": """
model = nn.Linear(2, 2)
def f(x):
    new = torch.ones(2, 2)
    y = model(x)
    model.weight.data = new  # <-
    return y.detach()
""",
    "a state that is made anew": """
class State:
    h = torch.zeros(2, 2)
def f(x):
    y = x + 1
    State.h = State.h + y  # <-
    return State.h * 1
""",
}


@pytest.mark.parametrize("title", LINES)
def test_a_refused_capture_names_the_line_to_blame(title: str) -> None:
    program = LINES[title]
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(compile(program, "program.py", "exec"), names)
    (marked,) = [i for i, line in enumerate(program.splitlines(), 1) if line.endswith("# <-")]
    with sanitize() as findings:
        capture(names["f"], (torch.ones(2, 2),))
    (finding,) = findings
    assert (finding.kind, finding.where.file, finding.where.line) == ("refused", "program.py", marked)


# -- hooks -----------------------------------------------------------------------------------------


def test_hooks_of_every_kind_are_reported() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []

    @torch.no_grad()
    def decorated(module: nn.Module, args: Any) -> None:
        seen.append(1)

    def everywhere(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(2)

    model[0].register_forward_pre_hook(lambda module, args: (args[0].view(-1, 4),))  # a view: recorded
    model[1].register_forward_pre_hook(decorated)
    model[1].weight.register_hook(lambda gradient: seen.append(3))
    handle = nn.modules.module.register_module_forward_hook(everywhere)
    try:
        with sanitize() as findings:
            capture(lambda x: model(x).sum().backward(), (torch.randn(2, 4),))
    finally:
        handle.remove()
    assert [finding.kind for finding in findings] == ["hook"] * 3
    assert {finding.where.module for finding in findings} == {"1", "every module", "1.weight"}


def through(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


def test_a_finding_about_a_decorated_hook_names_its_def() -> None:
    @through
    def hook(module: nn.Module, args: Any, output: Tensor) -> None: ...

    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(hook)
    with sanitize() as findings, torch.no_grad():
        capture(lambda x: model(x), (torch.ones(1, 4),))
    assert findings.items[0].where.line == hook.__wrapped__.__code__.co_firstlineno + 1  # type: ignore[attr-defined]
