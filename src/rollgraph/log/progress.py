"""Progress of a run: the interface of all displays, and the display as plain lines of text."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Self

# -- the interface ---------------------------------------------------------------------------------
# Each step repeats the phases in `STEP_PHASES`. Outside of steps there are other phases: set-up, the warm start, a
# validation. At most one phase outside of steps is active at a time.

STEP_PHASES = ("generate", "reward", "score", "train")
# The metrics to show, with a format for each. Sinks get all metrics.
DISPLAYED_METRICS = {
    "reward": "reward {}",
    "policy/kl": "KL {}",
    "loss": "loss {}",
    "speed/tokens_per_second": "{} tokens/s",
    "speed/memory_gib": "{} GiB",
}
VALIDATION = "validation/"  # metrics with this prefix stay on the screen until the next validation
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
GAP = "   "  # between cells
RECENT_STEPS = 20  # steps from which the remaining time is estimated


class ProgressDisplay:
    """The interface of all displays. This one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def phase(self, name: str, done: int, total: int, detail: str = "", *, in_bytes: bool = False) -> None:
        """Show how much of a phase is done. `detail` names the current part. Cheap enough to call for every token.

        A total of 0 means unknown. A phase outside of steps lasts until `end_phase()`, or until another one begins. It
        may be counted `in_bytes`.
        """

    def end_phase(self) -> None:
        """End the phase outside of steps."""

    def step(self, step: int, values: Mapping[str, float], seconds_by_phase: Mapping[str, float]) -> None:
        """Show a finished step. Steps count from 0."""

    def samples(self, cells: Sequence[str]) -> None:
        """Show samples of the current model, as many as fit on one line."""

    def note(self, text: str) -> None:
        """Show one line that stays on the screen."""

    def show_last_lines(self, lines: Sequence[str]) -> None:
        """Show the last lines of a run, below everything else."""
        for line in lines:
            self.note(line)


@dataclass(frozen=True)
class PhaseProgress:
    """Progress of a phase outside of steps, e.g. PhaseProgress("warm start", 12.5, 120, 290)."""

    name: str
    started: float
    done: int = 0
    total: int = 0
    detail: str = ""
    in_bytes: bool = False

    def format_count(self, now: float) -> str:
        """`120/290`, or `41%, 12.3 of 61.2 GiB, 3.4 GiB/s`. Empty if the total is unknown."""
        if not self.total:
            return ""
        if not self.in_bytes:
            return f"{self.done:,}/{self.total:,}"
        size, unit = next((size, unit) for size, unit in UNITS if self.total >= size)
        text = f"{self.done / self.total:.0%}, {self.done / size:.1f} of {self.total / size:.1f} {unit}"
        if self.done and now > self.started:
            text += f", {self.done / (now - self.started) / size:.1f} {unit}/s"
        return text

    def time_left(self, now: float) -> str:
        """The remaining time at the average speed so far, as text. Empty if nothing is done yet."""
        if not 0 < self.done < self.total:
            return ""
        return f"{format_duration((now - self.started) / self.done * (self.total - self.done))} left"


class StepClock:
    """Estimates the remaining time from recent steps."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)

    def time_left(self, steps: int) -> str:
        if not self._recent or steps <= 0:
            return ""
        return f"{format_duration(steps * sum(self._recent) / len(self._recent))} left"


def join_while_fitting(cells: Sequence[str], width: int) -> str:
    """As many cells as fit into one line, and at least one."""
    line = cells[0]
    for cell in cells[1:]:
        if len(line) + len(GAP) + len(cell) > width:
            break
        line += GAP + cell
    return line


def format_metrics(values: Mapping[str, float]) -> list[str]:
    return [words.format(format_number(values[name])) for name, words in DISPLAYED_METRICS.items() if name in values]


def describe_step_count(count: int) -> str:
    """A point in a run: `before the first step`, `after 1 step`, `after 20 steps`."""
    if count == 0:
        return "before the first step"
    return "after 1 step" if count == 1 else f"after {count:,} steps"


def format_number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    if minutes:
        return f"{minutes}m {remainder:02d}s"
    return f"{remainder}s"


# -- lines of text ---------------------------------------------------------------------------------
# Until the first step is finished, a phase outside of steps prints a first line, a last line, and one every few seconds
# in between. Later there is one line for each step, and more only if a step takes long.

SETUP_PAUSE = 5.0  # seconds between two lines of a phase, before the first step
WIDTH = 100  # of a line with samples
STEP_PAUSE = 30.0  # seconds without a line after which a phase of a step gets one


class PlainDisplay(ProgressDisplay):
    """`[ 12/100]  reward 0.412  KL 0.0031  6.1s: generate 4.1, train 1.9  9m 02s left`."""

    def __init__(self, total_steps: int, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._stream = stream
        self._clock = clock
        self._steps = StepClock()
        self._last_step: int | None = None
        self._phase: PhaseProgress | None = None  # outside of steps
        self._last_print = clock()

    def phase(self, name: str, done: int, total: int, detail: str = "", *, in_bytes: bool = False) -> None:
        now = self._clock()
        progress = PhaseProgress(name, now, done, total, detail, in_bytes)
        if name in STEP_PHASES or self._last_step is not None:
            if now - self._last_print >= STEP_PAUSE:
                self._print(f"{self._step_prefix()}{_format_phase(progress, now)}")
            return
        current = self._phase
        begins = current is None or current.name != name
        if current is not None and not begins:
            progress = replace(progress, started=current.started)
        else:
            self.end_phase()
        self._phase = progress
        if begins or now - self._last_print >= SETUP_PAUSE:
            time_left = progress.time_left(now)
            self._print(f"{_format_phase(progress, now)}{', ' if time_left else ''}{time_left}")

    def end_phase(self) -> None:
        if self._phase is None:
            return
        elapsed = self._clock() - self._phase.started
        elapsed_text = f"{elapsed:.1f}s" if elapsed < 10 else format_duration(elapsed)
        self._print(f"{self._phase.name}: done in {elapsed_text}")
        self._phase = None

    def step(self, step: int, values: Mapping[str, float], seconds_by_phase: Mapping[str, float]) -> None:
        self._last_step = step
        self._steps.add(sum(seconds_by_phase.values()))
        validation = [f"{name} {format_number(value)}" for name, value in values.items() if name.startswith(VALIDATION)]
        cells = [*format_metrics(values), *validation]
        if seconds_by_phase:
            phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in seconds_by_phase.items())
            cells.append(f"{sum(seconds_by_phase.values()):.1f}s: {phases}")
        cells.append(self._steps.time_left(self._total - step - 1))
        self._print("  ".join([self._step_label(step), *filter(None, cells)]))

    def samples(self, cells: Sequence[str]) -> None:
        self._print(f"samples: {join_while_fitting(cells, WIDTH)}")

    def note(self, text: str) -> None:
        self._print(text)

    def _step_label(self, step: int) -> str:
        width = len(str(self._total))
        return f"[{step + 1:{width}d}/{self._total}]"

    def _step_prefix(self) -> str:
        return "" if self._last_step is None else f"{self._step_label(self._last_step + 1)}  "

    def _print(self, text: str) -> None:
        clean = "".join(character if character.isprintable() else " " for character in text)
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            print(clean.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
        except BrokenPipeError:  # a closed pager is no reason to end the run
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        self._last_print = self._clock()


def _format_phase(phase: PhaseProgress, now: float) -> str:
    count = phase.format_count(now)
    text = f"{phase.name}: {count}" if count else phase.name
    return f"{text} ({phase.detail})" if phase.detail else text
