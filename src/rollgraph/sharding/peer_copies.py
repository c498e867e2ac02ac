"""Copies of optimizer state in host memory that outlive an attempt: this rank's own, and those of a neighbour.

Of each there are two: the newest one that all ranks are known to have, and one that is being made. Owns the memory and
says what is in it. Does not communicate; `peer_exchange.py` fills it.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import torch

from rollgraph.distributed.links import receive_into
from rollgraph.sharding.optimizer_state import ShardState
from rollgraph.sharding.peer_choice import Holding, Version
from rollgraph.sharding.shard_snapshot import ShardLayout, allocate_copies, layout_of

COPIES = 2  # of a rank's own state, and as many of a neighbour's
_LENGTH = struct.Struct("!Q")


@dataclass
class ShardCopy:
    """The state of one rank after one step, or memory for one."""

    shards: Sequence[ShardState] = ()
    owner: int = -1
    version: Version | None = None  # None: it is not whole
    about: dict[str, Any] = field(default_factory=dict)  # all that is not a tensor
    read: Event | None = None  # set once a checkpoint is written from it

    def begin(self, layout: ShardLayout, device: str) -> None:
        """Make room for another state; from here on, what it held does not count."""
        self.version = None
        if layout_of(self.shards) != layout:
            self.shards = allocate_copies(layout, device)

    def complete(self, owner: int, version: Version, about: dict[str, Any]) -> None:
        """From now on it may be restored."""
        self.owner = owner
        self.about = about
        self.version = version

    def bytes(self) -> Iterator[memoryview]:
        """Its memory, tensor by tensor."""
        for shard in self.shards:
            for tensor in shard.values():
                yield tensor.view(torch.uint8).numpy().data


class PeerCopies:
    """What one process holds. A process that replaces another one begins with nothing."""

    def __init__(self) -> None:
        self._ranks = 0  # among which the state is divided
        self.own: list[ShardCopy] = []
        self.neighbours: list[ShardCopy] = []

    def prepare(self, ranks: int) -> None:
        """Forget copies of a state that was divided among another number of ranks."""
        if ranks != self._ranks:
            self._ranks = ranks
            self.own = [ShardCopy() for _ in range(COPIES)]
            self.neighbours = [ShardCopy() for _ in range(COPIES)]

    def held(self) -> list[Holding]:
        """The copies that are whole."""
        return [Holding(copy.owner, copy.version) for copy in self._all() if copy.version is not None]

    def find(self, owner: int, version: Version) -> ShardCopy | None:
        for copy in self._all():
            if (copy.owner, copy.version) == (owner, version):
                return copy
        return None

    def forget_all_but(self, version: Version) -> None:
        """The others are older, or will be made again."""
        for copy in self._all():
            if copy.version != version:
                copy.version = None

    def _all(self) -> list[ShardCopy]:
        return [*self.own, *self.neighbours]


def spare_of(copies: Sequence[ShardCopy]) -> ShardCopy:
    """The one that is not needed: not whole, or older than the other."""
    return min(copies, key=lambda copy: (copy.version is not None, copy.version or Version(0, 0)))


def send_copy(connected: socket.socket, copy: ShardCopy) -> None:
    assert copy.version is not None
    layout = []
    for shard in layout_of(copy.shards):
        layout.append({name: [entries, str(dtype).removeprefix("torch.")] for name, (entries, dtype) in shard.items()})
    header = {
        "owner": copy.owner,
        "version": [copy.version.attempt, copy.version.step],
        "layout": layout,
        "about": copy.about,
    }
    text = json.dumps(header).encode()
    connected.sendall(_LENGTH.pack(len(text)) + text)
    for memory in copy.bytes():
        connected.sendall(memory)


def receive_copy(connected: socket.socket, copy: ShardCopy, device: str) -> None:
    """Fill a copy. It counts only once all of it is there."""
    copy.version = None
    length = bytearray(_LENGTH.size)
    receive_into(connected, memoryview(length))
    text = bytearray(_LENGTH.unpack(length)[0])
    receive_into(connected, memoryview(text))
    header = json.loads(text)
    layout: ShardLayout = []
    for shard in header["layout"]:
        layout.append({name: (entries, getattr(torch, dtype)) for name, (entries, dtype) in shard.items()})
    copy.begin(layout, device)
    for memory in copy.bytes():
        receive_into(connected, memory)
    copy.complete(header["owner"], Version(*header["version"]), header["about"])
