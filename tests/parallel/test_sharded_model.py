"""Sharded data parallel on gloo gives the same bits as one process, with and without overlap and graphs."""

from __future__ import annotations

import copy
import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import GraphPool, StaleGraph, capture, make_graphed_callables
from rollgraph.parallel.data.bucket_plan import execution_order
from rollgraph.parallel.data.collectives import CommunicationError
from rollgraph.parallel.data.gathers import StaleWeights
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.world import World
from tests.parallel.small_net import ALONE, DECAY, RATE, build, loss, microbatch
from tests.parallel.worlds import run_world, run_world_with_a_loss

STEPS = 3


class Case(NamedTuple):
    overlap_gather: bool
    overlap_reduce: bool
    graphs: bool
    accumulation: int
    reduction: Any = "ordered"
    bucket_bytes: int = 400
    eps: float = 1e-8


CASES = [Case(*flags, accumulation) for flags in itertools.product((False, True), repeat=3) for accumulation in (1, 4)]


# A library sums in its own order. With such a large eps Adam does not amplify the rounding.
CASES += [Case(True, True, False, 1, "library", eps=1.0), Case(True, True, True, 1, "ordered", 10**9)]


def measured_bytes(sharded: ShardedModel, optimizer: ShardedAdamW) -> int:
    """The bytes of the storages behind the parameters, the gradients and the optimizer state."""
    tensors = [*sharded.model.parameters(), *sharded.flat.grad_buffers.values()]
    tensors += [tensor for shard in optimizer.state.shards for tensor in shard.values()]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def train(world: World, case: Case) -> dict[str, Tensor]:
    model = build()
    sharded = ShardedModel(
        model,
        world,
        overlap_gather=case.overlap_gather,
        overlap_reduce=case.overlap_reduce,
        bucket_bytes=case.bucket_bytes,
        reduction=case.reduction,
    )
    optimizer = ShardedAdamW(sharded, RATE, weight_decay=DECAY, eps=case.eps)
    pool = GraphPool()
    if case.graphs:
        make_graphed_callables(
            tuple(model.layers),
            ((torch.randn(2, 5, 8, requires_grad=True),),) * 3,
            pool=pool,
            hooks=[sharded.graph_hooks(layer) for layer in model.layers],
            guards=[],
            grad_buffers=sharded.flat.grad_buffers,
        )
    for step in range(STEPS):
        for number in range(case.accumulation):
            ids = microbatch(step, world.rank, number)
            if number < case.accumulation - 1:
                with sharded.gradients.no_sync():
                    loss(model, ids).backward()
            else:
                loss(model, ids).backward()
        sharded.gradients.finish()
        optimizer.step()
    sharded.gather()
    sharded.flat.check()
    assert measured_bytes(sharded, optimizer) == sharded.plan().total
    result = {name: p.detach().clone() for name, p in model.named_parameters()}
    pool.reset()
    sharded.close()
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    return result


def reference(ranks: int, accumulation: int, eps: float) -> dict[str, Tensor]:
    """One process that runs the microbatches of all ranks and sums in the order of ranks."""
    model = build()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(RATE), eps=eps, fused=True, capturable=True)
    for step in range(STEPS):
        totals = []
        for rank in range(ranks):
            sums = [torch.zeros_like(p) for p in trained]
            for number in range(accumulation):
                gradients = torch.autograd.grad(loss(model, microbatch(step, rank, number)), trained)
                for total, gradient in zip(sums, gradients, strict=True):
                    total.add_(gradient)
            totals.append(sums)
        for parameter, *parts in zip(trained, *totals, strict=True):
            parameter.grad = parts[0].clone()
            for part in parts[1:]:
                parameter.grad.add_(part)
            parameter.grad.div_(ranks)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def run_cases(world: World, cases: list[Case]) -> list[dict[str, Tensor]]:
    return [train(world, case) for case in cases]


@pytest.mark.multi
@pytest.mark.parametrize(
    ("size", "cases"),
    [(1, CASES), (3, CASES[::3]), *(pytest.param(size, CASES, marks=pytest.mark.slow) for size in (2, 3, 4))],
    ids=lambda value: value if isinstance(value, int) else f"{len(value)} cases",
)
def test_all_settings_have_the_bits_of_one_process(size: int, cases: list[Case], tmp_path: Path) -> None:
    outputs = run_world(size, tmp_path, run_cases, cases)
    assert not any(isinstance(result, str) for result in outputs), next(r for r in outputs if isinstance(r, str))
    settings = {(case.accumulation, case.eps) for case in cases}
    expected = {how: reference(size, *how) for how in settings}
    for rank, results in enumerate(outputs):
        for case, result in zip(cases, results, strict=True):
            for name, tensor in expected[case.accumulation, case.eps].items():
                if case.reduction == "ordered":
                    assert torch.equal(result[name], tensor), (rank, case, name)
                else:
                    torch.testing.assert_close(result[name], tensor, rtol=1e-5, atol=1e-6)


