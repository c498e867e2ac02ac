"""Aborted steps: by all ranks, by one rank, and by one rank that the others cannot follow."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from rollgraph.parallel.data.collectives import CommunicationError
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.data.together import StepAborted
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.failures import LossReport
from rollgraph.parallel.ranks.world import World
from tests.parallel.lockstep import PATIENCE, Room, RoomCollectives, RoomLiveness, run_ranks
from tests.parallel.worlds import run_world

RANKS = 3


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) * (index + 1) / 8)

    def forward(self, x: Tensor, fails_at: int | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index == fails_at:
                raise ValueError("an unreadable sample")
            x = layer(x).tanh()
        return x


def batch(step: int, rank: int) -> Tensor:
    return torch.linspace(-1, 1 + step + rank, 12).view(3, 4)


def train(sharded: ShardedModel, optimizer: ShardedAdamW, step: int, fails_at: int | None = None) -> None:
    """One step, written as in a program that survives a failed step."""
    try:
        sharded.model(batch(step, sharded.world.rank), fails_at=fails_at).square().sum().backward()
        sharded.gradients.finish()
        optimizer.step()
    except BaseException:
        sharded.gradients.drop()
        raise


def steps_with_a_failure(sharded: ShardedModel, fails_at: int | None, failing: int) -> tuple[list[Tensor], str]:
    """Step 1 fails on one rank before the layer `fails_at`; if that is None, step 1 is left out."""
    optimizer = ShardedAdamW(sharded, 0.1)
    text = ""
    for step in range(4):
        fails = step == 1 and fails_at is not None and sharded.world.rank == failing
        try:
            if step != 1 or fails_at is not None:
                train(sharded, optimizer, step, fails_at if fails else None)
        except (ValueError, StepAborted) as error:
            text = f"{type(error).__name__}: {error}"
    sharded.gather()
    return [p.detach().clone() for p in sharded.model.parameters()], text


def simulated(rank: int, room: Room) -> ShardedModel:
    collectives = RoomCollectives(room, rank)
    return ShardedModel(Stack(), World(rank, RANKS, "cpu"), bucket_bytes=1, collectives=collectives)


def hasten_timeout(sharded: ShardedModel) -> None:
    """From now on, a minute passes in 0.3 s for this rank. Before, a slow machine has all the time it needs."""
    liveness = sharded.collectives.liveness
    assert isinstance(liveness, RoomLiveness)
    liveness.clock = lambda: 200 * time.monotonic()


Shard = Literal["optimizer", "parameters"]


def make_sharded(rank: int, collectives: RoomCollectives, shard: Shard) -> ShardedModel:
    model = Stack()
    world, layers = World(rank, RANKS, "cpu"), list(model.layers)
    return ShardedModel(model, world, bucket_bytes=1, collectives=collectives, shard=shard, units=layers)


@pytest.mark.parametrize("fails_at", range(4))
def test_all_ranks_abort_a_step_that_one_rank_aborts(fails_at: int) -> None:
    results = run_ranks(RANKS, lambda rank, room: steps_with_a_failure(simulated(rank, room), fails_at, failing=1))
    expected, _ = run_ranks(RANKS, lambda rank, room: steps_with_a_failure(simulated(rank, room), None, failing=1))[0]
    for rank, (parameters, text) in enumerate(results):
        assert all(torch.equal(p, q) for p, q in zip(parameters, expected, strict=True))
        if rank == 1:
            assert text == "ValueError: an unreadable sample"
        else:
            assert text == (
                "StepAborted: rank 1 aborted the step (ValueError: an unreadable sample): all ranks drop its gradients"
            )


class End:
    """The end of a step: a rank has reached it once it waits in `gradients.finish()`, or has left that."""

    def __init__(self) -> None:
        self._reached = [threading.Event() for _ in range(RANKS)]

    def collectives(self, rank: int, room: Room, timeout: float = 60.0) -> RoomCollectives:
        return RoomCollectives(room, rank, timeout, before_looking=self._reached[rank].set)

    def finish(self, sharded: ShardedModel) -> None:
        try:
            sharded.gradients.finish()
        finally:
            self._reached[sharded.rank].set()

    def wait_for(self, *ranks: int) -> None:
        for rank in ranks:
            assert self._reached[rank].wait(PATIENCE), f"rank {rank} did not reach the end of the step"


def take_step(sharded: ShardedModel) -> list[Tensor]:
    train(sharded, ShardedAdamW(sharded, 0.1), 0)
    full_model = sharded.make_full_model()
    sharded.gather()
    return [p.detach().clone() for p in full_model.parameters()]


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_a_rank_that_fails_after_its_last_reduction_aborts_the_step(shard: Shard) -> None:
    """The others have all their sums by then, so they learn of it only at the end of the step."""
    end = End()

    def work(rank: int, room: Room) -> tuple[list[Tensor], list[str]]:
        collectives = end.collectives(rank, room)
        sharded = make_sharded(rank, collectives, shard)
        text = ""
        try:
            sharded.model(batch(0, rank)).square().sum().backward()
            if rank == 1:
                end.wait_for(0, 2)
                raise ValueError("an unreadable sample")
            end.finish(sharded)
        except (ValueError, StepAborted) as error:
            text = str(error)
            sharded.gradients.drop()
        assert text.startswith("an unreadable" if rank == 1 else "rank 1 aborted the step (ValueError: an unreadable")
        return take_step(sharded), collectives.liveness.operations

    expected = run_ranks(RANKS, lambda rank, room: take_step(simulated(rank, room)))[0]
    for parameters, operations in run_ranks(RANKS, work):
        assert all(torch.equal(p, q) for p, q in zip(parameters, expected, strict=True))
        assert operations == ["the end of the step"] * 2  # on all ranks alike, or a late rank would be named wrongly


@pytest.mark.parametrize("what", ["is lost", "is late"])
def test_the_wait_for_the_end_of_a_step_ends_if_a_rank_is_lost_or_late(what: str) -> None:
    end = End()
    watched = {}

    def work(rank: int, room: Room) -> str:
        model, collectives = Stack(), end.collectives(rank, room, timeout=0.3 if what == "is late" else 60.0)
        watched[rank] = collectives.liveness
        sharded = ShardedModel(model, World(rank, RANKS, "cpu"), bucket_bytes=1, collectives=collectives)
        model(batch(0, rank)).square().sum().backward()
        if rank != 1:
            with pytest.raises(CommunicationError) as caught:
                end.finish(sharded)
            return str(caught.value)
        end.wait_for(0, 2)
        if what == "is lost":
            for liveness in watched.values():
                liveness.loss = LossReport(1, "rank 1 is lost")
        return ""

    reason = "rank 1 is lost" if what == "is lost" else "some rank did not reach the end of the step"
    for rank, text in enumerate(run_ranks(RANKS, work)):
        assert text == ("" if rank == 1 else f"rank {rank} has reduced its gradients, and {reason}")


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_the_store_does_not_grow_with_every_step(shard: Shard) -> None:
    """Neither with finished nor with aborted steps."""

    def keys_after(steps: int) -> int:
        rooms = []

        def work(rank: int, room: Room) -> None:
            sharded = make_sharded(rank, RoomCollectives(room, rank), shard)
            optimizer = ShardedAdamW(sharded, 0.1)
            for step in range(steps):
                fails_at = 2 if rank == 1 and step % 3 else None  # two of three steps are aborted
                with suppress(ValueError, StepAborted):
                    train(sharded, optimizer, step, fails_at)
            for step in range(2):
                train(sharded, optimizer, step)
            rooms.append(room)

        run_ranks(RANKS, work)
        return int(rooms[0].store.num_keys())

    assert keys_after(12) == keys_after(3)


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_a_step_is_dropped_while_an_earlier_failure_is_handled(shard: Shard) -> None:
    """Python's current exception is then that of the step before."""

    def work(rank: int, room: Room) -> str:
        sharded = make_sharded(rank, RoomCollectives(room, rank), shard)
        try:
            train(sharded, ShardedAdamW(sharded, 0.1), 0, 2 if rank == 1 else None)
        except (ValueError, StepAborted):
            sharded.model(batch(1, rank)).square().sum().backward()
            if rank == 0:
                sharded.gradients.drop()
                sharded.gather()
                return "dropped"
            with pytest.raises(StepAborted, match="rank 0 aborted the step"):
                sharded.gradients.finish()
            sharded.gradients.drop()
            sharded.gather()
        return "followed"

    assert run_ranks(RANKS, work) == ["dropped", "followed", "followed"]


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_all_ranks_drop_the_gradients_of_an_aborted_step(shard: Shard) -> None:
    def work(rank: int, room: Room) -> list[str]:
        sharded = make_sharded(rank, RoomCollectives(room, rank), shard)
        optimizer = ShardedAdamW(sharded, 0.1)
        outcomes = []

        def fail(gradient: Tensor) -> None:
            raise ValueError("in the last layer of a backward pass")

        for step in range(3):
            loss = sharded.model(batch(step, rank)).square().sum()
            try:
                if step == 1 and rank == 1:
                    hook = sharded.model.get_parameter("layers.0.weight").register_hook(fail)
                loss.backward()
                sharded.gradients.finish()
                optimizer.step()
                outcomes.append("taken")
            except ValueError:
                hook.remove()
                sharded.gradients.drop()
                outcomes.append("failed")
            except StepAborted:  # gradients.finish() has dropped them already
                outcomes.append("aborted")
        return outcomes

    outcomes_by_rank = run_ranks(RANKS, work)
    assert outcomes_by_rank == [["taken", outcomes, "taken"] for outcomes in ("aborted", "failed", "aborted")]


