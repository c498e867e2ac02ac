"""What every progress display can be told, and the words that they share.

A run has phases that each step repeats (`STEP_PHASES`), and phases outside of steps: set-up, the warm start, a
validation. At most one of the latter is under way at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

STEP_PHASES = ("generate", "reward", "score", "train")
# The metrics to show, each with the words around its number. Sinks get all metrics.
SHOWN = {
    "reward": "reward {}",
    "policy/kl": "KL {}",
    "loss": "loss {}",
    "speed/tokens_per_second": "{} tokens/s",
    "speed/memory_gib": "{} GiB",
}
VALIDATION = "validation/"  # metrics with this prefix stay on the screen until the next validation
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
RECENT = 20  # steps from which the remaining time is estimated


class View:
    """The interface of all views. This one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def phase(self, name: str, done: int, total: int, detail: str = "", *, in_bytes: bool = False) -> None:
        """Show how much of a phase is done, and the part of it that is under way. Cheap enough for every token.

        A total of 0 is unknown. A phase outside of steps lasts until `end_phase()`, or until another one begins; it may
        be counted `in_bytes`.
        """

    def end_phase(self) -> None:
        """Show that the phase outside of steps is over."""

    def step(self, step: int, values: Mapping[str, float], seconds_by_phase: Mapping[str, float]) -> None:
        """Show a finished step; steps count from 0."""

    def note(self, text: str) -> None:
        """Show one line that stays."""


@dataclass(frozen=True)
class PhaseProgress:
    """How far a phase outside of steps has come, e.g. PhaseProgress("warm start", 12.5, 120, 290)."""

    name: str
    started: float
    done: int = 0
    total: int = 0
    detail: str = ""
    in_bytes: bool = False

    def counted(self, now: float) -> str:
        """`120/290`, or `41%, 12.3 of 61.2 GiB, 3.4 GiB/s`; empty if the total is unknown."""
        if not self.total:
            return ""
        if not self.in_bytes:
            return f"{self.done:,}/{self.total:,}"
        size, unit = next((size, unit) for size, unit in UNITS if self.total >= size)
        text = f"{self.done / self.total:.0%}, {self.done / size:.1f} of {self.total / size:.1f} {unit}"
        if self.done and now > self.started:
            text += f", {self.done / (now - self.started) / size:.1f} {unit}/s"
        return text

    def left(self, now: float) -> str:
        """The time that the rest takes if it goes on like this; empty if nothing is known yet."""
        if not 0 < self.done < self.total:
            return ""
        return f"{duration((now - self.started) / self.done * (self.total - self.done))} left"


class StepClock:
    """Estimates the remaining time from recent steps."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)

    def left(self, steps: int) -> str:
        if not self._recent or steps <= 0:
            return ""
        return f"{duration(steps * sum(self._recent) / len(self._recent))} left"


def shown_metrics(values: Mapping[str, float]) -> list[str]:
    return [words.format(number(values[name])) for name, words in SHOWN.items() if name in values]


def number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.3g}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    if minutes:
        return f"{minutes}m {rest:02d}s"
    return f"{rest}s"
