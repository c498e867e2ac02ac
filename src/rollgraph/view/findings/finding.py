"""What a finding is, and the history of a run that findings look at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollgraph.view.growing_lines import finite
from rollgraph.view.metrics_index import Floats, MetricsIndex

Severity = Literal["problem", "warning", "note", "good"]
RECENT = 20  # rows at the end that say how the run is now
Steps = NDArray[np.int64]
FEWEST = 5  # rows of a metric without which nothing is said about it


@dataclass(frozen=True)
class RunFinding:
    """One sentence about a run, what to do about it, and where to see it."""

    id: str
    severity: Severity
    sentence: str
    advice: str = ""
    evidence: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Curve:
    """The finite values of one metric, with their steps."""

    name: str
    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.values)

    @property
    def recent(self) -> Floats:
        return self.values[-RECENT:]

    @property
    def now(self) -> float:
        """The mean of the last rows."""
        return float(np.mean(self.recent))

    @property
    def at_first(self) -> float:
        """The mean of the first rows."""
        return float(np.mean(self.values[:RECENT]))

    def evidence(self, *others: str, recent: bool = False) -> dict[str, Any]:
        """The chart of this metric and others, whole or of the last rows."""
        found: dict[str, Any] = {"kind": "series", "names": [self.name, *others]}
        if recent and len(self) > RECENT:
            found |= {"from": int(self.steps[-RECENT]), "to": int(self.steps[-1])}
        return found


class History:
    """A run's metrics, what its configuration says, and the steps that it wrote samples of."""

    def __init__(self, metrics: MetricsIndex, config: Mapping[str, Any], sample_steps: Steps) -> None:
        self._metrics = metrics
        self._config = config
        self._sample_steps = sample_steps

    @property
    def names(self) -> list[str]:
        return self._metrics.names

    @property
    def last_step(self) -> int:
        steps = self._metrics.steps()
        return int(steps[-1]) if len(steps) else -1

    def curve(self, name: str) -> Curve | None:
        """None if there are too few values to say anything."""
        values = self._metrics.column(name)
        known = np.isfinite(values)
        if np.count_nonzero(known) < FEWEST:
            return None
        return Curve(name, self._metrics.steps()[known], values[known])

    def recent_counts(self, name: str) -> Floats:
        """The last rows of a count that is only written where it is not 0."""
        return np.nan_to_num(self._metrics.column(name)[-RECENT:])

    def setting(self, key: str) -> Any:
        """The value of a dotted key; None if it is not known."""
        value: Any = self._config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def number(self, key: str) -> float | None:
        number = finite(self.setting(key))
        return None if math.isnan(number) else number

    def samples_near(self, step: int) -> list[dict[str, Any]]:
        """The samples of a step or, if none were written at it, of the step nearest to it; empty if there are none."""
        if not len(self._sample_steps):
            return []
        nearest = int(self._sample_steps[np.argmin(np.abs(self._sample_steps - step))])
        label = f"samples of step {nearest}" if nearest == step else f"the nearest samples, of step {nearest}"
        return [samples(label, step=nearest)]


def samples(label: str, **filters: Any) -> dict[str, Any]:
    """Samples as evidence; `step`, `split`, `finish`, `reward_min`, `reward_max` and `group` narrow them down."""
    return {"kind": "samples", "label": label, **filters}
