"""Whether somebody watches the captures of this context, as the sanitizer does.

It is asked for when something is captured, and when a call is refused; a replay does not know of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Protocol

from torch import nn

from rollgraph.graph.backend import Backend


class Observer(Protocol):
    def backend(self, backend: Backend) -> Backend:
        """The backend to capture with."""

    def captured(self, graph: Any, called: Iterable[nn.Module]) -> None:
        """A graph was captured, and these modules were called in it."""

    def saw(self, graph: Any, error: Exception) -> None:
        """A call of a graph was refused."""


watching: ContextVar[Observer | None] = ContextVar("watching", default=None)
