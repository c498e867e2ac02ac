"""`torchrun --max-restarts`: ranks are killed or stopped in every phase, and the run that goes on by itself gives the
same bits as one that was not disturbed.

ROLLGRAPH_KILLS sets the number of kills, ROLLGRAPH_KILLS_SEED their order.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollgraph.config import to_yaml
from tests.doomed_rank import START
from tests.test_kills import CONFIG, RANKS, assert_same, undisturbed
from tests.test_train import config_of, folder

__all__ = ["folder", "undisturbed"]

KILLS = int(os.environ.get("ROLLGRAPH_KILLS", "4"))
TOGETHER = 6  # kills of one run: each attempt takes a step or two before it is disturbed
LIMIT = 900.0  # seconds for a run with its restarts, on a busy machine
IN_STEPS = ("step", "generate", "reward", "score", "train", "save")
RESUMED = "load checkpoint"  # a phase that the first attempt does not have
PHASES = (START, "load model", "capture", RESUMED, *IN_STEPS)


def run(
    folder: Path, output: Path, dooms: list[dict[str, Any]], *overrides: str, restarts: int | None = None
) -> subprocess.CompletedProcess[str]:
    """A run under `torchrun` with a doom for each of its first attempts. What its ranks note lies beside the output."""
    restarts = len(dooms) if restarts is None else restarts
    master = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    process = start(folder, output, dooms, overrides, RANKS, f"--max-restarts={restarts}", *master)
    try:
        written = process.communicate(timeout=LIMIT)[0]
    finally:
        process.terminate()
    return subprocess.CompletedProcess(process.args, process.returncode, written)


def start(
    folder: Path, output: Path, dooms: list[dict[str, Any]], overrides: Sequence[str], ranks: int, *options: str
) -> subprocess.Popen[str]:
    """Start a `torchrun` with some ranks of a run."""
    config = folder / f"{output.name}.yaml"
    given = [f"output={output}", "data.validation=null", "ranks={timeout: 300, heartbeat_timeout: 200}", *overrides]
    config.write_text(to_yaml(config_of(folder, *given, text=CONFIG)))
    notes = notes_of(output)
    notes.mkdir(exist_ok=True)
    logs = ["--log-dir", str(notes / "logs"), "--redirects=3", "--monitor-interval=0.1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *logs, *options]
    environment = {**os.environ, "DOOM": json.dumps(dooms), "NOTES": str(notes), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*torchrun, "-m", "tests.doomed_rank", str(config)],
        env=environment,
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def notes_of(output: Path) -> Path:
    return output.with_name(f"{output.name} notes")


def said(output: Path, attempt: int) -> str:
    """What the ranks of an attempt wrote."""
    paths = sorted(notes_of(output).glob(f"logs/*/attempt_{attempt}/*/std*.log"))
    return "".join(f"-- {path.parent.name} {path.name}\n{path.read_text()}" for path in paths)


def doom(chance: random.Random, phase: str) -> dict[str, Any]:
    entry = chance.randint(1, 2) if phase in IN_STEPS else 1
    delay = chance.choice([0, chance.uniform(0, 0.05), chance.uniform(0, 0.5)])
    return {"rank": chance.randrange(RANKS), "phase": phase, "entry": entry, "delay": delay, "how": "SIGKILL"}


def happened(output: Path, attempt: int) -> bool:
    """Whether the doom of an attempt came before the end of the run."""
    return (notes_of(output) / f"killed{attempt}").exists()


def check_attempt(output: Path, attempt: int, doomed: dict[str, Any]) -> float | None:
    """The others named the rank that was lost and no other one. Returns how many seconds it took to know."""
    notes = notes_of(output)
    killed = float((notes / f"killed{attempt}").read_text())
    known = [json.loads(path.read_text()) for path in notes.glob(f"known{attempt}.*")]
    for loss in known:
        assert loss["rank"] in (doomed["rank"], None), said(output, attempt)
        assert loss["at"] - killed < 150, "it waited for the timeout"
    if doomed["phase"] != START:
        assert f"rank {doomed['rank']} on {socket.gethostname()} (" in said(output, attempt)
    if doomed["phase"] in IN_STEPS and not doomed["delay"]:
        assert f" ({doomed['phase']}; last operation: " in said(output, attempt)
    return max((loss["at"] - killed for loss in known), default=None)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(1200 + 120 * KILLS)
def test_a_run_goes_on_by_itself_after_kills_in_every_phase(folder: Path, undisturbed: Path) -> None:
    chance = random.Random(int(os.environ.get("ROLLGRAPH_KILLS_SEED", "0")))
    to_come: list[str] = []
    killed: list[str] = []
    while len(killed) < KILLS:
        if len(to_come) < TOGETHER:
            to_come += chance.sample(PHASES, len(PHASES))
        chosen, to_come = to_come[: TOGETHER - 1], to_come[TOGETHER - 1 :]
        # The first attempt saves something, so that the others have something to load.
        dooms = [{**doom(chance, "save"), "entry": 3}, *(doom(chance, phase) for phase in chosen)]
        output = folder / f"restarted {len(killed)}"
        done = run(folder, output, dooms)
        assert done.returncode == 0, done.stdout + said(output, len(dooms))
        for attempt, doomed in enumerate(dooms):
            if happened(output, attempt):
                seconds = check_attempt(output, attempt, doomed)
                print(json.dumps({**doomed, "known after": seconds and round(seconds, 2)}), flush=True)
                killed.append(doomed["phase"])
            else:
                to_come.insert(0, doomed["phase"])
        assert_same(undisturbed, output)
    assert set(killed) == set(PHASES) or 3 * len(PHASES) > KILLS


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("victim", range(RANKS))
def test_machines_that_count_their_restarts_differently_restart_together(
    folder: Path, undisturbed: Path, victim: int
) -> None:
    """A second agent, with one rank, restarts it because its rank was lost or because the first one asks it to."""
    output = folder / "machines"
    doomed = [{"rank": victim, "phase": "train", "entry": 2, "delay": 0, "how": "SIGKILL"}]
    meeting = ["--nnodes=2", "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    agents = [start(folder, output, doomed, (), ranks, *meeting) for ranks in (2, 1)]
    try:
        for agent in agents:
            written = agent.communicate(timeout=LIMIT)[0]
            assert agent.returncode == 0, written
    finally:
        for agent in agents:
            agent.terminate()
    assert happened(output, 0)
    assert_same(undisturbed, output)


@pytest.mark.slow
@pytest.mark.multi
def test_a_rank_that_hangs_is_named_and_replaced(folder: Path, undisturbed: Path) -> None:
    """It is stopped inside a save, where the others wait for what it was to write."""
    output = folder / "hung"
    doomed = {"rank": 1, "phase": "save", "entry": 2, "delay": 0, "how": "SIGSTOP"}
    done = run(folder, output, [doomed], "ranks.heartbeat_timeout=10", "model.checkpointing=true")
    assert done.returncode == 0, done.stdout + said(output, 1)
    assert happened(output, 0)
    check_attempt(output, 0, doomed)
    assert "has sent no heartbeat for 10 s" in said(output, 0)
    assert_same(undisturbed, output)


@pytest.mark.slow
@pytest.mark.multi
def test_a_users_error_is_not_tried_again(folder: Path) -> None:
    """The reward of every rollout fails, which is known at the end of the first step."""
    calls = folder / "calls"
    (folder / "rewards.py").write_text(
        "import os\n"
        "def even(completions, **columns):\n"
        f"    open({str(calls)!r}, 'a').write(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "    raise KeyError('answre')\n"
    )
    output = folder / "refused"
    done = run(folder, output, [], "reward.workers=0", restarts=2)
    assert done.returncode != 0
    assert set(calls.read_text()) == {"0"}
    reason = "no rollout of the first step got a reward"
    assert reason in said(output, 0)
    assert f"an earlier attempt failed, and so would this one: {reason}" in said(output, 1)
    assert "exitcode  : 2" in done.stdout


@pytest.mark.slow
@pytest.mark.multi
def test_a_restart_goes_on_although_resume_is_never(folder: Path) -> None:
    output = folder / "never"
    doomed = {"rank": 0, "phase": "generate", "entry": 3, "delay": 0, "how": signal.Signals.SIGKILL.name}
    done = run(folder, output, [doomed], "resume=never", "steps=4", "graph.impl=none")
    assert done.returncode == 0, done.stdout + said(output, 1)
    assert "resumed after" in said(output, 1)
