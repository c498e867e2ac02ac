"""`torchrun --max-restarts`: ranks are killed or stopped in every phase, and the restarted run has the bits of an
undisturbed one.

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
KILLS_PER_RUN = 6  # each attempt takes a step or two before it is disturbed
LIMIT = 900.0  # seconds for a run with its restarts, on a busy machine
IN_STEPS = ("step", "generate", "reward", "score", "train", "save")
RESUMED = "load checkpoint"  # a phase of all attempts but the first
PHASES = (START, "load model", "capture", RESUMED, *IN_STEPS)


def run(
    folder: Path, output: Path, dooms: list[dict[str, Any]], *overrides: str, restarts: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run under `torchrun` with a doom for each of the first attempts. Notes of the ranks are beside the output."""
    restarts = len(dooms) if restarts is None else restarts
    master = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    process = start(folder, output, dooms, overrides, RANKS, f"--max-restarts={restarts}", *master)
    try:
        log = process.communicate(timeout=LIMIT)[0]
    finally:
        process.terminate()
    return subprocess.CompletedProcess(process.args, process.returncode, log)


def start(
    folder: Path, output: Path, dooms: list[dict[str, Any]], overrides: Sequence[str], ranks: int, *options: str
) -> subprocess.Popen[str]:
    """Start `torchrun` with some of the ranks of a run."""
    config = folder / f"{output.name}.yaml"
    settings = [f"output={output}", "data.validation=null", "ranks={timeout: 300, heartbeat_timeout: 200}", *overrides]
    config.write_text(to_yaml(config_of(folder, *settings, text=CONFIG)))
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


def logs_of(output: Path, attempt: int) -> str:
    """The output of the ranks of an attempt."""
    paths = sorted(notes_of(output).glob(f"logs/*/attempt_{attempt}/*/std*.log"))
    return "".join(f"-- {path.parent.name} {path.name}\n{path.read_text()}" for path in paths)


def doom(generator: random.Random, phase: str) -> dict[str, Any]:
    entry = generator.randint(1, 2) if phase in IN_STEPS else 1
    delay = generator.choice([0, generator.uniform(0, 0.05), generator.uniform(0, 0.5)])
    return {"rank": generator.randrange(RANKS), "phase": phase, "entry": entry, "delay": delay, "how": "SIGKILL"}


def was_killed(output: Path, attempt: int) -> bool:
    """Whether the doom of an attempt came before its end."""
    return (notes_of(output) / f"killed{attempt}").exists()


def assert_loss_reported(output: Path, attempt: int, doomed: dict[str, Any]) -> float | None:
    """Check that the others named the lost rank and no other. Return the seconds until they all knew."""
    notes = notes_of(output)
    killed = float((notes / f"killed{attempt}").read_text())
    losses = [json.loads(path.read_text()) for path in notes.glob(f"known{attempt}.*")]
    for loss in losses:
        assert loss["rank"] in (doomed["rank"], None), logs_of(output, attempt)
        assert loss["at"] - killed < 150, "the loss was noticed only by the timeout"
    if doomed["phase"] != START:
        assert f"rank {doomed['rank']} on {socket.gethostname()} (" in logs_of(output, attempt)
    if doomed["phase"] in IN_STEPS and not doomed["delay"]:
        assert f" ({doomed['phase']}; last operation: " in logs_of(output, attempt)
    return max((loss["at"] - killed for loss in losses), default=None)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(1200 + 120 * KILLS)
