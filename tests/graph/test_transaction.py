"""A capture, failed or successful, leaves the process as it found it."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import CaptureError, GraphHooks, GraphPool, HookError, HostReadError, capture
from rollgraph.graph import make_graphed_callables as graph
from tests.graph.marked_lines import line_of
from tests.graph.process_state import (
    WARMUP,
    Bomb,
    Explosion,
    Trainer,
    assert_goes_on,
    assert_same,
    bomb_line,
    graph_layers,
    inputs,
    make_model,
    photograph,
    run,
)

# -- success ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("primed", [False, True])
@pytest.mark.parametrize("collector", [False, True])
def test_a_successful_capture_changes_nothing(
    backend: str, device: torch.device, primed: bool, collector: bool
) -> None:
    trainer, generator = Trainer(device), torch.Generator(device)
    noise = torch.zeros(5, 4)

    def step(x: Tensor) -> Tensor:
        noise.uniform_(generator=generator)
        random.random(), np.random.rand()
        return trainer.step(x + noise)

    if primed:
        step(inputs())
    (gc.enable if collector else gc.disable)()
    try:
        before = photograph(trainer.model, trainer.optimizer, generator)
        capture(step, (inputs(),), backend=backend)
        after = photograph(trainer.model, trainer.optimizer, generator)
    finally:
        gc.enable()
    assert_same(before, after, apart_from=() if primed else ("state",))
    for state in trainer.optimizer.state.values() if not primed else ():
        assert all(not value.any() for value in state.values()), "lazily created state is at its initial value"


@pytest.mark.parametrize("gradients", ["none", "present"])
def test_graphing_modules_changes_only_their_forward(backend: str, device: torch.device, gradients: str) -> None:
    trainer = Trainer(device)
    if gradients == "present":
        trainer.step(inputs())
    before = photograph(trainer.model, trainer.optimizer)
    graph_layers(trainer, backend)
    after = photograph(trainer.model, trainer.optimizer)
    for name, module in trainer.model.named_modules():
        attributes = after[f"attributes of {name!r}"]
        assert ("forward" in attributes) == (module is not trainer.model)
        attributes.pop("forward", None)
    assert_same(before, after)


def test_a_capture_keeps_the_modes_of_its_caller(backend: str, device: torch.device) -> None:
    model = make_model().eval()
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        before = photograph(model)
        capture(model, (inputs(),), backend=backend)
        assert_same(before, photograph(model))
    with torch.inference_mode():
        before = photograph(model)
        capture(model, (inputs(),), backend=backend)
        assert_same(before, photograph(model))


# -- failures --------------------------------------------------------------------------------------


# Of the runs of a capture, `make test` lets the first and the last fail: the first warm-up and the recording.
FIRST_AND_LAST = [1, *(pytest.param(number, marks=pytest.mark.slow) for number in range(2, WARMUP + 1)), WARMUP + 1]


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("number", FIRST_AND_LAST)
def test_a_function_that_fails_leaves_nothing_changed(
    backend: str, device: torch.device, which: str, number: int
) -> None:
    trainer, twin = Trainer(device), Trainer(device)
    trainer.model[3].set(which, number)
    before = photograph(trainer.model, trainer.optimizer)
    with pytest.raises(CaptureError) as caught:
        capture(trainer.step, (inputs(),), backend=backend, warmup=WARMUP)
    assert_same(before, photograph(trainer.model, trainer.optimizer))
    message = str(caught.value)
    assert bomb_line(which) in message
    assert f"Explosion: in {which}" in message
    assert ("warm-up" if number <= WARMUP else "capture") in message
    if which == "forward":
        assert "Sequential.3" in message
    assert isinstance(caught.value.__cause__, Explosion)
    assert_goes_on(trainer, twin, backend)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("number", FIRST_AND_LAST)
def test_a_module_that_fails_among_others_leaves_nothing_changed(
    backend: str, device: torch.device, which: str, number: int
) -> None:
    trainer, twin = Trainer(device), Trainer(device)
    trainer.model[3].set(which, number)
    pool = GraphPool()
    before = photograph(trainer.model, trainer.optimizer)
    with pytest.raises(CaptureError, match=f"Explosion: in {which}") as caught:
        graph_layers(trainer, backend, pool=pool)
    assert_same(before, photograph(trainer.model, trainer.optimizer))
    assert bomb_line(which) in str(caught.value)
    assert "'Bomb'" in str(caught.value)
    assert pool.graphs == []
    assert pool.arena.open_intervals() == []
    assert_goes_on(trainer, twin, backend)
    trainer.model[3].fuse = None
    graph_layers(trainer, backend, pool=pool)
    assert run(trainer.step_outside, trainer, 3, 5) == run(twin.step_outside, twin, 3, 5)


@pytest.mark.parametrize("others", [1, 3])
def test_a_failure_of_the_last_callable_leaves_nothing_changed(backend: str, device: torch.device, others: int) -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(others)]
    trainer, twin = (Trainer(device, lambda: nn.Sequential(*copy.deepcopy(layers), Bomb())) for _ in range(2))
    trainer.model[-1].set("backward", WARMUP + 1)
    before = photograph(trainer.model)
    samples = tuple((inputs().requires_grad_(),) for _ in trainer.model)
    with pytest.raises(CaptureError, match="Explosion"):
        graph(tuple(trainer.model), samples, backend=backend)
    assert_same(before, photograph(trainer.model))
    assert_goes_on(trainer, twin, backend)


@pytest.mark.parametrize("kind", ["pre_forward", "post_forward", "pre_backward", "post_backward"])
@pytest.mark.parametrize("moment", ["warmup", "capture"])
@pytest.mark.parametrize("returns", [False, True])
def test_a_hook_that_fails_leaves_nothing_changed(
    backend: str, device: torch.device, kind: str, moment: str, returns: bool
) -> None:
    trainer, twin = Trainer(device), Trainer(device)

    def hook(*_: Any) -> Any:
        if not returns:
            raise Explosion("in hook")
        return 1

    before = photograph(trainer.model, trainer.optimizer)
    hooks = [None] * 4 + [GraphHooks(**{kind: [hook]}, when=(moment,))]
    with pytest.raises(HookError, match=kind) as caught:
        graph_layers(trainer, backend, hooks=hooks)
    assert "a_hook_that_fails" in str(caught.value), "names the hook"
    assert moment in str(caught.value) or returns
    assert_same(before, photograph(trainer.model, trainer.optimizer))
    if kind.endswith("forward"):
        with pytest.raises(HookError, match=kind):
            capture(trainer.step, (inputs(),), backend=backend, hooks=GraphHooks(**{kind: [hook]}, when=(moment,)))
        assert_same(before, photograph(trainer.model, trainer.optimizer))
    if not returns:
        assert_goes_on(trainer, twin, backend)


@pytest.mark.parametrize("which", ["pre_warmup_hook", "post_warmup_hook"])
def test_a_warmup_hook_that_fails_leaves_nothing_changed(backend: str, device: torch.device, which: str) -> None:
    trainer, twin = Trainer(device), Trainer(device)

    def hook(target: Any) -> None:
        if target is trainer.model[-1]:
            raise Explosion("in warm-up hook")

    before = photograph(trainer.model, trainer.optimizer)
    with pytest.raises(HookError, match=which):
        graph_layers(trainer, backend, **{which: hook})
    assert_same(before, photograph(trainer.model, trainer.optimizer))
    assert_goes_on(trainer, twin, backend)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("number", FIRST_AND_LAST)
@pytest.mark.parametrize("whole", [True, False])
def test_a_keyboard_interrupt_leaves_nothing_changed(
    backend: str, device: torch.device, which: str, number: int, whole: bool
) -> None:
    trainer, twin = Trainer(device), Trainer(device)
    trainer.model[3].set(which, number, KeyboardInterrupt)
    before = photograph(trainer.model, trainer.optimizer)
    with pytest.raises(KeyboardInterrupt):
        capture(trainer.step, (inputs(),), backend=backend) if whole else graph_layers(trainer, backend)
    assert_same(before, photograph(trainer.model, trainer.optimizer))
    assert_goes_on(trainer, twin, backend)


@pytest.mark.parametrize("run_number", [1, 2, 3, 4, 5])
def test_an_optimizer_step_that_fails_leaves_nothing_changed(
    backend: str, device: torch.device, run_number: int
) -> None:
    """The steps are warm-up 1, the one that creates state, warm-up 2 and 3, and the recorded one."""
    trainer, twin, calls = Trainer(device), Trainer(device), []

    def explode(*_: Any) -> None:
        calls.append(1)
        if len(calls) == run_number:
            raise Explosion("in step")

    handle = trainer.optimizer.register_step_post_hook(explode)
    before = photograph(trainer.model, trainer.optimizer)
    with pytest.raises(CaptureError, match="Explosion: in step"):
        capture(trainer.step, (inputs(),), backend=backend)
    assert_same(before, photograph(trainer.model, trainer.optimizer))
    handle.remove()
    assert_goes_on(trainer, twin, backend)


def test_a_host_read_inside_a_model_leaves_nothing_changed(backend: str, device: torch.device) -> None:
    trainer, twin = Trainer(device), Trainer(device)

    class Peek(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x  # here: peek

    model = nn.Sequential(trainer.model, Peek())
    before = photograph(model, trainer.optimizer)

    def step(x: Tensor) -> Tensor:
        trainer.optimizer.zero_grad()
        loss = model(x).mean()
        loss.backward()
        trainer.optimizer.step()
        return loss.detach()

    with pytest.raises(HostReadError) as caught:
        capture(step, (inputs(),), backend=backend)
    message = str(caught.value)
    assert all(part in message for part in ("__bool__", "Sequential.1", line_of("peek", __file__)))
    assert_same(before, photograph(model, trainer.optimizer))
    assert_goes_on(trainer, twin, backend)


def test_a_host_read_in_backward_leaves_nothing_changed(backend: str, device: torch.device) -> None:
    class Read(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * float(gradient.sum())  # here: read in backward

    layer = nn.Linear(4, 4)
    before = photograph(layer)
    with pytest.raises(HostReadError) as caught:
        graph(lambda x: Read.apply(layer(x)), (inputs(),), backend=backend)
    assert line_of("read in backward", __file__) in str(caught.value)
    assert_same(before, photograph(layer))


def test_a_failed_recapture_keeps_the_existing_graphs(backend: str, device: torch.device) -> None:
    trainer, twin = Trainer(device), Trainer(device)
    step = capture(trainer.step, (inputs(),), backend=backend, on_mismatch="recapture")
    before = photograph(trainer.model, trainer.optimizer)
    trainer.model[3].set("backward", 2)
    with pytest.raises(CaptureError, match="Explosion"):
        step(inputs(9))
    trainer.model[3].set("backward", -1)
    before["attributes of '3'"] = photograph(trainer.model)["attributes of '3'"]
    assert_same(before, photograph(trainer.model, trainer.optimizer))
    assert run(step, trainer, 3, 3) == run(twin.step, twin, 3, 3)
    assert (step.record.captures, step.record.replays) == (1, 3)


def test_results_of_the_first_run_in_its_context_are_discarded(backend: str, device: torch.device) -> None:
    """In that context, a function may compute anything: neither its writes nor its results become part of the graph."""
    wrong: list[bool] = []
    weight = torch.ones(3, device=device, requires_grad=True)
    total = torch.zeros(3, device=device)

    @contextmanager
    def computing_wrong_values() -> Iterator[None]:
        wrong.append(True)
        yield
        wrong.append(False)

    def step(x: Tensor) -> Tensor:
        factor = float("nan") if wrong[-1:] == [True] else 2.0
        (weight * x * factor).sum().backward()
        assert weight.grad is not None
        total.add_(weight.grad)
        return total * factor

    captured = capture(
        step, (torch.ones(3, device=device),), pool=GraphPool(), backend=backend, first_run=computing_wrong_values
    )
    assert wrong == [True, False]
    assert weight.grad is None
    assert total.tolist() == [0.0, 0.0, 0.0]
    assert captured(torch.full((3,), 5.0, device=device)).tolist() == [20.0, 20.0, 20.0]
    assert total.tolist() == [10.0, 10.0, 10.0]
    assert wrong == [True, False]


def test_an_error_in_the_first_run_leaves_its_context(backend: str, device: torch.device) -> None:
    left: list[bool] = []

    @contextmanager
    def noting_the_end() -> Iterator[None]:
        try:
            yield
        finally:
            left.append(True)

    def fail(x: Tensor) -> Tensor:
        raise Explosion

    with pytest.raises(CaptureError):
        capture(fail, (torch.ones(3, device=device),), pool=GraphPool(), backend=backend, first_run=noting_the_end)
    assert left == [True]


def test_first_run_must_be_a_function_that_returns_a_context(backend: str, device: torch.device) -> None:
    runs: list[Tensor] = []
    with pytest.raises(
        CaptureError, match="first_run must be a function that makes a context manager, got nullcontext"
    ):
        capture(runs.append, (torch.ones(3, device=device),), backend=backend, first_run=nullcontext())  # type: ignore[arg-type]
    assert not runs
