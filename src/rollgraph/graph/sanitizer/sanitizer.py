"""The sanitizer: observes captures and replays, and reports what a graph gets wrong.

It captures with the requested backend. At each replay it compares the program with its state at capture, runs the
function eagerly on the same inputs and random numbers, and returns copies of the outputs. It poisons a copy at the
moment when a replay would have overwritten the output. Without the sanitizer, a program pays nothing.
"""

from __future__ import annotations

import atexit
import linecache
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import CodeType
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from rollgraph.graph.backend import Backend, Recording, current_observer
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
from rollgraph.graph.sanitizer.findings import Findings
from rollgraph.graph.sanitizer.interceptors import MethodInterceptor, OperationInterceptor, intercepting_backward
from rollgraph.graph.sanitizer.recording import InstrumentedBackend, InstrumentedRecording
from rollgraph.graph.sanitizer.session import Session, describe_host_read
from rollgraph.graph.sanitizer.snapshot import ProgramSnapshot
from rollgraph.graph.state.slots import code_of

# -- from an error to a finding --------------------------------------------------------------------


def finding_kind(error: GraphError) -> str:
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


def blame_line(error: GraphError, unfinished: Sequence[InstrumentedRecording]) -> Location:
    """The line to blame for an error. `unfinished` are the recordings of the capture that raised it."""
    if error.where is not None:
        return error.where
    if isinstance(error, StateError):
        for recording in unfinished:
            # Ask for this first: the search for the line runs the function again, which replaces escaped tensors.
            escaped = recording.escaped_operations()
            for location in (recording.rebinding_line(), *(operation.where for operation in escaped)):
                if location.file:
                    return location
    location = raised_at(error)
    return location if location.file else here()


# -- hooks that a replay will not run --------------------------------------------------------------

_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_DECORATORS = 20  # lines of decorators that a function may have


class HookSite(NamedTuple):
    owner: str  # path of the module or parameter
    kind: str
    function: Any

    def left_operations_in(self, recorded_code: set[CodeType]) -> bool:
        return code_of(self.function) in recorded_code

    def __str__(self) -> str:
        return f"{self.kind} {getattr(self.function, '__qualname__', self.function)!s}"

    def definition(self) -> Location:
        return definition_of(self.function, self.owner)


def hooks_run_at_capture(
    graphed: nn.Module | None, called_modules: Sequence[nn.Module], leaves: Iterable[Tensor]
) -> Iterator[HookSite]:
    """Hooks on the called modules and the leaves they read. Hooks on the graphed module itself run at replay."""
    yield from _module_hooks(graphed, called_modules)
    for attribute in _GLOBAL_HOOKS:
        for hook in getattr(torch.nn.modules.module, attribute).values():
            yield HookSite("every module", _kind_of(attribute), hook)
    if graphed is None:
        yield from _tensor_hooks(called_modules, leaves)


def _module_hooks(graphed: nn.Module | None, called_modules: Sequence[nn.Module]) -> Iterator[HookSite]:
    paths: dict[int, str] = {}
    for root in reversed(called_modules):  # the outermost module comes last, so its longer paths win
        paths.update((id(module), name) for name, module in root.named_modules() if name)
    for module in called_modules:
        if module is graphed:
            continue
        owner = paths.get(id(module)) or type(module).__name__
        for attribute in _MODULE_HOOKS:
            for hook in vars(module).get(attribute, {}).values():
                yield HookSite(owner, _kind_of(attribute), hook)


def _tensor_hooks(called_modules: Sequence[nn.Module], leaves: Iterable[Tensor]) -> Iterator[HookSite]:
    """The hooks on leaves that require grad, with the parameter's name as owner if a called module has it."""
    names: dict[int, str] = {}
    for root in reversed(called_modules):  # the outermost module comes last, so its longer names win
        names.update((id(parameter), name) for name, parameter in root.named_parameters())
    for leaf in leaves:
        if not leaf.requires_grad:
            continue
        for attribute in _TENSOR_HOOKS:
            for hook in (getattr(leaf, attribute, None) or {}).values():
                yield HookSite(names.get(id(leaf), "a tensor"), "tensor hook", hook)


def _kind_of(attribute: str) -> str:
    return attribute.strip("_").removesuffix("s")


def definition_of(function: Any, owner: str) -> Location:
    """The line of a function's `def`."""
    code = code_of(function)
    if code is None:
        return Location(owner, "", 0)
    return Location(owner, code.co_filename, _line_of_def(code))


