"""The observer of captures: what the graph runtime tells a tool such as the sanitizer.

The runtime asks for the observer when it captures a function and when it refuses a call. A replay knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

from torch import nn

from rollgraph.graph.backend import Backend, Recording
from rollgraph.graph.errors import GraphError


class Observer(Protocol):
    def backend(self, backend: Backend) -> Backend:
        """Return the backend to capture with: the given one, or a wrapper around it."""

    def creating_optimizer_state(self) -> AbstractContextManager[None]:
        """Surround a step on zero gradients, which the runtime makes itself to create an optimizer's state."""

    def captured(self, graph: Any, called: Iterable[nn.Module], recordings: Sequence[Recording]) -> None:
        """A graph was captured: the modules that were called in it, and its new recordings."""

    def saw(self, graph: Any, error: GraphError) -> None:
        """A call of a graph was refused."""


current_observer: ContextVar[Observer | None] = ContextVar("current_observer", default=None)


def creating_optimizer_state() -> AbstractContextManager[None]:
    """Tell the observer, if there is one, that the runtime steps an optimizer on its own account."""
    observer = current_observer.get()
    if observer is None:
        return nullcontext()
    return observer.creating_optimizer_state()
