"""An instrumented recording: checked whenever it is replayed, and asked after its capture what escaped from it.

A replay is compared with an eager run of the function on the same inputs and random numbers, and hands out copies of
its outputs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rollgraph.graph.backend import Recording, Thunk
from rollgraph.graph.errors import GraphError, Location, here, raised_at
from rollgraph.graph.live_objects import ProgramObjects, PythonState
from rollgraph.graph.pool import Arena
from rollgraph.graph.sanitizer.divergence import Divergence, first_divergence, python_divergence
from rollgraph.graph.sanitizer.eager_reference import EagerReference, EagerRun
from rollgraph.graph.sanitizer.operation_trace import OperationTrace, TracedOperation
from rollgraph.graph.sanitizer.referrers import held_by_program
from rollgraph.graph.sanitizer.session import ChangedValue, Session
from rollgraph.graph.sanitizer.snapshot import ProgramSnapshot, spell_value
from rollgraph.graph.surface import StaticTensors, own_copy
from rollgraph.graph.undo_log import storage_of


@dataclass
class Passes:
    """What the forward and the backward of one callable share."""

    forward_recorded: bool = False
    forward_ran_eagerly: bool = False  # since the last backward


class InstrumentedRecording:
    """A recording that is compared with the function it was made from, and hands out copies of its outputs."""

    def __init__(
        self,
        inner: Recording,
        trace: OperationTrace,
        thunk: Thunk,
        statics: StaticTensors,
        arena: Arena,
        passes: Passes,
        session: Session,
    ) -> None:
        self.operations = inner.operations
        self.nbytes = inner.nbytes
        self.external = inner.external
        self.outputs = inner.outputs
        self.recorded_code = trace.recorded_code
        self.draws_python_random = False
        self._inner = inner
        self._traced = trace.operations
        self._eager = EagerReference(thunk)
        self._statics = statics
        self._arena = arena
        self._capture = arena.captures
        self._passes = passes
        self._is_backward = passes.forward_recorded
        passes.forward_recorded = True
        self._session = session
        self._graph = ""
        self._snapshot: ProgramSnapshot | None = None
        self._pre_hooks: set[Any] = set()

    def attach(self, graph: str, snapshot: ProgramSnapshot, pre_hooks: set[Any]) -> None:
        """Its graph was captured. `pre_hooks` is the code of hooks that may keep their results, as weight_norm does."""
        self._graph = graph
        self._snapshot = snapshot
        self._pre_hooks = pre_hooks

    def seal(self, versions: bool = True) -> None:
        self._inner.seal(versions)
        self.operations = self._inner.operations

    def release(self) -> None:
        self._session.outputs.poison_only(self._arena, self._capture, f"graph {self._graph!r} was reset")
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
                changed = session.report_program_changes(self._graph, self._snapshot)
        expected = self._run_eagerly(inputs, changed) if session.compares else None
        outputs = self._inner.replay(inputs)
        if expected is None:
            self._report_constants(changed)
        else:
            self._compare(expected, changed)
        event = f"graph {self._graph!r} was replayed at {here()}"
        session.outputs.poison_from(self._arena, self._capture, event)
        return session.outputs.hand_out(self._arena, self._capture, self._graph, outputs, self._borrowed_storages())

    def _borrowed_storages(self) -> set[int]:
        borrowed: set[int] = set()
        for tensor in self.external:
            storage = storage_of(tensor)
            if storage is not None:
                borrowed.add(storage._cdata)
        return borrowed

    def _report_constants(self, changed: list[ChangedValue]) -> None:
        for value in changed:
            self._session.report("constant", self._graph, value.what, value.where)

    def _run_eagerly(self, inputs: Sequence[Tensor], changed: list[ChangedValue]) -> EagerRun | None:
        """Run the function itself on these inputs, and add the Python values that it changed to `changed`."""
        if self._is_backward:
            if not self._passes.forward_ran_eagerly:
                return None  # there is no eager forward to go back from
            self._passes.forward_ran_eagerly = False
        try:
            run = self._eager.run(self._own_copies(inputs))
        except GraphError:
            raise
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            what = f"eager raises {type(error).__name__}: {first_line}; the replay does not"
            self._session.report("differs", self._graph, what, raised_at(error))
            return None
        if not self._is_backward:
            self._passes.forward_ran_eagerly = True
        if self._snapshot is not None:
            for read, value in self._snapshot.names.changed():
                change = f"from {spell_value(read.value)} to {spell_value(value)}"
                changed.append(ChangedValue(f"the function itself changes {read.name} {change}", read.where))
        return run

    def _own_copies(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Copies that no replay overwrites before the backward has used them."""
        copies = []
        for tensor, static in zip(inputs, self._statics.tensors, strict=True):
            copies.append(own_copy(tensor).requires_grad_(static.requires_grad))
        return copies

    def _compare(self, expected: EagerRun, changed: list[ChangedValue]) -> None:
        findings = self._session.findings
        findings.compared += 1
        if expected.matches_memory(self.outputs):
            for value in changed:
                findings.note(f"{self._graph}: {value.what} ({value.where}); the results are the same so far")
        elif changed:
            self._report_constants(changed)
        elif not self.draws_python_random:  # that is a finding already
            self._explain_difference(expected)

    def _explain_difference(self, expected: EagerRun) -> None:
        """Blame the graph only if eager itself gives the same result twice."""
        divergence = first_divergence(expected.operations, self._traced)
        if divergence is None:
            divergence = Divergence("a result differs, though every operation computed the same", here())
        if self._is_backward:  # it cannot run again: its activations are gone. The forward did run again
            self._session.report("differs", self._graph, *divergence)
            return
        second = self._eager.run_again(expected)
        if expected.matches(second):
            self._session.report("differs", self._graph, *divergence)
            return
        python = python_divergence(expected.operations, second.operations)
        if python is not None:
            self._session.report("constant", self._graph, *python)
        else:
            what = "eager gives different bits in each run, so replays cannot be compared with it"
            self._session.findings.note(f"{self._graph}: {what}")

    # -- questions after a capture ---------------------------------------------------------------

    def escaped_operations(self) -> list[TracedOperation]:
        """The operations whose result the program still holds. Only the first call can tell."""
        made = [(operation, ref) for operation in self._traced for ref in operation.results]
        tensors = [tensor for tensor in [ref() for _, ref in made] if tensor is not None]
        held = held_by_program(tensors)
        escaped = []
        for operation, ref in made:
            if id(ref()) in held and not operation.running & self._pre_hooks:
                escaped.append(operation)
        for operation in self._traced:
            operation.results.clear()
        return escaped

    def keeps_inputs(self) -> bool:
        """Whether the program still holds a static input, which every replay fills with new values."""
        return not self._is_backward and bool(held_by_program(self._statics.tensors))

    def random_line(self) -> Location:
        """The line that draws from Python's or NumPy's generator."""
        before = python_random_state()
        return self._first_line_after_which(lambda: python_random_state() != before)

    def rebinding_line(self) -> Location:
        """The line that gives a module or an optimizer another object, or a tensor other memory."""
        before: list[PythonState] = []

        def has_rebound() -> bool:
            if not before:  # the function runs by now, and the stand-ins for parameters are in place
                before.append(PythonState(ProgramObjects()))
            return next(before[0].rebound(), None) is not None

        return self._first_line_after_which(has_rebound)

    def _first_line_after_which(self, changed: Callable[[], bool]) -> Location:
        return self._eager.first_line_after_which(changed, self._own_copies(self._statics.tensors))


def python_random_state() -> tuple[Any, Any]:
    """The state of Python's and NumPy's global generators, in a form that can be compared."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), None
    state = numpy.random.get_state()
    return random.getstate(), (state[1].tobytes(), *state[2:])
