"""Progress in the terminal: a live view, one line per step, or nothing.

Owns what is on the screen during a run, and which metrics are shown there. rich is imported when a live view is made.
Anything that is not a terminal gets plain text only.
"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Literal, Self

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PHASES = ("generate", "reward", "score", "train")
# The metrics to show, each with the words around its number. Sinks get all metrics.
SHOWN = {
    "reward": "reward {}",
    "policy/kl": "KL {}",
    "loss": "loss {}",
    "speed/tokens_per_second": "{} tokens/s",
    "speed/memory_gib": "{} GiB",
}
VALIDATION = "validation/"  # metrics with this prefix stay on the screen until the next validation
RECENT = 20  # steps from which the remaining time is estimated
BLOCKS = "▁▂▃▄▅▆▇█"


class View:
    """The interface of all views. This one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def phase(self, name: str, done: int, total: int) -> None:
        """Show how much of a phase of the current step is done. Cheap enough to be called for every token."""

    def step(self, step: int, values: Mapping[str, float], seconds_by_phase: Mapping[str, float]) -> None:
        """Show a finished step; steps count from 0."""

    def note(self, text: str) -> None:
        """Show one line that stays."""


def make_view(
    progress: Literal["auto", "live", "plain", "none"], total_steps: int, stream: IO[str] | None = None
) -> View:
    """`live` needs a terminal that can move its cursor and show block characters; elsewhere it becomes `plain`."""
    stream = stream or sys.stdout
    if progress == "none":
        return View()
    utf8 = (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
    if progress == "plain" or not stream.isatty() or not utf8 or os.environ.get("TERM") in ("dumb", "unknown"):
        return PlainView(total_steps, stream)
    from rich.console import Console

    return LiveView(total_steps, Console(file=stream))


class PlainView(View):
    """`[ 12/100]  reward 0.412  KL 0.0031  6.1s: generate 4.1, train 1.9  9m 02s left`."""

    def __init__(self, total_steps: int, stream: IO[str]) -> None:
        self._total = total_steps
        self._stream = stream
        self._clock = _Clock()

    def step(self, step: int, values: Mapping[str, float], seconds_by_phase: Mapping[str, float]) -> None:
        self._clock.add(sum(seconds_by_phase.values()))
        validation = [f"{name} {_number(value)}" for name, value in values.items() if name.startswith(VALIDATION)]
        cells = [*_shown(values), *validation]
        if seconds_by_phase:
            phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in seconds_by_phase.items())
            cells.append(f"{sum(seconds_by_phase.values()):.1f}s: {phases}")
        cells.append(self._clock.left(self._total - step - 1))
        width = len(str(self._total))
        self._print("  ".join([f"[{step + 1:{width}d}/{self._total}]", *filter(None, cells)]))

    def note(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        clean = "".join(character if character.isprintable() else " " for character in text)
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            print(clean.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
        except BrokenPipeError:  # a pager was closed, which is no reason to end the run
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class LiveView(View):
    """Bars for the run and for the phases of the current step, and the metrics of the last one."""

    def __init__(self, total_steps: int, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._total = total_steps
        self._clock = _Clock()
        self._done = 0
        self._phases: dict[str, tuple[int, int]] = dict.fromkeys(PHASES, (0, 0))
        self._seconds: dict[str, float] = {}
        self._values: dict[str, float] = {}
        self._validation: tuple[int, dict[str, float]] | None = None
        self._rewards: deque[float] = deque(maxlen=200)
        self._is_new_step = False
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()  # draws once more and shows the cursor again

    def phase(self, name: str, done: int, total: int) -> None:
        if self._is_new_step:
            self._phases = dict.fromkeys(PHASES, (0, 0))
            self._is_new_step = False
        # Replace the dict instead of changing it: another thread may be drawing it.
        phases = {**self._phases, name: (done, total)}
        if name not in PHASES:  # phases that come once, such as captures, share one row until they are done
            phases = {kept: phases[kept] for kept in phases if kept in PHASES or (kept == name and done < total)}
        self._phases = phases

    def step(self, step: int, values: Mapping[str, float], seconds_by_phase: Mapping[str, float]) -> None:
        self._done = step + 1
        self._values = dict(values)
        self._seconds = dict(seconds_by_phase)
        self._clock.add(sum(seconds_by_phase.values()))
        self._is_new_step = True
        if "reward" in values:
            self._rewards.append(values["reward"])
        if validation := {name: value for name, value in values.items() if name.startswith(VALIDATION)}:
            self._validation = self._done, validation

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def render(self) -> RenderableType:
        from rich.console import Group
        from rich.padding import Padding
        from rich.panel import Panel

        width = min(self._console.width, 100)
        parts = [self._bars(), Padding(self._numbers(width - 4), (1, 0, 0, 0))]
        return Panel(
            Group(*parts),
            title="rollgraph",
            title_align="left",
            border_style="dim",
            width=width,
        )

    def _bars(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 1), expand=True)
        for justify, ratio in (("left", None), ("left", 1), ("right", None), ("right", None)):
            table.add_column(justify=justify, ratio=ratio, no_wrap=True)  # type: ignore[arg-type]
        rows: list[tuple[str, int, int, str]] = [
            ("steps", self._done, self._total, self._clock.left(self._total - self._done))
        ]
        whole = sum(self._seconds.values())
        for name, (done, total) in self._phases.items():
            seconds = self._seconds.get(name)
            if not total and self._seconds and seconds is None:
                continue  # this run has no such phase
            cell = "" if seconds is None else f"{seconds:.1f}s {seconds / max(whole, 1e-9):4.0%}"
            rows.append((name, done, total, cell))
        for name, done, total, cell in rows:
            bar = ProgressBar(total=total, completed=done, complete_style="cyan", finished_style="dim green")
            table.add_row(name, bar if total else "", f"{done:,}/{total:,}" if total else "", f"[dim]{cell}[/]")
        return table

    def _numbers(self, width: int) -> RenderableType:
        from rich.text import Text

        text = Text(_wrapped(_shown(self._values) or ["the first step is under way"], width))
        if len(self._rewards) > 1:
            text.append("\nreward ").append(sparkline(list(self._rewards)[-max(1, width - 7) :]), style="cyan")
        if self._validation is not None:
            step, values = self._validation
            cells = [f"{name.removeprefix(VALIDATION)} {_number(value)}" for name, value in values.items()]
            text.append("\n" + _wrapped([f"validation at {step}:", *cells], width))
        return text


def sparkline(values: Sequence[float]) -> str:
    """One block per value, scaled from the lowest to the highest; a space for values that are not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)


class _Clock:
    """Estimates the remaining time from recent steps."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)

    def left(self, steps: int) -> str:
        if not self._recent or steps <= 0:
            return ""
        return f"{_duration(steps * sum(self._recent) / len(self._recent))} left"


def _shown(values: Mapping[str, float]) -> list[str]:
    return [words.format(_number(values[name])) for name, words in SHOWN.items() if name in values]


def _wrapped(cells: Sequence[str], width: int) -> str:
    """Cells side by side, with line breaks only between them."""
    lines = [cells[0]]
    for cell in cells[1:]:
        if len(lines[-1]) + 3 + len(cell) <= width:
            lines[-1] += f"   {cell}"
        else:
            lines.append(cell)
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    if minutes:
        return f"{minutes}m {rest:02d}s"
    return f"{rest}s"
