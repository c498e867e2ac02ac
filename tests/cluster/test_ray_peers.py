"""`checkpoint.peers` on a Ray cluster of simulated nodes: lost ranks and nodes cost no step.

ROLLGRAPH_KILLS sets the number of losses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollgraph.checkpoint import peer_exchange
from rollgraph.cluster.driver import ClusterOutcome, train_on_cluster
from rollgraph.cluster.rank_worker import RankIdentity
from rollgraph.config import Config
from tests.cluster.losing_worker import PLAN, LosingWorker, marks
from tests.cluster.ray_nodes import SimulatedNodes
from tests.cluster.test_ray_run import LOSSES as LOSS_COUNT
from tests.cluster.test_ray_run import RANKS, Watcher, make_config, nodes, undisturbed
from tests.test_kills import STEPS
from tests.test_train import assert_same_run

__all__ = ["nodes", "undisturbed"]

pytestmark = [pytest.mark.slow, pytest.mark.multi]

LOSSES: list[list[Any]] = [
    [2, "generate", 1, "kill"],
    [1, "train", 1, "node"],  # a spare node replaces it
    [0, "load checkpoint", 0, "kill"],
    [1, "score", 1, "kill"],
    [0, "reward", 1, "kill"],
    [2, "save", 0, "kill"],
]


class PatientWorker(LosingWorker):
    """Waits for its state to arrive before a step counts, since a busy machine is slow to send even a small state."""

    def __init__(self, config: Config, identity: RankIdentity, folder: str | None) -> None:
        super().__init__(config, identity, folder)
        peer_exchange._BRIEF_SECONDS = 100.0


@pytest.mark.parametrize("turn", range(max(1, LOSS_COUNT // len(LOSSES))))
def test_a_lost_rank_or_node_costs_no_step(nodes: SimulatedNodes, tmp_path: Path, undisturbed: Path, turn: int) -> None:
    """Only the last step is saved, so the run can resume only from memory. Each `turn` loses other ranks."""
    config = make_config(nodes, tmp_path, "checkpoint.peers=1", "checkpoint.every=100")
    losses = [[(rank + turn) % RANKS, *rest] for rank, *rest in LOSSES]
    (Path(config.output).parent / PLAN).write_text(json.dumps(losses))
    watcher = Watcher()
    ending = train_on_cluster(config, view=watcher, worker=PatientWorker)
    nodes.add()  # replaces the lost one
    assert ending == ClusterOutcome(0, ""), watcher.all_notes()
    assert len(marks(config.output)) == len(losses), watcher.all_notes()
    assert_same_run(undisturbed, Path(config.output), STEPS - 1)
    steps = [step for _, step in watcher.steps]
    assert len(steps) == len(set(steps)), watcher.all_notes()  # the driver may miss the last news of a killed rank 0
    starts = (Path(config.output) / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["first_step"] for line in starts].count(0) == 1
