"""The layout of a run: how many ranks on how many nodes, and what they divide among themselves.

Owns the arithmetic of groups. Ranks of a tensor group have the same samples and
divide each layer; the samples and the optimizer's state are divided by ranks of different tensor groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from rollgraph.config import Config, ConfigError, ConfigProblem
from rollgraph.run.communication import Group, Network

Shard = Literal["optimizer", "parameters"]
NODE = 8  # GPUs of a node, where nobody says how many there are


@dataclass(frozen=True)
class Layout:
    """All ranks of a run, e.g. Layout(ranks=16, nodes=2, tensor=8)."""

    ranks: int = 1
    nodes: int = 1
    shard: Shard = "optimizer"
    tensor: int = 1  # ranks that divide each layer
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.nodes < 1:
            raise ConfigError([f"{self.ranks} ranks on {self.nodes} nodes: there must be at least one of each"])
        if self.ranks % self.nodes:
            raise ConfigError([f"{self.ranks} ranks cannot be spread equally over {self.nodes} nodes"])
        if self.per_node % self.tensor:
            place = "the run has" if self.nodes == 1 else "a node has"
            ranks = "one rank" if self.per_node == 1 else f"{self.per_node} ranks"
            wrong = f"{self.tensor} does not divide the {ranks} that {place}"
            raise ConfigError([ConfigProblem(wrong, "tensor_parallel", rule="ranks_form_groups")])

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def data(self) -> int:
        """Ranks that have samples of their own: one for each tensor group."""
        return self.ranks // self.tensor

    @property
    def shards_parameters(self) -> bool:
        return self.shard == "parameters" and self.data > 1

    @property
    def data_group(self) -> Group:
        """The ranks with the same part of each layer."""
        return Group(self.data, self.nodes, self.network)

    @property
    def tensor_group(self) -> Group:
        return Group(self.tensor, 1, self.network)

    def describe(self) -> str:
        """As it is written in a configuration: what is not the default, e.g. "tensor_parallel: 8"."""
        settings = []
        if self.shard != "optimizer" or self.tensor == 1:
            settings.append(f"shard: {self.shard}")
        if self.tensor > 1:
            settings.append(f"tensor_parallel: {self.tensor}")
        return ", ".join(settings)


def layout_of(config: Config, ranks: int = 1, nodes: int = 1, network: Network | None = None) -> Layout:
    """The layout that a configuration asks for."""
    return Layout(ranks, nodes, config.shard, config.tensor_parallel, network or Network())


def has_prompts(config: Config, layout: Layout) -> bool:
    """Whether a step has a prompt for each rank that has samples of its own; a run is refused otherwise."""
    return config.data.prompts_per_step >= layout.data


def assumed_nodes(ranks: int) -> int:
    """How many nodes so many ranks have, if nobody says so: whole nodes of 8, or else one."""
    return 1 if ranks % NODE else ranks // NODE


def possible_layouts(layout: Layout) -> Iterator[Layout]:
    """Every layout of the same ranks, one that divides less before one that divides more."""
    for shard in ("optimizer", "parameters"):
        yield replace(layout, shard=shard, tensor=1)
    tensor = 2
    while tensor <= layout.per_node:
        if layout.per_node % tensor == 0:
            yield replace(layout, shard="optimizer", tensor=tensor)
        tensor *= 2