def lend_and_take_back(sharded: ShardedModel) -> None:
    """Do what a worker does to generate between two steps: the cache overwrites the gradients."""
    with sharded.paused(gather=True):  # ends an aborted step on all ranks
        sharded.gradients.lend()
        sharded.flat.gradient_memory.fill_(torch.nan)
    sharded.gradients.take_back()


@pytest.mark.parametrize("fails_at", [0, 3])
def test_the_memory_of_gradients_can_be_lent_after_an_aborted_step(fails_at: int) -> None:
    def work(rank: int, room: Room, fails_at: int | None) -> list[Tensor]:
        sharded = simulated(rank, room)
        optimizer = ShardedAdamW(sharded, 0.1)
        for step in range(4):
            lend_and_take_back(sharded)
            if step != 1:
                train(sharded, optimizer, step)
            elif fails_at is not None:
                with pytest.raises((ValueError, StepAborted)):
                    train(sharded, optimizer, step, fails_at if rank == 1 else None)
                with pytest.raises(RuntimeError, match="would be overwritten"):  # others may still reduce them
                    sharded.gradients.lend()
        lend_and_take_back(sharded)
        return [p.detach().clone() for p in sharded.model.parameters()]

    expected = run_ranks(RANKS, lambda rank, room: work(rank, room, None))[0]
    for parameters in run_ranks(RANKS, lambda rank, room: work(rank, room, fails_at)):
        assert all(torch.equal(p, q) for p, q in zip(parameters, expected, strict=True))
    assert all(p.isfinite().all() for p in expected)


