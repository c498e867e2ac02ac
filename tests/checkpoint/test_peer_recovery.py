"""`checkpoint.peers`: ranks are killed in every phase, new processes take their places, and no step is taken twice.

As on a cluster, ranks that lose another one continue in their processes. There is no checkpoint to resume from, unless
a test is about the disk.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rollgraph.checkpoint import peer_exchange
from rollgraph.config import Config, load_config, to_yaml
from rollgraph.parallel.ranks.failures import RankLost
from rollgraph.parallel.ranks.join import Attempt, end_process, join, leave, own_store
from rollgraph.parallel.ranks.liveness import Liveness
from rollgraph.run.setup import WarmWorker
from rollgraph.train import train
from tests.test_kills import CONFIG, RANKS, assert_same
from tests.test_train import config_of, folder

__all__ = ["folder"]

LIMIT = 600.0  # seconds for a run, on a busy machine
ON_CLUSTER = "cluster={engine: ray, gpus_per_node: 0, ranks_per_node: 3}"
Kill = tuple[int, str, int]  # of a rank, in a phase, at which entry into it in this attempt


def rank_main(rank: int, number: int, port: int, file: str, kills: list[Kill], together: bool) -> None:
    """One rank from the attempt `number` on, for as long as others are lost."""
    torch.set_num_threads(1)
    peer_exchange._BRIEF_SECONDS = LIMIT  # a busy machine is slow to send even a small state
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    config = load_config(file)
    notes = Path(config.output).with_name("notes")
    (notes / f"pid{rank}").write_text(str(os.getpid()))
    log = os.open(notes / f"log{rank}.{number}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    patch_phases(kills, notes, together)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    warm_worker = WarmWorker("abc")
    while True:
        world = join(Attempt(number, rank, RANKS, node=f"node-{rank}", store=own_store(store, number)), config.ranks)
        try:
            train(config, world, warm_worker=warm_worker, on_step=lambda step, _: note_step(notes, step))
            leave(world)
            break
        except RankLost as error:
            leave(world, error)
            number += 1
    end_process(0)


def note_step(notes: Path, step: int) -> None:
    with (notes / "steps").open("a") as file:
        file.write(f"{step}\n")


def patch_phases(kills: list[Kill], notes: Path, together: bool) -> None:
    """Kill this process where `kills` says so, `together` with the rank after it."""
    entries: Counter[tuple[int, str]] = Counter()
    enter_phase = Liveness.enter_phase

    def enter(self: Liveness, phase: str) -> None:
        enter_phase(self, phase)
        if self.attempt >= len(kills):
            return
        rank, doomed_phase, entry = kills[self.attempt]
        entries[self.attempt, phase] += 1
        if (rank, doomed_phase) == (self.rank, phase) and entries[self.attempt, phase] == entry:
            (notes / f"killed{self.attempt}").touch()
            if together:
                os.kill(int((notes / f"pid{rank + 1}").read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    Liveness.enter_phase = enter  # type: ignore[method-assign]


def run(folder: Path, name: str, kills: list[Kill], *overrides: str, together: bool = False) -> Path:
    """Run until all steps are taken, whichever ranks are killed. Returns the folder of the run."""
    home = folder / name
    notes = home / "notes"
    notes.mkdir(parents=True)
    config = make_config(folder, home / "run", *overrides)
    file = home / "config.yaml"
    file.write_text(to_yaml(config))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("forkserver")

    def start(rank: int, number: int) -> BaseProcess:
        arguments = (rank, number, store.port, str(file), kills, together)
        process = context.Process(target=rank_main, args=arguments, daemon=True)
        process.start()
        return process

    ranks = {rank: start(rank, 0) for rank in range(RANKS)}
    deadline = time.monotonic() + LIMIT
    while any(process.exitcode != 0 for process in ranks.values()):
        assert time.monotonic() < deadline, logs_of(notes)
        for rank, process in ranks.items():
            if process.exitcode == -signal.SIGKILL:
                ranks[rank] = start(rank, len(list(notes.glob("killed*"))))
            assert process.exitcode in (None, 0, -signal.SIGKILL), logs_of(notes)
        time.sleep(0.05)
    assert len(list(notes.glob("killed*"))) == len(kills)
    return home / "run"


def make_config(folder: Path, output: Path, *overrides: str) -> Config:
    common = [f"output={output}", "data.validation=null", "ranks={timeout: 300, heartbeat_timeout: 200}"]
    return config_of(folder, *common, "graph.impl=none", "checkpoint.every=100", *overrides, text=CONFIG)


def logs_of(notes: Path) -> str:
    return "".join(f"-- {path.name}\n{path.read_text()}" for path in sorted(notes.glob("log*")))


def steps_of(output: Path) -> list[int]:
    return [int(line) for line in (output.with_name("notes") / "steps").read_text().split()]


def starts_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "starts.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(1500)
def test_a_lost_rank_costs_no_step(folder: Path) -> None:
    kills = [
        (1, "generate", 3),
        (0, "train", 1),
        (2, "reward", 2),
        (0, "load checkpoint", 1),  # it holds the state of the rank that was just lost
        (1, "score", 2),
        (1, "capture", 1),
        (0, "step", 1),
        (2, "train", 2),
        (2, "save", 1),  # of the last step
    ]
    undisturbed = run(folder, "undisturbed", [])
    peers = run(folder, "peers", kills, ON_CLUSTER, "checkpoint.peers=1")
    assert_same(undisturbed, peers)
    assert steps_of(peers) == steps_of(undisturbed) == list(range(12)), logs_of(peers.with_name("notes"))
    first_steps = sorted(start["first_step"] for start in starts_of(peers))
    assert first_steps[0] == 0
    assert first_steps[-1] == 12


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(1500)
def test_two_neighbours_lost_at_once_are_restored_from_the_disk(folder: Path) -> None:
    """The state of rank 1 was in the memory of ranks 1 and 2. The step after the last save is repeated."""
    settings = ["checkpoint.every=2", "optimizer.state=int8"]
    undisturbed = run(folder, "undisturbed", [], *settings)
    kills = [(1, "generate", 4), (1, "train", 2)]
    disk = run(folder, "disk", kills[:1], *settings, ON_CLUSTER, "checkpoint.peers=1", together=True)
    assert_same(undisturbed, disk)
    assert steps_of(disk) == [0, 1, 2, *range(2, 12)]
    peers = run(folder, "peers", kills, *settings, ON_CLUSTER, "checkpoint.peers=1")
    assert_same(undisturbed, peers)
    assert steps_of(peers) == list(range(12))
