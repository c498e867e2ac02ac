"""Gathers in flight: who waits for them, and what happens to weights that are written meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollgraph.parallel.data.gathers import StaleWeights
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from tests.parallel.lockstep import Room, run_ranks
from tests.parallel.small_net import ALONE, RATE, build, loss, microbatch, one_step, same, simulated, values


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

    results = [run_ranks(3, lambda rank, room, reads=reads: work(rank, room, reads)) for reads in (False, True)]
    for unread, read in zip(*results, strict=True):
        assert same(unread, read)
        assert same(unread, results[0][0])


@pytest.mark.parametrize("how", ["load", "restore", "load_state_dict"])
def test_weights_loaded_after_a_step_stay(how: str) -> None:
    def work(rank: int, room: Room) -> bool:
        model, sharded, optimizer = simulated(rank, room)
        snapshot, first = sharded.flat.snapshot(), values(model)
        one_step(model, sharded, optimizer, 0)  # gathers are in flight
        if how == "load":
            sharded.flat.load(first)
        elif how == "restore":
            sharded.flat.restore(snapshot)
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
        snapshot = sharded.flat.snapshot()
        return all(torch.equal(a, b.parameters) for a, b in zip(snapshot, sharded.flat.buckets, strict=True))

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


def test_a_backward_across_an_update_raises_as_without_sharding() -> None:
    model = build()
    sharded = ShardedModel(model, ALONE)
    optimizer = ShardedAdamW(sharded, RATE)
    value = loss(model, microbatch(0, 0, 0))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
