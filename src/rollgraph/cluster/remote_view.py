"""The view of a run whose people are elsewhere: what it is shown becomes news for the driver.

It is called very often while a rank computes, so it is also where a rank notices that it should leave an attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollgraph.cluster.news import NewsBox, Shown
from rollgraph.telemetry import View


class RemoteView(View):
    """Passes on what rank 0 shows; `check` is called on every rank, and raises if the attempt is over."""

    def __init__(self, box: NewsBox, *, shows: bool, check: Callable[[], None]) -> None:
        self._box = box
        self._shows = shows
        self._check = check

    def phase(self, name: str, done: int, total: int, detail: str = "", *, in_bytes: bool = False) -> None:
        self._check()
        if self._shows:
            self._box.show_progress(Shown("phase", (name, done, total, detail), {"in_bytes": in_bytes}))

    def end_phase(self) -> None:
        self._show("end_phase")

    def step(self, step: int, values: Mapping[str, float], seconds_by_phase: Mapping[str, float]) -> None:
        plain = {name: float(value) for name, value in values.items()}
        self._show("step", step, plain, dict(seconds_by_phase))

    def note(self, text: str) -> None:
        self._show("note", text)

    def _show(self, method: str, *arguments: object) -> None:
        if self._shows:
            self._box.put(Shown(method, arguments))
