"""Traces of runs of a function, eager reference runs for comparison with a replay, and where two traces diverge."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rollgraph.graph.backend import PassFunction
from rollgraph.graph.errors import Location, here, is_library
from rollgraph.graph.state.transaction import RngState, Transaction
from rollgraph.graph.state.undo_log import OperationMode, bytes_of, storage_of, tensors_in, written_arguments

# -- the line that changes something ---------------------------------------------------------------

NOWHERE = Location("", "", 0)


class LineSearch:
    """Finds the first line of the program after which `changed()` is true; `where` is NOWHERE until then."""

    def __init__(self, changed: Callable[[], bool]) -> None:
        self.where = NOWHERE
        self._changed = changed
        self._last = NOWHERE

    @contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)
        self._check()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if is_library(frame.f_code.co_filename):
            return None
        self._check()
        if event in ("line", "call"):
            self._last = Location("", frame.f_code.co_filename, frame.f_lineno)
        return self._trace

    def _check(self) -> None:
        if self.where == NOWHERE and self._changed():
            self.where = self._last


# -- the trace of a run ----------------------------------------------------------------------------
# The checksums are recorded into the graph, so every replay computes its own. A comparison with those of an eager run
# finds the first operation with another result.

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
_UNINITIALISED = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::set_")


@dataclass
class TracedOperation:
    """One operation that ran."""

    operation: str
    where: Location
    numbers: tuple[Any, ...]  # the Python numbers among its arguments
    running: set[CodeType]  # the code of the functions that were running
    checksums: list[Tensor]
    results: list[weakref.ref[Tensor]]  # the tensors it created


class OperationTrace(OperationMode):
    """Traces each operation that runs inside it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[TracedOperation] = []
        self.recorded_code: set[CodeType] = set()  # of the functions that left an operation in the recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        returned = tensors_in(result)
        checksums: list[Tensor] = []
        if _computes(func):
            checksums = _checksums([*returned, *written_arguments(func, args, kwargs)])
        input_ids = {id(tensor) for tensor in tensors_in((args, kwargs))}
        results = [weakref.ref(tensor) for tensor in returned if id(tensor) not in input_ids]
        leaves = pytree.tree_leaves((args, kwargs))
        numbers = tuple(leaf for leaf in leaves if isinstance(leaf, (int, float, complex)))
        running = _code_on_the_stack()
        if func._schema.name not in ("aten::detach", "aten::alias"):
            self.recorded_code |= running
        self.operations.append(TracedOperation(str(func), here(), numbers, running, checksums, results))
        return result


def _computes(func: Any) -> bool:
    """Whether an operation has a result to check: a view computes nothing, and fresh memory has no value yet."""
    name = func._schema.name
    if func.is_view and name != "aten::lift_fresh":  # which is torch.tensor(...)
        return False
    return not name.startswith(_UNINITIALISED)


def _code_on_the_stack() -> set[CodeType]:
    """The code of all functions on the stack. A hook is a plain function, so only the stack shows that it ran."""
    codes: set[CodeType] = set()
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        codes.add(frame.f_code)
        frame = frame.f_back
    return codes


def _checksums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sum of each tensor's memory as integers, for tensors whose memory can be read."""
    sums: list[Tensor] = []
    with torch._C.DisableTorchFunction():
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            integers = _as_integers(tensor)
            if integers is not None and integers.numel():
                sums.append(integers.sum(dtype=torch.int64))
    return sums


