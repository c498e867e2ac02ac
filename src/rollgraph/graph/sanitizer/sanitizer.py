"""The sanitizer: observes captures and replays, and reports what a graph gets wrong.

It captures through the backend that was asked for. At each replay it compares the program with what it was at capture,
runs the function eagerly on the same inputs and random numbers, and hands out copies that it poisons once a replay
would have overwritten them. A program that does not ask for it pays nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TextIO

from torch import Tensor, nn

from rollgraph.graph.backend import Backend, Recording
from rollgraph.graph.errors import GraphError, HostReadError, MemoryInUse, StaleGraph
from rollgraph.graph.observer import current_observer
from rollgraph.graph.sanitizer.diagnosis import kind_of, place_of
from rollgraph.graph.sanitizer.findings import Findings
from rollgraph.graph.sanitizer.instrumented_backend import InstrumentedBackend
from rollgraph.graph.sanitizer.instrumented_recording import InstrumentedRecording
from rollgraph.graph.sanitizer.interceptors import MethodInterceptor, OperationInterceptor, intercepting_backward
from rollgraph.graph.sanitizer.session import Session, spell_host_read
from rollgraph.graph.sanitizer.snapshot import ProgramSnapshot
from rollgraph.graph.sanitizer.unrecorded_hooks import definition_of, hooks_run_at_capture
from rollgraph.graph.slots import code_of


@contextmanager
def sanitize(compare: bool = True, stream: TextIO | None = None) -> Iterator[Findings]:
    """Check everything captured and replayed in the block. A GraphError ends the block and becomes a finding.

    `compare=False` skips the eager run beside each replay. Findings are also written to `stream` as they are made.
    """
    sanitizer = Sanitizer(compare, stream)
    with sanitizer:
        try:
            yield sanitizer.findings
        except GraphError as error:
            sanitizer.saw(None, error)


def sanitize_process_if_asked() -> None:
    """ROLLGRAPH_SANITIZE=1: check this thread to its end, and write findings and a summary to stderr."""
    asked = os.environ.get("ROLLGRAPH_SANITIZE", "0")
    if asked == "0" or current_observer.get() is not None:
        return
    if asked != "1":
        raise ValueError(f"ROLLGRAPH_SANITIZE={asked}: expected 0 or 1")
    sanitizer = Sanitizer(compare=True, stream=sys.stderr)
    sanitizer.__enter__()

    def summarize() -> None:
        findings = sanitizer.findings
        if findings.graphs or len(findings):
            print(f"rollgraph sanitizer: {findings}", file=sys.stderr)

    atexit.register(summarize)


class Sanitizer:
    """The observer of one `sanitize()` block, or of a whole process."""

    def __init__(self, compare: bool, stream: TextIO | None) -> None:
        self._session = Session(compare, stream)
        self._snapshots: weakref.WeakKeyDictionary[Any, list[ProgramSnapshot]] = weakref.WeakKeyDictionary()
        self._unfinished: list[InstrumentedRecording] = []  # of the capture in progress
        self._explained: list[GraphError] = []  # each error becomes a finding once
        self._interceptors = ExitStack()

    @property
    def findings(self) -> Findings:
        return self._session.findings

    def __enter__(self) -> Sanitizer:
        self._token = current_observer.set(self)
        self._session.active = True
        self._interceptors.enter_context(OperationInterceptor(self._session))
        self._interceptors.enter_context(MethodInterceptor(self._session))
        self._interceptors.enter_context(intercepting_backward(self._session))
        return self

    def __exit__(self, *error: Any) -> None:
        self._interceptors.close()
        self._session.active = False
        current_observer.reset(self._token)

    # -- the observer's part ---------------------------------------------------------------------

    def backend(self, backend: Backend) -> Backend:
        self._unfinished = []
        self._session.host_reads = {}
        if not backend.records:
            return backend
        return InstrumentedBackend(
            backend,
            self._session,
            on_recording=lambda recording: self._unfinished.append(recording),
            on_error=lambda error: self.saw(None, error),
        )

    def creating_optimizer_state(self) -> AbstractContextManager[None]:
        return self._session.creating_optimizer_state()

    def captured(self, graph: Any, called: Iterable[nn.Module], recordings: Sequence[Recording]) -> None:
        """Check what the capture left behind, and remember what the program is like."""
        modules = list(called)
        if graph.name not in self.findings.graphs:
            self.findings.graphs.append(graph.name)
        instrumented = [recording for recording in recordings if isinstance(recording, InstrumentedRecording)]
        self._unfinished = [recording for recording in self._unfinished if recording not in instrumented]
        snapshot = ProgramSnapshot(graph.target, modules, _leaves_read(instrumented))
        self._snapshots.setdefault(graph, []).append(snapshot)
        pre_hooks: set[Any] = set()
        for module in modules:
            pre_hooks.update(map(code_of, module._forward_pre_hooks.values()))
        for recording in instrumented:
            recording.attach(graph.name, snapshot, pre_hooks)
            self._check_recording(graph, recording)
        self._check_hooks(graph, modules, instrumented)

    def saw(self, graph: Any, error: GraphError) -> None:
        """Report an error of a capture or of a call: what caused it if that is known, or else the error itself."""
        if not self._session.active or any(error is known for known in self._explained):
            return
        self._explained.append(error)
        name = "" if graph is None else graph.name
        known_findings = len(self.findings)
        self._report_causes(graph, name, error)
        if len(self.findings) > known_findings:
            return
        kind = kind_of(error)
        where = place_of(error, self._unfinished)
        what = spell_host_read(error.operation) if isinstance(error, HostReadError) else str(error)
        if kind == "refused" and any((f.where.file, f.where.line) == (where.file, where.line) for f in self.findings):
            return  # a finding at the same line has told the reason
        self._session.report(kind, name, what, where)

    # -- checks ----------------------------------------------------------------------------------

    def _report_causes(self, graph: Any, name: str, error: GraphError) -> None:
        if isinstance(error, HostReadError):
            for where, what in self._session.host_reads.items():
                self._session.report("host-read", name, what, where)
        elif isinstance(error, StaleGraph) and not isinstance(error, MemoryInUse) and graph is not None:
            for snapshot in self._snapshots.get(graph, ()):
                for value in self._session.report_program_changes(name, snapshot):
                    self._session.report("constant", name, value.what, value.where)

    def _check_recording(self, graph: Any, recording: InstrumentedRecording) -> None:
        report = self._session.report
        if recording.keeps_inputs():
            what = "the program keeps an argument of the captured function, which each replay overwrites"
            report("escape", graph.name, what, definition_of(graph.target, ""))
        for operation in recording.escaped_operations():
            what = f"the program still holds the result of {operation.operation} after the capture"
            report("escape", graph.name, what, operation.where)
        if recording.draws_python_random:
            what = "the function draws random numbers from Python's or NumPy's generator, outside PyTorch"
            report("generator", graph.name, what, recording.random_line())

    def _check_hooks(
        self, graph: Any, called: Sequence[nn.Module], recordings: Sequence[InstrumentedRecording]
    ) -> None:
        """Report the hooks that ran at capture and left no operation in the graph."""
        recorded_code: set[Any] = set()
        for recording in recordings:
            recorded_code |= recording.recorded_code
        graphed = getattr(graph, "module", None)
        for hook in hooks_run_at_capture(graphed, called, _leaves_read(recordings)):
            if not hook.is_among(recorded_code):
                what = f"{hook} ran at capture and left nothing in the graph"
                self._session.report("hook", graph.name, what, hook.definition())


def _leaves_read(recordings: Sequence[InstrumentedRecording]) -> Iterator[Tensor]:
    """The leaves that recordings read. A generator, because a list would count as a holder of them."""
    for recording in recordings:
        for tensor in recording.external:
            if tensor.is_leaf:
                yield tensor