def test_gradients_that_are_still_needed_are_not_lent() -> None:
    sharded = ShardedModel(Stack(), World(0, 1, "cpu"))
    optimizer = ShardedAdamW(sharded, 0.1)
    refused = pytest.raises(RuntimeError, match="would be overwritten")
    with sharded.gradients.no_sync():
        sharded.model(batch(0, 0)).sum().backward()
    with refused:
        sharded.gradients.lend()
    sharded.model(batch(1, 0)).sum().backward()
    sharded.gradients.finish()
    gradients = [shard.clone() for shard in sharded.gradients.shards()]
    with refused:
        sharded.gradients.lend()
    assert all(torch.equal(one, other) for one, other in zip(gradients, sharded.gradients.shards(), strict=True))
    optimizer.step()
    sharded.gradients.lend()
    sharded.flat.gradient_memory.fill_(5)
    sharded.gradients.drop()  # there is no step to drop
    assert (sharded.flat.gradient_memory == 5).all()
    sharded.gradients.take_back()
    sharded.flat.gradient_memory[0] = 7
    sharded.gradients.take_back()  # it was taken back already: nothing is zeroed
    assert sharded.flat.gradient_memory[0] == 7


def on_gloo(world: World) -> list[tuple[list[Tensor], str]]:
    def sharded() -> ShardedModel:
        return ShardedModel(Stack(), world, bucket_bytes=1, reduction="ordered")

    return [steps_with_a_failure(sharded(), 2, failing=1), steps_with_a_failure(sharded(), None, failing=1)]


