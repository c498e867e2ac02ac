"""The picture of a run: bars for the run and its phases, and the metrics of the last step.

Owns what is in the picture; `live_view.py` and `notebook_view.py` own where it is drawn. rich is imported when a
picture is drawn.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rollgraph.telemetry.view import STEP_PHASES, VALIDATION, PhaseProgress, StepClock, View, number, shown_metrics

if TYPE_CHECKING:
    from rich.console import RenderableType

BLOCKS = "▁▂▃▄▅▆▇█"
_WIDEST = 100


class RunPicture(View):
    """Remembers what it is told, and renders it. It may be told from one thread and rendered in another."""

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._clock = clock
        self._steps = StepClock()
        self._done = 0
        self._of_step: dict[str, tuple[int, int]] = {}  # phases of the step that is under way: done, total
        self._outside: PhaseProgress | None = None  # the phase outside of steps
        self._seconds: dict[str, float] = {}
        self._values: dict[str, float] = {}
        self._validation: tuple[int, dict[str, float]] | None = None
        self._rewards: deque[float] = deque(maxlen=200)
        self._is_new_step = False

    # Values are replaced rather than changed: another thread may be drawing them.

    def phase(self, name: str, done: int, total: int, detail: str = "", *, in_bytes: bool = False) -> None:
        if self._is_new_step:
            self._of_step = {}
            self._is_new_step = False
        if name in STEP_PHASES:
            self._of_step = {**self._of_step, name: (done, total)}
            return
        known = self._outside
        if known is None or known.name != name:
            self.end_phase()
            known = PhaseProgress(name, self._clock())
        self._outside = replace(known, done=done, total=total, detail=detail, in_bytes=in_bytes)

    def end_phase(self) -> None:
        self._outside = None
        if not self._done:
            self._of_step = {}  # of samples that a warm start drew

    def step(self, step: int, values: Mapping[str, float], seconds_by_phase: Mapping[str, float]) -> None:
        self._done = step + 1
        self._values = dict(values)
        self._seconds = dict(seconds_by_phase)
        self._steps.add(sum(seconds_by_phase.values()))
        self._is_new_step = True
        if "reward" in values:
            self._rewards.append(values["reward"])
        if validation := {name: value for name, value in values.items() if name.startswith(VALIDATION)}:
            self._validation = self._done, validation

    def render(self, width: int) -> RenderableType:
        from rich.console import Group
        from rich.padding import Padding
        from rich.panel import Panel

        width = min(width, _WIDEST)
        parts = [self._bars(), Padding(self._numbers(width - 4), (1, 0, 0, 0))]
        return Panel(Group(*parts), title="rollgraph", title_align="left", border_style="dim", width=width)

    def _bars(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1), expand=True)
        for justify, ratio in (("left", None), ("left", 1), ("right", None), ("right", None)):
            table.add_column(justify=justify, ratio=ratio, no_wrap=True)  # type: ignore[arg-type]
        for name, done, total, count, cell in self._rows():
            bar = ProgressBar(total=total, completed=done, complete_style="cyan", finished_style="dim green")
            # A style, not markup: a note is printed without markup, and the picture is drawn anew with it.
            table.add_row(name, bar if total else "", count, Text(cell, style="dim"))
        return table

    def _rows(self) -> list[tuple[str, int, int, str, str]]:
        """The name of each bar, how much is done, of how much, that in words, and what is known about its time."""
        now = self._clock()
        left = self._steps.left(self._total - self._done)
        rows = [("steps", self._done, self._total, _counted(self._done, self._total), left)]
        outside = self._outside
        if outside is not None:
            rows.append((outside.name, outside.done, outside.total, outside.counted(now), outside.left(now)))
        whole = sum(self._seconds.values())
        reached = self._of_step
        for name in STEP_PHASES:
            seconds = self._seconds.get(name)
            if seconds is None and name not in reached and (self._seconds or outside is not None or not reached):
                continue  # this run has no such phase, or its first step has not begun
            done, total = reached.get(name, (0, 0))
            rows.append((name, done, total, _counted(done, total), _share(seconds, whole)))
        return rows

    def _numbers(self, width: int) -> RenderableType:
        from rich.text import Text

        text = Text(_wrapped(shown_metrics(self._values) or [self._before_metrics()], width))
        if len(self._rewards) > 1:
            text.append("\nreward ").append(sparkline(list(self._rewards)[-max(1, width - 7) :]), style="cyan")
        if self._validation is not None:
            step, values = self._validation
            cells = [f"{name.removeprefix(VALIDATION)} {number(value)}" for name, value in values.items()]
            text.append("\n" + _wrapped([f"validation at {step}:", *cells], width))
        return text

    def _before_metrics(self) -> str:
        """What is going on while there are no numbers of a step yet."""
        outside = self._outside
        if outside is None:
            return "the first step is under way" if self._of_step else "starting"
        part = f" ({outside.detail})" if outside.detail else ""
        return f"before the first step: {outside.name}{part}"


def _counted(done: int, total: int) -> str:
    return f"{done:,}/{total:,}" if total else ""


def _share(seconds: float | None, whole: float) -> str:
    return "" if seconds is None else f"{seconds:.1f}s {seconds / max(whole, 1e-9):4.0%}"


def _wrapped(cells: Sequence[str], width: int) -> str:
    """Cells side by side, with line breaks only between them."""
    lines = [cells[0]]
    for cell in cells[1:]:
        if len(lines[-1]) + 3 + len(cell) <= width:
            lines[-1] += f"   {cell}"
        else:
            lines.append(cell)
    return "\n".join(lines)


def sparkline(values: Sequence[float]) -> str:
    """One block per value, scaled from the lowest to the highest; a space for values that are not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)
