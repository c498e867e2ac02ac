"""The machine page: captured graphs, memory of each phase against the plan, and the times of each rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from rollgraph.view.index import Floats, MetricsIndex
from rollgraph.view.run_files import GRAPHS, NotedValue, read_small_object
from rollgraph.view.runs import RunData

# -- graphs.json and memory.json -------------------------------------------------------------------
# Another version of rollgraph may have written them: fields with unknown types are left out.

MEMORY_FILE = "memory.json"
PHASES = ("generate", "score", "train")  # in the memory plan
_COUNTS = ("operations", "bytes_owned", "captures", "replays", "backward_replays")


def read_graphs(folder: Path) -> NotedValue:
    """The graph report; None until the run has written it."""
    report_file = read_small_object(folder, GRAPHS, f"{GRAPHS} is written at the end of a run and does not exist yet.")
    if report_file.value is None:
        return report_file
    graphs = report_file.value.get("graphs")
    if not isinstance(graphs, list):
        return NotedValue(None, f"{GRAPHS} does not hold a report on graphs that this version can read.")
    report = {
        "pool_bytes": _read_count(report_file.value.get("pool_bytes")),
        "notes": _read_strings(report_file.value.get("notes")),
        "graphs": [_read_graph(graph) for graph in graphs if isinstance(graph, dict)],
    }
    return NotedValue(report)


def _read_graph(graph: dict[str, Any]) -> dict[str, Any]:
    eager = graph.get("eager_runs")
    return {
        **{name: str(graph.get(name, "")) for name in ("name", "backend", "surface")},
        **{name: _read_count(graph.get(name)) for name in _COUNTS},
        "eager_runs": {why: _read_count(count) for why, count in eager.items()} if isinstance(eager, dict) else {},
        "notes": _read_strings(graph.get("notes")),
    }


def read_plan(folder: Path) -> NotedValue:
    """The memory plan: its lines, the planned bytes of each phase, and the device's memory; None without a plan."""
    plan_file = read_small_object(folder, MEMORY_FILE, f"There is no {MEMORY_FILE}, so the memory plan is not known.")
    if plan_file.value is None:
        return plan_file
    entries = plan_file.value.get("lines")
    if not isinstance(entries, list):
        return NotedValue(None, f"{MEMORY_FILE} does not hold a plan that this version can read.")
    lines = [_read_line(line) for line in entries if isinstance(line, dict)]
    on_device = [line for line in lines if line["where"] == "device"]
    phases = {phase: sum(line["nbytes"] for line in on_device if phase in line["phases"]) for phase in PHASES}
    plan = {
        "lines": [line for line in lines if line["nbytes"]],
        "phases": phases,
        "peak": max(phases.values()),
        "device": str(plan_file.value.get("device", "")),
        "device_bytes": _read_count(plan_file.value.get("device_bytes")) or None,
        "reasons": _read_reasons(plan_file.value),
    }
    return NotedValue(plan)


def _read_line(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": str(line.get("name", "")),
        "nbytes": _read_count(line.get("nbytes")),
        "where": str(line.get("where", "")),
        "phases": _read_strings(line.get("phases")),
    }


def _read_reasons(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The settings that the run chose automatically, and why."""
    chosen, reasons = record.get("chosen"), record.get("reasons")
    if not isinstance(chosen, dict) or not isinstance(reasons, dict):
        return []
    return [{"key": key, "value": value, "reason": str(reasons.get(key, ""))} for key, value in chosen.items()]


def _read_count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _read_strings(value: Any) -> list[str]:
    return [str(text) for text in value] if isinstance(value, list) else []


# -- the machine -----------------------------------------------------------------------------------

RECENT = 100  # steps over which the times of a rank are averaged
GIB = 2**30
MEMORY = "speed/memory_gib"
_RANK_METRIC = re.compile(r"speed/ranks/(\d+)/(.+)")


def build_machine_report(run: RunData) -> tuple[dict[str, Any], list[str]]:
    graphs = read_graphs(run.folder)
    plan = read_plan(run.folder)
    starts = run.files.starts.value
    ranks = describe_ranks(run.metrics)
    notes = [note for note in (graphs.note, plan.note) if note]
    start = starts[-1] if starts else {}
    if len(ranks) <= 1 and start.get("ranks", 1) != 1:
        notes.append(f"The run has {start['ranks']} ranks but wrote times of the first one only.")
    answer = {
        "device": start.get("device"),
        "versions": start.get("versions"),
        "graphs": graphs.value,
        "memory": {"planned": plan.value, "measured": measure_peak_memory(run.metrics)},
        "ranks": ranks,
    }
    return answer, notes


def measure_peak_memory(metrics: MetricsIndex) -> dict[str, float]:
    """Peak bytes over all steps, under "peak" and, where the run wrote them, under the name of each phase."""
    peak_bytes = {}
    for name in metrics.names:
        if name == MEMORY or name.startswith(f"{MEMORY}/"):
            phase = name.removeprefix(MEMORY).removeprefix("/") or "peak"
            largest = np.nanmax(metrics.column(name), initial=0.0)
            peak_bytes[phase] = float(largest) * GIB
    return peak_bytes


def describe_ranks(metrics: MetricsIndex) -> list[dict[str, Any]]:
    """Mean seconds of each rank's phases over the recent steps. A run with one rank has them under other names."""
    by_rank: dict[int, dict[str, float]] = {}
    for name in metrics.names:
        if match := _RANK_METRIC.fullmatch(name):
            mean = recent_mean(metrics.column(name))
            if mean is not None:
                by_rank.setdefault(int(match[1]), {})[match[2]] = mean
    step_seconds = recent_mean(metrics.column("speed/seconds"))
    if not by_rank:
        return (
            []
            if step_seconds is None
            else [{"rank": 0, "step_seconds": step_seconds, "values": single_rank_values(metrics)}]
        )
    ranks = []
    for rank, values in sorted(by_rank.items()):
        seconds = [value for name, value in values.items() if name.startswith("seconds/")]
        ranks.append({"rank": rank, "step_seconds": sum(seconds) or step_seconds, "values": values})
    return ranks


def single_rank_values(metrics: MetricsIndex) -> dict[str, float]:
    """Mean seconds of each phase and mean memory of a run with one rank."""
    steps = np.isfinite(metrics.column("speed/seconds"))
    values = {}
    for name in metrics.names:
        if name.startswith("speed/seconds/"):  # a step without this phase counts as 0 seconds
            mean = recent_mean(np.nan_to_num(metrics.column(name)[steps]))
        else:
            mean = recent_mean(metrics.column(name)) if name == MEMORY else None
        if mean:
            values[name.removeprefix("speed/")] = mean
    return values


def recent_mean(values: Floats) -> float | None:
    finite_values = values[np.isfinite(values)][-RECENT:]
    return float(np.mean(finite_values)) if len(finite_values) else None
