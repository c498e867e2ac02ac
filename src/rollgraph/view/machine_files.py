"""The report on graphs and the plan of memory. What another version wrote in another form is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollgraph.view.run_files import GRAPHS, Noted, read_small_object

MEMORY = "memory.json"
PHASES = ("generate", "score", "train")  # that are planned
_COUNTS = ("operations", "bytes_owned", "captures", "replays", "backward_replays")


def read_graphs(folder: Path) -> Noted:
    """The report on graphs, or None while there is none."""
    found = read_small_object(folder, GRAPHS, f"{GRAPHS} is written at the end of a run, and is not there yet.")
    if found.value is None:
        return found
    graphs = found.value.get("graphs")
    if not isinstance(graphs, list):
        return Noted(None, f"{GRAPHS} does not hold a report on graphs that this version can read.")
    report = {
        "pool_bytes": _count(found.value.get("pool_bytes")),
        "notes": _texts(found.value.get("notes")),
        "graphs": [_read_graph(graph) for graph in graphs if isinstance(graph, dict)],
    }
    return Noted(report)


def _read_graph(graph: dict[str, Any]) -> dict[str, Any]:
    eager = graph.get("eager_runs")
    return {
        **{name: str(graph.get(name, "")) for name in ("name", "backend", "surface")},
        **{name: _count(graph.get(name)) for name in _COUNTS},
        "eager_runs": {why: _count(count) for why, count in eager.items()} if isinstance(eager, dict) else {},
        "notes": _texts(graph.get("notes")),
    }


def read_plan(folder: Path) -> Noted:
    """The parts of the plan on the device, their sum for each phase, and what was free; None without a plan."""
    found = read_small_object(folder, MEMORY, f"There is no {MEMORY}, so it is not known what memory was planned.")
    if found.value is None:
        return found
    listed = found.value.get("lines")
    if not isinstance(listed, list):
        return Noted(None, f"{MEMORY} does not hold a plan that this version can read.")
    lines = [_read_line(line) for line in listed if isinstance(line, dict)]
    on_device = [line for line in lines if line["where"] == "device"]
    phases = {phase: sum(line["nbytes"] for line in on_device if phase in line["phases"]) for phase in PHASES}
    plan = {
        "lines": [line for line in lines if line["nbytes"]],
        "phases": phases,
        "peak": max(phases.values()),
        "device": str(found.value.get("device", "")),
        "device_bytes": _count(found.value.get("device_bytes")) or None,
        "reasons": _read_reasons(found.value),
    }
    return Noted(plan)


def _read_line(line: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": str(line.get("name", "")),
        "nbytes": _count(line.get("nbytes")),
        "where": str(line.get("where", "")),
        "phases": _texts(line.get("phases")),
    }


def _read_reasons(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What the run chose by itself, and why."""
    chosen, reasons = record.get("chosen"), record.get("reasons")
    if not isinstance(chosen, dict) or not isinstance(reasons, dict):
        return []
    return [{"key": key, "value": value, "reason": str(reasons.get(key, ""))} for key, value in chosen.items()]


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _texts(value: Any) -> list[str]:
    return [str(text) for text in value] if isinstance(value, list) else []