def test_a_run_restarts_by_itself_after_kills_in_every_phase(folder: Path, undisturbed: Path) -> None:
    generator = random.Random(int(os.environ.get("ROLLGRAPH_KILLS_SEED", "0")))
    remaining: list[str] = []
    killed: list[str] = []
    while len(killed) < KILLS:
        if len(remaining) < KILLS_PER_RUN:
            remaining += generator.sample(PHASES, len(PHASES))
        phases, remaining = remaining[: KILLS_PER_RUN - 1], remaining[KILLS_PER_RUN - 1 :]
        # The first attempt saves, so that the others have a checkpoint to load.
        dooms = [{**doom(generator, "save"), "entry": 3}, *(doom(generator, phase) for phase in phases)]
        output = folder / f"restarted {len(killed)}"
        completed = run(folder, output, dooms)
        assert completed.returncode == 0, completed.stdout + logs_of(output, len(dooms))
        for attempt, doomed in enumerate(dooms):
            if was_killed(output, attempt):
                seconds = assert_loss_reported(output, attempt, doomed)
                print(json.dumps({**doomed, "known after": seconds and round(seconds, 2)}), flush=True)
                killed.append(doomed["phase"])
            else:
                remaining.insert(0, doomed["phase"])
        assert_same(undisturbed, output)
    assert set(killed) == set(PHASES) or 3 * len(PHASES) > KILLS


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("victim", range(RANKS))
def test_agents_with_different_restart_counts_restart_together(folder: Path, undisturbed: Path, victim: int) -> None:
    """Two agents, one with two ranks and one with one. Only the agent of the lost rank counts a restart."""
    output = folder / "machines"
    doomed = [{"rank": victim, "phase": "train", "entry": 2, "delay": 0, "how": "SIGKILL"}]
    rendezvous = ["--nnodes=2", "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    agents = [start(folder, output, doomed, (), ranks, *rendezvous) for ranks in (2, 1)]
    try:
        for agent in agents:
            log = agent.communicate(timeout=LIMIT)[0]
            assert agent.returncode == 0, log
    finally:
        for agent in agents:
            agent.terminate()
    assert was_killed(output, 0)
    assert_same(undisturbed, output)


@pytest.mark.slow
@pytest.mark.multi
def test_a_hanging_rank_is_named_and_replaced(folder: Path, undisturbed: Path) -> None:
    """It is stopped inside a save, where the others wait for its shard."""
    output = folder / "hung"
    doomed = {"rank": 1, "phase": "save", "entry": 2, "delay": 0, "how": "SIGSTOP"}
    completed = run(folder, output, [doomed], "ranks.heartbeat_timeout=10", "model.checkpointing=true")
    assert completed.returncode == 0, completed.stdout + logs_of(output, 1)
    assert was_killed(output, 0)
    assert_loss_reported(output, 0, doomed)
    assert "has sent no heartbeat for 10 s" in logs_of(output, 0)
    assert_same(undisturbed, output)


@pytest.mark.slow
@pytest.mark.multi
def test_errors_of_users_are_not_retried(folder: Path) -> None:
    """The reward of every rollout fails, which ends the run after its first step."""
    calls = folder / "calls"
    (folder / "rewards.py").write_text(
        "import os\n"
        "def even(completions, **columns):\n"
        f"    open({str(calls)!r}, 'a').write(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "    raise KeyError('answre')\n"
    )
    output = folder / "refused"
    completed = run(folder, output, [], "reward.workers=0", restarts=2)
    assert completed.returncode != 0
    assert set(calls.read_text()) == {"0"}
    reason = "no rollout of the first step got a reward"
    assert reason in logs_of(output, 0)
    assert f"an earlier attempt failed, and so would this one: {reason}" in logs_of(output, 1)
    assert "exitcode  : 2" in completed.stdout


@pytest.mark.slow
@pytest.mark.multi
def test_a_restart_resumes_even_with_resume_never(folder: Path) -> None:
    output = folder / "never"
    doomed = {"rank": 0, "phase": "generate", "entry": 3, "delay": 0, "how": signal.Signals.SIGKILL.name}
    completed = run(folder, output, [doomed], "resume=never", "steps=4", "graph.impl=none")
    assert completed.returncode == 0, completed.stdout + logs_of(output, 1)
    assert "resumed after" in logs_of(output, 1)
