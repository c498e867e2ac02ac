"""Charts: the values of metrics over steps or time, with no more points than a screen has pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollgraph.view.metrics_index import Floats, MetricsIndex

POINTS = 800
MOST_POINTS = 5000
SECONDS = "speed/seconds"
PHASES = "speed/seconds/"  # and the name of a phase


@dataclass(frozen=True)
class Range:
    """What part of the axis is shown, and with how many points."""

    axis: str = "step"  # or "time": seconds that steps have taken
    start: float = -math.inf
    end: float = math.inf
    points: int = POINTS


def find_series(metrics: MetricsIndex, names: list[str], shown: Range) -> dict[str, Any]:
    x = axis_of(metrics, shown.axis)
    inside = (x >= shown.start) & (x <= shown.end)
    found = {}
    for name in names:
        y = metrics.column(name)
        known = inside & np.isfinite(y)
        found[name] = thin(x[known], y[known], shown.points)
    return found


def axis_of(metrics: MetricsIndex, axis: str) -> Floats:
    """Steps, or the seconds that they took. Steps without a row of their own took as long as the next that has one."""
    steps = metrics.steps()
    if axis != "time":
        return steps
    seconds = np.nan_to_num(metrics.column(SECONDS))
    taken = np.diff(steps, prepend=steps[:1] - 1 if len(steps) else 0.0)
    return np.cumsum(seconds * np.maximum(1.0, taken))


def thin(x: Floats, y: Floats, points: int) -> dict[str, list[float]]:
    """At most `points` points: each is the mean of its stretch of the axis, with the least and the largest value."""
    if len(x) <= points:
        values = _rounded(y)
        return {"x": _rounded(x), "y": values, "low": values, "high": values}
    width = (x[-1] - x[0]) / points or 1.0
    bucket = np.minimum((x - x[0]) // width, points - 1)
    first = np.flatnonzero(np.diff(bucket, prepend=-1.0))
    counts = np.diff(np.append(first, len(x)))
    return {
        "x": _rounded(x[first]),
        "y": _rounded(np.add.reduceat(y, first) / counts),
        "low": _rounded(np.minimum.reduceat(y, first)),
        "high": _rounded(np.maximum.reduceat(y, first)),
    }


def find_phases(metrics: MetricsIndex, shown: Range) -> dict[str, Any]:
    """The seconds of each phase, on one axis, and the rest of the step: switching between phases."""
    x = axis_of(metrics, shown.axis)
    whole = metrics.column(SECONDS)
    known = (x >= shown.start) & (x <= shown.end) & np.isfinite(whole)
    phases = [name for name in metrics.names if name.startswith(PHASES)]
    parts = {name.removeprefix(PHASES): np.nan_to_num(metrics.column(name)[known]) for name in phases}
    rest = whole[known] - sum(parts.values(), np.zeros(np.count_nonzero(known)))
    parts["switching"] = np.maximum(0.0, rest)
    thinned = {name: thin(x[known], seconds, shown.points) for name, seconds in parts.items()}
    axis = next(iter(thinned.values()))["x"]
    return {"x": axis, "phases": {name: values["y"] for name, values in thinned.items()}}


def _rounded(values: Floats) -> list[float]:
    """Seven digits: more cannot be seen, and would have to be sent."""
    return [float(f"{value:.7g}") for value in values.tolist()]
