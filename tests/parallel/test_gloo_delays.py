"""The model of communication against real messages of gloo, over links that the test makes slow.

There are two kinds of links, because only root can delay packets:

- *Paced*: the collectives are gloo's own, and the kernel limits how fast each connection sends (SO_MAX_PACING_RATE).
  This shows that the bytes that the model counts are those that pass over the busiest link. It has no latency.
- *Delayed*: the messages are gloo's, and rings and trees are built from them here. A receiver waits until its message
  would have arrived: a latency after it was sent, and no earlier than the link's bandwidth allows. This shows that
  rounds add up as the model says, over links of two kinds, too. It does not say which algorithm a library chooses.

The delays are far longer than everything else, so the prediction is a lower bound on any machine, because no message
can be early. The fastest of several repetitions shows, with a wide margin, that the prediction is not far too low.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rollgraph.parallel.ranks.world import World
from rollgraph.plan.layout import Link, Network, RankGroup
from tests.parallel.worlds import run_world

pytestmark = [pytest.mark.multi, pytest.mark.slow]
PACING = 47  # SO_MAX_PACING_RATE of Linux, which Python has no name for
RATE = 8_000_000  # bytes per second
BURST = 700_000  # bytes that a connection may send before its pace counts
REPETITIONS = {"paced": 3, "delayed": 8}
MARGIN = 2.0  # the fastest repetition takes at most so many times the prediction
RATIO_MARGIN = 1.4  # and ratios of two of them are off by at most this factor
Span = tuple[float, float]


def fastest(spans: list[list[Span]]) -> float:
    """Seconds from the first start on any rank to the last end, in the fastest repetition; [ranks][repetitions]."""
    repetitions = zip(*spans, strict=True)
    return min(max(end for _, end in spans) - min(start for start, _ in spans) for spans in repetitions)


def measure(kind: str, work: Callable[[], Any]) -> list[Span]:
    """The start and end of each repetition, by the clock that all processes of a machine share."""
    spans = []
    for _ in range(REPETITIONS[kind]):
        dist.barrier()
        start = time.monotonic()
        work()
        spans.append((start, time.monotonic()))
    return spans


# -- paced -------------------------------------------------------------------------------------------


def pace_connections(rate: int) -> int:
    """Limit how fast this process sends over each of its TCP connections; returns how many there are."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                connection.getpeername()  # one that listens has none
                connection.setsockopt(socket.SOL_SOCKET, PACING, rate)
                count += 1
        except OSError:
            continue
    return count


def can_pace() -> bool:
    """Whether the kernel keeps connections to their pace: 2 MB over one that may send 4 MB per second."""
    if not os.path.isdir("/proc/self/fd"):
        return False
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        try:
            sender.setsockopt(socket.SOL_SOCKET, PACING, 4_000_000)
        except OSError:
            return False
        start = time.monotonic()
        sending = threading.Thread(target=sender.sendall, args=(bytes(2_000_000),))
        sending.start()
        with receiver:
            left = 2_000_000
            while left:
                left -= len(receiver.recv(1 << 16))
        sending.join()
        return time.monotonic() - start > 0.2


