"""Functions that are captured by their first call: it does what eager does, and later calls replay."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import CaptureError, GraphPool, ReplayMismatch, StaleGraph, capture, capture_lazily


class Program:
    """A small training program: dropout, a loss with its backward, and a running sum outside of the model."""

    def __init__(self, dropout: float = 0.5) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 2))
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.total = torch.zeros(())
        torch.manual_seed(1)

    def step(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = self.model(x).square().mean()
            loss.backward()
        self.total += loss.detach()
        return loss.detach()

    def state(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return [self.total, torch.get_rng_state(), *gradients]


def lazily(fn: Callable[..., Any], pool: GraphPool | None = None, **options: Any) -> Any:
    return capture_lazily(fn, pool=pool or GraphPool(), backend="tape", **options)


def assert_same(tensors: list[Tensor], expected: list[Tensor]) -> None:
    assert len(tensors) == len(expected)
    for a, b in zip(tensors, expected, strict=True):
        assert torch.equal(a, b)


def inputs(seed: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def test_every_call_equals_eager_and_only_the_first_one_records() -> None:
    eager, results = Program(), []
    for seed in range(4):
        results.append((eager.step(inputs(seed)), [tensor.clone() for tensor in eager.state()]))
    program = Program()
    runs = []

    def step(x: Tensor) -> Tensor:
        runs.append(x)
        return program.step(x)

    graphed = lazily(step)
    for seed in range(4):
        result = graphed(inputs(seed)).clone()
        expected, state = results[seed]
        assert torch.equal(result, expected)
        assert_same(program.state(), state)
    assert len(runs) == 1
    assert graphed.record.captures == 1
    assert graphed.record.replays == 3


def test_a_first_call_that_raises_is_rolled_back_and_can_be_repeated() -> None:
    program, fails = Program(), [True]

    def step(x: Tensor) -> Tensor:
        result = program.step(x)
        program.model[0].weight.data.mul_(2)
        if fails:
            raise ValueError("not now")
        return result

    before = [tensor.clone() for tensor in (*program.state(), *program.model.parameters())]
    graphed = lazily(step)
    with pytest.raises(CaptureError, match=r"first call of 'step'.*ValueError: not now"):
        graphed(inputs(0))
    assert_same([*program.state(), *program.model.parameters()], before)
    fails.clear()
    result, state = graphed(inputs(0)), [tensor.clone() for tensor in program.state()]
    twin = Program()
    assert torch.equal(result, twin.step(inputs(0)))
    assert_same(state, twin.state())


def without_gradients(program: Program) -> Callable[[Tensor], Tensor]:
    for parameter in program.model.parameters():
        parameter.grad = None
    return program.step


def with_a_first_optimizer_step(program: Program) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.Adam(program.model.parameters(), fused=True)

    def step(x: Tensor) -> Tensor:
        loss = program.step(x)
        optimizer.step()
        return loss

    return step


def with_a_generator(program: Program) -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)

    def step(x: Tensor) -> Tensor:
        return program.step(x) + torch.rand((), generator=generator)

    return step


def with_a_rewound_stream(program: Program) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        with torch.enable_grad():
            hidden = program.model[0](x)
            hidden = torch.utils.checkpoint.checkpoint(program.model[1], hidden, use_reentrant=False)
            hidden.square().mean().backward()
        return program.step(x)

    return step


def with_a_cache(program: Program) -> Callable[[Tensor], Tensor]:
    cache: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        if not cache:
            cache.append(torch.full((4,), 0.5))
        return program.step(x * cache[0])

    return step


NEED_WARMUP = [without_gradients, with_a_first_optimizer_step, with_a_generator, with_a_rewound_stream, with_a_cache]


@pytest.mark.parametrize("make", NEED_WARMUP)
def test_a_function_that_needs_warm_up_gets_it_and_equals_eager(make: Callable[..., Any]) -> None:
    eager, program = Program(), Program()
    twin, step = make(eager), make(program)
    expected = []
    for seed in range(3):
        result = twin(inputs(seed))
        parameters = list(eager.model.parameters())
        expected.append([tensor.clone() for tensor in (result, *eager.state(), *parameters)])
    torch.manual_seed(1)
    graphed = lazily(step)
    for seed in range(3):
        result = graphed(inputs(seed))
        assert_same([result, *program.state(), *program.model.parameters()], expected[seed])
    assert graphed.record.replays == 3


@pytest.mark.parametrize("make", [with_a_generator, with_a_cache])
def test_warm_up_is_refused_after_a_write_to_unsaved_memory(make: Callable[..., Any]) -> None:
    """Warm-up would write that memory several times, and nothing restores it."""
    program, pool = Program(), GraphPool()
    pool.leave_unsaved(program.total)
    graphed = lazily(make(program), pool)
    gradients = [parameter.grad.clone() for parameter in program.model.parameters() if parameter.grad is not None]
    with pytest.raises(CaptureError, match="cannot be recorded by its first call"):
        graphed(inputs(0))
    assert_same([p.grad for p in program.model.parameters() if p.grad is not None], gradients)


def test_warm_up_of_a_first_call_changes_unsaved_memory_once() -> None:
    """Earlier calls wrote to it, too."""
    pool, total, generator = GraphPool(), torch.zeros(()), torch.Generator().manual_seed(3)
    pool.leave_unsaved(total)

    def step(x: Tensor) -> Tensor:
        noise = torch.rand((), generator=generator)  # needs warm-up, which begins before anything is written
        total.add_(1)
        return x + noise

    plain = lazily(total.add_, pool)
    plain(torch.ones(()))
    graphed = lazily(step, pool)
    for calls in range(2, 5):
        graphed(inputs(0))
        assert float(total) == calls


@pytest.mark.parametrize("keep", [lambda h: h, lambda h: h.detach(), lambda h: h.view(-1)[:]])
def test_a_result_kept_as_state_is_refused(keep: Callable[[Tensor], Tensor]) -> None:
    """In eager, the next call starts from it; a replay would start from that of the first call."""
    state = [torch.zeros(12)]

    def step(x: Tensor) -> Tensor:
        result = state[0].view_as(x) / 2 + x
        state[0] = keep(result)
        return result

    with pytest.raises(CaptureError, match="passes from one call to the next"):
        lazily(step)(inputs(0))


def test_unsaved_memory_keeps_what_the_first_call_wrote() -> None:
    program, twin, pool = Program(), Program(), GraphPool()
    pool.leave_unsaved(program.total)
    graphed = lazily(program.step, pool)
    torch.manual_seed(1)
    for seed in range(2):
        graphed(inputs(seed))
    torch.manual_seed(1)
    for seed in range(2):
        twin.step(inputs(seed))
    assert torch.equal(program.total, twin.total)


def test_a_written_argument_is_refused_and_nothing_changes() -> None:
    program = Program()

    def step(x: Tensor) -> Tensor:
        result = program.step(x)
        x.zero_()
        return result

    before = [tensor.clone() for tensor in program.state()]
    x = inputs(0)
    with pytest.raises(CaptureError, match="argument 0 is written in place"):
        lazily(step)(x)
    assert_same(program.state(), before)
    assert torch.equal(x, inputs(0))


@pytest.mark.parametrize("use", [lambda x: x * 2, lambda x: x], ids=["read", "returned"])
def test_an_argument_in_memory_that_the_function_writes_is_refused(use: Callable[[Tensor], Tensor]) -> None:
    """Eager sees the write through the argument; a graph has a copy from before it."""
    buffer = torch.zeros(4)

    def step(x: Tensor) -> Tensor:
        buffer.add_(1)
        return use(x)

    graphed = lazily(step)
    for argument in (buffer, buffer[1:3]):
        with pytest.raises(ReplayMismatch, match="argument 0 lies in memory that the function writes"):
            graphed(argument)
        assert not buffer.any()
    assert torch.equal(lazily(step, on_mismatch="eager")(buffer[:2]), use(torch.ones(2)))
    assert torch.equal(buffer, torch.ones(4))
    pool = GraphPool()
    pool.leave_unsaved(buffer)
    with pytest.raises(CaptureError, match="cannot be recorded by its first call"):
        lazily(step, pool, on_mismatch="eager")(buffer)
    assert torch.equal(graphed(inputs(0)), use(inputs(0)))


def test_a_rollback_restores_an_array_that_two_tensors_share() -> None:
    array = np.zeros(4, np.float32)
    first, second = torch.from_numpy(array), torch.from_numpy(array)

    def step(x: Tensor) -> Tensor:
        first.add_(x)
        second.add_(x)
        raise ValueError("not now")

    with pytest.raises(CaptureError, match="not now"):
        lazily(step)(torch.ones(()))
    assert not array.any()


@pytest.mark.parametrize(
    "make_tensor",
    [
        lambda memory: torch.frombuffer(memory, dtype=torch.float32),
        lambda memory: torch.asarray(memory, dtype=torch.float32),
        lambda memory: torch.utils.dlpack.from_dlpack(np.frombuffer(memory, np.float32)),
    ],
)
def test_memory_that_pytorch_did_not_allocate_is_refused(make_tensor: Callable[[bytearray], Tensor]) -> None:
    """Eager creates such a tensor in each call; a replay would keep using that of the first call."""

    def step(x: Tensor) -> Tensor:
        count = make_tensor(bytearray(16))
        count += 1
        return x * count

    with pytest.raises(CaptureError, match="frombuffer"):
        lazily(step)(inputs(0))


def test_guards_refuse_a_first_call_before_anything_runs() -> None:
    program = Program()
    graphed = lazily(program.step, guards=[lambda: "stale weights"])
    with pytest.raises(StaleGraph, match="stale weights"):
        graphed(inputs(0))
    assert float(program.total) == 0


def test_a_first_call_runs_the_original_code_of_other_graphs() -> None:
    pool = GraphPool()
    double = capture(lambda x: x * 2, (inputs(0),), pool=pool, name="double")
    graphed = lazily(lambda x: double(x) + 1, pool)
    assert torch.equal(graphed(inputs(1)), inputs(1) * 2 + 1)
    assert torch.equal(graphed(inputs(2)), inputs(2) * 2 + 1)
    assert double.record.replays == 0
    assert double.enabled


def test_a_first_call_captures_no_first_calls_inside_it() -> None:
    pool = GraphPool()
    double = lazily(lambda x: x * 2, pool, name="double")

    def halve(x: Tensor, times: int = 3) -> Tensor:
        halved: Tensor = graphed(x, times - 1) / 2 if times else double(x)
        return halved

    graphed = lazily(halve, pool)
    for seed in range(2):
        assert torch.equal(graphed(inputs(seed)), inputs(seed) * 2 / 2 / 2 / 2)
    assert [graph.record.captures for graph in (graphed, double)] == [1, 0]
    assert torch.equal(double(inputs(2)), inputs(2) * 2)
    assert double.record.captures == 1


def test_a_pool_switches_off_functions_that_are_not_captured_yet() -> None:
    pool = GraphPool()
    graphed = lazily(lambda x: x * 2, pool)
    with pool.disabled():
        assert torch.equal(graphed(inputs(0)), inputs(0) * 2)
    assert (graphed.record.captures, dict(graphed.record.eager_runs)) == (0, {"disabled": 1})
    assert torch.equal(graphed(inputs(1)), inputs(1) * 2)
    assert graphed.record.captures == 1


def test_one_of_several_threads_makes_the_first_call() -> None:
    pool, runs, total = GraphPool(), [], torch.zeros(())
    captured = capture(lambda x: x + 1, (inputs(0),), pool=pool, backend="tape")
    barrier = threading.Barrier(4)

    def add(x: Tensor) -> None:
        runs.append(x)
        time.sleep(0.05)  # so that the other threads arrive
        total.add_(x)

    def call() -> None:
        barrier.wait()
        graphed(torch.ones(()))

    graphed = lazily(add, pool)
    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert float(total) == 4
    assert len(runs) == graphed.record.captures == 1
    assert len(pool.graphs) == 2
    assert captured.enabled


def test_a_first_call_inside_another_capture_is_refused() -> None:
    pool = GraphPool()
    inner = lazily(lambda x: x * 2, pool)
    with pytest.raises(CaptureError, match="inside another capture"):
        capture(lambda x: inner(x) + 1, (inputs(0),), backend="tape")


def test_the_report_lists_captured_graphs_only_and_a_reset_runs_eagerly() -> None:
    pool = GraphPool()
    graphed, unused = lazily(torch.neg, pool, name="used"), lazily(torch.abs, pool, name="unused")
    graphed(inputs(0))
    assert [record.name for record in pool.report().graphs] == ["used"]
    pool.reset()
    assert torch.equal(graphed(inputs(1)), -inputs(1))
    assert graphed.record.eager_runs == {"reset": 1}
    assert torch.equal(unused(inputs(1)), inputs(1).abs())
    assert unused.record.eager_runs == {"reset": 1}
    assert not pool.graphs


def test_an_explicit_capture_leaves_only_replays_to_calls() -> None:
    program = Program()
    graphed = lazily(program.step)
    before = [tensor.clone() for tensor in program.state()]
    graphed.capture(inputs(0))
    assert_same(program.state(), before)
    assert graphed.record.captures == 1
    result = graphed(inputs(0)).clone()
    assert torch.equal(result, Program().step(inputs(0)))
    assert graphed.record.replays == 1
