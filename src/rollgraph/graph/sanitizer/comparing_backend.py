"""Watched recordings: a backend whose graphs carry probes and are compared with the function they were made from."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from rollgraph.graph.backend import Backend, Recording, Thunk
from rollgraph.graph.errors import GraphError, Location, here, is_library, raised_at
from rollgraph.graph.live_objects import ProgramObjects, PythonState
from rollgraph.graph.pool import Arena
from rollgraph.graph.sanitizer.findings import Findings
from rollgraph.graph.sanitizer.referrers import held_by_program
from rollgraph.graph.sanitizer.snapshot import ProgramSnapshot, short
from rollgraph.graph.sanitizer.stale_outputs import StaleOutputs
from rollgraph.graph.sanitizer.trace import (
    OperationTrace,
    TracedOperation,
    first_difference,
    python_difference,
    same_bits,
)
from rollgraph.graph.surface import StaticTensors, own_copy
from rollgraph.graph.transaction import RngState, Transaction
from rollgraph.graph.undo_log import bytes_of, storage_of

Doubt = tuple[str, Location]  # a Python value that changed, which may matter or not


class ComparisonSession(Protocol):
    """What a watched recording knows of the sanitizer."""

    active: bool
    compares: bool
    findings: Findings
    lent: StaleOutputs

    def add(self, kind: str, graph: str, what: str, where: Location) -> None: ...

    def saw(self, graph: Any, error: Exception) -> None: ...

    def recorded(self, recording: ComparingRecording) -> None: ...

    def look_for_changes(self, name: str, snapshot: ProgramSnapshot) -> list[Doubt]: ...

    def in_capture(self) -> AbstractContextManager[None]: ...


class ComparingBackend:
    """A backend whose recordings carry probes, and whose replays are checked."""

    def __init__(self, inner: Backend, watch: ComparisonSession) -> None:
        self._inner, self._watch = inner, watch
        self.name, self.records, self.executes = inner.name, inner.records, inner.executes

    @contextmanager
    def stage(self, arena: Arena) -> Iterator[None]:
        with self._watch.in_capture(), self._inner.stage(arena):
            yield

    def record(
        self,
        thunk: Thunk,
        inputs: StaticTensors,
        arena: Arena,
        generators: Sequence[torch.Generator],
        marks: dict[Any, Any],
    ) -> Recording:
        probe, before = OperationTrace(), _python_random()

        def probed(tensors: Sequence[Tensor]) -> list[Tensor | None]:
            with self._watch.in_capture(), probe:
                return thunk(tensors)

        try:
            inner = self._inner.record(probed, inputs, arena, generators, marks)
        except GraphError as error:
            self._watch.saw(None, error)
            raise
        recording = ComparingRecording(inner, probe, thunk, inputs, arena, marks, self._watch)
        recording.draws_python_random = _python_random() != before
        self._watch.recorded(recording)
        return recording


@dataclass
class Expected:
    """What an eager run gave: its outputs, what it wrote, and the state it started from."""

    inputs: list[Tensor]
    outputs: list[Tensor | None]
    written: list[tuple[torch.UntypedStorage, Tensor, Tensor]]  # storage, bytes before, bytes after
    steps: list[TracedOperation]
    rng: RngState


class ComparingRecording:
    """A recording that is compared with the function it was made from, and hands out copies."""

    def __init__(
        self,
        inner: Recording,
        probe: OperationTrace,
        thunk: Thunk,
        statics: StaticTensors,
        arena: Arena,
        marks: dict[Any, Any],
        watch: ComparisonSession,
    ) -> None:
        self._inner, self._steps, self._thunk, self._statics = inner, probe.steps, thunk, statics
        self._arena, self._marks, self._watch = arena, marks, watch
        self._number = arena.captures
        self._modes = torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()
        self.graph: str | None = None
        self.snapshot: ProgramSnapshot | None = None
        self.draws_python_random = False
        self.is_backward = bool(marks.get(_FORWARD))
        marks[_FORWARD] = True
        self.operations, self.nbytes = inner.operations, inner.nbytes
        self.external, self.outputs = inner.external, inner.outputs
        self.codes = probe.codes
        self.pre_hooks: set[Any] = (
            set()
        )  # code of hooks that keep what they make, as weight_norm does, and make it anew

    def seal(self, versions: bool = True) -> None:
        self._inner.seal(versions)
        self.operations = self._inner.operations

    def release(self) -> None:
        self._watch.lent.end(self._arena, self._number, f"graph {self.graph!r} was reset", only=True)
        self._inner.release()
        self.external, self.outputs = (), []

    def belongs_to(self, graph: Any) -> bool:
        return any(cell is self for cell in _recordings_of(graph))

    def escaped(self) -> list[TracedOperation]:
        """Operations whose result the program still holds."""
        made = [(step, ref) for step in self._steps for ref in step.made]
        tensors = list(filter(torch.is_tensor, [ref() for _, ref in made]))
        kept = held_by_program(tensors) if tensors else set()
        theirs = [step for step, ref in made if id(ref()) in kept and not step.codes & self.pre_hooks]
        for step in self._steps:
            step.made.clear()
        return theirs

    def keeps_inputs(self) -> bool:
        """The program still holds a static input, which the next replay fills anew."""
        return not self.is_backward and bool(held_by_program(self._statics.tensors) if self._statics.tensors else ())

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        watch, name, doubts = self._watch, self.graph or "", list[Doubt]()
        if not watch.active:
            return self._inner.replay(inputs)
        if not self.is_backward:
            watch.findings.replays += 1
            if self.snapshot is not None:
                doubts = watch.look_for_changes(name, self.snapshot)
        expected = self._run_eagerly(inputs, doubts) if watch.compares else None
        outputs = self._inner.replay(inputs)
        if expected is not None:
            self._compare(expected, doubts)
        else:
            self._tell(doubts)
        watch.lent.end(self._arena, self._number, f"graph {name!r} was replayed at {here()}")
        borrowed = {s._cdata for t in self.external if (s := storage_of(t)) is not None}
        return watch.lent.lend(self._arena, self._number, name, outputs, borrowed)

    def _tell(self, doubts: list[Doubt]) -> None:
        for what, where in doubts:
            self._watch.add("constant", self.graph or "", what, where)

    def _run_eagerly(self, inputs: Sequence[Tensor], doubts: list[Doubt]) -> Expected | None:
        """The function itself on these inputs, with everything put back afterwards."""
        if self.is_backward and not self._marks.pop(_RAN, False):
            return None  # its forward was not run beside the replay, so there is nothing to go back from
        try:
            expected = self._eager_run(self._own(inputs))
        except GraphError:
            raise
        except Exception as error:
            what = f"eager raises {type(error).__name__}: {str(error).splitlines()[0]}, the replay does not"
            self._watch.add("differs", self.graph or "", what, raised_at(error))
            return None
        if not self.is_backward:
            self._marks[_RAN] = True
        if self.snapshot is not None:
            for read, value in self.snapshot.names.changed():
                what = f"the function itself changes {read.name} ({short(read.value)} to {short(value)})"
                doubts.append((what, read.where))
        return expected

    def _own(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Copies that no replay writes over, before the backward has gone through them."""
        pairs = zip(inputs, self._statics.tensors, strict=True)
        return [own_copy(t).requires_grad_(static.requires_grad) for t, static in pairs]

    def _eager_run(self, inputs: list[Tensor]) -> Expected:
        (grad, autocast), rng = self._modes, RngState()
        with Transaction() as transaction:
            undo_log, probe = transaction.undo_log, OperationTrace()
            with (
                undo_log.run(again=True),
                probe,
                torch.set_grad_enabled(grad),
                nullcontext() if autocast else torch._C._DisableAutocast(),
            ):
                outputs = self._thunk(inputs)
            kept = [None if o is None else o.detach().clone() for o in outputs]
            written = [(storage, before, bytes_of(storage).clone()) for storage, before in undo_log.saved()]
            undo_log.keep_fresh()  # activations, which the backward will want
        return Expected(inputs, kept, written, probe.steps, rng)

    def _compare(self, expected: Expected, doubts: list[Doubt]) -> None:
        watch, name = self._watch, self.graph or ""
        watch.findings.compared += 1
        same = all(map(same_bits, expected.outputs, self.outputs)) and all(
            torch.equal(bytes_of(storage), after) for storage, _, after in expected.written
        )
        if same:
            for what, where in doubts:
                watch.findings.note(f"{name}: {what} ({where}); the results are the same so far")
        elif doubts:
            self._tell(doubts)  # that is why
        elif not self.draws_python_random:
            found = first_difference(expected.steps, self._steps)
            second = self._run_again(expected)
            if second is None:
                what, where = found or ("a result differs, though each operation computed the same", here())
                watch.add("differs", name, what, where)
            elif (python := python_difference(expected.steps, second)) is not None:
                watch.add("constant", name, *python)
            else:
                watch.findings.note(f"{name}: eager gives other bits each time, so replays cannot be compared with it")

    def _run_again(self, first: Expected) -> list[TracedOperation] | None:
        """Another eager run, from the state before the replay; None if it gives the same as the first."""
        if self.is_backward:
            return None  # its activations are gone; the forward has been asked
        after, now = [(storage, bytes_of(storage).clone()) for storage, _, _ in first.written], RngState()
        try:
            for storage, before, _ in first.written:
                bytes_of(storage).copy_(before)
            first.rng.restore()
            second = self._eager_run(first.inputs)
        finally:
            for storage, value in after:
                bytes_of(storage).copy_(value)
            now.restore()
        same = all(map(same_bits, first.outputs, second.outputs)) and all(
            torch.equal(one[2], other[2]) for one, other in zip(first.written, second.written, strict=False)
        )
        return None if same else second.steps

    def random_line(self) -> Location:
        """The line that draws from Python's or NumPy's generator."""
        before = _python_random()
        return self._first_line_after_which(lambda: _python_random() != before)

    def rebinding_line(self) -> Location:
        """The line that gives a module or an optimizer another object, or a tensor other memory."""
        before: list[PythonState] = []

        def rebound() -> bool:
            if not before:  # by now the function runs, and stands-ins for parameters are in their places
                before.append(PythonState(ProgramObjects()))
            return next(before[0].rebound(), None) is not None

        return self._first_line_after_which(rebound)

    def _first_line_after_which(self, changed: Callable[[], bool]) -> Location:
        """Run the function once more, traced, and put everything back, also what a successful run would keep."""
        tracer = _LineTracer(changed)
        with suppress(_RollBack), Transaction() as transaction:
            with transaction.undo_log.run(again=True), torch.set_grad_enabled(self._modes[0]), tracer.tracing():
                self._thunk(self._own(self._statics.tensors))
            raise _RollBack
        return tracer.where


_FORWARD, _RAN = "watched", "ran eagerly"  # keys in the marks that the passes of a callable share
PYTHON_RANDOM = "random numbers are drawn from Python's or NumPy's generator, outside PyTorch"


def _recordings_of(graph: Any) -> Iterator[Any]:
    for variant in graph._variants:
        yield from variant.recordings()


def _python_random() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return random.getstate(), None if state is None else (state[1].tobytes(), *state[2:])


class _RollBack(Exception):
    """Ends a transaction whose effects nobody wants."""


class _LineTracer:
    """Finds the first line of the program after which something has changed."""

    def __init__(self, changed: Callable[[], bool]) -> None:
        self.where = Location("", "", 0)
        self._changed = changed
        self._last = self.where

    @contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)
        if not self.where.file and self._changed():
            self.where = self._last

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if is_library(frame.f_code.co_filename):
            return None
        if not self.where.file and self._changed():
            self.where = self._last
        if event in ("line", "call"):
            self._last = Location("", frame.f_code.co_filename, frame.f_lineno)
        return self._trace
