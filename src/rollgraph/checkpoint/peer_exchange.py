"""Keeping copies of each rank's state in the host memory of a neighbour, so that lost ranks cost at most one step.

`start_copy` starts to copy this rank's state to the host and from there to its neighbour; threads do both. The next
update waits only for the first copy. Before the memory of an older state is reused for a newer one, all ranks agree
that they have the state in between, so there is always a complete one. In the next attempt, `distribute_copies` sends
copies to where they are missing, and `PeerExchange.load` loads them. `PeerCopies` owns the memory, and `peer_choice.py`
decides.
"""

from __future__ import annotations

import concurrent.futures
import json
import select
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Any

import torch

from rollgraph.checkpoint.peer_choice import CopyTransfer, Holding, Version, choose_distance
from rollgraph.checkpoint.write import (
    ShardLayout,
    ShardSnapshot,
    allocate_copies,
    copy_state_shards,
    shard_layout,
    snapshot_of,
)
from rollgraph.parallel.data.collectives import Collectives
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.data.together import CHECK_SECONDS, Task, start_task, wait_for_tasks
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.optim.state import ShardState
from rollgraph.parallel.ranks.connection import (
    HANDSHAKE_SECONDS,
    LOCALHOST,
    listen_everywhere,
    machine_id,
    read_line,
    send_line,
)
from rollgraph.parallel.ranks.failures import RankLost
from rollgraph.parallel.ranks.liveness import Liveness

# -- connections between pairs of ranks ------------------------------------------------------------
# Owns the sockets. Any thread may close them at any time: a thread that waits for one gets an error, and afterwards
# nothing is written to receive buffers. A process group guarantees neither.

_CHECK_SECONDS = 0.25  # between two checks for a lost rank, while waiting for a connection

Pair = tuple[int, int]  # sender, receiver
Address = dict[str, Any]  # of a rank: "machine", the "hosts" under which others reach it, and "port"


@dataclass(frozen=True)
class Links:
    """The connections of one rank, by peer rank."""

    outgoing: dict[int, socket.socket] = field(default_factory=dict)
    incoming: dict[int, socket.socket] = field(default_factory=dict)

    def close(self) -> None:
        """End all transfers."""
        for sock in (*self.outgoing.values(), *self.incoming.values()):
            with suppress(OSError):  # the other side closed it first
                sock.shutdown(socket.SHUT_RDWR)  # wakes threads that wait for the socket, unlike close()
            sock.close()


def connect(liveness: Liveness, pairs: Collection[Pair], exchange: Callable[[str], list[str]]) -> Links:
    """Connect the sender of each pair to its receiver. All ranks call this with the same pairs.

    `exchange` all-gathers texts, in the order of ranks.
    """
    rank = liveness.rank
    senders = {sender for sender, receiver in pairs if receiver == rank}
    links = Links()
    with listen_everywhere(max(1, len(senders))) as listening:
        address = {"port": listening.getsockname()[1], "hosts": liveness.hosts, "machine": machine_id()}
        addresses = [json.loads(text) for text in exchange(json.dumps(address))]
        try:
            # Connecting before accepting is no deadlock: connections wait in the backlog of the listening socket.
            for sender, receiver in pairs:
                if sender == rank:
                    links.outgoing[receiver] = _open(liveness, receiver, addresses)
            deadline = liveness.clock() + liveness.timeout
            while senders - links.incoming.keys():
                missing = min(senders - links.incoming.keys())
                liveness.check()
                if liveness.clock() > deadline:
                    raise RankLost(liveness.report_timeout(f"the connection from rank {missing}"), liveness.loss)
                _accept(listening, liveness.token, senders, links)
        except BaseException:
            links.close()
            raise
    return links


def find_hosts(address: Address, addresses: Sequence[Address], here: str) -> list[str]:
    """The host names and addresses under which a rank can be reached from the machine `here`.

    A rank on the machine of rank 0 knows itself only as 127.0.0.1, so we take the hosts of all ranks of its machine.
    """
    if address["machine"] == here:
        return [LOCALHOST]
    hosts = [host for peer in addresses if peer["machine"] == address["machine"] for host in peer["hosts"]]
    return [host for host in dict.fromkeys(hosts) if not host.startswith("127.")]