def same_bits(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether two tensors are equal bit for bit, as far as their memory can be read."""
    if first is None or second is None:
        return first is second
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    first_integers = _as_integers(first)
    second_integers = _as_integers(second)
    return first_integers is None or second_integers is None or torch.equal(first_integers, second_integers)


def _as_integers(tensor: Tensor) -> Tensor | None:
    """The tensor's memory as integers, or None if it cannot be read directly."""
    if storage_of(tensor) is None or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return None
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    dtype = _INTEGERS.get(tensor.element_size())
    return None if dtype is None else tensor.view(dtype)


# -- where two traces diverge ----------------------------------------------------------------------


class Divergence(NamedTuple):
    what: str
    where: Location


def first_divergence(eager: Sequence[TracedOperation], replayed: Sequence[TracedOperation]) -> Divergence | None:
    """The first operation in which an eager run and a replay differ."""
    for ours, theirs in zip(eager, replayed, strict=False):
        if ours.operation != theirs.operation:
            return Divergence(f"eager runs {ours.operation}, but the graph holds {theirs.operation}", ours.where)
        if not _same_numbers(ours, theirs):
            what = f"eager passes {_format_numbers(ours)} to {ours.operation}, but the graph holds "
            return Divergence(what + _format_numbers(theirs), ours.where)
        if not _same_checksums(ours, theirs):
            return Divergence(f"{ours.operation} is the first operation with another result", ours.where)
    if len(eager) == len(replayed):
        return None
    longer = eager if len(eager) > len(replayed) else replayed
    first_extra = longer[min(len(eager), len(replayed))]
    what = f"eager runs {len(eager)} operations, but the graph holds {len(replayed)}"
    return Divergence(what, first_extra.where)


def python_divergence(first_run: Sequence[TracedOperation], second_run: Sequence[TracedOperation]) -> Divergence | None:
    """Where two eager runs diverge because Python passed other values; None if a kernel is the reason."""
    for first, second in zip(first_run, second_run, strict=False):
        if first.operation != second.operation or not _same_numbers(first, second):
            return Divergence(f"{first.operation} gets another Python value in each run of the function", first.where)
        if not _same_checksums(first, second):
            if first.operation.startswith("aten.lift_fresh"):
                return Divergence("a tensor is made from other Python values in each run of the function", first.where)
            return None
    return None


def _same_numbers(first: TracedOperation, second: TracedOperation) -> bool:
    return repr(first.numbers) == repr(second.numbers)  # NaN equals NaN here, and 1 differs from True


def _same_checksums(first: TracedOperation, second: TracedOperation) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.checksums, second.checksums, strict=False))


def _format_numbers(operation: TracedOperation) -> str:
    return ", ".join(map(repr, operation.numbers)) or "no number"


# -- eager reference runs --------------------------------------------------------------------------


class MemoryWrite(NamedTuple):
    """Memory that a run wrote."""

    storage: torch.UntypedStorage
    before: Tensor  # its bytes
    after: Tensor


@dataclass
class EagerRun:
    """The results of an eager run, and the state before it."""

    inputs: list[Tensor]
    outputs: list[Tensor | None]
    writes: list[MemoryWrite]
    operations: list[TracedOperation]
    rng: RngState  # before the run

    def matches_replay(self, outputs: Sequence[Tensor | None]) -> bool:
        """Whether a replay that just ran has the same outputs, and the same bytes wherever this run wrote."""
        if not all(map(same_bits, self.outputs, outputs)):
            return False
        return all(torch.equal(bytes_of(write.storage), write.after) for write in self.writes)

    def matches(self, second_run: EagerRun) -> bool:
        if not all(map(same_bits, self.outputs, second_run.outputs)):
            return False
        pairs = zip(self.writes, second_run.writes, strict=False)
        return all(torch.equal(first.after, second.after) for first, second in pairs)


class EagerReference:
    """Runs a captured function eagerly, in the modes of its capture."""

    def __init__(self, run_pass: PassFunction) -> None:
        self._run_pass = run_pass
        self._grad_mode = torch.is_grad_enabled()
        self._autocast = torch._C._is_any_autocast_enabled()

    def run(self, inputs: list[Tensor]) -> EagerRun:
        rng = RngState()
        trace = OperationTrace()
        autocast = nullcontext() if self._autocast else torch._C._DisableAutocast()
        with Transaction() as transaction:
            undo_log = transaction.undo_log
            with undo_log.run(is_rerun=True), trace, torch.set_grad_enabled(self._grad_mode), autocast:
                results = self._run_pass(inputs)
            outputs = [None if result is None else result.detach().clone() for result in results]
            writes = [MemoryWrite(storage, before, bytes_of(storage).clone()) for storage, before in undo_log.saved()]
            undo_log.keep_created()  # the backward will need the activations
        return EagerRun(inputs, outputs, writes, trace.operations, rng)

    def run_again(self, first: EagerRun) -> EagerRun:
        """Repeat the first run from the state before it, and then restore what the replay since has left."""
        after_replay = [(write.storage, bytes_of(write.storage).clone()) for write in first.writes]
        rng_after_replay = RngState()
        try:
            for write in first.writes:
                bytes_of(write.storage).copy_(write.before)
            first.rng.restore()
            return self.run(first.inputs)
        finally:
            for storage, content in after_replay:
                bytes_of(storage).copy_(content)
            rng_after_replay.restore()

    def find_line_where(self, changed: Callable[[], bool], inputs: list[Tensor]) -> Location:
        """Run the function once more to find the line that makes `changed()` true."""
        search = LineSearch(changed)
        with suppress(_RollBack), Transaction() as transaction:
            with transaction.undo_log.run(is_rerun=True), torch.set_grad_enabled(self._grad_mode), search.tracing():
                self._run_pass(inputs)
            raise _RollBack  # also undoes what a successful transaction would keep
        return search.where


class _RollBack(Exception):
    """Ends a transaction and undoes all of its effects."""