def run_paced(world: World, nbytes: int) -> dict[str, Any]:
    whole = torch.ones(world.size, nbytes // 4 // world.size)
    part, parts = torch.ones(whole.shape[1]), list(whole)
    dist.all_gather(parts, part)  # connects all ranks
    dist.all_reduce(whole)
    return {
        "connections": pace_connections(RATE),
        "gather": measure("paced", lambda: dist.all_gather(parts, part)),
        "sum": measure("paced", lambda: dist.all_reduce(whole)),
    }


def test_collectives_of_gloo_take_as_long_as_their_busiest_link(tmp_path: Path) -> None:
    """Between two ranks, gloo's gather takes half as long again as predicted; the others are within a few percent."""
    if not can_pace():
        pytest.skip("this kernel does not pace connections")
    nbytes = 8_000_000
    network = Network(Link(RATE, 0.0), Link(RATE, 0.0))
    sums = {}
    for size in (2, 4):
        results = run_world(size, tmp_path, run_paced, nbytes)
        assert [rank for rank in results if isinstance(rank, str)] == []
        assert [rank["connections"] >= size - 1 for rank in results] == [True] * size
        group = RankGroup(size, 1, network)
        predicted = {"gather": group.all_gather(nbytes), "sum": group.all_reduce(nbytes, "ring")}
        for name, expected in predicted.items():
            measured = fastest([rank[name] for rank in results])
            assert expected - BURST / RATE <= measured <= MARGIN * expected, name
        sums[size] = fastest([rank["sum"] for rank in results])
    # The whole sum passes over each link between two ranks, and one and a half times as much over one of four.
    assert 1.5 / RATIO_MARGIN < sums[4] / sums[2] < 1.5 * RATIO_MARGIN


# -- delayed -----------------------------------------------------------------------------------------


class DelayedLinks:
    """Messages to and from other ranks, which arrive no earlier than their link allows."""

    def __init__(self, world: World, nodes: int, network: Network) -> None:
        self.rank, self.ranks = world.rank, world.size
        self.per_node = world.size // nodes
        self.network = network
        self._free: dict[int, float] = {}  # when the link from a rank is free again

    def exchange(self, mine: Tensor, to: int, theirs: Tensor, source: int) -> None:
        """Send one tensor of doubles, and receive another."""
        sending = dist.isend(torch.cat([torch.tensor([time.monotonic()], dtype=torch.double), mine]), to)
        message = torch.empty(len(theirs) + 1, dtype=torch.double)
        dist.recv(message, source)
        assert sending is not None
        link = self.network.inside
        if source // self.per_node != self.rank // self.per_node:
            link = self.network.between
        self._free[source] = max(float(message[0]), self._free.get(source, 0.0)) + theirs.nbytes / link.bandwidth
        arrives = self._free[source] + link.latency
        while (left := arrives - time.monotonic()) > 0:
            time.sleep(left)
        theirs.copy_(message[1:])
        sending.wait()

    def gather_around(self, whole: Tensor) -> None:
        """A ring: in each round, every rank passes on the row that it received last. `whole` is [ranks, elements]."""
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        for number in range(self.ranks - 1):
            sent, received = (self.rank - number) % self.ranks, (self.rank - number - 1) % self.ranks
            self.exchange(whole[sent], after, whole[received], before)

    def reduce_around(self, whole: Tensor) -> None:
        """The same ring for sums: afterwards row r + 1 of `whole` is complete on rank r."""
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        arrived = torch.empty_like(whole[0])
        for number in range(self.ranks - 1):
            sent, received = (self.rank - number) % self.ranks, (self.rank - number - 1) % self.ranks
            self.exchange(whole[sent], after, arrived, before)
            whole[received] += arrived

    def gather_by_doubling(self, whole: Tensor) -> None:
        """A tree: with ranks of other nodes first, then inside of the node. Numbers are powers of two."""
        owned = [self.rank]
        for distance in [*self._doubled(self.per_node, self.ranks), *self._doubled(1, self.per_node)]:
            partner = self.rank ^ distance
            theirs = [row ^ distance for row in owned]
            received = torch.empty(len(owned) * whole.shape[1], dtype=torch.double)
            self.exchange(whole[owned].flatten(), partner, received, partner)
            whole[theirs] = received.view(len(owned), -1)
            owned += theirs

    @staticmethod
    def _doubled(first: int, end: int) -> list[int]:
        distances = []
        while first < end:
            distances.append(first)
            first *= 2
        return distances


def run_delayed(world: World, nodes: int, network: Network, elements: int) -> dict[str, list[Span]]:
    links = DelayedLinks(world, nodes, network)
    expected = torch.arange(world.size, dtype=torch.double).unsqueeze(1).expand(-1, elements)
    whole = torch.empty(world.size, elements, dtype=torch.double)

    def gather(around: Callable[[Tensor], None]) -> None:
        whole.fill_(-1)
        whole[world.rank] = world.rank
        around(whole)
        assert torch.equal(whole, expected)

    def reduce() -> None:
        whole.fill_(world.rank)
        links.reduce_around(whole)
        assert bool((whole[(world.rank + 1) % world.size] == sum(range(world.size))).all())

    return {
        "ring": measure("delayed", lambda: gather(links.gather_around)),
        "sum": measure("delayed", reduce),
        "tree": measure("delayed", lambda: gather(links.gather_by_doubling)),
    }


@pytest.mark.parametrize(
    ("nodes", "network", "nbytes"),
    [
        (1, Network(inside=Link(1e9, 0.1)), 8000),  # latency alone: two rounds of a tree are faster than three
        (1, Network(inside=Link(40_000, 0.02)), 16_000),  # 0.1 s for each of four parts: bandwidth alone counts
        (2, Network(Link(1e9, 0.02), Link(1e9, 0.15)), 8000),  # two crossings on the way around, one in a tree
        (4, Network(Link(1e9, 0.0), Link(80_000, 0.05)), 16_000),  # one rank on each node
    ],
    ids=["latency", "bandwidth", "two nodes", "four nodes"],
)
def test_rounds_of_messages_add_up_as_predicted(tmp_path: Path, nodes: int, network: Network, nbytes: int) -> None:
    spans = run_world(4, tmp_path, run_delayed, nodes, network, nbytes // 4 // 8)
    assert [rank for rank in spans if isinstance(rank, str)] == []
    group = RankGroup(4, nodes, network)
    predicted = {
        "ring": group.all_gather(nbytes),
        "sum": group.reduce_scatter(nbytes),
        "tree": group.all_gather(nbytes, "tree"),
    }
    for name, expected in predicted.items():
        measured = fastest([rank[name] for rank in spans])
        assert expected * (1 - 1e-6) <= measured <= MARGIN * expected, name


def test_two_ranks_and_four_follow_the_model(tmp_path: Path) -> None:
    network = Network(inside=Link(1e9, 0.1))
    rings = {}
    for size in (2, 4):
        spans = run_world(size, tmp_path, run_delayed, 1, network, 100)
        assert [rank for rank in spans if isinstance(rank, str)] == []
        rings[size] = fastest([rank["ring"] for rank in spans])
        assert rings[size] >= RankGroup(size, 1, network).all_gather(size * 800) * (1 - 1e-6)
    assert 3 / RATIO_MARGIN < rings[4] / rings[2] < 3 * RATIO_MARGIN
