"""The picture of a run in a notebook: one output that is updated in place, with notes below it.

Knows IPython, which is there if this is used at all. It needs no widgets, so the last picture stays in a notebook that
is saved. Nothing is drawn in another thread, whose output would belong to no cell.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

from rollgraph.telemetry.run_picture import RunPicture

if TYPE_CHECKING:
    from rich.console import Console

_PAUSE = 0.5  # seconds between two pictures
_WIDTH = 100
_HTML = '<pre style="font-family:monospace;line-height:1.2;white-space:pre;overflow-x:auto">{code}</pre>'


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. Neither IPython in a terminal nor plain Python is."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


class NotebookView(RunPicture):
    """Draws again when it is told something, but no more than twice a second."""

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(total_steps, clock)
        self._output: Any = None  # IPython's handle of what is displayed
        self._drawn = 0.0

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

    def note(self, text: str) -> None:
        print(text, flush=True)

    def _draw_soon(self) -> None:
        if self._clock() - self._drawn >= _PAUSE:
            self._draw()

    def _draw(self) -> None:
        import IPython.display as ipython

        pictures = {"text/plain": self._as_text(), "text/html": self._as_html()}
        if self._output is None:
            show: Any = ipython.display  # it has no types
            self._output = show(pictures, raw=True, display_id=True)
        else:
            self._output.update(pictures, raw=True)
        self._drawn = self._clock()

    def _as_html(self) -> str:
        return self._recorded().export_html(inline_styles=True, code_format=_HTML)

    def _as_text(self) -> str:
        return self._recorded().export_text().rstrip()

    def _recorded(self) -> Console:
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
