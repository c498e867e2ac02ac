"""Backends, which record a function so that it can be replayed; and the observer that the sanitizer installs.

The eager backend runs the Python function again; `cuda_backend.py` records a CUDA graph, and `tape.py` records
operations. All three implement one protocol, so no code above them asks which one it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rollgraph.graph.errors import CaptureError, GraphError, raised_at
from rollgraph.graph.pool import Arena
from rollgraph.graph.surface import StaticTensors

# -- backends --------------------------------------------------------------------------------------

_STREAM_CAPTURE_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit: the legacy stream would wait for the capture
PassFunction = Callable[[Sequence[Tensor]], list[Tensor | None]]  # a pass: inputs -> outputs


class Recording(Protocol):
    """One recorded pass. `replay` fills the static inputs, runs the pass, and returns its outputs."""

    operations: int
    nbytes: int  # memory that stays allocated for the recording
    external: Sequence[Tensor]  # tensors it reads that are neither created in it nor inputs
    outputs: list[Tensor | None]

    def seal(self, versions: bool = True) -> None:
        """Finish the recording. All passes of its callable are recorded, so none can refer to it any more.

        With `versions`, each replay increments the version counters of its outputs, so that autograd notices the write.
        """

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]: ...

    def release(self) -> None: ...


RecordCall = Callable[[PassFunction, StaticTensors], Recording]  # records a pass as it runs, and keeps its effects


class Backend(Protocol):
    name: str
    records: bool  # False if each replay runs Python: nothing to warm up or to bind
    executes: bool  # whether recording runs the function for real

    @property
    def record_call(self) -> RecordCall | None:
        """Records a call as it runs; None if recording does not have all effects of the call."""

    def stream_context(self, arena: Arena, in_pool: bool = False) -> AbstractContextManager[None]:
        """The context of warm-up: the capture stream on a GPU. With `in_pool`, allocate from the arena's memory."""

    def record(
        self,
        run_pass: PassFunction,
        inputs: StaticTensors,
        arena: Arena,
        generators: Sequence[torch.Generator],
        shared_state: dict[Any, Any],
    ) -> Recording:
        """Run `run_pass` on `inputs` and record it. The passes of one callable share `shared_state`."""


# -- eager -----------------------------------------------------------------------------------------


class EagerRecording:
    """Runs the Python function itself on the tensors of the caller."""

    operations = 0
    nbytes = 0
    external: Sequence[Tensor] = ()

    def __init__(self, run_pass: PassFunction) -> None:
        self.outputs: list[Tensor | None] = []
        self._run_pass = run_pass

    def seal(self, versions: bool = True) -> None:
        pass

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        return self._run_pass(inputs)

    def release(self) -> None:
        pass


class EagerBackend:
    name = "eager"
    records = False
    executes = False
    record_call = None

    def stream_context(self, arena: Arena, in_pool: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def record(
        self,
        run_pass: PassFunction,
        inputs: StaticTensors,
        arena: Arena,
        generators: Sequence[torch.Generator],
        shared_state: dict[Any, Any],
    ) -> Recording:
        return EagerRecording(run_pass)


# -- errors of a capture ---------------------------------------------------------------------------


@contextmanager
def capture_errors(label: str, kind: type[CaptureError] = CaptureError) -> Iterator[None]:
    """Turn an exception of the user's function into a `kind` of CaptureError that names the line."""
    try:
        yield
    except GraphError:
        raise
    except Exception as error:
        message = str(error).split("\n", 1)[0]
        if getattr(error, "error_code", None) == _STREAM_CAPTURE_IMPLICIT:
            message += " (is an output or a loss of an earlier run still alive? It ties the parameters to its stream)"
        raise kind(f"{label} failed at {raised_at(error)}: {type(error).__name__}: {message}") from error


# -- the observer of captures ----------------------------------------------------------------------
# The runtime calls the observer when it captures a function and when it refuses a call. A replay never does.


class Observer(Protocol):
    def wrap_backend(self, backend: Backend) -> Backend:
        """Return the backend to capture with: `backend`, or a wrapper around it."""

    def creating_optimizer_state(self) -> AbstractContextManager[None]:
        """The context of a step on zero gradients, with which the runtime creates an optimizer's state."""

    def on_capture(self, graph: Any, called_modules: Iterable[nn.Module], recordings: Sequence[Recording]) -> None:
        """A graph was captured. It called these modules and has these new recordings."""

    def on_error(self, graph: Any, error: GraphError) -> None:
        """A call of a graph was refused."""


current_observer: ContextVar[Observer | None] = ContextVar("current_observer", default=None)


def creating_optimizer_state() -> AbstractContextManager[None]:
    """Tell the observer, if there is one, that the runtime and not the program steps an optimizer."""
    observer = current_observer.get()
    if observer is None:
        return nullcontext()
    return observer.creating_optimizer_state()
