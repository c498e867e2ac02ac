"""Progress as lines of text, for pipes, files and simple terminals.

Before the first step is finished, phases outside of steps have a first line, a last line, and one every few seconds in
between. After that there is one line for each step, and more only where a step takes long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import IO

from rollgraph.telemetry.view import STEP_PHASES, VALIDATION, PhaseProgress, StepClock, View, number, shown_metrics
from rollgraph.telemetry.view import duration as spell_duration

SETUP_PAUSE = 5.0  # seconds between two lines of a phase, before the first step
STEP_PAUSE = 30.0  # seconds without a line after which a phase of a step gets one


class PlainView(View):
    """`[ 12/100]  reward 0.412  KL 0.0031  6.1s: generate 4.1, train 1.9  9m 02s left`."""

    def __init__(self, total_steps: int, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._stream = stream
        self._clock = clock
        self._steps = StepClock()
        self._last_step: int | None = None
        self._phase: PhaseProgress | None = None  # the one outside of steps
        self._printed = clock()  # when the last line was

    def phase(self, name: str, done: int, total: int, detail: str = "", *, in_bytes: bool = False) -> None:
        now = self._clock()
        reached = PhaseProgress(name, now, done, total, detail, in_bytes)
        if name in STEP_PHASES or self._last_step is not None:
            if now - self._printed >= STEP_PAUSE:
                self._print(f"{self._in_step()}{_described(reached, now)}")
            return
        known = self._phase
        begins = known is None or known.name != name
        if known is not None and not begins:
            reached = replace(reached, started=known.started)
        else:
            self.end_phase()
        self._phase = reached
        if begins or now - self._printed >= SETUP_PAUSE:
            left = reached.left(now)
            self._print(f"{_described(reached, now)}{', ' if left else ''}{left}")

    def end_phase(self) -> None:
        if self._phase is None:
            return
        taken = self._clock() - self._phase.started
        spelled = f"{taken:.1f}s" if taken < 10 else spell_duration(taken)
        self._print(f"{self._phase.name}: done in {spelled}")
        self._phase = None

    def step(self, step: int, values: Mapping[str, float], seconds_by_phase: Mapping[str, float]) -> None:
        self._last_step = step
        self._steps.add(sum(seconds_by_phase.values()))
        validation = [f"{name} {number(value)}" for name, value in values.items() if name.startswith(VALIDATION)]
        cells = [*shown_metrics(values), *validation]
        if seconds_by_phase:
            phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in seconds_by_phase.items())
            cells.append(f"{sum(seconds_by_phase.values()):.1f}s: {phases}")
        cells.append(self._steps.left(self._total - step - 1))
        self._print("  ".join([self._label(step), *filter(None, cells)]))

    def note(self, text: str) -> None:
        self._print(text)

    def _label(self, step: int) -> str:
        width = len(str(self._total))
        return f"[{step + 1:{width}d}/{self._total}]"

    def _in_step(self) -> str:
        return "" if self._last_step is None else f"{self._label(self._last_step + 1)}  "

    def _print(self, text: str) -> None:
        clean = "".join(character if character.isprintable() else " " for character in text)
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            print(clean.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
        except BrokenPipeError:  # a pager was closed, which is no reason to end the run
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        self._printed = self._clock()


def _described(phase: PhaseProgress, now: float) -> str:
    count = phase.counted(now)
    text = f"{phase.name}: {count}" if count else phase.name
    return f"{text} ({phase.detail})" if phase.detail else text
