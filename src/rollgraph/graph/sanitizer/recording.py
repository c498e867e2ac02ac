"""Instrumented recordings: traced during the recording, checked at each replay."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollgraph.graph.backend import Backend, PassFunction, Recording
from rollgraph.graph.errors import GraphError, Location, here, raised_at
from rollgraph.graph.pool import Arena
from rollgraph.graph.sanitizer.session import ChangedValue, Session
from rollgraph.graph.sanitizer.snapshot import ProgramSnapshot, describe_value, referenced_by_program
from rollgraph.graph.sanitizer.trace import (
    Divergence,
    EagerReference,
    EagerRun,
    OperationTrace,
    TracedOperation,
    first_divergence,
    python_divergence,
)
from rollgraph.graph.state.transaction import ProgramObjects, PythonState
from rollgraph.graph.state.undo_log import storage_of
from rollgraph.graph.surface import StaticTensors, static_copy

# -- the recording ---------------------------------------------------------------------------------
# Each replay is compared with an eager run of the function on the same inputs and random numbers, and returns copies of
# its outputs.


@dataclass
class PassState:
    """State that the forward and the backward of one callable share."""

    forward_recorded: bool = False  # so the next recording of the callable is its backward
    forward_ran_eagerly: bool = False  # since the last backward


class InstrumentedRecording:
    """A recording that is compared with its function at each replay, and returns copies of its outputs."""

    def __init__(
        self,
        inner: Recording,
        trace: OperationTrace,
        run_pass: PassFunction,
        statics: StaticTensors,
        arena: Arena,
        pass_state: PassState,
        session: Session,
    ) -> None:
        self.operations = inner.operations
        self.nbytes = inner.nbytes
        self.external = inner.external
        self.outputs = inner.outputs
        self.recorded_code = trace.recorded_code
        self.draws_python_random = False  # the backend sets it after the recording
        self._inner = inner
        self._traced = trace.operations
        self._eager = EagerReference(run_pass)
        self._statics = statics
        self._arena = arena
        self._capture_index = arena.captures  # of this recording among those that share the arena
        self._pass_state = pass_state
        self._is_backward = pass_state.forward_recorded
        pass_state.forward_recorded = True
        self._session = session
        # `attach` sets these once the whole callable has been captured.
        self._graph_name = ""
        self._snapshot: ProgramSnapshot | None = None
        self._pre_hooks: set[Any] = set()  # the code of hooks that run before a forward

    def attach(self, graph_name: str, snapshot: ProgramSnapshot, pre_hooks: set[Any]) -> None:
        """Called after the capture. Hooks whose code is in `pre_hooks` may keep results, as weight_norm does."""
        self._graph_name = graph_name
        self._snapshot = snapshot
        self._pre_hooks = pre_hooks

    def seal(self, versions: bool = True) -> None:
        self._inner.seal(versions)
        self.operations = self._inner.operations

    def release(self) -> None:
        self._session.outputs.poison_only(self._arena, self._capture_index, f"graph {self._graph_name!r} was reset")
        self._inner.release()
        self.external = ()
        self.outputs = []

    # -- replays ---------------------------------------------------------------------------------

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        session = self._session
        if not session.active:
            return self._inner.replay(inputs)
        changed: list[ChangedValue] = []
        if not self._is_backward:
            session.findings.replays += 1
            if self._snapshot is not None:
                changed = session.report_program_changes(self._graph_name, self._snapshot)
        expected = self._run_eagerly(inputs, changed) if session.compares else None
        outputs = self._inner.replay(inputs)
        if expected is None:
            self._report_constants(changed)
        else:
            self._compare(expected, changed)
        event = f"graph {self._graph_name!r} was replayed at {here()}"
        session.outputs.poison_from(self._arena, self._capture_index, event)
        return session.outputs.hand_out(
            self._arena, self._capture_index, self._graph_name, outputs, self._borrowed_storages()
        )

    def _borrowed_storages(self) -> set[int]:
        borrowed: set[int] = set()
        for tensor in self.external:
            storage = storage_of(tensor)
            if storage is not None:
                borrowed.add(storage._cdata)
        return borrowed

    def _report_constants(self, changed: list[ChangedValue]) -> None:
        for value in changed:
            self._session.report("constant", self._graph_name, value.what, value.where)

    def _run_eagerly(self, inputs: Sequence[Tensor], changed: list[ChangedValue]) -> EagerRun | None:
        """Run the function eagerly on these inputs, and append the Python values that it changes to `changed`."""
        if self._is_backward:
            if not self._pass_state.forward_ran_eagerly:
                return None  # no eager forward ran
            self._pass_state.forward_ran_eagerly = False
        try:
            run = self._eager.run(self._own_copies(inputs))
        except GraphError:
            raise
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            what = f"eager raises {type(error).__name__}: {first_line}; the replay does not"
            self._session.report("differs", self._graph_name, what, raised_at(error))
            return None
        if not self._is_backward:
            self._pass_state.forward_ran_eagerly = True
        if self._snapshot is not None:
            for read, value in self._snapshot.names.changed():
                change = f"from {describe_value(read.value)} to {describe_value(value)}"
                changed.append(ChangedValue(f"the function itself changes {read.name} {change}", read.where))
        return run

    def _own_copies(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the inputs that no replay overwrites before the backward uses them."""
        copies = []
        for tensor, static in zip(inputs, self._statics.tensors, strict=True):
            copies.append(static_copy(tensor).requires_grad_(static.requires_grad))
        return copies

    def _compare(self, expected: EagerRun, changed: list[ChangedValue]) -> None:
        findings = self._session.findings
        findings.compared += 1
        if expected.matches_replay(self.outputs):
            for value in changed:
                findings.note(f"{self._graph_name}: {value.what} ({value.where}); the results are the same so far")
        elif changed:
            self._report_constants(changed)
        elif not self.draws_python_random:  # this is already a finding
            self._explain_difference(expected)

    def _explain_difference(self, expected: EagerRun) -> None:
        """Report a difference, but blame the graph only if eager gives the same result twice."""
        divergence = first_divergence(expected.operations, self._traced)
        if divergence is None:
            divergence = Divergence("a result differs, though every operation computed the same", here())
        if self._is_backward:  # it cannot run again without its activations; its forward did
            self._session.report("differs", self._graph_name, *divergence)
            return
        second = self._eager.run_again(expected)
        if expected.matches(second):
            self._session.report("differs", self._graph_name, *divergence)
            return
        python = python_divergence(expected.operations, second.operations)
        if python is not None:
            self._session.report("constant", self._graph_name, *python)
        else:
            what = "eager gives different bits in each run, so replays cannot be compared with it"
            self._session.findings.note(f"{self._graph_name}: {what}")

    # -- questions after a capture ---------------------------------------------------------------

    def escaped_operations(self) -> list[TracedOperation]:
        """The operations whose result the program still refers to. Only the first call can tell."""
        results = [(operation, ref) for operation in self._traced for ref in operation.results]
        tensors = [tensor for tensor in [ref() for _, ref in results] if tensor is not None]
        referenced = referenced_by_program(tensors)
        escaped = []
        for operation, ref in results:
            if id(ref()) in referenced and not operation.running & self._pre_hooks:
                escaped.append(operation)
        for operation in self._traced:
            operation.results.clear()
        return escaped

    def keeps_inputs(self) -> bool:
        """Whether the program still refers to a static input, which every replay overwrites."""
        return not self._is_backward and bool(referenced_by_program(self._statics.tensors))

    def random_line(self) -> Location:
        """The line that draws from Python's or NumPy's generator."""
        before = python_random_state()
        return self._find_line_where(lambda: python_random_state() != before)

    def rebinding_line(self) -> Location:
        """The line that replaces an object of a module or optimizer, or the memory of a tensor."""
        before: list[PythonState] = []

        def has_rebound() -> bool:
            if not before:  # first call: the function is running, so the aliases of parameters are in place
                before.append(PythonState(ProgramObjects()))
            return next(before[0].find_rebound(), None) is not None

        return self._find_line_where(has_rebound)

    def _find_line_where(self, changed: Callable[[], bool]) -> Location:
        return self._eager.find_line_where(changed, self._own_copies(self._statics.tensors))


