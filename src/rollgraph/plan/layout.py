"""The layout of a run: its ranks, nodes and parallel groups, and the time of their collectives.

Owns the arithmetic of groups. Ranks of a tensor parallel group have the same samples and shard each layer. Ranks of a
data parallel group, one from each tensor parallel group, have different samples and shard the optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from rollgraph.config import Config, ConfigError, ConfigProblem

# -- the time of a collective ----------------------------------------------------------------------
# Knows neither models nor runs: bytes in, seconds out. A link has a bandwidth and a latency.
#
# - *ring*: n - 1 rounds. In each, every rank sends 1/n of the data to the next rank. There is one ring for each rank of
#   a node, with an equal share of the data, and each leaves the node by the link of another rank: like NCCL, a node
#   sends over all of its links at once. We count the busiest link, and the latencies of the hops around the ring.
# - *tree*: log2(n) rounds of doubling: first between nodes, each rank with its part of the data, then inside a node.
#   Less latency than a ring, but links inside and between nodes are used one after the other.
#
# We add nothing for the work on the data and assume that no link is shared, so a real collective takes longer.

CollectiveAlgorithm = Literal["ring", "tree"]
COLLECTIVE_ALGORITHMS: tuple[CollectiveAlgorithm, ...] = ("ring", "tree")


@dataclass(frozen=True)
class Link:
    """The link between two ranks: bandwidth in bytes per second and direction, and latency in seconds."""

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < float("inf") or not 0 <= self.latency < float("inf"):
            raise ValueError(f"a link needs a positive bandwidth and a latency of 0 or more, not {self}")


# Nominal figures, not measured ones. NVLink of an H200: 900 GB/s, half of it in each direction. InfiniBand: 400 Gb/s,
# one adapter per GPU. The latencies are the order of magnitude of one hop in a collective's kernel.
NVLINK = Link(450e9, 3e-6)
INFINIBAND = Link(50e9, 10e-6)


@dataclass(frozen=True)
class Network:
    """The links of a rank: inside its node, and between nodes."""

    inside: Link = NVLINK
    between: Link = INFINIBAND


@dataclass(frozen=True)
class RankGroup:
    """Ranks that run collectives together, equally many on each node, e.g. RankGroup(ranks=16, nodes=2)."""

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

    # -- collectives -------------------------------------------------------------------------------

    def all_gather(self, nbytes: float, algorithm: CollectiveAlgorithm = "ring") -> float:
        """Seconds until every rank has all `nbytes`; each starts with its part."""
        return self._ring(nbytes) if algorithm == "ring" else self._tree(nbytes)

    def reduce_scatter(self, nbytes: float, algorithm: CollectiveAlgorithm = "ring") -> float:
        """Seconds until every rank has its part of the sum of `nbytes`: an all-gather in reverse."""
        return self.all_gather(nbytes, algorithm)

    def all_reduce(self, nbytes: float, algorithm: CollectiveAlgorithm | None = None) -> float:
        """Seconds until every rank has the sum of `nbytes`. Without an algorithm, the faster one is used."""
        if algorithm is None:
            return min(self.all_reduce(nbytes, candidate) for candidate in COLLECTIVE_ALGORITHMS)
        return self.reduce_scatter(nbytes, algorithm) + self.all_gather(nbytes, algorithm)

    # -- ring and tree -----------------------------------------------------------------------------

    def _ring(self, nbytes: float) -> float:
        inside, between = self.network.inside, self.network.between
        hops = self.ranks - 1
        sent = nbytes * hops / self.ranks  # bytes over the links of a rank
        if self.nodes == 1:
            return hops * inside.latency + sent / inside.bandwidth
        crossings = min(self.nodes, hops)
        latency = crossings * between.latency + (hops - crossings) * inside.latency
        leaving = sent / self.per_node  # by the ring in which this rank is the last of its node
        return latency + max(leaving / between.bandwidth, (sent - leaving) / inside.bandwidth)

    def _tree(self, nbytes: float) -> float:
        inside, between = self.network.inside, self.network.between
        between_nodes = nbytes / self.per_node * (self.nodes - 1) / self.nodes
        inside_node = nbytes * (self.per_node - 1) / self.per_node
        latency = _ceil_log2(self.nodes) * between.latency + _ceil_log2(self.per_node) * inside.latency
        return latency + between_nodes / between.bandwidth + inside_node / inside.bandwidth


def _ceil_log2(count: int) -> int:
    """How often 1 has to be doubled to reach `count`."""
    return (count - 1).bit_length()


# -- layouts ---------------------------------------------------------------------------------------

Shard = Literal["optimizer", "parameters"]
GPUS_PER_NODE = 8  # assumed if not specified


@dataclass(frozen=True)
class Layout:
    """All ranks of a run, e.g. Layout(ranks=16, nodes=2, tensor_parallel=8)."""

    ranks: int = 1
    nodes: int = 1
    shard: Shard = "optimizer"
    tensor_parallel: int = 1  # ranks of a tensor parallel group
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.nodes < 1:
            raise ConfigError([f"{self.ranks} ranks on {self.nodes} nodes: there must be at least one of each"])
        if self.ranks % self.nodes:
            raise ConfigError([f"{self.ranks} ranks cannot be spread equally over {self.nodes} nodes"])
        if self.per_node % self.tensor_parallel:
            owner = "the run has" if self.nodes == 1 else "a node has"
            ranks = "one rank" if self.per_node == 1 else f"{self.per_node} ranks"
            problem = f"{self.tensor_parallel} does not divide the {ranks} that {owner}"
            raise ConfigError([ConfigProblem(problem, "tensor_parallel", rule="ranks_form_groups")])

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def data_parallel(self) -> int:
        """The size of a data parallel group: the number of tensor parallel groups."""
        return self.ranks // self.tensor_parallel

    @property
    def shards_parameters(self) -> bool:
        return self.shard == "parameters" and self.data_parallel > 1

    @property
    def data_group(self) -> RankGroup:
        """A data parallel group: the ranks with the same shard of each layer."""
        return RankGroup(self.data_parallel, self.nodes, self.network)

    @property
    def tensor_group(self) -> RankGroup:
        return RankGroup(self.tensor_parallel, 1, self.network)

    def describe(self) -> str:
        """As written in a configuration, without defaults, e.g. "tensor_parallel: 8"."""
        settings = []
        if self.shard != "optimizer" or self.tensor_parallel == 1:
            settings.append(f"shard: {self.shard}")
        if self.tensor_parallel > 1:
            settings.append(f"tensor_parallel: {self.tensor_parallel}")
        return ", ".join(settings)


def configured_layout(config: Config, ranks: int = 1, nodes: int = 1, network: Network | None = None) -> Layout:
    """The layout of a configuration on `ranks` ranks."""
    return Layout(ranks, nodes, config.shard, config.tensor_parallel, network or Network())


def has_enough_prompts(config: Config, layout: Layout) -> bool:
    """Whether a step has a prompt for each data parallel rank; otherwise the run is refused."""
    return config.data.prompts_per_step >= layout.data_parallel


def infer_nodes(ranks: int) -> int:
    """The assumed number of nodes: whole nodes of 8 GPUs, or else one."""
    return 1 if ranks % GPUS_PER_NODE else ranks // GPUS_PER_NODE


def candidate_layouts(layout: Layout) -> Iterator[Layout]:
    """Every layout of the same ranks, from the least sharded to the most."""
    for shard in ("optimizer", "parameters"):
        yield replace(layout, shard=shard, tensor_parallel=1)
    tensor = 2
    while tensor <= layout.per_node:
        if layout.per_node % tensor == 0:
            yield replace(layout, shard="optimizer", tensor_parallel=tensor)
        tensor *= 2
