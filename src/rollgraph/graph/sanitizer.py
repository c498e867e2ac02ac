"""The sanitizer: watches captures and replays, and tells what a graph gets wrong before it does.

It captures through the backend that was asked for, and around each replay it compares the program with
what it was at capture, runs the function eagerly on the same inputs and random numbers, and hands out
copies that it poisons once a replay would have written over them. Without it, none of this exists.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rollgraph.graph.backend import (
    Backend,
    Recording,
    Thunk,
    reads_on_host,
    refuse_copy_to_host,
    refuse_host_read,
)
from rollgraph.graph.errors import (
    GeneratorError,
    GraphError,
    HostReadError,
    Location,
    MemoryInUse,
    ReplayMismatch,
    StaleGraph,
    here,
    is_library,
    raised_at,
)
from rollgraph.graph.findings import Finding, Findings
from rollgraph.graph.holders import held_by_program
from rollgraph.graph.journal import RngState, Transaction, storage_of, tensors_in
from rollgraph.graph.names import Names
from rollgraph.graph.pool import Arena
from rollgraph.graph.probe import Probe, Step, first_difference, same_bits
from rollgraph.graph.surface import StaticTensors, own_copy
from rollgraph.graph.watch import watching

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor", "symm_mem")
_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
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


def sanitize_process_if_asked() -> None:
    """ROLLGRAPH_SANITIZE=1: watch the whole process, write findings to stderr as they come, and sum up at the end."""
    asked = os.environ.get("ROLLGRAPH_SANITIZE", "0")
    if asked == "0" or watching.get() is not None:
        return
    if asked != "1":
        raise ValueError(f"ROLLGRAPH_SANITIZE={asked}: expected 0 or 1")
    watch = Sanitizer(Findings(), stream=sys.stderr)
    watch.__enter__()
    atexit.register(lambda: print(f"rollgraph sanitizer: {watch.findings}", file=sys.stderr))


class Sanitizer:
    """The watch of one `sanitize()` block, or of a whole process."""

    def __init__(self, findings: Findings, compare: bool = True, stream: TextIO | None = None) -> None:
        self.findings = findings
        self.compares = compare
        self.active = False
        self.capturing = 0  # depth of warm-ups and recordings
        self.lent = LentOutputs()
        self._stream = stream
        self._graphs: weakref.WeakKeyDictionary[Any, list[Snapshot]] = weakref.WeakKeyDictionary()
        self._recordings: list[WatchedRecording] = []  # of the capture that is going on
        self._host_reads: dict[Location, str] = {}
        self._errors: set[int] = set()
        self._modes: list[Any] = [_Operations(self), _Methods(self)]

    def __enter__(self) -> Sanitizer:
        self._token = watching.set(self)
        self.active = True
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        self.active = False
        watching.reset(self._token)

    def add(self, kind: str, graph: str, what: str, where: Location) -> None:
        finding = Finding(kind, graph, what, where)
        if self.findings.add(finding) and self._stream is not None:
            print(finding, file=self._stream)

    # -- what captures tell ----------------------------------------------------------------------

    def backend(self, backend: Backend) -> Backend:
        self._recordings, self._host_reads = [], {}
        return WatchedBackend(backend, self) if backend.records else backend

    def recorded(self, recording: WatchedRecording) -> None:
        self._recordings.append(recording)

    def captured(self, graph: Any, called: Iterable[nn.Module]) -> None:
        """Look at what the capture left behind, and remember what the program is like."""
        name, called = graph.name, list(called)
        if name not in self.findings.graphs:
            self.findings.graphs.append(name)
        mine = [r for r in self._recordings if r.belongs_to(graph)]
        self._recordings = [r for r in self._recordings if r not in mine]
        snapshot = Snapshot(graph.target, called, mine)
        self._graphs.setdefault(graph, []).append(snapshot)
        for recording in mine:
            recording.graph, recording.snapshot = name, snapshot
            for step in recording.escaped():
                made = f"the result of {step.operation} is kept by the program after the capture"
                self.add("escape", name, made, step.where)
            if recording.draws_python_random:
                self.add("generator", name, _PYTHON_RANDOM, recording.random_line())
        recorded = {code for recording in mine for code in recording.codes}
        for path, kind, hook in _hooks(graph.target, called):
            if _code(hook) not in recorded:
                what = f"{kind} {getattr(hook, '__qualname__', hook)!s} ran at capture and records nothing"
                self.add("hook", name, what, _definition(hook, path))

    def saw(self, graph: Any, error: Exception) -> None:
        """An error of a capture or of a call: explained by what changed, or as it is."""
        if id(error) in self._errors:
            return
        self._errors.add(id(error))
        name = "" if graph is None else graph.name
        before = len(self.findings)
        if isinstance(error, HostReadError):
            for where, what in self._host_reads.items():
                self.add("host-read", name, what, where)
        elif isinstance(error, StaleGraph) and not isinstance(error, MemoryInUse) and graph is not None:
            for snapshot in self._graphs.get(graph, ()):
                self.look_for_changes(name, snapshot)
        if len(self.findings) > before:
            return
        place = raised_at(error)
        where = place if place.file else here()
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

    # -- what replays tell -----------------------------------------------------------------------

    def look_for_changes(self, name: str, snapshot: Snapshot) -> None:
        place = here()
        for what in snapshot.tree_changes():
            self.add("tree", name, what, place)
        for moved in snapshot.moved():
            self.add("moved", name, f"{moved} has another address than at capture", place)
        for read, value in snapshot.names.changed():
            what = f"{read.name} was {_short(read.value)} at capture and is {_short(value)} now"
            self.add("constant", name, what, read.where)
        for tensor in snapshot.orphans():
            what = f"a tensor of shape {tuple(tensor.shape)} that the graph reads is held by nothing else any more"
            self.add("orphan", name, what, place)

    def host_read(self, error: HostReadError) -> None:
        """Told once the capture fails of it: what only the first run does, a graph does not hold."""
        if self.capturing:
            self._host_reads.setdefault(here(), _host_read(error))

    @contextmanager
    def in_capture(self) -> Iterator[None]:
        self.capturing += 1
        try:
            yield
        finally:
            self.capturing -= 1


# -- watched recordings ----------------------------------------------------------------------------


class WatchedBackend:
    """A backend whose recordings carry probes, and whose replays are checked."""

    def __init__(self, inner: Backend, watch: Sanitizer) -> None:
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
        probe, before = Probe(), _python_random()

        def probed(tensors: Sequence[Tensor]) -> list[Tensor | None]:
            with self._watch.in_capture(), probe:
                return thunk(tensors)

        try:
            inner = self._inner.record(probed, inputs, arena, generators, marks)
        except GraphError as error:
            self._watch.saw(None, error)
            raise
        recording = WatchedRecording(inner, probe, thunk, inputs, arena, marks, self._watch)
        recording.draws_python_random = _python_random() != before
        self._watch.recorded(recording)
        return recording


@dataclass
class Expected:
    """What an eager run gave: its outputs, what it wrote, and the state it started from."""

    inputs: list[Tensor]
    outputs: list[Tensor | None]
    written: list[tuple[torch.UntypedStorage, Tensor, Tensor]]  # storage, bytes before, bytes after
    steps: list[Step]
    rng: RngState


class WatchedRecording:
    """A recording that is compared with the function it was made from, and hands out copies."""

    def __init__(
        self,
        inner: Recording,
        probe: Probe,
        thunk: Thunk,
        statics: StaticTensors,
        arena: Arena,
        marks: dict[Any, Any],
        watch: Sanitizer,
    ) -> None:
        self._inner, self._steps, self._thunk, self._statics = inner, probe.steps, thunk, statics
        self._arena, self._marks, self._watch = arena, marks, watch
        self._number = arena.captures
        self._modes = torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()
        self.graph: str | None = None
        self.snapshot: Snapshot | None = None
        self.draws_python_random = False
        self.is_backward = bool(marks.get(_FORWARD))
        marks[_FORWARD] = True
        self.operations, self.nbytes = inner.operations, inner.nbytes
        self.external, self.outputs = inner.external, inner.outputs
        self.codes = probe.codes

    def seal(self) -> None:
        self._inner.seal()
        self.operations = self._inner.operations

    def release(self) -> None:
        self._watch.lent.end(self._arena, self._number, f"graph {self.graph!r} was reset", only=True)
        self._inner.release()
        self.external, self.outputs = (), []

    def belongs_to(self, graph: Any) -> bool:
        return any(cell is self for cell in _recordings_of(graph))

    def escaped(self) -> list[Step]:
        """Operations whose result the program still holds."""
        made = [(step, ref) for step in self._steps for ref in step.made]
        tensors = list(filter(torch.is_tensor, [ref() for _, ref in made]))
        kept = held_by_program(tensors) if tensors else set()
        theirs = [step for step, ref in made if id(ref()) in kept]
        for step in self._steps:
            step.made.clear()
        return theirs

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        watch, name = self._watch, self.graph or ""
        if not watch.active:
            return self._inner.replay(inputs)
        if not self.is_backward:
            watch.findings.replays += 1
            if self.snapshot is not None:
                watch.look_for_changes(name, self.snapshot)
        expected = self._run_eagerly(inputs) if watch.compares else None
        outputs = self._inner.replay(inputs)
        if expected is not None:
            self._compare(expected)
        watch.lent.end(self._arena, self._number, f"graph {name!r} was replayed at {here()}")
        return watch.lent.lend(self._arena, self._number, name, outputs)

    def _run_eagerly(self, inputs: Sequence[Tensor]) -> Expected | None:
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
                what = f"the function itself changes {read.name} ({_short(read.value)} to {_short(value)})"
                self._watch.add("constant", self.graph or "", what, read.where)
        return expected

    def _own(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Copies that no replay writes over, before the backward has gone through them."""
        pairs = zip(inputs, self._statics.tensors, strict=True)
        return [own_copy(t).requires_grad_(static.requires_grad) for t, static in pairs]

    def _eager_run(self, inputs: list[Tensor]) -> Expected:
        (grad, autocast), rng = self._modes, RngState()
        with Transaction() as transaction:
            journal, probe = transaction.journal, Probe()
            with (
                journal.run(again=True),
                probe,
                torch.set_grad_enabled(grad),
                nullcontext() if autocast else torch._C._DisableAutocast(),
            ):
                outputs = self._thunk(inputs)
            kept = [None if o is None else o.detach().clone() for o in outputs]
            written = [(storage, before, _copy(storage)) for storage, before in journal.saved()]
            journal.keep_fresh()  # activations, which the backward will want
        return Expected(inputs, kept, written, probe.steps, rng)

    def _compare(self, expected: Expected) -> None:
        watch = self._watch
        watch.findings.compared += 1
        same = all(map(same_bits, expected.outputs, self.outputs)) and all(
            torch.equal(_copy(storage), after) for storage, _, after in expected.written
        )
        if same:
            return
        found = first_difference(expected.steps, self._steps)
        if self._is_reproducible(expected):
            what, where = found or ("a result differs, though each operation computed the same", here())
            watch.add("differs", self.graph or "", what, where)
        else:
            note = f"{self.graph}: eager gives other bits each time, so its replays cannot be compared with it"
            if note not in watch.findings.notes:
                watch.findings.notes.append(note)

    def _is_reproducible(self, first: Expected) -> bool:
        """Whether eager gives the same twice; from the state before the replay, which is put back."""
        if self.is_backward:
            return True  # its activations are gone; the forward has been asked
        after, now = [(storage, _copy(storage)) for storage, _, _ in first.written], RngState()
        try:
            for storage, before, _ in first.written:
                _put(storage, before)
            first.rng.restore()
            second = self._eager_run(first.inputs)
        finally:
            for storage, value in after:
                _put(storage, value)
            now.restore()
        return all(map(same_bits, first.outputs, second.outputs)) and all(
            torch.equal(one[2], other[2]) for one, other in zip(first.written, second.written, strict=False)
        )

    def random_line(self) -> Location:
        """The line that draws from Python's or NumPy's generator."""
        tracer = _RandomTracer()
        with tracer.tracing():
            self._eager_run(self._own(self._statics.tensors))
        return tracer.where


