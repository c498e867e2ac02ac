"""TCP connections between pairs of ranks, for many bytes that must not wait for collectives, nor collectives for them.

Owns the sockets. Any thread may close them at any moment: whoever waits for one is woken with an error, and from then
on nothing arrives in the memory that was received into. A process group promises neither.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollgraph.distributed.connection import (
    HANDSHAKE_SECONDS,
    LOCALHOST,
    listen_everywhere,
    machine_id,
    read_line,
    send_line,
)
from rollgraph.distributed.liveness import Liveness
from rollgraph.distributed.lost_ranks import RankLost

_CHECK_SECONDS = 0.25  # between two looks at the other ranks, while one of them is waited for

Pair = tuple[int, int]  # sender, receiver
Address = dict[str, Any]  # of a rank: its machine, the hosts by which others reach that, and the port


@dataclass(frozen=True)
class Links:
    """The connections of one rank, by the rank on the other side."""

    outgoing: dict[int, socket.socket] = field(default_factory=dict)
    incoming: dict[int, socket.socket] = field(default_factory=dict)

    def close(self) -> None:
        """End whatever is being sent and received."""
        for connected in (*self.outgoing.values(), *self.incoming.values()):
            with suppress(OSError):  # the other side was first
                connected.shutdown(socket.SHUT_RDWR)  # wakes up threads that wait for it; close() alone does not
            connected.close()


def connect(liveness: Liveness, pairs: Collection[Pair], exchange: Callable[[str], list[str]]) -> Links:
    """Connect the sender of each pair to its receiver. All ranks call it, with the same pairs.

    `exchange` gives every rank the texts of all, in the order of ranks.
    """
    rank = liveness.rank
    senders = {sender for sender, receiver in pairs if receiver == rank}
    links = Links()
    with listen_everywhere(max(1, len(senders))) as listening:
        address = {"port": listening.getsockname()[1], "hosts": liveness.hosts, "machine": machine_id()}
        addresses = [json.loads(text) for text in exchange(json.dumps(address))]
        try:
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
    """The names and numbers under which a machine can be reached from the machine `here`.

    A rank on the machine of rank 0 has reached it there, so only what other ranks of its machine know is of use.
    """
    if address["machine"] == here:
        return [LOCALHOST]
    known = [host for other in addresses if other["machine"] == address["machine"] for host in other["hosts"]]
    return [host for host in dict.fromkeys(known) if not host.startswith("127.")]


def _open(liveness: Liveness, receiver: int, addresses: Sequence[Address]) -> socket.socket:
    """Connect to a rank that listens: it need not have time to answer."""
    failure = ""
    port = addresses[receiver]["port"]
    for host in find_hosts(addresses[receiver], addresses, machine_id()):
        try:
            connected = socket.create_connection((host, port), min(liveness.timeout, HANDSHAKE_SECONDS))
            send_line(connected, {"token": liveness.token, "rank": liveness.rank})
            connected.settimeout(None)
            return connected
        except OSError as error:
            failure = f"{host} port {port}: {error}"
    reason = liveness.wait_for_loss() or "all ranks are alive"
    raise RankLost(f"rank {receiver} cannot be reached: {reason} ({failure})", liveness.loss)


def _accept(listening: socket.socket, token: str, senders: Collection[int], links: Links) -> None:
    """Accept one of the senders, if one comes soon."""
    if not select.select([listening], [], [], _CHECK_SECONDS)[0]:
        return
    connected, _ = listening.accept()
    with suppress(OSError, ValueError, TypeError, KeyError):
        connected.settimeout(HANDSHAKE_SECONDS)
        hello = read_line(connected)
        if hello["token"] == token and hello["rank"] in senders:
            connected.settimeout(None)
            links.incoming[hello["rank"]] = connected
            return
    connected.close()


def receive_into(connected: socket.socket, memory: memoryview) -> None:
    """Fill memory with what the other side sends."""
    while memory:
        received = connected.recv_into(memory)
        if not received:
            raise ConnectionError("the connection was closed")
        memory = memory[received:]