def python_random_state() -> tuple[Any, Any]:
    """The state of Python's and NumPy's global generators, in a form that compares with ==."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    state = numpy.random.get_state()
    return random.getstate(), (state[1].tobytes(), *state[2:])


# -- the backend -----------------------------------------------------------------------------------
# Knows nothing of findings: the sanitizer passes callbacks for recordings and errors.


class InstrumentedBackend:
    """Wraps a backend, and passes each of its recordings to `on_recording`."""

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
        self.record_call = None  # an instrumented function is always warmed up first
        self._inner = inner
        self._session = session
        self._on_recording = on_recording
        self._on_error = on_error

    @contextmanager
    def stream_context(self, arena: Arena, in_pool: bool = False) -> Iterator[None]:
        with self._session.in_capture(), self._inner.stream_context(arena, in_pool):
            yield

    def record(
        self,
        run_pass: PassFunction,
        inputs: StaticTensors,
        arena: Arena,
        generators: Sequence[torch.Generator],
        shared_state: dict[Any, Any],
    ) -> Recording:
        trace = OperationTrace()
        random_state = python_random_state()

        def traced(tensors: Sequence[Tensor]) -> list[Tensor | None]:
            with self._session.in_capture(), trace:
                return run_pass(tensors)

        try:
            inner = self._inner.record(traced, inputs, arena, generators, shared_state)
        except GraphError as error:
            self._on_error(error)
            raise
        pass_state = shared_state.setdefault(PassState, PassState())
        recording = InstrumentedRecording(inner, trace, run_pass, inputs, arena, pass_state, self._session)
        recording.draws_python_random = python_random_state() != random_state
        self._on_recording(recording)
        return recording
