"""One of three ranks is killed or stopped: the others exit in time and name it, and the restarted run has the bits of
an undisturbed one.

ROLLGRAPH_KILLS sets the number of random kills.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollgraph.config import to_yaml
from rollgraph.parallel.ranks.failures import ExitCode
from tests.test_train import assert_same_run, config_of, folder, metrics_of, weights_of

__all__ = ["folder"]

RANKS, STEPS = 3, 12
TIMEOUT = 20.0  # seconds until a rank is missed that was stopped, or killed before it connected
LONG_TIMEOUT = 200.0  # for ranks that are killed later, which the others notice at once
GRACE = 250.0  # additional seconds, for a busy machine
KILLS = int(os.environ.get("ROLLGRAPH_KILLS", "12"))
NAMED = re.compile(r"rank (\d+) (?:on \S+ \(|did not join|did not respond|on \S+ failed with)")
CONFIG = f"""
steps: {STEPS}
cpu_threads: 1
model:
  tiny: {{layers: 1, width: 8, heads: 1, kv_heads: 1, mlp: 8, max_length: 12}}
data: {{prompts_per_step: 3, max_prompt_tokens: 6}}
rollout: {{samples_per_prompt: 2, max_tokens: 3, rows: 2}}
reward:
  functions: [{{name: "REWARD"}}]
algorithm: {{options: {{kl_coef: 0.05}}}}
optimizer: {{lr: 1e-2, schedule: linear}}
train: {{token_buckets: [48]}}
checkpoint: {{every: 1, export_at_end: false}}
memory: {{cache_gib: 0.001}}
log: {{progress: plain, sinks: [jsonl]}}
graph: {{warmup: 1}}
"""


def rank_main(rank: int, config: str, log: str, environment: dict[str, str]) -> None:
    """Run the command of one rank as `torchrun` would start it."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    from rollgraph.cli import main

    sys.exit(main(["train", config]))


