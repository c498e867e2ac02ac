"""The section `cluster` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rollgraph.config.key_types import Count, File, Natural


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    engine: Annotated[
        Literal["none", "ray"],
        "What starts the ranks. none: whoever starts this command, such as torchrun; ray: a Ray cluster, where lost "
        "ranks are replaced (pip install 'rollgraph[ray]').",
    ] = "none"
    address: Annotated[
        str | None,
        "Address of the Ray cluster: host:port, auto on one of its nodes, or ray://host:10001 from elsewhere. null: "
        "what RAY_ADDRESS says, the cluster of this machine, or else one of this machine alone, only for the run.",
    ] = None
    nodes: Annotated[Count, "Number of nodes that the ranks are spread over, equally many on each."] = 1
    gpus_per_node: Annotated[Natural, "Number of GPUs to use on each node; each is one rank. 0: ranks on CPUs."] = 1
    ranks_per_node: Annotated[Count, "Number of ranks on each node if `gpus_per_node` is 0."] = 1
    cpus_per_rank: Annotated[
        Count, "CPU cores that Ray reserves for each rank. On a CPU, also its number of threads unless `cpu_threads`."
    ] = 1
    working_dir: Annotated[
        File | None,
        "Folder with your modules that Ray copies to all nodes, where ranks run in it. null: nodes share the file "
        "system, and ranks run in the folder that this command runs in.",
    ] = None
    attempts: Annotated[
        Count, "Attempts in a row that may end with a lost rank before a step is finished; then the run gives up."
    ] = 3

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_on_node

    @property
    def ranks_on_node(self) -> int:
        return self.gpus_per_node or self.ranks_per_node
