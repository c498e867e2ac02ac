"""Keeping each rank's state in the host memory of a neighbour: after every step, while the next one is computed.

`keep` begins to copy the state of this rank to the host, and from there to its neighbour; threads do both. The next
update waits for the first copy only. Before the memory of an older state is used for a newer one, all ranks agree that
they have the one in between, so at any moment there is a whole one. In the next attempt, `spread` brings copies to
where they are missing, and `load` puts them in place. `peer_copies.py` owns the memory and `peer_choice.py` decides;
this file moves bytes.
"""

from __future__ import annotations

import concurrent.futures
import json
import socket
from collections.abc import Sequence
from functools import partial
from threading import Event
from typing import Any

import torch

from rollgraph.distributed.links import connect
from rollgraph.distributed.lost_ranks import RankLost
from rollgraph.sharding.background_tasks import CHECK_SECONDS, Task, start, wait
from rollgraph.sharding.collectives import Collectives
from rollgraph.sharding.optimizer import ShardedAdamW
from rollgraph.sharding.peer_choice import CopyTransfer, Version, choose_distance
from rollgraph.sharding.peer_copies import PeerCopies, ShardCopy, receive_copy, send_copy, spare_of
from rollgraph.sharding.shard_snapshot import ShardSnapshot, copy_shards, layout_of, snapshot_of
from rollgraph.sharding.sharded_model import ShardedModel

_LINGER_SECONDS = 0.5  # that the end of a step waits for: small states are then with the neighbour in any case
_DRAIN_SECONDS = 2.0  # to receive what a lost rank had sent
_WHAT = "keeping state in a neighbour's memory"


class PeerExchange:
    """The exchange of one attempt. All ranks create it and call its methods together."""

    def __init__(self, model: ShardedModel, optimizer: ShardedAdamW, copies: PeerCopies) -> None:
        self._model = model
        self._optimizer = optimizer
        self._copies = copies
        self._rank = model.world.rank
        self._agreed = True  # nothing is under way that some rank may not have
        self._newest: ShardCopy | None = None  # of this rank's own state, copied or being copied
        self._copied = Event()
        self._tasks: list[Task] = []
        liveness = model.collectives.liveness
        assert liveness is not None, "a single rank has no neighbour"
        self._liveness = liveness
        self._stream: torch.cuda.Stream | None = None
        if model.world.device.startswith("cuda"):
            self._stream = torch.cuda.Stream(model.world.device)
        distance = choose_distance(model.collectives.all_gather_text(liveness.node))
        ranks = model.world.size
        self._next = (self._rank + distance) % ranks
        self._previous = (self._rank - distance) % ranks
        pairs = [(rank, (rank + distance) % ranks) for rank in range(ranks)]
        self._links = connect(liveness, pairs, model.collectives.all_gather_text)

    # -- after a step ------------------------------------------------------------------------------

    def keep(self, step: int, state: dict[str, Any]) -> None:
        """Begin to copy the state after a step. `state` is JSON: what else this rank needs to go on from there."""
        self._model.raise_if_swapped()
        self._agree(None)
        self._copies.prepare(self._model.world.size)
        own = spare_of(self._copies.own)
        neighbours = spare_of(self._copies.neighbours)
        self._wait_for_writer(own)
        own.begin(layout_of(self._optimizer.state.shards), self._model.world.device)
        about = {
            "steps": self._optimizer.steps,
            "skipped": int(self._optimizer.skipped),
            "updates": int(self._optimizer.updates),
            "state": state,
        }
        version = Version(self._model.world.attempt, step)
        updated = None
        if self._stream is not None:
            updated = torch.cuda.Event()
            updated.record()
        lent = self._optimizer.state.lend()
        self._newest = own
        self._copied = Event()
        self._agreed = False
        send = self._links.outgoing[self._next]
        receive = self._links.incoming[self._previous]

        def copy_and_send(copied: Event = self._copied) -> None:
            try:
                self._copy_state(own, updated)
                own.complete(self._rank, version, about)
            finally:
                lent.set()
                copied.set()
            send_copy(send, own)

        self._tasks = [
            start(copy_and_send),
            start(partial(receive_copy, receive, neighbours, self._model.world.device)),
        ]

    def _copy_state(self, copy: ShardCopy, updated: torch.cuda.Event | None) -> None:
        state = self._optimizer.state
        if self._stream is None or updated is None:
            copy_shards(state, copy.shards)
            return
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(updated)
            copy_shards(state, copy.shards)
        self._stream.synchronize()

    def linger(self) -> None:
        """Give the state a moment to arrive. A large one goes on arriving while the next step is computed."""
        self._agree(_LINGER_SECONDS)

    def snapshot(self, step: int) -> ShardSnapshot | None:
        """The state after a step as a checkpoint writes it, if that is the last one that was kept: it needs no copy."""
        own = self._newest
        if own is None:
            return None
        while not self._copied.wait(CHECK_SECONDS):
            self._liveness.check()
        if own.version != Version(self._model.world.attempt, step):
            return None
        own.read = Event()
        return snapshot_of(self._model, self._optimizer, own.shards, written=own.read)

    def close(self) -> None:
        """End what is under way. What a lost rank had sent is received before."""
        concurrent.futures.wait(self._tasks, _DRAIN_SECONDS)
        self._links.close()
        concurrent.futures.wait(self._tasks, _DRAIN_SECONDS)  # so that no thread writes to a copy any more

    # -- after a loss ------------------------------------------------------------------------------

    def find(self, version: Version) -> tuple[ShardCopy, dict[str, Any]]:
        """This rank's part of a state, and what rank 0 had kept with its own."""
        mine = self._copies.find(self._rank, version)
        assert mine is not None
        about = json.dumps(mine.about["state"]) if self._rank == 0 else ""
        return mine, json.loads(self._model.collectives.all_gather_text(about)[0])

    @torch.no_grad()
    def load(self, copy: ShardCopy) -> None:
        """Put a rank's part of a state in place, in the memory that model and optimizer have."""
        optimizer = self._optimizer
        self._model.before_update()
        optimizer.state.before_writing()
        for shard, kept in zip(optimizer.state.shards, copy.shards, strict=True):
            for name, tensor in shard.items():
                tensor.copy_(kept[name])
        optimizer.skipped.fill_(copy.about["skipped"])
        optimizer.updates.fill_(copy.about["updates"])
        optimizer.steps = copy.about["steps"]
        optimizer.write_shards()
        self._model.after_update()
        self._model.gather()

    # -- waiting -----------------------------------------------------------------------------------

    def _agree(self, patience: float | None) -> None:
        """Find out whether the last state has arrived everywhere; without limits to the patience, make sure of it."""
        if self._agreed:
            return
        arrived = wait(self._tasks, self._liveness, _WHAT, patience)
        missing = torch.tensor(float(not arrived), device=self._model.world.device)
        self._agreed = not self._model.any_rank(missing)

    def _wait_for_writer(self, copy: ShardCopy) -> None:
        """A checkpoint may still be written from it, if the disk needs longer than two steps."""
        while copy.read is not None and not copy.read.wait(CHECK_SECONDS):
            if self._liveness.loss is not None:
                raise RankLost(self._liveness.loss.text, self._liveness.loss)
        copy.read = None


