"""What the machine did: graphs, memory by phase against the plan, and the ranks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from rollgraph.view.machine_files import read_graphs, read_plan
from rollgraph.view.metrics_index import Floats, MetricsIndex
from rollgraph.view.run_data import RunData

RECENT = 100  # steps that a rank's times are the mean of
GIB = 2**30
MEMORY = "speed/memory_gib"
_OF_RANK = re.compile(r"speed/ranks/(\d+)/(.+)")


def describe_machine(run: RunData) -> tuple[dict[str, Any], list[str]]:
    graphs = read_graphs(run.folder)
    plan = read_plan(run.folder)
    starts = run.files.starts.value
    ranks = describe_ranks(run.metrics)
    notes = [note for note in (graphs.note, plan.note) if note]
    start = starts[-1] if starts else {}
    if len(ranks) <= 1 and start.get("ranks", 1) != 1:
        notes.append(f"The run has {start['ranks']} ranks, and wrote times of the first one only.")
    answer = {
        "device": start.get("device"),
        "versions": start.get("versions"),
        "graphs": graphs.value,
        "memory": {"planned": plan.value, "measured": measured_memory(run.metrics)},
        "ranks": ranks,
    }
    return answer, notes


def measured_memory(metrics: MetricsIndex) -> dict[str, float]:
    """The most bytes of any step: of each phase, where the run wrote them, and of the whole."""
    found = {}
    for name in metrics.names:
        if name == MEMORY or name.startswith(f"{MEMORY}/"):
            phase = name.removeprefix(MEMORY).removeprefix("/") or "peak"
            largest = np.nanmax(metrics.column(name), initial=0.0)
            found[phase] = float(largest) * GIB
    return found


def describe_ranks(metrics: MetricsIndex) -> list[dict[str, Any]]:
    """Mean seconds of each rank in the last steps, by phase; a run with one rank writes its own under other names."""
    by_rank: dict[int, dict[str, float]] = {}
    for name in metrics.names:
        if found := _OF_RANK.fullmatch(name):
            mean = recent_mean(metrics.column(name))
            if mean is not None:
                by_rank.setdefault(int(found[1]), {})[found[2]] = mean
    step_seconds = recent_mean(metrics.column("speed/seconds"))
    if not by_rank:
        return [] if step_seconds is None else [{"rank": 0, "step_seconds": step_seconds, "values": single(metrics)}]
    ranks = []
    for rank, values in sorted(by_rank.items()):
        seconds = [value for name, value in values.items() if name.startswith("seconds/")]
        ranks.append({"rank": rank, "step_seconds": sum(seconds) or step_seconds, "values": values})
    return ranks


def single(metrics: MetricsIndex) -> dict[str, float]:
    """The mean seconds of the phases of rank 0, and its memory."""
    steps = np.isfinite(metrics.column("speed/seconds"))
    found = {}
    for name in metrics.names:
        if name.startswith("speed/seconds/"):  # a step without the phase took no time for it
            mean = recent_mean(np.nan_to_num(metrics.column(name)[steps]))
        else:
            mean = recent_mean(metrics.column(name)) if name == MEMORY else None
        if mean:
            found[name.removeprefix("speed/")] = mean
    return found


def recent_mean(values: Floats) -> float | None:
    known = values[np.isfinite(values)][-RECENT:]
    return float(np.mean(known)) if len(known) else None
