"""Run folders of any length in which every number is known, for tests without a browser."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rollgraph.view.index import Database, ReadCounters
from rollgraph.view.runs import RunData

Curve = Callable[[int], float]
CONFIG = """
steps: 60
data: {prompts_per_step: 8}
rollout: {samples_per_prompt: 4, max_tokens: 100, top_p: 1.0, top_k: 0, min_p: 0.0}
optimizer: {clip_norm: 1.0, lr: 1.0e-6}
"""
HEALTHY: dict[str, Curve] = {  # a run without findings
    "reward": lambda step: 0.2 + 0.005 * step,
    "groups/frac_reward_zero_std": lambda step: 0.3,
    "groups/rounds": lambda step: 1.0,
    "failures/unrewarded": lambda step: 0.0,
    "length/mean": lambda step: 40.0 + step % 3,
    "length/truncated": lambda step: 0.02,
    "policy/entropy": lambda step: 0.8 - 0.003 * step,
    "policy/kl": lambda step: 0.001 * step,
    "policy/token_mult_prob_error": lambda step: 1.0,
    "optimizer/grad_norm": lambda step: 0.4 + 0.1 * math.sin(step),
    "optimizer/lr": lambda step: 1e-6,
    "loss": lambda step: 0.02 * math.sin(7 * step),
    "speed/seconds": lambda step: 2.0,
    "speed/seconds/generate": lambda step: 1.25,
    "speed/seconds/train": lambda step: 0.5,
}


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def write_metrics(folder: Path, curves: dict[str, Curve], steps: range) -> None:
    rows = ({"step": step, **{name: curve(step) for name, curve in curves.items()}} for step in steps)
    write_lines(folder / "metrics.jsonl", rows)


def write_run(folder: Path, steps: int = 60, config: str = CONFIG, **curves: Curve) -> Path:
    """Write a run with the metrics of a healthy one. `curves` replaces metrics, with `__` in names for a slash."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    write_lines(folder / "starts.jsonl", [{"time": "2026-11-16T10:00:00+00:00", "first_step": 0, "ranks": 1}])
    write_metrics(folder, HEALTHY | {name.replace("__", "/"): curve for name, curve in curves.items()}, range(steps))
    return folder


def make_sample(step: int, group: int, index: int, **fields: Any) -> dict[str, Any]:
    """A sample whose reward and texts follow from its step, group and index."""
    record = {
        "step": step,
        "split": "train",
        "group": group,
        "prompt_id": group,
        "prompt": f"prompt {group}",
        "columns": {},
        "completion": f"step {step} group {group} sample {index}",
        "reward": float(index % 4) / 4,
        "rewards": {"exact": float(index % 4) / 4},
        "finish_reason": "stop",
        "tokens": 3,
        "spans": [{"start": 0, "end": 3, "kind": "turn"}],
        "advantage": 0.5,
    }
    return record | fields


def write_group(folder: Path, step: int, group: int, size: int = 4, **fields: Any) -> None:
    write_lines(folder / "samples.jsonl", [make_sample(step, group, index, **fields) for index in range(size)])


def open_run(folder: Path, cache: Path | None = None) -> RunData:
    """The run as a new process sees it; with a cache, what another one has indexed is there."""
    run = RunData("run", folder.name, folder, Database(cache and cache / "index.sqlite"))
    run.update()
    return run


def index_all(run: RunData) -> RunData:
    while run.update() or not run.is_indexed:
        pass
    return run


def work_of(run: RunData) -> ReadCounters:
    return ReadCounters(run.counters.bytes_read, run.counters.lines_parsed)
