"""The live progress panel, with bars and metrics, in a terminal or a notebook; and the choice of a display.

rich is imported only when the panel is drawn.
"""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, Literal, Self

from rollgraph.log.progress import (
    STEP_PHASES,
    VALIDATION,
    PhaseProgress,
    PlainDisplay,
    ProgressDisplay,
    StepClock,
    format_metrics,
    format_number,
    join_while_fitting,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


# -- the panel -------------------------------------------------------------------------------------
# Bars for the run and its phases, then the metrics of the last step.

BLOCKS = "▁▂▃▄▅▆▇█"
_WIDEST = 100


class ProgressPanel(ProgressDisplay):
    """Keeps the latest progress and renders it. One thread may update it while another renders."""

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._clock = clock
        self._steps = StepClock()
        self._done = 0
        self._step_phases: dict[str, tuple[int, int]] = {}  # phases of the current step: (done, total)
        self._outer_phase: PhaseProgress | None = None  # outside of steps
        self._seconds: dict[str, float] = {}
        self._values: dict[str, float] = {}
        self._validation: tuple[int, dict[str, float]] | None = None
        self._rewards: deque[float] = deque(maxlen=200)
        self._samples: Sequence[str] = ()
        self._is_new_step = False

    # Values are replaced, never mutated, because another thread may be drawing them.

    def phase(self, name: str, done: int, total: int, detail: str = "", *, in_bytes: bool = False) -> None:
        if self._is_new_step:
            self._step_phases = {}
            self._is_new_step = False
        if name in STEP_PHASES:
            self._step_phases = {**self._step_phases, name: (done, total)}
            return
        current = self._outer_phase
        if current is None or current.name != name:
            self.end_phase()
            current = PhaseProgress(name, self._clock())
        self._outer_phase = replace(current, done=done, total=total, detail=detail, in_bytes=in_bytes)

    def end_phase(self) -> None:
        self._outer_phase = None
        if not self._done:
            self._step_phases = {}  # a warm start has sampled, too

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

    def samples(self, cells: Sequence[str]) -> None:
        self._samples = list(cells)

    def render(self, width: int) -> RenderableType:
        from rich.console import Group
        from rich.padding import Padding
        from rich.panel import Panel

        width = min(width, _WIDEST)
        parts = [self._render_bars(), Padding(self._render_metrics(width - 4), (1, 0, 0, 0))]
        return Panel(Group(*parts), title="rollgraph", title_align="left", border_style="dim", width=width)

    def _render_bars(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1), expand=True)
        for justify, ratio in (("left", None), ("left", 1), ("right", None), ("right", None)):
            table.add_column(justify=justify, ratio=ratio, no_wrap=True)  # type: ignore[arg-type]
        for name, done, total, count, cell in self._rows():
            bar = ProgressBar(total=total, completed=done, complete_style="cyan", finished_style="dim green")
            # A style, not markup such as [dim]: printing a note redraws the panel with markup switched off.
            table.add_row(name, bar if total else "", count, Text(cell, style="dim"))
        return table

    def _rows(self) -> list[tuple[str, int, int, str, str]]:
        """(name, done, total, count as text, time as text) of each bar."""
        now = self._clock()
        time_left = self._steps.time_left(self._total - self._done)
        rows = [("steps", self._done, self._total, _format_count(self._done, self._total), time_left)]
        outer = self._outer_phase
        if outer is not None:
            rows.append((outer.name, outer.done, outer.total, outer.format_count(now), outer.time_left(now)))
        whole = sum(self._seconds.values())
        step_phases = self._step_phases
        for name in STEP_PHASES:
            seconds = self._seconds.get(name)
            if seconds is None and name not in step_phases and (self._seconds or outer is not None or not step_phases):
                continue  # this run has no such phase, or its first step has not begun
            done, total = step_phases.get(name, (0, 0))
            rows.append((name, done, total, _format_count(done, total), _format_share(seconds, whole)))
        return rows

    def _render_metrics(self, width: int) -> RenderableType:
        from rich.text import Text

        text = Text(_wrap_cells(format_metrics(self._values) or [self._describe_start()], width))
        if len(self._rewards) > 1:
            text.append("\nreward ").append(sparkline(list(self._rewards)[-max(1, width - 7) :]), style="cyan")
        if self._validation is not None:
            step, values = self._validation
            cells = [f"{name.removeprefix(VALIDATION)} {format_number(value)}" for name, value in values.items()]
            text.append("\n" + _wrap_cells([f"validation at {step}:", *cells], width))
        if self._samples:
            text.append(f"\n{join_while_fitting(self._samples, width)}", style="cyan")
        return text

    def _describe_start(self) -> str:
        """A line to show while there are no metrics of a step yet."""
        outer = self._outer_phase
        if outer is None:
            return "the first step is under way" if self._step_phases else "starting"
        part = f" ({outer.detail})" if outer.detail else ""
        return f"before the first step: {outer.name}{part}"