@pytest.mark.multi
def test_processes_abort_a_step_together(tmp_path: Path) -> None:
    for rank, result in enumerate(run_world(2, tmp_path, on_gloo)):
        assert not isinstance(result, str), result
        (parameters, text), (expected, _) = result
        assert all(torch.equal(p, q) for p, q in zip(parameters, expected, strict=True))
        assert text.startswith("ValueError" if rank == 1 else "StepAborted: rank 1 aborted the step (ValueError")


def test_a_rank_that_aborts_alone_joins_no_collective_of_the_next_step() -> None:
    """The others have finished their gradients, so their next collectives do not belong to an aborted step."""

    def work(rank: int, room: Room) -> str:
        sharded = simulated(rank, room)
        sharded.model(batch(0, rank)).sum().backward()
        sharded.gradients.finish()
        if rank != 1:
            return ""
        hasten_timeout(sharded)
        sharded.gradients.drop()
        with pytest.raises(CommunicationError) as caught:
            sharded.gradients.norm()
        sharded.close()  # waits for no one
        return str(caught.value)

    text = run_ranks(RANKS, work)[1]
    assert text.startswith("rank 1 aborted a step by gradients.drop(), and rank 0, rank 2 did not within 60 s"), text


def test_a_rank_that_fails_before_an_exchange_does_not_join_it() -> None:
    """Rank 1 fails before an exchange of strings that the others wait in."""

    def work(rank: int, room: Room) -> str:
        sharded = simulated(rank, room)
        train(sharded, ShardedAdamW(sharded, 0.1), 0)
        if rank != 1:
            with pytest.raises(AssertionError, match="another rank failed"):  # with real processes: the timeout
                sharded.collectives.all_gather_text("how many microbatches are there?")
            return ""
        hasten_timeout(sharded)
        sharded.gradients.drop()
        with pytest.raises(CommunicationError) as caught:
            sharded.model(batch(0, rank))
        room.fail(caught.value)
        return str(caught.value)

    text = run_ranks(RANKS, work)[1]
    assert "rank 0, rank 2 neither started its reductions nor called gradients.drop() within 60 s" in text, text


def test_a_failed_reduction_cannot_be_ignored() -> None:
    def work(rank: int, room: Room) -> Tensor:
        sharded = simulated(rank, room)
        sharded.model(batch(0, rank)).sum().backward()
        assert isinstance(sharded.collectives, RoomCollectives)
        sharded.collectives.fail_at("wait", 3)
        with pytest.raises(CommunicationError, match="made to fail"):
            sharded.gradients.finish()
        with pytest.raises(CommunicationError, match=r"failed earlier: call gradients.drop\(\) first"):
            sharded.gradients.finish()
        sharded.gradients.drop()
        sharded.model(batch(0, rank)).sum().backward()
        sharded.gradients.finish()
        return sharded.gradients.norm()

    assert all(norm > 0 for norm in run_ranks(RANKS, work))


def test_ranks_that_run_different_modules_start_the_same_collectives() -> None:
    """A rank that reads fewer buckets still takes part in all gathers, before its first reduction."""

    def work(rank: int, room: Room) -> list[Tensor]:
        sharded = simulated(rank, room)
        optimizer = ShardedAdamW(sharded, 0.1)
        for step in range(3):
            layers = list(sharded.model.layers)[: 4 - rank]
            x = batch(step, rank)
            for layer in layers:
                x = layer(x).tanh()
            x.square().sum().backward()
            sharded.gradients.finish()
            optimizer.step()
        sharded.gather()
        return [p.detach().clone() for p in sharded.model.parameters()]

    first, *others = run_ranks(RANKS, work)
    for other in others:
        assert all(torch.equal(p, q) for p, q in zip(first, other, strict=True))