def _open(liveness: Liveness, receiver: int, addresses: Sequence[Address]) -> socket.socket:
    """Connect to a rank that listens, trying each of its hosts. It may accept later: the system queues connections.

    If no host answers, waits for the report of a lost rank, and raises RankLost with or without one.
    """
    failures = []
    port = addresses[receiver]["port"]
    for host in find_hosts(addresses[receiver], addresses, machine_id()):
        try:
            sock = socket.create_connection((host, port), min(liveness.timeout, HANDSHAKE_SECONDS))
            send_line(sock, {"token": liveness.token, "rank": liveness.rank})
            sock.settimeout(None)
            return sock
        except OSError as error:
            failures.append(f"{host} port {port}: {error}")
    reason = liveness.wait_for_loss() or "all ranks are alive"
    raise RankLost(f"rank {receiver} cannot be reached: {reason} ({'; '.join(failures)})", liveness.loss)


def _accept(listening: socket.socket, token: str, senders: Collection[int], links: Links) -> None:
    """Accept a connection of one of the senders, if one arrives soon."""
    if not select.select([listening], [], [], _CHECK_SECONDS)[0]:
        return
    sock, _ = listening.accept()
    with suppress(OSError, ValueError, TypeError, KeyError):
        sock.settimeout(HANDSHAKE_SECONDS)
        hello = read_line(sock)
        if hello["token"] == token and hello["rank"] in senders:
            sock.settimeout(None)
            links.incoming[hello["rank"]] = sock
            return
    sock.close()


def receive_into(sock: socket.socket, memory: memoryview) -> None:
    """Fill `memory` with bytes from the other side."""
    while memory:
        received = sock.recv_into(memory)
        if not received:
            raise ConnectionError("the connection was closed")
        memory = memory[received:]


# -- copies in host memory -------------------------------------------------------------------------
# A rank has two copies of its own state and two of its neighbour's: the newest one that all ranks are known to have,
# and one in progress. Owns the memory and the records of its contents. Does not communicate; the exchange below fills
# it.

COPIES = 2  # of a rank's own state, and of its neighbour's
_LENGTH = struct.Struct("!Q")


@dataclass
class ShardCopy:
    """A copy of one rank's state after a step, or memory for one."""

    shards: Sequence[ShardState] = ()
    owner: int = -1
    version: Version | None = None  # None: it is not complete
    metadata: dict[str, Any] = field(default_factory=dict)  # the state apart from tensors
    written: Event | None = None  # set when a checkpoint that reads it is written

    def allocate(self, layout: ShardLayout, device: str) -> None:
        """Allocate memory for another state, and invalidate the current one."""
        self.version = None
        if shard_layout(self.shards) != layout:
            self.shards = allocate_copies(layout, device)

    def mark_complete(self, owner: int, version: Version, metadata: dict[str, Any]) -> None:
        """Mark the copy as complete, so that it may be restored."""
        self.owner = owner
        self.metadata = metadata
        self.version = version

    def memoryviews(self) -> Iterator[memoryview]:
        """The memory of each tensor."""
        for shard in self.shards:
            for tensor in shard.values():
                yield tensor.view(torch.uint8).numpy().data


class PeerCopies:
    """The copies in one process. A process that replaces a lost one starts without any."""

    def __init__(self) -> None:
        self._ranks = 0  # over which the state is sharded
        self.own_copies: list[ShardCopy] = []
        self.neighbour_copies: list[ShardCopy] = []

    def prepare(self, ranks: int) -> None:
        """Drop copies of a state that was sharded over another number of ranks."""
        if ranks != self._ranks:
            self._ranks = ranks
            self.own_copies = [ShardCopy() for _ in range(COPIES)]
            self.neighbour_copies = [ShardCopy() for _ in range(COPIES)]

    def holdings(self) -> list[Holding]:
        """The complete copies."""
        return [Holding(copy.owner, copy.version) for copy in self._all() if copy.version is not None]

    def find(self, owner: int, version: Version) -> ShardCopy | None:
        for copy in self._all():
            if (copy.owner, copy.version) == (owner, version):
                return copy
        return None

    def forget_all_but(self, version: Version) -> None:
        """Invalidate all other versions, which are older or will be copied again."""
        for copy in self._all():
            if copy.version != version:
                copy.version = None

    def _all(self) -> list[ShardCopy]:
        return [*self.own_copies, *self.neighbour_copies]


