"""How an error of the graph runtime becomes a finding: its kind, and the line of the program to blame."""

from __future__ import annotations

from collections.abc import Sequence

from rollgraph.graph.errors import (
    GeneratorError,
    GraphError,
    HostReadError,
    Location,
    MemoryInUse,
    ReplayMismatch,
    StaleGraph,
    StateError,
    here,
    raised_at,
)
from rollgraph.graph.sanitizer.instrumented_recording import InstrumentedRecording


def kind_of(error: GraphError) -> str:
    if isinstance(error, HostReadError):
        return "host-read"
    if isinstance(error, GeneratorError):
        return "generator"
    if error.frozen_value:
        return "constant"
    if isinstance(error, (MemoryInUse, ReplayMismatch)):
        return "mismatch"
    if isinstance(error, StaleGraph):
        return "moved"
    return "refused"


def place_of(error: GraphError, unfinished: Sequence[InstrumentedRecording]) -> Location:
    """The line to blame. `unfinished` are the recordings of the capture that raised the error."""
    if error.where is not None:
        return error.where
    if isinstance(error, StateError):
        for recording in unfinished:
            # First, because searching for the line runs the function again, which replaces what escaped.
            escaped = recording.escaped_operations()
            for place in (recording.rebinding_line(), *(operation.where for operation in escaped)):
                if place.file:
                    return place
    place = raised_at(error)
    return place if place.file else here()
