"""Each rank copies its state to a neighbour during the next step, and gets it back after a loss. Ranks are threads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.checkpoint import peer_exchange
from rollgraph.checkpoint.peer_choice import Holding, Version, choose_distance, choose_recovery, plan_transfers
from rollgraph.checkpoint.peer_exchange import PeerCopies, PeerExchange, distribute_copies
from rollgraph.checkpoint.write import copy_state_shards, take_snapshot
from rollgraph.parallel.data.bucket_plan import Offload, StateFormat
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.connection import LOCALHOST
from rollgraph.parallel.ranks.liveness import Liveness
from tests.parallel.lockstep import Room, run_ranks
from tests.parallel.small_net import Net, one_step, same, simulated, values

RANKS, LOST = 3, 1


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", LOCALHOST)


def with_ranks(work: Callable[..., Any], state: StateFormat = "fp32", offload: Offload = "none") -> list[Any]:
    """Call `work(model, sharded, optimizer)` on each of three ranks that watch each other."""

    def run_rank(rank: int, room: Room) -> Any:
        model, sharded, optimizer = simulated(rank, room)
        if (state, offload) != ("fp32", "none"):
            optimizer = ShardedAdamW(sharded, 0.05, state=state, offload=offload)
        liveness = Liveness(rank, RANKS, room.store, 60.0, node=f"node-{rank}")
        sharded.collectives.liveness = liveness
        result = work(model, sharded, optimizer)
        liveness.leave()
        return result

    return run_ranks(RANKS, run_rank)


def tensors_of(shards: Any) -> list[Tensor]:
    return [tensor.clone() for shard in shards for tensor in shard.values()]


@pytest.mark.parametrize(("state", "offload"), [("fp32", "none"), ("int8", "none"), ("fp32", "host")])
def test_a_restored_rank_takes_the_next_step_with_the_same_bits(state: StateFormat, offload: Offload) -> None:
    def work(model: Net, sharded: ShardedModel, optimizer: ShardedAdamW) -> None:
        rank = sharded.world.rank
        copies = PeerCopies()
        exchange = PeerExchange(sharded, optimizer, copies)
        for number in range(3):
            one_step(model, sharded, optimizer, number)
            exchange.start_copy(number, {"cursor": 10 * number + rank})
        exchange.wait_briefly()
        sharded.gather()
        expected = values(model), tensors_of(optimizer.state.shards)
        one_step(model, sharded, optimizer, 3)
        sharded.gather()
        expected_next = values(model)
        exchange.close()
        if rank == LOST:  # like a new process
            copies = PeerCopies()
            for tensor in (*optimizer.masters, optimizer.updates):
                tensor.fill_(7.0)
            optimizer.steps = 0

        restore_copies(sharded, copies)
        exchange = PeerExchange(sharded, optimizer, copies)
        copy, state_of_rank_0 = exchange.find(Version(0, 2))
        exchange.load(copy)
        assert copy.metadata["state"] == {"cursor": 20 + rank}
        assert state_of_rank_0 == {"cursor": 20}
        assert same(values(model), expected[0])
        assert all(map(torch.equal, tensors_of(optimizer.state.shards), expected[1]))
        one_step(model, sharded, optimizer, 3)
        sharded.gather()
        assert same(values(model), expected_next)
        exchange.close()

    with_ranks(work, state, offload)


def restore_copies(sharded: ShardedModel, copies: PeerCopies) -> None:
    """Do what the next attempt of a run does: ranks report their copies and send them to where they are missing."""
    rank = sharded.world.rank
    copies.prepare(RANKS)
    holdings_text = json.dumps([(one.owner, one.version.step) for one in copies.holdings()])
    holdings = {}
    for holder, text in enumerate(sharded.collectives.all_gather_text(holdings_text)):
        holdings[holder] = [Holding(owner, Version(0, step)) for owner, step in json.loads(text)]
    recovery = choose_recovery(RANKS, holdings)
    assert recovery is not None
    assert recovery.version == Version(0, 2)
    assert recovery.holders == (0, 2, 2)
    transfers = plan_transfers(recovery, holdings, choose_distance(["a", "b", "c"]))
    distribute_copies(copies, recovery.version, transfers, sharded.collectives, "cpu")
    assert {one.owner for one in copies.holdings()} == {rank, (rank - 1) % RANKS}


def test_an_update_waits_for_the_copy_of_the_state_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(model: Net, sharded: ShardedModel, optimizer: ShardedAdamW) -> bool:
        exchange = PeerExchange(sharded, optimizer, PeerCopies())
        one_step(model, sharded, optimizer, 0)
        before = tensors_of(optimizer.state.shards)

        def copy_late(state: Any, shards: Any) -> None:
            deadline = time.monotonic() + 0.3
            while optimizer.steps == 1 and time.monotonic() < deadline:  # until the next update begins, if it does
                time.sleep(0.001)
            copy_state_shards(state, shards)

        monkeypatch.setattr(peer_exchange, "copy_state_shards", copy_late)
        exchange.start_copy(0, {})
        one_step(model, sharded, optimizer, 1)
        exchange.wait_briefly()
        copy, _ = exchange.find(Version(0, 0))
        copied = tensors_of(copy.shards)
        assert all(map(torch.equal, copied, before))
        exchange.close()
        return all(map(torch.equal, copied, tensors_of(optimizer.state.shards)))

    unchanged = with_ranks(work)
    assert not all(unchanged)  # the last rank has nothing but padding


def test_a_copy_stays_until_its_checkpoint_is_written() -> None:
    def work(model: Net, sharded: ShardedModel, optimizer: ShardedAdamW) -> None:
        exchange = PeerExchange(sharded, optimizer, PeerCopies())
        one_step(model, sharded, optimizer, 0)
        assert exchange.snapshot(0) is None  # nothing is copied yet
        exchange.start_copy(0, {})
        sharded.gather()
        snapshot, expected = exchange.snapshot(0), take_snapshot(sharded, optimizer)
        assert snapshot is not None
        assert (snapshot.parts, snapshot.header) == (expected.parts, expected.header)
        assert same(snapshot.shard, expected.shard)
        assert same(snapshot.unsharded, expected.unsharded)
        for number in (1, 2):
            one_step(model, sharded, optimizer, number)
            if number == 2:
                assert same(snapshot.shard, expected.shard)  # although the next state was copied
                snapshot.release()
            exchange.start_copy(number, {})
        assert exchange.snapshot(0) is None
        exchange.close()

    with_ranks(work)