def reusable_copy(copies: Sequence[ShardCopy]) -> ShardCopy:
    """The copy to overwrite: an incomplete one, or the oldest."""
    return min(copies, key=lambda copy: (copy.version is not None, copy.version or Version(0, 0)))


def send_copy(sock: socket.socket, copy: ShardCopy) -> None:
    assert copy.version is not None
    layout = []
    for shard in shard_layout(copy.shards):
        layout.append({name: [entries, str(dtype).removeprefix("torch.")] for name, (entries, dtype) in shard.items()})
    header = {
        "owner": copy.owner,
        "version": [copy.version.attempt, copy.version.step],
        "layout": layout,
        "about": copy.metadata,
    }
    text = json.dumps(header).encode()
    sock.sendall(_LENGTH.pack(len(text)) + text)
    for memory in copy.memoryviews():
        sock.sendall(memory)


def receive_copy(sock: socket.socket, copy: ShardCopy, device: str) -> None:
    """Fill a copy. It is valid only when all of it has arrived."""
    copy.version = None
    length = bytearray(_LENGTH.size)
    receive_into(sock, memoryview(length))
    text = bytearray(_LENGTH.unpack(length)[0])
    receive_into(sock, memoryview(text))
    header = json.loads(text)
    layout: ShardLayout = []
    for shard in header["layout"]:
        layout.append({name: (entries, getattr(torch, dtype)) for name, (entries, dtype) in shard.items()})
    copy.allocate(layout, device)
    for memory in copy.memoryviews():
        receive_into(sock, memory)
    copy.mark_complete(header["owner"], Version(*header["version"]), header["about"])


# -- the exchange ----------------------------------------------------------------------------------

_BRIEF_SECONDS = 0.5  # the wait at the end of a step, in which small states reach the neighbour
_DRAIN_SECONDS = 2.0  # to receive data that a lost rank had sent
_OPERATION = "keeping state in a neighbour's memory"


