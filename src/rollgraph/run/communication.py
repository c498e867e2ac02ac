"""A model of communication: how long a collective takes among ranks that are spread over nodes.

Owns the formulas, and knows neither models nor runs: bytes in, seconds out. A link has a bandwidth and a latency.

- *ring*: n - 1 rounds, in each of which every rank sends the n-th part of the data to the next rank. There are as many
  rings as a node has ranks, each with its share of the data, and each leaves the node by the link of another rank, so
  that a node sends over all of its links at once, as NCCL does. The busiest link counts, and the latencies of the hops
  on the way around.
- *tree*: log2(n) rounds, by doubling: first the ranks of different nodes, each with its share, then those of a node.
  Less latency than a ring, but links inside and between nodes are used one after the other.

Nothing is added for the work on the data, and no link is shared with anybody else, so a real collective takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Algorithm = Literal["ring", "tree"]
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree")


@dataclass(frozen=True)
class Link:
    """What one rank can send to another: bytes per second in one direction, and the seconds until the first arrives."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < float("inf") or not 0 <= self.latency < float("inf"):
            raise ValueError(f"a link needs a positive bandwidth and a latency of 0 or more, not {self}")


# Nominal figures, not measured ones. NVLink of an H200: 900 GB/s, half of it in each direction. InfiniBand: 400 Gb/s,
# one adapter for each GPU. The latencies are of the order that a kernel of a collective needs for one hop.
NVLINK = Link(450e9, 3e-6)
INFINIBAND = Link(50e9, 10e-6)


@dataclass(frozen=True)
class Network:
    """The links of a rank: to those of its own node, and to those of other nodes."""

    inside: Link = NVLINK
    between: Link = INFINIBAND


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, equally many on each of some nodes, e.g. Group(ranks=16, nodes=2)."""

    ranks: int
    nodes: int = 1
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.nodes < 1:
            raise ValueError(f"{self.ranks} ranks on {self.nodes} nodes: both must be 1 or more")
        if self.ranks % self.nodes:
            raise ValueError(f"{self.ranks} ranks cannot be spread equally over {self.nodes} nodes")

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes

    # -- collectives ---------------------------------------------------------------------------------

    def all_gather(self, nbytes: float, algorithm: Algorithm = "ring") -> float:
        """Seconds until every rank has all of `nbytes`, of which each had its part."""
        return self._ring(nbytes) if algorithm == "ring" else self._tree(nbytes)

    def reduce_scatter(self, nbytes: float, algorithm: Algorithm = "ring") -> float:
        """Seconds until every rank has its part of the sum of `nbytes`: a gather with its arrows turned around."""
        return self.all_gather(nbytes, algorithm)

    def all_reduce(self, nbytes: float, algorithm: Algorithm | None = None) -> float:
        """Seconds until every rank has the sum of `nbytes`. Without an algorithm, that of the faster one."""
        if algorithm is None:
            return min(self.all_reduce(nbytes, each) for each in ALGORITHMS)
        return self.reduce_scatter(nbytes, algorithm) + self.all_gather(nbytes, algorithm)

    # -- what they are made of -----------------------------------------------------------------------

    def _ring(self, nbytes: float) -> float:
        inside, between = self.network.inside, self.network.between
        hops = self.ranks - 1
        passes = nbytes * hops / self.ranks  # over the links of a rank
        if self.nodes == 1:
            return hops * inside.latency + passes / inside.bandwidth
        crossings = min(self.nodes, hops)
        latency = crossings * between.latency + (hops - crossings) * inside.latency
        leaving = passes / self.per_node  # in the one ring in which the rank is the last of its node
        return latency + max(leaving / between.bandwidth, (passes - leaving) / inside.bandwidth)

    def _tree(self, nbytes: float) -> float:
        inside, between = self.network.inside, self.network.between
        from_nodes = nbytes / self.per_node * (self.nodes - 1) / self.nodes
        from_node = nbytes * (self.per_node - 1) / self.per_node
        latency = _doublings(self.nodes) * between.latency + _doublings(self.per_node) * inside.latency
        return latency + from_nodes / between.bandwidth + from_node / inside.bandwidth


def _doublings(count: int) -> int:
    """How often 1 has to be doubled to reach a number."""
    return (count - 1).bit_length()
