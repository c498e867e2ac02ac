"""The base of captured functions and graphed callables: the path of every call, and the steps of every capture.

A graph keeps several variants, one per captured surface. A call picks the variant that fits, checks guards and
bindings, runs the hooks and replays. Owns that path, the handling of calls that fit no variant (`on_mismatch`), and
the counters of the report. Knows nothing of how a variant is recorded or replayed: `capture.py` and `callables.py` add
that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rollgraph.graph.backend import Backend, PassFunction, RecordCall, Recording, capture_errors, current_observer
from rollgraph.graph.cuda_backend import CaptureMonitor
from rollgraph.graph.errors import CaptureError, GraphError, ReplayMismatch, StaleGraph
from rollgraph.graph.hooks import GraphHooks, Guard, check_guards
from rollgraph.graph.outputs import StaticOutputs
from rollgraph.graph.pool import Arena, GraphRecord
from rollgraph.graph.state.slots import fully_called_lists, modules_with
from rollgraph.graph.state.transaction import ProgramObjects, Transaction
from rollgraph.graph.state.undo_log import UndoLog, storage_keys, storage_of
from rollgraph.graph.surface import InputHazards, Span, StaticTensors, Surface, static_copy
from rollgraph.graph.tape import Recorder

# -- the path of a call ----------------------------------------------------------------------------

OnMismatch = Literal["raise", "eager", "recapture"]
FirstRun = Callable[[], AbstractContextManager[None]]
MAX_VARIANTS = 16  # variants that one graph keeps under on_mismatch="recapture"
_dispatch_modes = torch._C._len_torch_dispatch_stack


@dataclass
class GraphSpec:
    """The target of a capture, and its settings."""

    target: Any  # the module or function
    backend: Backend
    record: GraphRecord
    hooks: GraphHooks
    guards: Sequence[Guard]
    on_mismatch: OnMismatch
    warmup: int  # runs before the recording
    warmup_in_pool: bool = False  # warm-up allocates from the pool, too
    first_run: FirstRun = nullcontext  # the context of the first warm-up run
    callable_guards: Sequence[Guard] = ()  # run after the hooks, and again before a backward

    def __post_init__(self) -> None:
        if self.on_mismatch not in ("raise", "eager", "recapture"):
            raise ValueError(f"on_mismatch={self.on_mismatch!r}: expected 'raise', 'eager' or 'recapture'")
        self.has_replay_hooks = self.hooks.runs_at_replay
        self.original: Callable[..., Any] = self.target  # runs in place of a graph

    @property
    def name(self) -> str:
        return self.record.name


class Variant(Protocol):
    """One capture of a target, for calls with one surface."""

    surface: Surface
    hazards: InputHazards
    arena: Arena
    forward_capture_index: int  # its forward, in the arena's order of captures
    called_modules: Sequence[nn.Module]  # the modules that ran

    @property
    def bind(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Sequence[Tensor]]:
        """Return the tensors of a call, or raise ReplayMismatch."""

    @property
    def check(self) -> Callable[[], None]:
        """Raise StaleGraph if the program moved or replaced something that the capture is bound to."""

    def replay(self, inputs: Sequence[Tensor]) -> Any: ...

    def is_backward_pending(self) -> bool:
        """Return whether its forward ran and its backward can still follow."""

    def recordings(self) -> Sequence[Recording]: ...

    def static_bytes(self) -> int:
        """Memory of static tensors outside the recordings."""

    def release(self) -> None: ...


P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V", bound=Variant)


class GraphedTarget(ABC, Generic[P, R, V]):
    """A captured target: call it like the original, and it replays."""

    def __init__(self, spec: GraphSpec) -> None:
        self.target = spec.target
        self.record = spec.record
        self.enabled = True
        self.static_bytes = 0
        self._spec = spec
        self._original: Callable[..., R] = spec.original
        self._has_replay_hooks = spec.has_replay_hooks
        self._guards = list(spec.guards)
        self._callable_guards = list(spec.callable_guards)
        self._records = spec.backend.records
        self._observer = current_observer.get()
        self._variants: list[V] = []  # most recently used first

    @abstractmethod
    def _capture(self, surface: Surface, arena: Arena) -> V:
        """Capture a call with this surface in `arena`. On an error nothing has changed."""

    @property
    def name(self) -> str:
        return self.record.name

    def enable(self) -> None:
        self.enabled = True

    def disable(self) -> None:
        """Run the original code until `enable`. Such calls count as eager."""
        self.enabled = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self.enabled or not self._variants:
            return self._call_without_variant(args, kwargs)
        if _dispatch_modes():
            refuse_nesting(self.name)
        try:
            variant, inputs = self._find_variant(args, kwargs)
        except GraphError as error:
            if self._handle_mismatch(error) == "eager":
                return self._original(*args, **kwargs)
            variant = self._recapture(args, kwargs)
            inputs = Surface(args, kwargs).tensors
        if self._guards:
            check_guards(self._guards, self.name)
        if self._has_replay_hooks:
            variant.arena.admit(variant.forward_capture_index, self.name)  # refuse before a hook changes anything
            self._spec.hooks.run("pre_forward", "replay", self.target, args, kwargs)
        if self._callable_guards:
            check_guards(self._callable_guards, self.name)
        try:
            variant.check()
        except GraphError as error:
            output = self._run_stale(variant, error, inputs, args, kwargs)
        else:
            output = variant.replay(inputs)
            self._count_run()
        if self._has_replay_hooks:
            self._spec.hooks.run("post_forward", "replay", self.target, args, kwargs, output)
        return output

    def _call_without_variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        return self._run_original("disabled" if self._variants else "reset", args, kwargs)

    def _run_original(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        if not (_dispatch_modes() and _inside_capture()):  # inside a capture it becomes part of another graph
            self.record.eager_runs[reason] += 1
        return self._original(*args, **kwargs)

    def _find_variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[V, Sequence[Tensor]]:
        """Return the variant that fits the call, or raise the mismatch of the most recently used variant."""
        first_mismatch: GraphError | None = None
        for variant in self._variants:
            try:
                inputs = variant.bind(args, kwargs)
            except ReplayMismatch as error:
                first_mismatch = first_mismatch or error
                continue
            if variant is not self._variants[0]:
                self._variants.remove(variant)
                self._variants.insert(0, variant)
            return variant, inputs
        assert first_mismatch is not None
        raise first_mismatch

    def _handle_mismatch(self, error: GraphError) -> OnMismatch:
        """Raise `error`, or count an eager run and return what to do instead."""
        policy = self._spec.on_mismatch
        if policy == "raise" or not isinstance(error, (ReplayMismatch, StaleGraph)):
            if self._observer is not None:
                self._observer.on_error(self, error)
            error.add_note(f"in graph {self.name!r} (on_mismatch={policy!r})")
            raise error
        if policy == "eager":
            self.record.eager_runs[str(error)] += 1
        return policy

    def _run_stale(
        self,
        variant: V,
        error: GraphError,
        inputs: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> R:
        """Handle a call that fits a variant whose bindings the program changed."""
        if self._handle_mismatch(error) == "eager":
            return self._original(*args, **kwargs)
        self._drop(variant)
        output: R = self._recapture(args, kwargs).replay(inputs)
        self._count_run()
        return output

    def _count_run(self) -> None:
        if self._records:
            self.record.replays += 1
        else:
            self.record.eager_runs["backend is eager"] += 1

    # -- variants --------------------------------------------------------------------------------

    def _recapture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> V:
        self._make_room()
        surface = Surface(args, kwargs)
        variant = self._capture(surface, Arena())  # in a new arena, so that it may replay at any time
        self.add_variant(variant)
        variant.hazards.check(surface.tensors)
        return variant

    def _make_room(self) -> None:
        """Drop the least recently used variants, except those whose backward is pending."""
        excess = len(self._variants) + 1 - MAX_VARIANTS
        if excess <= 0:
            return
        idle = [variant for variant in reversed(self._variants) if not variant.is_backward_pending()]
        for variant in idle[:excess]:
            self._drop(variant)
            self.record.dropped += 1

    def add_variant(self, variant: V) -> None:
        """Use this variant for calls from now on, and count it."""
        self._variants.insert(0, variant)
        if self._observer is not None:
            self._observer.on_capture(self, variant.called_modules, variant.recordings())
        self.record.surface = str(variant.surface)
        self.record.captures += self._records
        self.record.operations = sum(recording.operations for recording in variant.recordings())
        self._count_memory(variant, 1)

    def _drop(self, variant: V) -> None:
        self._variants.remove(variant)
        self._count_memory(variant, -1)
        variant.release()

    def _count_memory(self, variant: V, sign: int) -> None:
        if not self._records:
            return
        static = variant.static_bytes()
        recorded = sum(recording.nbytes for recording in variant.recordings())
        self.record.bytes_owned += sign * (static + recorded)
        if self._spec.backend.name == "cuda":
            recorded = 0  # the pool counts it
        self.static_bytes += sign * (static + recorded)

    def reset(self) -> None:
        """Release the graphs. From now on calls run the original."""
        for variant in self._variants:
            variant.release()
        self._variants.clear()
        self.static_bytes = 0
        self.record.bytes_owned = 0


def identity(target: Any) -> Any:
    """Unpickle a graph as the target that it was captured from."""
    return target


def callable_name(target: Any) -> str:
    return getattr(target, "__name__", None) or type(target).__name__


def _inside_capture() -> bool:
    return any(isinstance(mode, (UndoLog, Recorder, CaptureMonitor)) for mode in _get_current_dispatch_mode_stack())


def refuse_nesting(name: str) -> None:
    """Raise CaptureError inside another capture: a graph cannot hold the replay of another graph."""
    if _inside_capture():
        raise CaptureError(
            f"graph {name!r} is used inside another capture: switch it off there, `with pool.disabled(): capture(...)`"
        )


# -- the steps of a capture ------------------------------------------------------------------------
# Owns how a pass is recorded inside a transaction, which modules a recording depends on, which uses of an argument
# rule out a static copy, and which outputs lie in the memory of a recording.

Writes = list[list[tuple[int, Span]]]  # for each input, the storage and the span of each write
Bind = Callable[[tuple[Any, ...], dict[str, Any]], Sequence[Tensor]]


def static_copies(surface: Surface) -> StaticTensors:
    """Static tensors for the inputs of a captured call."""
    return StaticTensors([static_copy(tensor) for tensor in surface.tensors])


def record_pass(
    transaction: Transaction,
    backend: Backend,
    run_pass: PassFunction,
    inputs: StaticTensors,
    arena: Arena,
    label: str,
    shared_state: dict[Any, Any],
) -> Recording:
    """Record one pass; `label` names it in errors."""
    generators = [generator for generator, _ in transaction.undo_log.generators.values()]
    with capture_errors(f"capture of {label}"), transaction.recording(backend.executes):
        return backend.record(run_pass, inputs, arena, generators, shared_state)


def record_call(
    transaction: Transaction, record: RecordCall, run_pass: PassFunction, inputs: StaticTensors, label: str
) -> Recording:
    """Record the first call of a function as it runs, and keep its effects; `label` names it in errors."""
    with capture_errors(f"the first call of {label}"), transaction.recording(executes=True, was_warmed_up=False):
        return record(run_pass, inputs)


def modules_to_bind(
    target: Any, called_modules: dict[int, nn.Module], tensors: Iterable[Tensor], objects: ProgramObjects
) -> list[nn.Module]:
    """The modules whose state a recording depends on."""
    modules = dict(called_modules)
    if isinstance(target, nn.Module):
        modules.update((id(module), module) for module in target.modules())
    else:
        modules.update((id(module), module) for module in fully_called_lists(called_modules, objects.modules))
    modules.update((id(module), module) for module in modules_with(tensors, objects.modules))
    for module in modules.values():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{callable_name(target)} runs the TorchScript module {module.original_name}, whose state a graph "
                "cannot follow: capture the module that it was scripted or traced from"
            )
    return list(modules.values())


def refuse_written_arguments(undo_log: UndoLog, surface: Surface, statics: StaticTensors) -> None:
    """Raise CaptureError if the function wrote an argument: a graph would write its own copy instead."""
    for name, static in zip(surface.names, statics.tensors, strict=True):
        if undo_log.wrote(static):
            where = undo_log.written_at(static)
            raise CaptureError(
                f"argument {name} is written in place at {where}, which the caller would not see: let the function "
                "reach that tensor from outside its arguments, or write to a copy",
                where,
            )


def writes_before_last_read(undo_log: UndoLog, statics: StaticTensors, outputs: Iterable[Tensor]) -> Writes:
    """For each input, the writes of the last run to memory from outside, up to its last read of that input."""
    returned = storage_keys(outputs)
    writes: Writes = []
    for static in statics.tensors:
        storage = storage_of(static)
        is_returned = storage is not None and storage._cdata in returned
        writes.append(undo_log.writes_before_last_read(static, is_returned))
    return writes


def input_hazards(surface: Surface, writes: Writes, recording: Recording) -> InputHazards:
    """Keep only writes to memory that the recording keeps alive; other memory may have been reused."""
    live_storages = storage_keys(recording.external)
    spans = [[span for key, span in written if key in live_storages] for written in writes]
    return InputHazards(surface.names, spans)


def checked_bind(surface: Surface, hazards: InputHazards) -> Bind:
    """Return `Surface.bind` with the check of hazards: the tensors of a call that fits, or ReplayMismatch."""
    bind = surface.fast_bind()
    if not hazards:
        return bind

    def bind_and_check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
        inputs = bind(args, kwargs)
        hazards.check(inputs)
        return inputs

    return bind_and_check


def static_outputs_of(recording: Recording) -> StaticOutputs:
    """The outputs that lie in the memory of the recording. Call this once the recording is sealed."""
    outside = storage_keys(recording.external)
    static = [t for t in recording.outputs if t is not None and t.untyped_storage()._cdata not in outside]
    return StaticOutputs(static)
