"""The line of the program that changes something, found by running the program with a trace function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rollgraph.graph.errors import Location, is_library

NOWHERE = Location("", "", 0)


class LineSearch:
    """Finds the first line of the program after which `changed()` is true; `where` is NOWHERE until then."""

    def __init__(self, changed: Callable[[], bool]) -> None:
        self.where = NOWHERE
        self._changed = changed
        self._last = NOWHERE

    @contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)
        self._check()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if is_library(frame.f_code.co_filename):
            return None
        self._check()
        if event in ("line", "call"):
            self._last = Location("", frame.f_code.co_filename, frame.f_lineno)
        return self._trace

    def _check(self) -> None:
        if self.where == NOWHERE and self._changed():
            self.where = self._last