_FORWARD, _RAN = "watched", "ran eagerly"  # keys in the marks that the passes of a callable share
_PYTHON_RANDOM = "random numbers are drawn from Python's or NumPy's generator, outside PyTorch"


# -- lent outputs ----------------------------------------------------------------------------------


@dataclass
class Lent:
    arena: Arena
    number: int
    graph: str
    storage: StorageWeakRef
    alias: Tensor | None  # until it has ended
    ended: str = ""


class LentOutputs:
    """Copies of outputs in the hands of the program, and those whose time is over."""

    def __init__(self) -> None:
        self._lent: dict[int, Lent] = {}

    def lend(self, arena: Arena, number: int, graph: str, outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        handed: list[Tensor | None] = []
        with torch.no_grad():
            for output in outputs:
                copy = None if output is None else output.clone()
                handed.append(copy)
                if copy is not None and copy.numel():
                    storage = copy.untyped_storage()
                    alias = copy.detach()
                    self._lent[storage._cdata] = Lent(arena, number, graph, StorageWeakRef(storage), alias)
        return handed

    def end(self, arena: Arena, number: int, why: str, only: bool = False) -> None:
        """Poison what a replay of that graph may write over: results of graphs that were captured later, or its own."""
        for key, lent in list(self._lent.items()):
            if lent.storage.expired():
                del self._lent[key]
            elif lent.arena is arena and not lent.ended and (lent.number == number if only else lent.number >= number):
                assert lent.alias is not None
                _poison(lent.alias)
                lent.ended, lent.alias = why, None

    def ended(self, tensor: Tensor) -> Lent | None:
        if not self._lent:
            return None
        storage = storage_of(tensor)
        lent = None if storage is None else self._lent.get(storage._cdata)
        return lent if lent is not None and lent.ended and not lent.storage.expired() else None


def _poison(tensor: Tensor) -> None:
    """Every byte 0xff: NaN as a number, -1 as an index."""
    if not tensor.is_inference():
        torch._C._increment_version([tensor])  # what autograd saved of it is not the same any more
    _bytes(tensor.untyped_storage()).fill_(0xFF)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    with torch._C.DisableTorchFunction():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(storage: torch.UntypedStorage) -> Tensor:
    return _bytes(storage).clone()


def _put(storage: torch.UntypedStorage, value: Tensor) -> None:
    _bytes(storage).copy_(value)


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
        if not func.is_view:
            read = args[1:] if func._schema.name in _WRITES else args
            for tensor in tensors_in((read, kwargs)):
                _report_read(watch, tensor, str(func))
        if watch.capturing:
            if func.namespace in _COLLECTIVES:
                watch.add("collective", "", f"{func} is part of the recording", here())
            try:
                refuse_host_read(func, args, kwargs)
                refuse_copy_to_host(func, args, kwargs)
            except HostReadError as read_error:
                watch.host_read(read_error)
        return func(*args, **kwargs)


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
    if lent is not None:
        what = f"{operation} reads an output of graph {lent.graph!r}, but {lent.ended}"
        watch.add("stale-output", lent.graph, what, here())


# -- what the program was like ---------------------------------------------------------------------


class Snapshot:
    """The module tree, the addresses and the names of a graph's program, as they were at capture."""

    def __init__(self, target: Any, called: Sequence[nn.Module], recordings: Sequence[WatchedRecording]) -> None:
        self.names = Names(target, called)
        children = {id(child) for module in called for child in module.modules() if child is not module}
        roots = [target] if isinstance(target, nn.Module) else [m for m in called if id(m) not in children]
        self._trees = [(weakref.ref(root), _tree(root)) for root in roots]
        self._addresses = [(weakref.ref(root), _addresses(root)) for root in roots]
        owned = {id(t) for root in roots for t in (*root.parameters(), *root.buffers())}
        read = [t for r in recordings for t in r.external if t.is_leaf and id(t) not in owned]
        kept = held_by_program(read) if read else set()
        self._held = list({id(t): t for t in read if id(t) in kept}.values())
        self._holders = list(map(sys.getrefcount, self._held))

    def tree_changes(self) -> Iterator[str]:
        for index, (ref, before) in enumerate(self._trees):
            root = ref()
            if root is None or (now := _tree(root)) == before:
                continue
            self._trees[index] = (ref, now)
            added = [f"{name} ({kind})" for name, (_, kind) in now.items() if before.get(name) != now[name]]
            removed = [f"{name} ({kind})" for name, (_, kind) in before.items() if name not in now]
            parts = [f"added {', '.join(added)}"] * bool(added) + [f"removed {', '.join(removed)}"] * bool(removed)
            yield f"{type(root).__name__} since capture: {'; '.join(parts)}"

    def moved(self) -> Iterator[str]:
        for index, (ref, before) in enumerate(self._addresses):
            root = ref()
            if root is None or (now := _addresses(root)) == before:
                continue
            self._addresses[index] = (ref, now)
            for name, address in now.items():
                if name in before and before[name] != address:
                    yield f"{type(root).__name__}.{name}"

    def orphans(self) -> list[Tensor]:
        """What the graph reads and the program has let go of."""
        counts = list(map(sys.getrefcount, self._held))
        fewer = [t for t, now, before in zip(self._held, counts, self._holders, strict=True) if now < before]
        self._holders = list(map(min, counts, self._holders))
        if not fewer:
            return []
        kept = held_by_program(fewer)
        return [t for t in fewer if id(t) not in kept]


def _tree(root: nn.Module) -> dict[str, tuple[int, str]]:
    return {name: (id(module), type(module).__name__) for name, module in root.named_modules() if name}


def _addresses(root: nn.Module) -> dict[str, int]:
    named = [*root.named_parameters(), *root.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in named if tensor.layout is torch.strided}


def _recordings_of(graph: Any) -> Iterator[Any]:
    for segment in getattr(graph, "_segments", ()):
        yield from (segment.forward, segment.backward)
    for variant in getattr(graph, "_variants", ()):
        yield variant.recording


def _hooks(target: Any, called: Sequence[nn.Module]) -> Iterator[tuple[str, str, Any]]:
    """(module path, kind, function) of the hooks that a capture ran and a replay does not."""
    paths = {id(m): name for root in called for name, m in reversed(list(root.named_modules())) if name}
    for module in called:
        if module is target:
            continue  # its own hooks run around the replay
        for kind in _MODULE_HOOKS:
            for hook in vars(module).get(kind, {}).values():
                yield paths.get(id(module)) or type(module).__name__, kind.strip("_").removesuffix("s"), hook


def _code(hook: Any) -> Any:
    hook = getattr(hook, "__func__", getattr(hook, "func", hook))
    return getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)


def _definition(hook: Any, path: str) -> Location:
    code = _code(hook)
    return Location(path, code.co_filename, code.co_firstlineno) if code is not None else Location(path, "", 0)


def _host_read(error: HostReadError) -> str:
    return str(error).split(" at ")[0] + " reads tensor values on the host"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."


def _python_random() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return random.getstate(), None if state is None else (state[1].tobytes(), *state[2:])


class _RandomTracer:
    """Finds the first line of the program after which the state of Python's or NumPy's generator is another."""

    def __init__(self) -> None:
        self.where = Location("", "", 0)
        self._state: Any = None
        self._last = self.where

    @contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        self._state = _python_random()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if is_library(frame.f_code.co_filename):
            return None
        if not self.where.file and _python_random() != self._state:
            self.where = self._last
        if event in ("line", "call"):
            self._last = Location("", frame.f_code.co_filename, frame.f_lineno)
        return self._trace