def _line_of_def(code: CodeType) -> int:
    """The code of a function starts at its first decorator; its `def` comes after the last one."""
    for line in range(code.co_firstlineno, code.co_firstlineno + _DECORATORS):
        words = linecache.getline(code.co_filename, line).split()
        if "def" in words[:2]:
            return line
    return code.co_firstlineno


# -- the sanitizer ---------------------------------------------------------------------------------


@contextmanager
def sanitize(compare: bool = True, stream: TextIO | None = None) -> Iterator[Findings]:
    """Check everything captured and replayed in the block. A GraphError ends the block and becomes a finding.

    `compare=False` skips the eager run at each replay. Findings are also written to `stream` as they come up.
    """
    sanitizer = Sanitizer(compare, stream)
    with sanitizer:
        try:
            yield sanitizer.findings
        except GraphError as error:
            sanitizer.on_error(None, error)


def sanitize_process_if_enabled() -> None:
    """ROLLGRAPH_SANITIZE=1: check this thread until exit, and write findings and a summary to stderr."""
    setting = os.environ.get("ROLLGRAPH_SANITIZE", "0")
    if setting == "0" or current_observer.get() is not None:
        return
    if setting != "1":
        raise ValueError(f"ROLLGRAPH_SANITIZE={setting}: expected 0 or 1")
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
        self._unfinished_recordings: list[InstrumentedRecording] = []  # of the capture in progress
        self._reported: list[GraphError] = []  # each error becomes a finding once
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

    def wrap_backend(self, backend: Backend) -> Backend:
        self._unfinished_recordings = []
        self._session.host_reads = {}
        if not backend.records:
            return backend
        return InstrumentedBackend(
            backend,
            self._session,
            on_recording=lambda recording: self._unfinished_recordings.append(recording),
            on_error=lambda error: self.on_error(None, error),
        )

    def creating_optimizer_state(self) -> AbstractContextManager[None]:
        return self._session.creating_optimizer_state()

    def on_capture(self, graph: Any, called_modules: Iterable[nn.Module], recordings: Sequence[Recording]) -> None:
        """Check the effects of the capture, and take a snapshot of the program."""
        modules = list(called_modules)
        if graph.name not in self.findings.graphs:
            self.findings.graphs.append(graph.name)
        instrumented = [recording for recording in recordings if isinstance(recording, InstrumentedRecording)]
        self._unfinished_recordings = [
            recording for recording in self._unfinished_recordings if recording not in instrumented
        ]
        snapshot = ProgramSnapshot(graph.target, modules, _leaves_read(instrumented))
        self._snapshots.setdefault(graph, []).append(snapshot)
        pre_hooks: set[Any] = set()
        for module in modules:
            pre_hooks.update(map(code_of, module._forward_pre_hooks.values()))
        for recording in instrumented:
            recording.attach(graph.name, snapshot, pre_hooks)
            self._check_recording(graph, recording)
        self._check_hooks(graph, modules, instrumented)

    def on_error(self, graph: Any, error: GraphError) -> None:
        """Report the cause of an error in a capture or a call if it is known, else the error itself."""
        if not self._session.active or any(error is known for known in self._reported):
            return
        self._reported.append(error)
        name = "" if graph is None else graph.name
        known_findings = len(self.findings)
        self._report_causes(graph, name, error)
        if len(self.findings) > known_findings:
            return
        kind = finding_kind(error)
        where = blame_line(error, self._unfinished_recordings)
        what = describe_host_read(error.operation) if isinstance(error, HostReadError) else str(error)
        if kind == "refused" and any((f.where.file, f.where.line) == (where.file, where.line) for f in self.findings):
            return  # a finding at the same line already tells the reason
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
        self, graph: Any, called_modules: Sequence[nn.Module], recordings: Sequence[InstrumentedRecording]
    ) -> None:
        """Report the hooks that ran at capture and left no operation in the graph."""
        recorded_code: set[Any] = set()
        for recording in recordings:
            recorded_code |= recording.recorded_code
        graphed = getattr(graph, "module", None)
        for hook in hooks_run_at_capture(graphed, called_modules, _leaves_read(recordings)):
            if not hook.left_operations_in(recorded_code):
                what = f"{hook} ran at capture and left nothing in the graph"
                self._session.report("hook", graph.name, what, hook.definition())


def _leaves_read(recordings: Sequence[InstrumentedRecording]) -> Iterator[Tensor]:
    """The leaves that recordings read. A generator, because a list would count as a reference to them."""
    for recording in recordings:
        for tensor in recording.external:
            if tensor.is_leaf:
                yield tensor