@dataclass
class Attempt:
    """The three processes of a run."""

    output: Path
    processes: list[Any]
    logs: list[Path]
    store: Any  # kept alive as long as the attempt

    def running(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def end(self) -> None:
        for process in self.processes:
            process.kill()  # works on a stopped process, too
            process.join()

    def describe(self, rank: int) -> str:
        return f"rank {rank}, exit code {self.processes[rank].exitcode}: {self.logs[rank].read_text()}"


def begin(
    folder: Path, output: Path, *overrides: str, store_at_rank_0: bool = False, timeout: float = LONG_TIMEOUT
) -> Attempt:
    """Start the ranks, forked from a server that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "yaml", "rollgraph.train", "rollgraph.cli", "tests.test_kills"])
    path = folder / f"{output.name}.yaml"
    limits = f"ranks={{timeout: {timeout}, heartbeat_timeout: {timeout}}}"
    options = [f"output={output}", "data.validation=null", limits, *overrides]
    config = config_of(folder, *options, text=CONFIG)
    path.write_text(to_yaml(config))
    environment = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0"}
    store = None
    if store_at_rank_0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            environment["MASTER_PORT"] = str(free.getsockname()[1])
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment["MASTER_PORT"] = str(store.port)
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    logs = [folder / f"{output.name}.rank{rank}.log" for rank in range(RANKS)]
    processes = []
    for rank, log in enumerate(logs):
        log.unlink(missing_ok=True)
        process: Any = context.Process(target=rank_main, args=(rank, str(path), str(log), environment), daemon=True)
        process.start()
        processes.append(process)
    return Attempt(output, processes, logs, store)


def finish(attempt: Attempt, code: int = 0) -> None:
    """Wait for the end of an undisturbed run."""
    for rank, process in enumerate(attempt.processes):
        process.join(GRACE)
        assert process.exitcode == code, attempt.describe(rank)


# -- moments ---------------------------------------------------------------------------------------


def count_steps(output: Path) -> int:
    try:
        lines = (output / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    return sum(not line.startswith('{"step": -1,') for line in lines)  # the validation before the first step


def unfinished_saves(output: Path) -> set[str]:
    try:
        return {path.name for path in (output / "checkpoints").iterdir() if path.name.endswith(".incomplete")}
    except OSError:
        return set()


def a_save(output: Path, delay: float) -> Callable[[], bool]:
    before = unfinished_saves(output)
    return after(lambda: bool(unfinished_saves(output) - before), delay)


def a_step(output: Path, count: int, delay: float) -> Callable[[], bool]:
    before = count_steps(output)
    return after(lambda: count_steps(output) >= before + count, delay)


def after(condition: Callable[[], bool], delay: float) -> Callable[[], bool]:
    """A condition that becomes true `delay` seconds after `condition` did."""
    first_held: list[float] = []

    def reached() -> bool:
        if not first_held and condition():
            first_held.append(time.monotonic())
        return bool(first_held) and time.monotonic() >= first_held[0] + delay

    return reached


def random_moment(generator: random.Random, output: Path) -> Callable[[], bool]:
    kind = generator.choice(["start", "step", "save", "save"])
    if kind == "start":
        return after(lambda: True, generator.uniform(0, 2))
    if kind == "step":
        return a_step(output, generator.randint(1, 3), generator.uniform(0, 0.2))
    return a_save(output, generator.choice([0, generator.uniform(0, 0.03)]))


# -- kills -----------------------------------------------------------------------------------------


def kill_rank(attempt: Attempt, moment: Callable[[], bool], victim: int, signal_number: signal.Signals) -> bool:
    """Send a signal to one rank at a moment, and check that the others exit in time and name it.

    Returns whether the moment came before the end of the run.
    """
    try:
        while not moment():
            if not attempt.running():
                finish(attempt)
                return False
            time.sleep(0.002)
        try:
            os.kill(attempt.processes[victim].pid, signal_number)
        except ProcessLookupError:  # it has just finished
            finish(attempt)
            return False
        deadline = time.monotonic() + TIMEOUT + GRACE
        for rank, process in enumerate(attempt.processes):
            if rank != victim:
                process.join(max(0.0, deadline - time.monotonic()))
                check_survivor(attempt, rank, victim)
    finally:
        attempt.end()
    return True


def stop(attempt: Attempt, moment: Callable[[], bool]) -> None:
    """Send SIGTERM as Slurm does. `torchrun` forwards the signal that it gets, so each rank gets two."""
    while not moment():
        assert attempt.running(), attempt.describe(0)
        time.sleep(0.002)
    for process in 2 * attempt.processes:
        os.kill(process.pid, signal.SIGTERM)
    finish(attempt, ExitCode.TERMINATED)
    saved = max((attempt.output / "checkpoints").glob("step_*")).name.removeprefix("step_")
    assert f"asked to stop: saved after {int(saved) + 1} of {STEPS} steps" in attempt.describe(0)


def check_survivor(attempt: Attempt, rank: int, victim: int) -> None:
    code, log = attempt.processes[rank].exitcode, attempt.describe(rank)
    assert code is not None, f"rank {victim} was lost, and rank {rank} is still running: {log}"
    if code == 0:  # it has finished
        assert (attempt.output / "checkpoints" / f"step_{STEPS - 1:08}").exists(), log
        return
    assert code == ExitCode.RANK_LOST, f"rank {victim} was lost: {log}"
    assert set(NAMED.findall(log)) == {str(victim)}, f"rank {victim} was lost: {log}"


def assert_same(first: Path, second: Path) -> None:
    assert_same_run(first, second, STEPS - 1)
    for rank in range(RANKS):
        ours, theirs = weights_of(first, STEPS - 1, rank), weights_of(second, STEPS - 1, rank)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [entry["step"] for entry in metrics_of(second)] == list(range(STEPS))


@pytest.fixture
def undisturbed(folder: Path) -> Path:
    output = folder / "undisturbed"
    finish(begin(folder, output, "graph.impl=none"))  # graphs change no bit, and captures take time
    return output


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(1200)
def test_a_killed_rank_is_named_and_the_run_resumes_exactly(folder: Path, undisturbed: Path) -> None:
    output = folder / "killed"
    assert kill_rank(begin(folder, output), a_save(output, 0), victim=1, signal_number=signal.SIGKILL)
    assert kill_rank(begin(folder, output), a_step(output, 1, 0), victim=0, signal_number=signal.SIGKILL)
    stop(begin(folder, output), a_step(output, 1, 0))
    finish(begin(folder, output))
    assert_same(undisturbed, output)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(1200 + 120 * KILLS)
def test_kills_at_random_moments_change_no_bit(folder: Path, undisturbed: Path) -> None:
    """Kill ranks KILLS times. A run that finishes before its kill is compared, too."""
    generator = random.Random(int(os.environ.get("ROLLGRAPH_KILLS_SEED", "0")))
    kills, runs, kinds = 0, 0, []
    while kills < KILLS:
        output = folder / f"killed {runs}"
        moment, victim = random_moment(generator, output), generator.randrange(RANKS)
        signal_number = signal.SIGSTOP if generator.random() < 0.2 else signal.SIGKILL
        start_time = time.monotonic()
        attempt = begin(folder, output, store_at_rank_0=generator.random() < 0.25, timeout=TIMEOUT)
        if kill_rank(attempt, moment, victim, signal_number):
            kills += 1
            kinds.append({"victim": victim, "how": signal_number.name, "steps": count_steps(output)})
            print(json.dumps({**kinds[-1], "seconds": round(time.monotonic() - start_time, 1)}), flush=True)
        else:
            assert_same(undisturbed, output)
            runs += 1
    output = folder / f"killed {runs}"
    finish(begin(folder, output))
    assert_same(undisturbed, output)
