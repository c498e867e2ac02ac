"""A backend whose recordings are instrumented: every operation is traced while it is recorded.

Knows nothing of how errors become findings; the sanitizer gives it callbacks for recordings and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollgraph.graph.backend import Backend, Recording, Thunk
from rollgraph.graph.errors import GraphError
from rollgraph.graph.pool import Arena
from rollgraph.graph.sanitizer.instrumented_recording import InstrumentedRecording, Passes, python_random_state
from rollgraph.graph.sanitizer.operation_trace import OperationTrace
from rollgraph.graph.sanitizer.session import Session
from rollgraph.graph.surface import StaticTensors


class InstrumentedBackend:
    """Wraps a backend. Every recording that it makes registers itself with `on_recording`."""

    def __init__(
        self,
        inner: Backend,
        session: Session,
        on_recording: Callable[[InstrumentedRecording], None],
        on_error: Callable[[GraphError], None],
    ) -> None:
        self.name = inner.name
        self.records = inner.records
        self.executes = inner.executes
        self._inner = inner
        self._session = session
        self._on_recording = on_recording
        self._on_error = on_error

    @contextmanager
    def stage(self, arena: Arena, in_pool: bool = False) -> Iterator[None]:
        with self._session.in_capture(), self._inner.stage(arena, in_pool):
            yield

    def record(
        self,
        thunk: Thunk,
        inputs: StaticTensors,
        arena: Arena,
        generators: Sequence[torch.Generator],
        marks: dict[Any, Any],
    ) -> Recording:
        trace = OperationTrace()
        random_state = python_random_state()

        def traced(tensors: Sequence[Tensor]) -> list[Tensor | None]:
            with self._session.in_capture(), trace:
                return thunk(tensors)

        try:
            inner = self._inner.record(traced, inputs, arena, generators, marks)
        except GraphError as error:
            self._on_error(error)
            raise
        passes = marks.setdefault(Passes, Passes())
        recording = InstrumentedRecording(inner, trace, thunk, inputs, arena, passes, self._session)
        recording.draws_python_random = python_random_state() != random_state
        self._on_recording(recording)
        return recording