def _format_count(done: int, total: int) -> str:
    return f"{done:,}/{total:,}" if total else ""


def _format_share(seconds: float | None, whole: float) -> str:
    return "" if seconds is None else f"{seconds:.1f}s {seconds / max(whole, 1e-9):4.0%}"


def _wrap_cells(cells: Sequence[str], width: int) -> str:
    """Join cells into lines, with line breaks only between cells."""
    lines = [cells[0]]
    for cell in cells[1:]:
        if len(lines[-1]) + 3 + len(cell) <= width:
            lines[-1] += f"   {cell}"
        else:
            lines.append(cell)
    return "\n".join(lines)


def sparkline(values: Sequence[float]) -> str:
    """One block per value, scaled from the lowest to the highest. Values that are not finite become a space."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)


# -- in a terminal ---------------------------------------------------------------------------------


class LiveDisplay(ProgressPanel):
    """The panel in a terminal. Notes scroll by above it."""

    def __init__(self, total_steps: int, console: Console) -> None:
        from rich.live import Live

        super().__init__(total_steps)
        self._console = console
        self._last_lines: Sequence[str] = ()
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()  # draws once more and restores the cursor
        for line in self._last_lines:
            self.note(line)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)  # a command can be copied as a whole

    def show_last_lines(self, lines: Sequence[str]) -> None:
        self._last_lines = lines

    def _draw(self) -> RenderableType:
        return self.render(self._console.width)


# -- in a notebook ---------------------------------------------------------------------------------
# IPython is always installed where this is used. We need no widgets, so the last panel stays in a saved notebook. We
# never draw in another thread, because its output would belong to no cell.

_PAUSE = 0.5  # seconds between two updates
_WIDTH = 100
_HTML = '<pre style="font-family:monospace;line-height:1.2;white-space:pre;overflow-x:auto">{code}</pre>'


def in_notebook() -> bool:
    """Whether this process is a notebook kernel. IPython in a terminal is not."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


class NotebookDisplay(ProgressPanel):
    """The panel in a notebook cell, redrawn at most twice a second."""

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(total_steps, clock)
        self._output: Any = None  # IPython's display handle
        self._last_draw = 0.0

    def __enter__(self) -> Self:
        self._draw()
        return self

    def __exit__(self, *error: object) -> None:
        self._draw()

    def phase(self, name: str, done: int, total: int, detail: str = "", *, in_bytes: bool = False) -> None:
        super().phase(name, done, total, detail, in_bytes=in_bytes)
        self._draw_soon()

    def end_phase(self) -> None:
        super().end_phase()
        self._draw_soon()

    def step(self, step: int, values: Mapping[str, float], seconds_by_phase: Mapping[str, float]) -> None:
        super().step(step, values, seconds_by_phase)
        self._draw_soon()

    def samples(self, cells: Sequence[str]) -> None:
        super().samples(cells)
        self._draw_soon()

    def note(self, text: str) -> None:
        print(text, flush=True)

    def _draw_soon(self) -> None:
        if self._clock() - self._last_draw >= _PAUSE:
            self._draw()

    def _draw(self) -> None:
        import IPython.display as ipython

        formats = {"text/plain": self._to_text(), "text/html": self._to_html()}
        if self._output is None:
            show: Any = ipython.display  # it has no types
            self._output = show(formats, raw=True, display_id=True)
        else:
            self._output.update(formats, raw=True)
        self._last_draw = self._clock()

    def _to_html(self) -> str:
        return self._render_to_console().export_html(inline_styles=True, code_format=_HTML)

    def _to_text(self) -> str:
        return self._render_to_console().export_text().rstrip()

    def _render_to_console(self) -> Console:
        from rich.console import Console

        console = Console(
            record=True,
            file=io.StringIO(),
            width=_WIDTH,
            force_terminal=True,
            force_jupyter=False,
            color_system="truecolor",
            legacy_windows=False,
        )
        console.print(self.render(_WIDTH))
        return console


# -- choosing a display ----------------------------------------------------------------------------


def make_display(
    progress: Literal["auto", "live", "plain", "none"], total_steps: int, stream: IO[str] | None = None
) -> ProgressDisplay:
    """Choose a display. `auto` and `live` draw a panel in a notebook or a capable terminal, and otherwise fall back to
    `plain`.

    A capable terminal can move its cursor and show block characters. An explicit `stream` is never the notebook's.
    """
    if progress == "none":
        return ProgressDisplay()
    if progress != "plain" and stream is None and in_notebook():
        return NotebookDisplay(total_steps)
    stream = stream or sys.stdout
    utf8 = (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
    if progress == "plain" or not stream.isatty() or not utf8 or os.environ.get("TERM") in ("dumb", "unknown"):
        return PlainDisplay(total_steps, stream)
    from rich.console import Console

    return LiveDisplay(total_steps, Console(file=stream))
