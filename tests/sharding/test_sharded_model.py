"""Sharded data parallel on gloo gives the same bits as one process, with and without overlap and graphs."""

from __future__ import annotations

import copy
import itertools
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from rollgraph.distributed.world import World
from rollgraph.graph import GraphPool, StaleGraph, capture, make_graphed_callables
from rollgraph.sharding import (
    CommunicationError,
    ShardedAdamW,
    ShardedModel,
    StaleWeights,
    cosine,
    execution_order,
    linear,
    warm_up,
)
from tests.sharding.lockstep import Room, RoomCollectives, run_ranks
from tests.sharding.worlds import run_world, run_world_with_a_loss

STEPS, RATE, DECAY = 3, 0.05, 0.1


class Net(nn.Module):
    """Has tied, frozen and plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.frozen(x))  # type: ignore[no-any-return]


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def microbatch(step: int, rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    return torch.randint(13, (2, 5), generator=generator)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flip(1).flatten())


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
    tensors = [*sharded.model.parameters(), *sharded.flat.grad_buffers.values(), *optimizer.masters]
    tensors += [t for piece in optimizer.pieces for t in piece.state.values() if t.dim()]
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
                with sharded.no_sync():
                    loss(model, ids).backward()
            else:
                loss(model, ids).backward()
        sharded.finish_gradients()
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
    """One process that runs the microbatches of all ranks and sums in their order."""
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
                found = torch.autograd.grad(loss(model, microbatch(step, rank, number)), trained)
                for total, gradient in zip(sums, found, strict=True):
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
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_setting_gives_the_bits_of_one_process(size: int, tmp_path: Path) -> None:
    found = run_world(size, tmp_path, run_cases, CASES)
    assert not any(isinstance(result, str) for result in found), next(r for r in found if isinstance(r, str))
    wanted = {(case.accumulation, case.eps) for case in CASES}
    expected = {how: reference(size, *how) for how in wanted}
    for rank, results in enumerate(found):
        for case, result in zip(CASES, results, strict=True):
            for name, tensor in expected[case.accumulation, case.eps].items():
                if case.reduction == "ordered":
                    assert torch.equal(result[name], tensor), (rank, case, name)
                else:
                    torch.testing.assert_close(result[name], tensor, rtol=1e-5, atol=1e-6)


def train_and_generate(world: World, phases: bool) -> tuple[dict[str, Tensor], int]:
    """Train for 100 steps; with `phases`, generate in between, switch graphs, add and remove modules, swap weights."""
    model = build()
    sharded = ShardedModel(model, world, bucket_bytes=400, reduction="ordered")
    optimizer, pool = ShardedAdamW(sharded, RATE), GraphPool()
    ids = microbatch(0, 0, 0)
    sharded.gather()
    with torch.no_grad(), sharded.paused(gather=True):
        generate = capture(lambda ids: model(ids), (ids,), pool=pool, guards=[sharded.stale])
    captures = pool.report().captures
    for step in range(100):
        loss(model, microbatch(step, world.rank, 0)).backward()
        sharded.finish_gradients()
        optimizer.step()
        if not phases:
            continue
        if step % 10 == 3:
            model.manager = nn.Identity()
        if step % 10 == 6:
            del model.manager
        with sharded.paused(gather=True), torch.no_grad():
            assert torch.equal(generate(ids), model(ids))
            kept = sharded.flat.snapshot()
            sharded.flat.load({name: torch.zeros_like(p) for name, p in model.named_parameters()})
            assert not generate(ids).any()
            sharded.flat.restore(kept)
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


def both_ways(world: World) -> Any:
    return train_and_generate(world, phases=True), train_and_generate(world, phases=False)


@pytest.mark.multi
def test_generation_between_a_hundred_steps_changes_nothing(tmp_path: Path) -> None:
    for found in run_world(2, tmp_path, both_ways):
        assert not isinstance(found, str), found
        (with_phases, left), (alone, _) = found
        assert left == 0  # neither a later capture nor a handle at the end
        assert all(torch.equal(with_phases[name], alone[name]) for name in alone)


def stale_reads(world: World) -> list[str]:
    model = build()
    sharded = ShardedModel(model, world, bucket_bytes=400)
    optimizer, ids, said = ShardedAdamW(sharded, RATE), microbatch(0, 0, 0), []
    with torch.no_grad(), sharded.paused(gather=True):
        graph = capture(lambda ids: model(ids), (ids,), guards=[sharded.stale])
    loss(model, ids).backward()
    sharded.finish_gradients()
    optimizer.step()
    reads = (lambda: model(ids), lambda: graph(ids), lambda: sharded.require_full_parameters("raise"), model.state_dict)
    with sharded.paused(gather=False), torch.no_grad():
        for read in reads:
            try:
                read()
                said.append("read")
            except (StaleWeights, StaleGraph) as error:
                said.append(str(error))
    sharded.require_full_parameters("gather")
    with sharded.paused(gather=False), torch.no_grad():
        said.append(str(torch.equal(graph(ids), model(ids))))
    return said


@pytest.mark.multi
def test_stale_parameters_cannot_be_read(tmp_path: Path) -> None:
    for said in run_world(2, tmp_path, stale_reads):
        assert isinstance(said, list), said
        *refused, same = said
        assert all("step 0, the model is at step 1" in message for message in refused), said
        assert same == "True"


def mismatched(world: World, what: str) -> None:
    dtype = torch.float64 if what == "dtype" and world.rank else torch.float32
    model = nn.Linear(4, 4 + (what == "shape" and world.rank), dtype=dtype)
    ShardedModel(model, world, bucket_bytes=100 + (what == "bucket_bytes" and world.rank))


@pytest.mark.multi
@pytest.mark.parametrize(
    ("what", "here", "there"),
    [
        ("shape", "weight torch.float32 (4, 4) trained", "weight torch.float32 (5, 4) trained"),
        ("dtype", "weight torch.float32 (4, 4) trained", "weight torch.float64 (4, 4) trained"),
        ("bucket_bytes", "bucket_bytes 100", "bucket_bytes 101"),
    ],
)
def test_the_first_difference_between_ranks_is_named(what: str, here: str, there: str, tmp_path: Path) -> None:
    first, second = run_world(2, tmp_path, mismatched, what)
    assert f"rank 0 has {here!r} where rank 1 has {there!r}" in first
    assert f"rank 1 has {there!r} where rank 0 has {here!r}" in second


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
            sharded.finish_gradients()
            optimizer.step()
        except CommunicationError as error:
            return f"{time.monotonic() - started:.1f}|{error}"
    return "no error"


@pytest.mark.multi
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_rank_is_named_by_the_others(how: str, tmp_path: Path) -> None:
    found = run_world_with_a_loss(3, tmp_path, lose_rank_1, how)
    assert set(found) == {0, 2}
    for rank, said in found.items():
        seconds, _, message = said.partition("|")
        assert float(seconds) < 30, said  # the timeout is 5 seconds
        assert message.startswith(f"rank {rank}: "), said
        assert "rank 1 (last operation: " in message, said
        assert "bucket" in message


ALONE = World(0, 1, "cpu")


def test_a_gradient_after_the_reduction_is_refused() -> None:
    model = ShardedModel(build(), ALONE).model
    loss(model, microbatch(0, 0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"no_sync\(\)"):
        loss(model, microbatch(0, 0, 1)).backward()


def test_gradients_are_averaged_over_tokens_and_clipped() -> None:
    model, twin = build(), build()
    sharded = ShardedModel(model, ALONE)
    ids = microbatch(0, 0, 0)
    (loss(model, ids) * ids.numel()).backward()
    sharded.finish_gradients(tokens=torch.tensor(float(ids.numel())))
    trained = [p for p in twin.parameters() if p.requires_grad]
    loss(twin, ids).backward()
    expected = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    torch.testing.assert_close(sharded.clip_gradients(0.01), expected)
    torch.testing.assert_close(sharded.gradient_norm(), torch.tensor(0.01), rtol=1e-3, atol=0)


def test_a_non_finite_gradient_skips_the_step() -> None:
    model = build()
    sharded = ShardedModel(model, ALONE)
    optimizer = ShardedAdamW(sharded, RATE)
    before = copy.deepcopy(dict(model.named_parameters()))
    loss(model, microbatch(0, 0, 0)).backward()
    next(iter(sharded.flat.grad_buffers.values())).fill_(float("nan"))
    sharded.finish_gradients()
    optimizer.step()
    assert optimizer.skipped == 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    loss(model, microbatch(0, 0, 0)).backward()
    sharded.finish_gradients()
    optimizer.step(loss=torch.tensor(float("inf")))
    assert optimizer.skipped == 2
    assert torch.equal(model.head.weight, before["embedding.weight"])
    loss(model, microbatch(0, 0, 0)).backward()
    sharded.finish_gradients()
    optimizer.step(loss=torch.tensor(1.0))
    assert optimizer.skipped == 2
    assert not torch.equal(model.head.weight, before["embedding.weight"])


def test_the_schedules_and_their_warm_up() -> None:
    schedule = warm_up(4, cosine(10, floor=0.1))
    values = [schedule(step) for step in range(20)]
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert values == sorted(values[:5]) + sorted(values[5:], reverse=True)
    assert values[14:] == pytest.approx([0.1] * 6)
    assert [linear(4)(step) for step in (0, 2, 4, 9)] == [1.0, 0.5, 0.0, 0.0]
    model = build()
    sharded = ShardedModel(model, ALONE)
    optimizer = ShardedAdamW(sharded, 0.5, schedule=linear(4))
    optimizer.step()
    optimizer.step()
    assert optimizer.rate.item() == pytest.approx(0.5 * 0.75)


def test_a_captured_update_follows_the_rate_and_the_step_count() -> None:
    def run(captured: bool) -> list[Tensor]:
        model = build()
        sharded = ShardedModel(model, ALONE)
        optimizer = ShardedAdamW(sharded, RATE, weight_decay=DECAY, schedule=linear(4))
        if captured:
            optimizer.update = capture(optimizer.update)  # type: ignore[method-assign]
        for step in range(4):
            loss(model, microbatch(step, 0, 0)).backward()
            sharded.finish_gradients()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(p, q) for p, q in zip(run(True), run(False), strict=True))


def test_an_aborted_step_can_be_dropped() -> None:
    model = build()
    sharded = ShardedModel(model, ALONE)
    loss(model, microbatch(0, 0, 0)).backward()
    sharded.drop_gradients()
    loss(model, microbatch(0, 0, 0)).backward()
    sharded.finish_gradients()
    twin = build()
    loss(twin, microbatch(0, 0, 0)).backward()
    gradient = sharded.flat.grad_buffers[model.head.weight]
    assert twin.head.weight.grad is not None
    assert torch.equal(gradient, twin.head.weight.grad)


def test_read_shards_makes_loaded_weights_permanent() -> None:
    model, other = build(), Net()
    sharded = ShardedModel(model, ALONE)
    optimizer = ShardedAdamW(sharded, RATE)
    sharded.flat.load(other.state_dict())
    optimizer.read_shards()
    optimizer.step()  # on zero gradients
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


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
    named = [slot.parameter.name for bucket in sharded.flat.buckets for slot in bucket.plan.slots]
    assert named == order[::-1]


def test_a_copy_of_a_sharded_model_is_an_ordinary_model() -> None:
    model = build()
    sharded = ShardedModel(model, ALONE)
    twin = copy.deepcopy(model)
    loss(twin, microbatch(0, 0, 0)).backward()
    assert twin.head.weight.grad is not None
    assert not any(buffer.any() for buffer in sharded.flat.grad_buffers.values())


def uneven(world: World) -> Any:
    """Train such that a layer in the middle gets no gradient on rank 1."""
    model = build()
    sharded = ShardedModel(model, world, bucket_bytes=400, reduction="ordered")
    optimizer = ShardedAdamW(sharded, RATE)
    for step in range(2):
        x = model.embedding(microbatch(step, world.rank, 0))
        for number, layer in enumerate(model.layers):
            hidden = layer(x)
            x = x if number == 1 and world.rank == 1 else hidden
        model.head(model.frozen(x)).square().mean().backward()
        sharded.finish_gradients()
        optimizer.step()
    sharded.gather()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.multi
def test_a_gradient_that_is_missing_on_one_rank_counts_as_zero(tmp_path: Path) -> None:
    first, second = run_world(2, tmp_path, uneven)
    assert not isinstance(first, str), first
    assert not isinstance(second, str), second
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def clip_by_tokens(world: World) -> tuple[Tensor, Tensor]:
    """Average over the tokens of all ranks, which have different numbers of them, and clip."""
    model = build()
    sharded = ShardedModel(model, world, bucket_bytes=400)
    ids = microbatch(0, world.rank, 0)[: world.rank + 1]
    (loss(model, ids) * ids.numel()).backward()
    sharded.finish_gradients(tokens=torch.tensor(float(ids.numel())))
    norm = sharded.clip_gradients(0.01)
    return norm, sharded.gradient_norm()


@pytest.mark.multi
def test_tokens_and_norms_are_summed_over_all_ranks(tmp_path: Path) -> None:
    model = build()
    batches = [microbatch(0, rank, 0)[: rank + 1] for rank in range(2)]
    total = sum(loss(model, ids) * ids.numel() for ids in batches) / sum(ids.numel() for ids in batches)
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = nn.utils.get_total_norm(torch.autograd.grad(total, trained))  # type: ignore[arg-type]
    for norm, clipped in run_world(2, tmp_path, clip_by_tokens):
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(clipped, torch.tensor(0.01), rtol=1e-3, atol=0)


def test_bf16_parameters_have_fp32_masters() -> None:
    """Updates too small for bf16 accumulate in the master weights."""
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    twin = copy.deepcopy(model).float()
    sharded = ShardedModel(model, ALONE)
    optimizer = ShardedAdamW(sharded, 1e-4)
    reference = torch.optim.AdamW(
        twin.parameters(), lr=torch.tensor(1e-4), weight_decay=0.0, fused=True, capturable=True
    )
    for _ in range(20):
        sharded.flat.grad_buffers[model.weight].fill_(1.0)
        sharded.finish_gradients()
        optimizer.step()
        twin.weight.grad, twin.bias.grad = torch.ones(8, 8), torch.zeros(8)
        reference.step()
    assert torch.equal(model.weight, twin.weight.bfloat16())
    assert model.weight.dtype is torch.bfloat16
    assert sharded.flat.grad_buffers[model.weight].dtype is torch.float32


@pytest.mark.parametrize("how", ["added", "unfrozen"])
def test_a_parameter_that_requires_grad_later_is_refused(how: str) -> None:
    model = build()
    sharded = ShardedModel(model, ALONE)
    if how == "added":
        model.adapter = nn.Linear(8, 8)
    else:
        model.frozen.requires_grad_(True)
    loss(model, microbatch(0, 0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"(adapter|frozen).weight, .* requires grad but did not"):
        sharded.finish_gradients()


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


# -- writes during collectives, and trees that change ----------------------------------------------


def simulated(rank: int, room: Room, bucket_bytes: int = 400) -> tuple[Net, ShardedModel, ShardedAdamW]:
    """One of three ranks in this process, see `lockstep.py`."""
    model = Net()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) / (index + 1))
    collectives = RoomCollectives(room, rank)
    sharded = ShardedModel(model, World(rank, 3, "cpu"), bucket_bytes=bucket_bytes, collectives=collectives)
    return model, sharded, ShardedAdamW(sharded, RATE, weight_decay=DECAY)


def one_step(model: Net, sharded: ShardedModel, optimizer: ShardedAdamW, number: int) -> None:
    loss(model, microbatch(number, sharded.world.rank, 0)).backward()
    sharded.finish_gradients()
    optimizer.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_an_update_waits_for_the_gathers_in_flight() -> None:
    """Only one bucket is read between the updates: the gathers of the others are still in flight."""

    def work(rank: int, room: Room, reads: bool) -> dict[str, Tensor]:
        model, sharded, optimizer = simulated(rank, room)
        one_step(model, sharded, optimizer, 0)
        for _ in range(3):
            if reads:
                sharded.gather()
            else:
                sharded.ensure_gathered([model.embedding.weight])
            optimizer.step()  # on zero gradients; moments and weight decay still change the weights
        sharded.gather()
        return values(model)

    found = [run_ranks(3, lambda rank, room, reads=reads: work(rank, room, reads)) for reads in (False, True)]
    for unread, read in zip(*found, strict=True):
        assert same(unread, read)
        assert same(unread, found[0][0])


@pytest.mark.parametrize("how", ["load", "restore", "load_state_dict"])
def test_weights_that_are_loaded_after_a_step_stay(how: str) -> None:
    def work(rank: int, room: Room) -> bool:
        model, sharded, optimizer = simulated(rank, room)
        kept, first = sharded.flat.snapshot(), values(model)
        one_step(model, sharded, optimizer, 0)  # gathers are in flight
        if how == "load":
            sharded.flat.load(first)
        elif how == "restore":
            sharded.flat.restore(kept)
        else:
            model.load_state_dict(first, strict=False)
        sharded.gather()
        return same(values(model), first)

    assert all(run_ranks(3, work))


def test_a_snapshot_of_stale_parameters_is_refused() -> None:
    def work(rank: int, room: Room) -> bool:
        model, sharded, optimizer = simulated(rank, room)
        one_step(model, sharded, optimizer, 0)
        with pytest.raises(StaleWeights, match=r"step 0, the model is at step 1: call gather\(\) first"):
            sharded.flat.snapshot()
        sharded.gather()
        kept = sharded.flat.snapshot()
        return all(torch.equal(a, b.parameters) for a, b in zip(kept, sharded.flat.buckets, strict=True))

    assert all(run_ranks(3, work))


def test_a_write_to_a_parameter_during_its_gather_is_an_error() -> None:
    def work(rank: int, room: Room) -> None:
        model, sharded, optimizer = simulated(rank, room)
        one_step(model, sharded, optimizer, 0)
        with torch.no_grad():
            model.embedding.weight.fill_(1)
        with pytest.raises(RuntimeError, match=r"embedding.weight\) was written while it was gathered"):
            sharded.gather()
        with torch.no_grad():
            model.embedding.weight.fill_(1)
        sharded.gather()
        assert (model.embedding.weight == 1).all()

    run_ranks(3, work)


def test_zeroing_gradients_waits_for_the_reductions() -> None:
    def work(rank: int, room: Room) -> Tensor:
        model, sharded, _ = simulated(rank, room)
        loss(model, microbatch(0, rank, 0)).backward()
        sharded.flat.zero_gradients()
        sharded.finish_gradients()
        return sharded.gradient_norm()

    assert run_ranks(3, work) == [0, 0, 0]


def test_a_step_needs_finished_gradients_and_uses_them_once() -> None:
    model = build()
    sharded = ShardedModel(model, ALONE)
    optimizer, before = ShardedAdamW(sharded, RATE), values(model)
    with sharded.no_sync():
        loss(model, microbatch(0, 0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"finish_gradients\(\) first"):
        optimizer.step()
    sharded.finish_gradients()
    with pytest.raises(RuntimeError, match="are finished"):
        sharded.finish_gradients()
    assert same(values(model), before)
    optimizer.step()
    assert not same(values(model), before)
    with sharded.hooks.paused():
        loss(model, microbatch(1, 0, 0)).backward()  # stays in param.grad, because no hook moved it
    with pytest.raises(RuntimeError, match=r"finish_gradients\(\) first"):
        optimizer.step()


def test_a_backward_across_an_update_raises_as_without_sharding() -> None:
    model = build()
    sharded = ShardedModel(model, ALONE)
    optimizer = ShardedAdamW(sharded, RATE)
    value = loss(model, microbatch(0, 0, 0))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def plain_gradient(change: Any) -> dict[str, Tensor]:
    """The gradients of a plain model whose tree was changed in the same way."""
    model = build()
    change(model)
    loss(model, microbatch(0, 0, 0)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def untie(model: Net) -> None:
    """Remove the embedding from the tree; its weight stays in the head."""
    weight = model.embedding.weight
    model.embedding = nn.Embedding.from_pretrained(torch.ones(13, 8))
    assert model.head.weight is weight


def freeze_and_unfreeze(model: Net) -> None:
    model.layers.requires_grad_(False)
    model.layers.requires_grad_(True)


@pytest.mark.parametrize("change", [untie, freeze_and_unfreeze])
@pytest.mark.parametrize("covers", ["enable", "pause", "forward"])
def test_a_parameter_is_trained_whichever_module_has_it_now(change: Any, covers: str) -> None:
    model = build()
    sharded = ShardedModel(model, ALONE)
    if change is freeze_and_unfreeze:
        model.layers.requires_grad_(False)
        with sharded.paused(gather=True):
            pass  # its end registers the hooks on what is trained
        model.layers.requires_grad_(True)
    else:
        change(model)
    if covers == "enable":
        sharded.hooks.enable()
    elif covers == "pause":
        with sharded.paused(gather=True):
            pass
    loss(model, microbatch(0, 0, 0)).backward()
    sharded.finish_gradients()
    expected = plain_gradient(change)
    assert "head.weight" in expected or "embedding.weight" in expected
    for name, parameter in model.named_parameters():
        if name in expected:
            assert torch.equal(sharded.flat.grad_buffers[parameter], expected[name]), name
            assert parameter.grad is None


@pytest.mark.parametrize("gather", [False, True])
def test_the_guard_covers_a_replaced_module(gather: bool) -> None:
    def work(rank: int, room: Room) -> None:
        model, sharded, optimizer = simulated(rank, room)
        with sharded.paused(gather=False):
            pass
        old = model.head
        model.head = nn.Linear(8, 13, bias=False)
        model.head.weight = old.weight
        one_step(model, sharded, optimizer, 0)
        ids = microbatch(0, 0, 0)
        with sharded.paused(gather=gather), torch.no_grad():
            if gather:
                model(ids)
                return
            for read in (lambda: model.head(torch.ones(8)), lambda: model(ids)):
                with pytest.raises(StaleWeights):
                    read()

    run_ranks(3, work)


def test_a_replaced_module_gathers_before_it_reads() -> None:
    def work(rank: int, room: Room) -> Tensor:
        model, sharded, optimizer = simulated(rank, room)
        one_step(model, sharded, optimizer, 0)
        old = model.layers[1][0]
        model.layers[1][0] = nn.Linear(8, 8)
        model.layers[1][0].weight, model.layers[1][0].bias = old.weight, old.bias
        with torch.no_grad():
            found = model(microbatch(0, 0, 0))
        sharded.gather()
        with torch.no_grad():
            assert torch.equal(found, model(microbatch(0, 0, 0)))
        return found

    first, *others = run_ranks(3, work)
    assert all(torch.equal(first, other) for other in others)


MOVES: dict[str, Any] = {
    "data": lambda model: setattr(model.layers[0][0].weight, "data", torch.zeros(8, 8)),
    "to": lambda model: model.layers[0].to(torch.float64),
    "shape": lambda model: setattr(model.layers[0][0].weight, "data", model.layers[0][0].weight.data[:4]),
}


@pytest.mark.parametrize("how", MOVES)
def test_a_parameter_that_left_its_memory_is_named_before_anything_changes(how: str) -> None:
    model, other = build(), build()
    sharded = ShardedModel(model, ALONE)
    optimizer = ShardedAdamW(sharded, RATE)
    kept = sharded.flat.snapshot()
    before = [bucket.parameters.clone() for bucket in sharded.flat.buckets]
    MOVES[how](model)
    calls = (
        sharded.finish_gradients,
        optimizer.step,
        optimizer.read_shards,
        sharded.flat.snapshot,
        lambda: sharded.flat.restore(kept),
        lambda: sharded.flat.load(other.state_dict()),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=r"layers.0.0.(weight|bias) left its flat buffer .* neither trained"):
            call()
    assert all(torch.equal(a, b.parameters) for a, b in zip(before, sharded.flat.buckets, strict=True))
    assert optimizer.steps == 0
