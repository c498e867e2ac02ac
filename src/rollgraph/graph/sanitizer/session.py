"""The sanitizer: watches captures and replays, and tells what a graph gets wrong before it does.

It captures through the backend that was asked for, and around each replay it compares the program with
what it was at capture, runs the function eagerly on the same inputs and random numbers, and hands out
copies that it poisons once a replay would have written over them. Without it, none of this exists.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rollgraph.graph.backend import Backend, optimizer_hint, reads_on_host, refuse_copy_to_host, refuse_host_read
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
from rollgraph.graph.observer import current_observer
from rollgraph.graph.sanitizer.comparing_backend import PYTHON_RANDOM, ComparingBackend, ComparingRecording, Doubt
from rollgraph.graph.sanitizer.findings import Finding, Findings
from rollgraph.graph.sanitizer.snapshot import ProgramSnapshot, definition_of, hooks_inside, short
from rollgraph.graph.sanitizer.stale_outputs import StaleOutputs
from rollgraph.graph.slots import code_of
from rollgraph.graph.undo_log import tensors_in

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem")
_WRITES = ("aten::copy_", "aten::fill_", "aten::zero_")  # of what they write, they read nothing


@contextmanager
def sanitize(compare: bool = True, stream: TextIO | None = None) -> Iterator[Findings]:
    """Watch everything captured and replayed inside; a GraphError ends the block and becomes a finding.

    `compare=False` leaves out the eager run beside each replay. Findings are also written to `stream` as they come.
    """
    findings = Findings()
    watch = Sanitizer(findings, compare, stream)
    with watch:
        try:
            yield findings
        except GraphError as error:
            watch.saw(None, error)
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error) and findings.graphs:
                what = "autograd saved an output that a replay wrote over before the backward"
                watch.add("stale-output", "", what, raised_at(error))
            raise


def sanitize_process_if_asked() -> None:
    """ROLLGRAPH_SANITIZE=1: watch this thread to the end, write findings to stderr as they come, and sum up."""
    asked = os.environ.get("ROLLGRAPH_SANITIZE", "0")
    if asked == "0" or current_observer.get() is not None:
        return
    if asked != "1":
        raise ValueError(f"ROLLGRAPH_SANITIZE={asked}: expected 0 or 1")
    watch = Sanitizer(Findings(), stream=sys.stderr)
    watch.__enter__()

    def sum_up() -> None:
        if watch.findings.graphs or len(watch.findings):
            print(f"rollgraph sanitizer: {watch.findings}", file=sys.stderr)

    atexit.register(sum_up)


class Sanitizer:
    """The watch of one `sanitize()` block, or of a whole process."""

    def __init__(self, findings: Findings, compare: bool = True, stream: TextIO | None = None) -> None:
        self.findings = findings
        self.compares = compare
        self.active = False
        self.capturing = 0  # depth of warm-ups and recordings
        self.lent = StaleOutputs()
        self._stream = stream
        self._graphs: weakref.WeakKeyDictionary[Any, list[ProgramSnapshot]] = weakref.WeakKeyDictionary()
        self._recordings: list[ComparingRecording] = []  # of the capture that is going on
        self._host_reads: dict[Location, str] = {}
        self._errors: list[Exception] = []  # each is explained once
        self._modes: list[Any] = [_Operations(self), _Methods(self)]

    def __enter__(self) -> Sanitizer:
        self._token = current_observer.set(self)
        self.active = True
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        self.active = False
        current_observer.reset(self._token)

    def add(self, kind: str, graph: str, what: str, where: Location) -> None:
        finding = Finding(kind, graph, what, where)
        if self.findings.add(finding) and self._stream is not None:
            print(finding, file=self._stream)

    # -- what captures tell ----------------------------------------------------------------------

    def backend(self, backend: Backend) -> Backend:
        self._recordings, self._host_reads = [], {}
        return ComparingBackend(backend, self) if backend.records else backend

    def recorded(self, recording: ComparingRecording) -> None:
        self._recordings.append(recording)

    def captured(self, graph: Any, called: Iterable[nn.Module]) -> None:
        """Look at what the capture left behind, and remember what the program is like."""
        name, called = graph.name, list(called)
        if name not in self.findings.graphs:
            self.findings.graphs.append(name)
        mine = [r for r in self._recordings if r.belongs_to(graph)]
        self._recordings = [r for r in self._recordings if r not in mine]
        snapshot = ProgramSnapshot(graph.target, called, _leaves(mine))
        self._graphs.setdefault(graph, []).append(snapshot)
        pre_hooks = {code_of(hook) for m in called for hook in m._forward_pre_hooks.values()}
        for recording in mine:
            recording.graph, recording.snapshot, recording.pre_hooks = name, snapshot, pre_hooks
            if recording.keeps_inputs():
                what = "the program keeps an argument of the captured function, which each replay fills anew"
                self.add("escape", name, what, definition_of(graph.target, ""))
            for step in recording.escaped():
                made = f"the result of {step.operation} is kept by the program after the capture"
                self.add("escape", name, made, step.where)
            if recording.draws_python_random:
                self.add("generator", name, PYTHON_RANDOM, recording.random_line())
        recorded = {code for recording in mine for code in recording.codes}
        for place, kind, hook in hooks_inside(getattr(graph, "module", None), called, _leaves(mine)):
            if code_of(hook) not in recorded:
                what = f"{kind} {getattr(hook, '__qualname__', hook)!s} ran at capture and records nothing"
                self.add("hook", name, what, definition_of(hook, place))

    def saw(self, graph: Any, error: Exception) -> None:
        """An error of a capture or of a call: explained by what changed, or as it is."""
        if not self.active or any(error is known for known in self._errors):
            return
        self._errors.append(error)
        name = "" if graph is None else graph.name
        before = len(self.findings)
        if isinstance(error, HostReadError):
            for where, what in self._host_reads.items():
                self.add("host-read", name, what, where)
        elif isinstance(error, StaleGraph) and not isinstance(error, MemoryInUse) and graph is not None:
            for snapshot in self._graphs.get(graph, ()):
                for what, where in self.look_for_changes(name, snapshot):
                    self.add("constant", name, what, where)
        if len(self.findings) > before:
            return
        where = self._place_of(error)
        message = str(error)
        if isinstance(error, HostReadError):
            self.add("host-read", name, _host_read(error), where)
        elif isinstance(error, GeneratorError):
            self.add("generator", name, message, where)
        elif isinstance(error, (MemoryInUse, ReplayMismatch)):
            self.add("mismatch" if "frozen as" not in message else "constant", name, message, where)
        elif isinstance(error, StaleGraph):
            self.add("constant" if "at capture and is" in message else "moved", name, message, where)
        elif not any((f.where.file, f.where.line) == (where.file, where.line) for f in self.findings):
            self.add("refused", name, message, where)

    def _place_of(self, error: Exception) -> Location:
        """The line of the program that an error is about, as near as can be told."""
        known = getattr(error, "where", None)
        if known is not None:
            return known  # type: ignore[no-any-return]
        if isinstance(error, StateError):
            for recording in self._recordings:  # of the capture that has just failed, after its function ran
                kept = [step.where for step in recording.escaped()]  # first: another run would replace it
                for place in (recording.rebinding_line(), *kept):
                    if place.file:
                        return place
        place = raised_at(error)
        return place if place.file else here()

    # -- what replays tell -----------------------------------------------------------------------

    def look_for_changes(self, name: str, snapshot: ProgramSnapshot) -> list[Doubt]:
        """Tell what is certainly wrong, and give back the Python values that changed."""
        place = here()
        for what in snapshot.tree_changes():
            self.add("tree", name, what, place)
        for moved in snapshot.moved():
            self.add("moved", name, f"{moved} has another address than at capture", place)
        for tensor in snapshot.orphans():
            what = f"a tensor of shape {tuple(tensor.shape)} that the graph reads is held by nothing else any more"
            self.add("orphan", name, what, place)
        return [
            (f"{read.name} was {short(read.value)} at capture and is {short(value)} now", read.where)
            for read, value in snapshot.names.changed()
        ]

    def host_read(self, error: HostReadError) -> None:
        """Told once the capture fails of it: what only the first run does, a graph does not hold."""
        if self.capturing and not _creates_state():
            self._host_reads.setdefault(here(), _host_read(error) + optimizer_hint())

    @contextmanager
    def in_capture(self) -> Iterator[None]:
        self.capturing += 1
        try:
            yield
        finally:
            self.capturing -= 1


# -- modes -----------------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """Sees each operation of the program: reads of what is over, host reads and collectives in captures."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, watch: Sanitizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, watch = kwargs or {}, self._watch
        name = func._schema.name
        if not func.is_view and not name.endswith("_like") and not name.startswith("aten::new_"):
            read = args[1:] if name in _WRITES else args
            for tensor in tensors_in((read, {k: v for k, v in kwargs.items() if k != "out"})):
                _report_read(watch, tensor, str(func))
        if watch.capturing:
            if func.namespace in _COLLECTIVES:
                watch.add("collective", "", f"{func} is part of the recording", here())
            try:
                refuse_host_read(func, args, kwargs)
                refuse_copy_to_host(func, args, kwargs)
            except HostReadError as read_error:
                watch.host_read(read_error)
        result = func(*args, **kwargs)
        if name in _WRITES:
            watch.lent.written(args[0])
        return result