def train_and_generate(world: World, steps: int, phases: bool) -> tuple[dict[str, Tensor], int]:
    """Train; with `phases`, generate in between, switch graphs, add and remove modules, swap weights."""
    model = build()
    sharded = ShardedModel(model, world, bucket_bytes=400, reduction="ordered")
    optimizer, pool = ShardedAdamW(sharded, RATE), GraphPool()
    ids = microbatch(0, 0, 0)
    sharded.gather()
    with torch.no_grad(), sharded.paused(gather=True):
        generate = capture(lambda ids: model(ids), (ids,), pool=pool, guards=[sharded.gathers.stale])
    captures = pool.report().captures
    for step in range(steps):
        loss(model, microbatch(step, world.rank, 0)).backward()
        sharded.gradients.finish()
        optimizer.step()
        if not phases:
            continue
        if step % 10 == 3:
            model.manager = nn.Identity()
        if step % 10 == 6:
            del model.manager
        with sharded.paused(gather=True), torch.no_grad():
            assert torch.equal(generate(ids), model(ids))
            snapshot = sharded.flat.snapshot()
            sharded.flat.load({name: torch.zeros_like(p) for name, p in model.named_parameters()})
            assert not generate(ids).any()
            sharded.flat.restore(snapshot)
            pool.disable()
            model(ids)
            pool.enable()
    sharded.gather()
    result = {name: p.detach().clone() for name, p in model.named_parameters()}
    captures = pool.report().captures - captures
    sharded.close()
    handles = sum(len(m._forward_pre_hooks) for m in model.modules())
    handles += sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return result, captures + handles


def both_ways(world: World, steps: int) -> Any:
    return train_and_generate(world, steps, phases=True), train_and_generate(world, steps, phases=False)


