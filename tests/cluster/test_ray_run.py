"""Whole runs on a Ray cluster of simulated nodes: ranks and nodes are lost in every phase, and no bit changes.

ROLLGRAPH_KILLS sets the number of losses.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollgraph.cluster.driver import ClusterOutcome, train_on_cluster
from rollgraph.config import Config
from rollgraph.log import ProgressDisplay
from rollgraph.parallel.ranks.stop import StopRequest
from rollgraph.rl.rewards.ray_pool import ray_connection
from rollgraph.train import train
from tests.cluster.losing_worker import PLAN, LosingWorker, marks
from tests.cluster.ray_nodes import SimulatedNodes
from tests.test_kills import CONFIG, STEPS
from tests.test_train import ONE, assert_same_run, config_of, metrics_of, write_inputs

ray: Any = pytest.importorskip("ray", reason="needs Ray: pip install 'rollgraph[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.multi]

RANKS = 3
LOSSES = int(os.environ.get("ROLLGRAPH_KILLS", "6"))
# In order, ten in each run: a rank, its phase, how often it enters that phase before, and the kind of loss. Ranks load
# and capture before there is a checkpoint, and after they were lost themselves.
ALL_LOSSES = [
    [1, "load model", 0, "kill"],
    [0, "capture", 0, "kill"],
    [2, "generate", 1, "kill"],
    [1, "train", 1, "node"],
    [0, "save", 1, "kill"],
    [1, "load checkpoint", 0, "kill"],
    [0, "train", 1, "kill"],
    [2, "save", 0, "kill"],
    [0, "load checkpoint", 0, "kill"],
    [1, "score", 0, "kill"],
    [2, "capture", 0, "kill"],
    [1, "load model", 0, "kill"],
    [2, "reward", 1, "kill"],
    [0, "generate", 0, "node"],
    [0, "score", 1, "kill"],
    [1, "generate", 0, "kill"],
    [2, "train", 0, "kill"],
    [1, "save", 1, "node"],
    [2, "load checkpoint", 0, "kill"],
    [0, "reward", 1, "kill"],
    [0, "load model", 0, "kill"],
    [1, "capture", 0, "kill"],
    [2, "score", 0, "node"],
    [0, "save", 0, "kill"],
    [1, "reward", 1, "kill"],
    [2, "save", 1, "kill"],
    [0, "train", 0, "node"],
    [1, "load checkpoint", 0, "node"],
    [2, "generate", 0, "kill"],
    [0, "save", 1, "kill"],
]


class Watcher(ProgressDisplay):
    """Records the notes and steps that a driver shows."""

    def __init__(self, on_note: Callable[[str], None] = lambda text: None) -> None:
        self.notes: list[str] = []
        self.steps: list[tuple[float, int]] = []
        self._on_note = on_note

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._on_note(text)

    def step(self, step: int, values: Mapping[str, float], seconds_by_phase: Mapping[str, float]) -> None:
        self.steps.append((time.monotonic(), step))

    def all_notes(self) -> str:
        return "\n".join(self.notes)


@pytest.fixture(scope="module")
def nodes() -> Iterator[SimulatedNodes]:
    simulated = SimulatedNodes(RANKS + 1)
    yield simulated
    simulated.close()


def make_config(nodes: SimulatedNodes, folder: Path, *overrides: str) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    write_inputs(folder)
    settings = [
        "data.validation=null",
        "ranks.heartbeat_timeout=20",
        "ranks.timeout=200",
        "cluster.engine=ray",
        f"cluster.address={nodes.address}",
        f"cluster.nodes={RANKS}",
        "cluster.gpus_per_node=0",
        "cluster.attempts=50",
    ]
    return config_of(folder, *settings, *overrides, text=CONFIG)


def run(config: Config, watcher: Watcher, plan: list[list[Any]] | None = None, **options: Any) -> ClusterOutcome:
    (Path(config.output).parent / PLAN).write_text(json.dumps(plan or []))
    return train_on_cluster(config, view=watcher, worker=LosingWorker, **options)


@pytest.fixture(scope="module")
def undisturbed(nodes: SimulatedNodes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_config(nodes, tmp_path_factory.mktemp("undisturbed"))
    watcher = Watcher()
    assert run(config, watcher) == ClusterOutcome(0, "")
    assert [step for _, step in watcher.steps] == list(range(STEPS))
    return Path(config.output)


def test_ray_leaves_sigterm_and_print_as_they_were(nodes: SimulatedNodes) -> None:
    """Ray's handler would end a run unsaved, and its `print` would be named instead of the caller."""
    before = signal.getsignal(signal.SIGTERM), builtins.print
    with ray_connection(nodes.address, "cluster.engine: ray") as connection:
        assert signal.getsignal(signal.SIGTERM) is before[0]
        connection.get(connection.remote(lambda: print("said by a task")).remote())
    assert (signal.getsignal(signal.SIGTERM), builtins.print) == before


