"""A Ray cluster on this machine whose nodes are groups of processes: they can be added and killed."""

from __future__ import annotations

from typing import Any

from rollgraph.parallel.ranks.stop import restore_termination_handlers

# By default, Ray takes a quarter of a minute to declare a node dead.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}


class SimulatedNodes:
    """`count` nodes with `cores` CPU cores each, beside a head node without any."""

    def __init__(self, count: int, cores: int = 1) -> None:
        from ray.cluster_utils import Cluster

        self._cores = cores
        with restore_termination_handlers():
            self._cluster: Any = Cluster(
                initialize_head=True,
                head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK},
            )
        for _ in range(count):
            self.add()

    @property
    def address(self) -> str:
        address: str = self._cluster.address
        return address

    def add(self) -> None:
        with restore_termination_handlers():
            self._cluster.add_node(num_cpus=self._cores)

    def close(self) -> None:
        self._cluster.shutdown()