@pytest.mark.multi
@pytest.mark.parametrize("steps", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_generation_between_steps_changes_nothing(steps: int, tmp_path: Path) -> None:
    for result in run_world(2, tmp_path, both_ways, steps):
        assert not isinstance(result, str), result
        (with_phases, leftovers), (alone, _) = result
        assert leftovers == 0  # neither a later capture nor a handle at the end
        assert all(torch.equal(with_phases[name], alone[name]) for name in alone)


def stale_reads(world: World) -> list[str]:
    model = build()
    sharded = ShardedModel(model, world, bucket_bytes=400)
    optimizer, ids, messages = ShardedAdamW(sharded, RATE), microbatch(0, 0, 0), []
    with torch.no_grad(), sharded.paused(gather=True):
        graph = capture(lambda ids: model(ids), (ids,), guards=[sharded.gathers.stale])
    loss(model, ids).backward()
    sharded.gradients.finish()
    optimizer.step()
    reads = (lambda: model(ids), lambda: graph(ids), lambda: sharded.require_full_parameters("raise"), model.state_dict)
    with sharded.paused(gather=False), torch.no_grad():
        for read in reads:
            try:
                read()
                messages.append("read")
            except (StaleWeights, StaleGraph) as error:
                messages.append(str(error))
    sharded.require_full_parameters("gather")
    with sharded.paused(gather=False), torch.no_grad():
        messages.append(str(torch.equal(graph(ids), model(ids))))
    return messages


@pytest.mark.multi
def test_stale_parameters_cannot_be_read(tmp_path: Path) -> None:
    for messages in run_world(2, tmp_path, stale_reads):
        assert isinstance(messages, list), messages
        *refused, same = messages
        assert all("step 0, the model is at step 1" in message for message in refused), messages
        assert same == "True"


DIFFERENCES = {
    "shape": ("weight torch.float32 (4, 4) trained", "weight torch.float32 (5, 4) trained"),
    "dtype": ("weight torch.float32 (4, 4) trained", "weight torch.float64 (4, 4) trained"),
    "bucket_bytes": ("bucket_bytes 100", "bucket_bytes 101"),
}


def mismatched(world: World) -> dict[str, str]:
    messages = {}
    for what in DIFFERENCES:
        dtype = torch.float64 if what == "dtype" and world.rank else torch.float32
        model = nn.Linear(4, 4 + (what == "shape" and world.rank), dtype=dtype)
        with pytest.raises(ValueError, match="rank") as raised:
            ShardedModel(model, world, bucket_bytes=100 + (what == "bucket_bytes" and world.rank))
        messages[what] = str(raised.value)
    return messages


@pytest.mark.multi
def test_the_first_difference_between_ranks_is_named(tmp_path: Path) -> None:
    first, second = run_world(2, tmp_path, mismatched)
    for what, (first_text, second_text) in DIFFERENCES.items():
        assert f"rank 0 has {first_text!r} where rank 1 has {second_text!r}" in first[what]
        assert f"rank 1 has {second_text!r} where rank 0 has {first_text!r}" in second[what]


def lose_rank_1(world: World, how: str) -> str:
    model = build()
    sharded = ShardedModel(model, world, bucket_bytes=400, timeout=5.0)
    optimizer = ShardedAdamW(sharded, RATE)
    started = time.monotonic()
    for step in range(3):
        if world.rank == 1 and step == 1:
            os._exit(1) if how == "dies" else time.sleep(600)
        started = time.monotonic()
        try:
            loss(model, microbatch(step, world.rank, 0)).backward()
            sharded.gradients.finish()
            optimizer.step()
        except CommunicationError as error:
            return f"{time.monotonic() - started:.1f}|{error}"
    return "no error"


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_rank_is_named_by_the_others(how: str, tmp_path: Path) -> None:
    results = run_world_with_a_loss(3, tmp_path, lose_rank_1, how)
    assert set(results) == {0, 2}
    for rank, result in results.items():
        seconds, _, message = result.partition("|")
        assert float(seconds) < 30, result  # the timeout is 5 seconds
        assert message.startswith(f"rank {rank}: "), result
        assert f"rank 1 on {socket.gethostname()} (set-up; last operation: " in message, result
        assert "bucket" in message


def test_buckets_follow_the_execution_order() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))  # type: ignore[no-any-return]

    model = Backwards()
    order = execution_order(model, torch.randn(1, 4))
    assert order == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert not any(m._forward_pre_hooks for m in model.modules())
    sharded = ShardedModel(model, ALONE, bucket_bytes=1, order=order)
    names = [slot.parameter.name for bucket in sharded.flat.buckets for slot in bucket.plan.slots]
    assert names == order[::-1]


def test_a_copy_of_a_sharded_model_is_an_ordinary_model() -> None:
    model = build()
    sharded = ShardedModel(model, ALONE)
    twin = copy.deepcopy(model)
    loss(twin, microbatch(0, 0, 0)).backward()
    assert twin.head.weight.grad is not None
    assert not any(buffer.any() for buffer in sharded.flat.grad_buffers.values())


def test_a_model_can_be_sharded_only_once_at_a_time() -> None:
    with pytest.raises(ValueError, match="Identity has no parameters"):
        ShardedModel(nn.Identity(), ALONE)
    model = build()
    sharded = ShardedModel(model, ALONE)
    with pytest.raises(ValueError, match=r"already: close\(\)"):
        ShardedModel(model, ALONE)
    ShardedModel(copy.deepcopy(model), ALONE).close()
    sharded.close()
    ShardedModel(model, ALONE).close()


MOVES: dict[str, Any] = {
    "data": lambda model: setattr(model.layers[0][0].weight, "data", torch.zeros(8, 8)),
    "to": lambda model: model.layers[0].to(torch.float64),
    "shape": lambda model: setattr(model.layers[0][0].weight, "data", model.layers[0][0].weight.data[:4]),
}


@pytest.mark.parametrize("how", MOVES)
def test_a_parameter_that_left_its_memory_is_named_before_anything_changes(how: str) -> None:
    model, second = build(), build()
    sharded = ShardedModel(model, ALONE)
    optimizer = ShardedAdamW(sharded, RATE)
    snapshot = sharded.flat.snapshot()
    before = [bucket.parameters.clone() for bucket in sharded.flat.buckets]
    MOVES[how](model)
    calls = (
        sharded.gradients.finish,
        optimizer.step,
        optimizer.read_shards,
        sharded.flat.snapshot,
        lambda: sharded.flat.restore(snapshot),
        lambda: sharded.flat.load(second.state_dict()),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=r"layers.0.0.(weight|bias) left its flat buffer .* neither trained"):
            call()
    assert all(torch.equal(a, b.parameters) for a, b in zip(before, sharded.flat.buckets, strict=True))
    assert optimizer.steps == 0