class _Methods(TorchFunctionMode):
    """Sees the reads that dispatch nothing: `.tolist()`, `.numpy()`, `bool()`, printing."""

    def __init__(self, watch: Sanitizer) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = reads_on_host(func, args)
        if name is not None:
            for tensor in tensors_in(args):
                _report_read(self._watch, tensor, name)
            self._watch.host_read(HostReadError(f"{name} at {here()}"))
        return func(*args, **(kwargs or {}))


def _report_read(watch: Sanitizer, tensor: Tensor, operation: str) -> None:
    lent = watch.lent.ended(tensor)
    if lent is None:
        return
    where = here()
    if not any((found.kind, found.where) == ("stale-output", where) for found in watch.findings):
        what = f"{operation} reads an output of graph {lent.graph!r}, but {lent.ended}"
        watch.add("stale-output", lent.graph, what, where)


def _creates_state() -> bool:
    """Inside the step on zero gradients that a capture makes, to give an optimizer its state."""
    return any(frame.name == "_step_on_zeros" for frame in traceback.extract_stack())


def _leaves(recordings: list[ComparingRecording]) -> Iterator[Tensor]:
    """What they read that is no result of anything; never kept, so that nobody counts as a holder for it."""
    return (tensor for recording in recordings for tensor in recording.external if tensor.is_leaf)


def _host_read(error: HostReadError) -> str:
    return str(error).split(" at ")[0] + " reads tensor values on the host"
