"""Measure the cost of a lost rank, and of Ray: `python benchmarks/recovery.py [--ranks 2] [--steps 30]`.

A few ranks train a tiny model on the CPU, alternately under `torchrun --max-restarts` and on a Ray cluster of this
machine alone. The step time is the median of an undisturbed run; the ratio compares the fastest runs. Then a reward
function kills its own process once, in the middle of a run. The loss is detected when the first line about it is
printed, and the run has recovered when the next step is finished.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from common import table

CONFIG = """
steps: {steps}
cpu_threads: 1
model:
  tiny: {{layers: 2, width: 64, heads: 2, kv_heads: 1, mlp: 128, max_length: 32}}
data: {{train: train.jsonl, prompts_per_step: 12, max_prompt_tokens: 8}}
rollout: {{samples_per_prompt: 4, max_tokens: 16, rows: 16}}
reward: {{functions: [{{name: "rewards.py:even"}}]}}
train: {{token_buckets: [256]}}
checkpoint: {{every: 1, export_at_end: false}}
memory: {{cache_gib: 0.01}}
log: {{progress: plain, sinks: [jsonl]}}
cluster: {{gpus_per_node: 0, ranks_per_node: {ranks}}}
"""
# Called once in each step. The first process to reach the chosen call kills itself.
REWARDS = """
import os, signal, time
calls = 0

def even(completions, **columns):
    global calls
    calls += 1
    if calls == int(os.environ.get("KILL_AT_CALL", "0")):
        try:
            note = os.open("killed", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            pass
        else:
            os.write(note, str(time.time()).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(text) % 2) for text in completions]
"""
LOSS = ("disappeared without notice", "was lost", "is lost", "exitcode")


@dataclass(frozen=True)
class Line:
    at: float
    text: str


def command(engine: str, ranks: int) -> list[str]:
    if engine == "ray":
        return [sys.executable, "-m", "rollgraph", "train", "config.yaml", "cluster.engine=ray"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, "--max-restarts=3", "--monitor-interval=0.1", "-m", "rollgraph", "train", "config.yaml"]


def run(engine: str, folder: Path, options: argparse.Namespace, kill_at_call: int = 0) -> list[Line]:
    """Run in a folder; return the lines it prints, with their times."""
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG.format(steps=options.steps, ranks=options.ranks) + "output: run\n")
    (folder / "rewards.py").write_text(REWARDS)
    rows = (json.dumps({"prompt": f"{number}+{number + 1}="}) for number in range(10, 74))
    (folder / "train.jsonl").write_text("\n".join(rows))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "KILL_AT_CALL": str(kill_at_call)}
    process = subprocess.Popen(
        command(engine, options.ranks), cwd=folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    lines = [Line(time.time(), text.rstrip()) for text in process.stdout]
    if process.wait():
        raise SystemExit("\n".join(line.text for line in lines))
    return lines


def median_step(folder: Path) -> float:
    """Return the median seconds of a step, without the first steps."""
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(step["speed/seconds"] for step in metrics[3:])


def measure_recovery(engine: str, folder: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds from the end of a rank until the loss is detected, and until the next step is finished."""
    lines = run(engine, folder, options, kill_at_call=options.steps // 2)
    killed = float((folder / "killed").read_text())
    later = [line for line in lines if line.at > killed]
    told = next(line.at for line in later if any(text in line.text for text in LOSS))
    finished = next(line.at for line in later if line.at > told and line.text.startswith("["))
    return told - killed, finished - killed


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the cost of a lost rank, and of Ray.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    engines = ("torchrun", "ray")
    steps: dict[str, list[float]] = {engine: [] for engine in engines}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for repeat in range(options.repeats):
            for engine in engines:
                folder = Path(name) / f"{engine} {repeat}"
                run(engine, folder, options)
                steps[engine].append(median_step(folder))
        for engine in engines:
            known, recovered = measure_recovery(engine, Path(name) / f"{engine} killed", options)
            least = min(steps[engine])
            ratio = least / min(steps["torchrun"])
            rows.append((engine, f"{1e3 * least:.1f}", f"{ratio:.3f}", f"{known:.2f}", f"{recovered:.1f}"))
    header = ("engine", "step, ms", "x torchrun", "loss detected, s", "recovered, s")
    table(f"{options.ranks} ranks on {os.cpu_count()} cores", header, rows)


if __name__ == "__main__":
    main()
