"""Chooses the progress display that suits where the output goes. rich is imported if it is to draw."""

from __future__ import annotations

import os
import sys
from typing import IO, Literal

from rollgraph.telemetry.notebook_view import NotebookView, in_notebook
from rollgraph.telemetry.plain_view import PlainView
from rollgraph.telemetry.view import View


def make_view(
    progress: Literal["auto", "live", "plain", "none"], total_steps: int, stream: IO[str] | None = None
) -> View:
    """`auto` and `live` draw in a notebook, and in a terminal that can move its cursor and show block characters.

    Elsewhere they become `plain`. A stream that is given is not the notebook's.
    """
    if progress == "none":
        return View()
    if progress != "plain" and stream is None and in_notebook():
        return NotebookView(total_steps)
    stream = stream or sys.stdout
    utf8 = (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
    if progress == "plain" or not stream.isatty() or not utf8 or os.environ.get("TERM") in ("dumb", "unknown"):
        return PlainView(total_steps, stream)
    from rich.console import Console

    from rollgraph.telemetry.live_view import LiveView

    return LiveView(total_steps, Console(file=stream))