class PeerExchange:
    """The exchange of copies in one attempt. All ranks create it and call its methods together."""

    def __init__(self, model: ShardedModel, optimizer: ShardedAdamW, copies: PeerCopies) -> None:
        self._model = model
        self._optimizer = optimizer
        self._copies = copies
        self._rank = model.world.rank
        self._agreed = True  # all ranks have the last copies
        self._newest: ShardCopy | None = None  # the copy of this rank's state, complete or in progress
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

    def start_copy(self, step: int, state: dict[str, Any]) -> None:
        """Start to copy the state after a step. `state` is JSON: the rest of this rank's state."""
        self._model.raise_if_swapped()
        self._agree(None)
        self._copies.prepare(self._model.world.size)
        own_copy = reusable_copy(self._copies.own_copies)
        neighbour_copy = reusable_copy(self._copies.neighbour_copies)
        self._wait_for_writer(own_copy)
        own_copy.allocate(shard_layout(self._optimizer.state.shards), self._model.world.device)
        metadata = {
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
        self._newest = own_copy
        self._copied = Event()
        self._agreed = False
        send = self._links.outgoing[self._next]
        receive = self._links.incoming[self._previous]

        def copy_and_send(copied: Event = self._copied) -> None:
            try:
                self._copy_state(own_copy, updated)
                own_copy.mark_complete(self._rank, version, metadata)
            finally:
                lent.set()
                copied.set()
            send_copy(send, own_copy)

        self._tasks = [
            start_task(copy_and_send),
            start_task(partial(receive_copy, receive, neighbour_copy, self._model.world.device)),
        ]

    def _copy_state(self, copy: ShardCopy, updated: torch.cuda.Event | None) -> None:
        state = self._optimizer.state
        if self._stream is None or updated is None:
            copy_state_shards(state, copy.shards)
            return
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(updated)
            copy_state_shards(state, copy.shards)
        self._stream.synchronize()

    def wait_briefly(self) -> None:
        """Wait a moment for the transfers. Those of a large state continue during the next step."""
        self._agree(_BRIEF_SECONDS)

    def snapshot(self, step: int) -> ShardSnapshot | None:
        """A snapshot of a step for a checkpoint without another copy, if it is the last one that was copied."""
        own_copy = self._newest
        if own_copy is None:
            return None
        while not self._copied.wait(CHECK_SECONDS):
            self._liveness.check()
        if own_copy.version != Version(self._model.world.attempt, step):
            return None
        own_copy.written = Event()
        return snapshot_of(self._model, self._optimizer, own_copy.shards, written=own_copy.written)

    def close(self) -> None:
        """End all transfers, after receiving data that a lost rank had sent."""
        concurrent.futures.wait(self._tasks, _DRAIN_SECONDS)
        self._links.close()
        concurrent.futures.wait(self._tasks, _DRAIN_SECONDS)  # afterwards no thread writes to a copy

    # -- after a loss ------------------------------------------------------------------------------

    def find(self, version: Version) -> tuple[ShardCopy, dict[str, Any]]:
        """This rank's part of a state, and the JSON state of rank 0."""
        own_copy = self._copies.find(self._rank, version)
        assert own_copy is not None
        state = json.dumps(own_copy.metadata["state"]) if self._rank == 0 else ""
        return own_copy, json.loads(self._model.collectives.all_gather_text(state)[0])

    @torch.no_grad()
    def load(self, copy: ShardCopy) -> None:
        """Load this rank's part of a state into the memory of model and optimizer."""
        optimizer = self._optimizer
        self._model.before_update()
        optimizer.state.before_writing()
        for shard, copied_shard in zip(optimizer.state.shards, copy.shards, strict=True):
            for name, tensor in shard.items():
                tensor.copy_(copied_shard[name])
        optimizer.skipped.fill_(copy.metadata["skipped"])
        optimizer.updates.fill_(copy.metadata["updates"])
        optimizer.steps = copy.metadata["steps"]
        optimizer.write_shards()
        self._model.after_update()
        self._model.gather()

    # -- waiting -----------------------------------------------------------------------------------

    def _agree(self, seconds: float | None) -> None:
        """Check whether the last state has arrived on all ranks within `seconds`; None: wait until it has."""
        if self._agreed:
            return
        arrived = wait_for_tasks(self._tasks, self._liveness, _OPERATION, seconds)
        missing = torch.tensor(float(not arrived), device=self._model.world.device)
        self._agreed = not self._model.any_rank(missing)

    def _wait_for_writer(self, copy: ShardCopy) -> None:
        """Wait until no checkpoint is written from the copy: the disk may need longer than two steps."""
        while copy.written is not None and not copy.written.wait(CHECK_SECONDS):
            if self._liveness.loss is not None:
                raise RankLost(self._liveness.loss.text, self._liveness.loss)
        copy.written = None


def distribute_copies(
    copies: PeerCopies, version: Version, transfers: Sequence[CopyTransfer], collectives: Collectives, device: str
) -> None:
    """Send copies of a state to where they are missing. All ranks call this with the same transfers.

    It needs no model: after a loss, each part has two copies again before a new rank has loaded anything.
    """
    liveness = collectives.liveness
    assert liveness is not None
    links = connect(
        liveness, {(transfer.sender, transfer.receiver) for transfer in transfers}, collectives.all_gather_text
    )
    tasks = []
    for receiver, sock in links.outgoing.items():
        owners = [
            transfer.owner
            for transfer in transfers
            if (transfer.sender, transfer.receiver) == (liveness.rank, receiver)
        ]
        tasks.append(start_task(partial(_send_all, sock, copies, version, owners)))
    for sender, sock in links.incoming.items():
        targets = []
        for transfer in transfers:
            if (transfer.sender, transfer.receiver) == (sender, liveness.rank):
                targets.append(
                    reusable_copy(copies.own_copies if transfer.owner == liveness.rank else copies.neighbour_copies)
                )
        tasks.append(start_task(partial(_receive_all, sock, targets, device)))
    try:
        wait_for_tasks(tasks, liveness, "restoring the copies of a lost rank")
    finally:
        links.close()
        concurrent.futures.wait(tasks, _DRAIN_SECONDS)
    copies.forget_all_but(version)


def _send_all(sock: socket.socket, copies: PeerCopies, version: Version, owners: Sequence[int]) -> None:
    for owner in owners:
        copy = copies.find(owner, version)
        assert copy is not None
        send_copy(sock, copy)


def _receive_all(sock: socket.socket, targets: Sequence[ShardCopy], device: str) -> None:
    for target in targets:
        receive_copy(sock, target, device)
