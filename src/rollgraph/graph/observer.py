"""The observer of the captures in this context, such as the sanitizer.

A capture asks for it, and so does a call that is refused; a replay never does.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Protocol

from torch import nn

from rollgraph.graph.backend import Backend


class Observer(Protocol):
    def backend(self, backend: Backend) -> Backend:
        """The backend to capture with, in place of `backend`."""

    def captured(self, graph: Any, called: Iterable[nn.Module]) -> None:
        """`graph` was captured; `called` are the modules that its function called."""

    def saw(self, graph: Any, error: Exception) -> None:
        """A call of `graph` was refused with `error`."""


current_observer: ContextVar[Observer | None] = ContextVar("current_observer", default=None)
