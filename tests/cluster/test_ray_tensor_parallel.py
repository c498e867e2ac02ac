"""Tensor parallel runs on a Ray cluster: a group is on one node, and a lost rank changes no bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollgraph.cluster.driver import ClusterOutcome, train_on_cluster
from rollgraph.config import Config
from tests.cluster.losing_worker import PLAN, LosingWorker, marks
from tests.cluster.ray_nodes import SimulatedNodes
from tests.cluster.test_ray_run import Watcher
from tests.test_kills import CONFIG
from tests.test_train import assert_same_run, config_of, write_inputs

pytest.importorskip("ray", reason="needs Ray: pip install 'rollgraph[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.multi]

STEPS = 5
LOSSES = [
    [1, "capture", 0, "kill"],
    [3, "generate", 1, "kill"],
    [0, "train", 1, "kill"],
    [2, "score", 0, "node"],
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[SimulatedNodes]:
    simulated = SimulatedNodes(3, cores=2)
    yield simulated
    simulated.close()


def make_config(nodes: SimulatedNodes, folder: Path) -> Config:
    folder.mkdir()
    write_inputs(folder)
    overrides = [
        f"steps={STEPS}",
        "data.validation=null",
        "data.prompts_per_step=4",
        "model.tiny={layers: 1, width: 8, heads: 2, kv_heads: 2, mlp: 8, max_length: 12}",
        "tensor_parallel=2",
        "ranks.heartbeat_timeout=20",
        "ranks.timeout=200",
        "cluster={engine: ray, nodes: 2, gpus_per_node: 0, ranks_per_node: 2, attempts: 50}",
        f"cluster.address={nodes.address}",
    ]
    return config_of(folder, *overrides, text=CONFIG)


def run(config: Config, plan: list[list[Any]]) -> Watcher:
    (Path(config.output).parent / PLAN).write_text(json.dumps(plan))
    watcher = Watcher()
    assert train_on_cluster(config, view=watcher, worker=LosingWorker) == ClusterOutcome(0, ""), watcher.all_notes()
    return watcher


def test_a_run_that_loses_tensor_parallel_ranks_has_the_same_bits(nodes: SimulatedNodes, tmp_path: Path) -> None:
    """Two groups of two. All ranks capture again, because their graphs hold collectives with the lost rank."""
    undisturbed, disturbed = (make_config(nodes, tmp_path / name) for name in ("undisturbed", "disturbed"))
    run(undisturbed, [])
    nodes.add()
    watcher = run(disturbed, LOSSES)
    assert len(marks(disturbed.output)) == len(LOSSES)
    assert_same_run(Path(undisturbed.output), Path(disturbed.output), STEPS - 1)
    assert watcher.all_notes().count(" was lost: ") >= len(LOSSES)