def test_ranks_and_nodes_are_lost_in_every_phase(nodes: SimulatedNodes, tmp_path: Path, undisturbed: Path) -> None:
    plan = ALL_LOSSES[:LOSSES]
    for number, start in enumerate(range(0, len(plan), 10)):
        part = plan[start : start + 10]
        for _ in range(sum(how == "node" for *_, how in part)):
            nodes.add()
        config = make_config(nodes, tmp_path / str(number))
        watcher = Watcher()
        assert run(config, watcher, part) == ClusterOutcome(0, ""), watcher.all_notes()
        assert len(marks(config.output)) == len(part)
        assert_same_run(undisturbed, Path(config.output), STEPS - 1)


def test_survivors_capture_nothing_and_a_hung_rank_is_named(
    nodes: SimulatedNodes, tmp_path: Path, undisturbed: Path
) -> None:
    config = make_config(nodes, tmp_path, "log.verbose=true")
    watcher = Watcher()
    assert run(config, watcher, [[1, "train", 2, "stop"]]) == ClusterOutcome(0, "")
    assert "rank 1 on " in watcher.all_notes()
    assert " 0 captured again, " in watcher.all_notes()
    assert not any("generation and training agree" in note for note in watcher.notes[2:]), "rank 0 captured again"
    assert_same_run(undisturbed, Path(config.output), STEPS - 1)


def test_an_unreachable_rank_0_cannot_write(nodes: SimulatedNodes, tmp_path: Path, undisturbed: Path) -> None:
    """Ray has lost its node, but the process lives on and holds the lock of the folder."""
    config = make_config(nodes, tmp_path)
    assert run(config, Watcher(), [[0, "save", 2, "cut"]]) == ClusterOutcome(0, "")
    assert_same_run(undisturbed, Path(config.output), STEPS - 1)
    nodes.add()


def test_a_run_without_a_spare_node_says_so_and_waits_for_one(
    nodes: SimulatedNodes, tmp_path: Path, undisturbed: Path
) -> None:
    config = make_config(nodes, tmp_path, "cluster.nodes=3")

    def add_node(text: str) -> None:
        if text.startswith("waiting for rank"):
            nodes.add()

    watcher = Watcher(add_node)
    losses: list[list[Any]] = [[1, "train", 2, "node"], [2, "train", 1, "node"]]
    assert run(config, watcher, losses) == ClusterOutcome(0, "")
    assert "until there is a node with 1 free CPU;" in watcher.all_notes()
    assert_same_run(undisturbed, Path(config.output), STEPS - 1)
    nodes.add()


def test_a_user_error_is_reported_once_and_not_retried(nodes: SimulatedNodes, tmp_path: Path) -> None:
    config = make_config(nodes, tmp_path)
    (tmp_path / "train.jsonl").write_text('{"no_prompt": 1}\n')
    watcher = Watcher()
    ending = run(config, watcher)
    assert ending.code == 2
    assert "train.jsonl" in ending.verdict
    assert not any("was lost" in note for note in watcher.notes)


def test_a_request_to_stop_saves_and_the_run_resumes_later(
    nodes: SimulatedNodes, tmp_path: Path, undisturbed: Path
) -> None:
    config = make_config(nodes, tmp_path)
    stop = StopRequest()

    class Stopping(Watcher):
        def step(self, step: int, values: Mapping[str, float], seconds_by_phase: Mapping[str, float]) -> None:
            super().step(step, values, seconds_by_phase)
            stop.request("the test")

    ending = run(config, Stopping(), stop=stop)
    assert ending.code == 0
    assert ending.verdict.startswith("stopped")
    assert 0 < len(metrics_of(Path(config.output))) < STEPS
    assert run(config, Watcher()) == ClusterOutcome(0, "")
    assert_same_run(undisturbed, Path(config.output), STEPS - 1)


def test_rewards_on_other_nodes_equal_rewards_on_this_machine(nodes: SimulatedNodes, tmp_path: Path) -> None:
    remote = make_config(nodes, tmp_path / "remote", "cluster.nodes=1", "reward.workers=2", "reward.place=cluster")
    assert run(remote, Watcher()) == ClusterOutcome(0, "")
    local = make_config(nodes, tmp_path / "local", "cluster.engine=none")
    train(local, ONE)
    assert_same_run(Path(local.output), Path(remote.output), STEPS - 1)