def spread(
    copies: PeerCopies, version: Version, transfers: Sequence[CopyTransfer], collectives: Collectives, device: str
) -> None:
    """Bring copies of a state to where they are missing. All ranks call it with the same transfers.

    It needs no model, so that after a loss every part is held twice again before a new rank has loaded anything.
    """
    liveness = collectives.liveness
    assert liveness is not None
    links = connect(liveness, {(one.sender, one.receiver) for one in transfers}, collectives.all_gather_text)
    tasks = []
    for receiver, connected in links.outgoing.items():
        owners = [one.owner for one in transfers if (one.sender, one.receiver) == (liveness.rank, receiver)]
        tasks.append(start(partial(_send_all, connected, copies, version, owners)))
    for sender, connected in links.incoming.items():
        places = []
        for one in transfers:
            if (one.sender, one.receiver) == (sender, liveness.rank):
                places.append(spare_of(copies.own if one.owner == liveness.rank else copies.neighbours))
        tasks.append(start(partial(_receive_all, connected, places, device)))
    try:
        wait(tasks, liveness, "bringing back what a lost rank held")
    finally:
        links.close()
        concurrent.futures.wait(tasks, _DRAIN_SECONDS)
    copies.forget_all_but(version)


def _send_all(connected: socket.socket, copies: PeerCopies, version: Version, owners: Sequence[int]) -> None:
    for owner in owners:
        copy = copies.find(owner, version)
        assert copy is not None
        send_copy(connected, copy)


def _receive_all(connected: socket.socket, places: Sequence[ShardCopy], device: str) -> None:
    for place in places:
        receive_copy(connected, place, device)
