"""Captured functions and modules at replay: the path of a call, and the graph of a whole function.

A graph keeps several variants, one per captured surface. A call picks the variant that fits, checks guards and
bindings, runs the hooks and replays. Owns that path, the handling of calls that fit no variant (`on_mismatch`), and
the counters of the report. A variant is a `FunctionVariant`, at the end of this file, or a segment (`segment.py`).
Knows nothing of how either is recorded.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rollgraph.graph.backend import Backend, Recording, current_observer
from rollgraph.graph.cuda_backend import CaptureMonitor
from rollgraph.graph.errors import CaptureError, GraphError, ReplayMismatch, StaleGraph
from rollgraph.graph.hooks import GraphHooks, Guard
from rollgraph.graph.outputs import OutputTree, StaticOutputs
from rollgraph.graph.pool import Arena, GraphRecord
from rollgraph.graph.state.binding import Binding, BoundGradients
from rollgraph.graph.state.undo_log import UndoLog, storage_keys
from rollgraph.graph.surface import InputHazards, StaticTensors, Surface
from rollgraph.graph.tape import Recorder

# -- the path of a call ----------------------------------------------------------------------------

OnMismatch = Literal["raise", "eager", "recapture"]
FirstRun = Callable[[], AbstractContextManager[None]]
MAX_VARIANTS = 16  # variants that one graph keeps under on_mismatch="recapture"
_dispatch_modes = torch._C._len_torch_dispatch_stack
Bind = Callable[[tuple[Any, ...], dict[str, Any]], Sequence[Tensor]]  # the tensors of a call, or ReplayMismatch


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
    def bind(self) -> Bind:
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


def check_guards(guards: Sequence[Guard], graph: str) -> None:
    """Raise StaleGraph if a guard objects to a replay."""
    for guard in guards:
        reason = guard()
        if reason is not None:
            raise StaleGraph(f"graph {graph!r} refused: {reason}")


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


# -- what the variants of functions and of segments share ------------------------------------------


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


# -- whole functions -------------------------------------------------------------------------------
# Owns the gradients of a captured function at replay. A replay sets `.grad` of the leaves it reaches; no gradient flows
# through arguments or outputs.

_thread = threading.get_ident
NO_GRADIENT = (
    "argument {} requires grad, but a captured function passes no gradient to it: detach it, or use "
    "make_graphed_callables"
)


class _Opaque(torch.autograd.Function):
    """Autograd node for outputs that require grad in eager. Its backward raises, since none was recorded."""

    @staticmethod
    def forward(ctx: Any, name: str, outputs: Sequence[Tensor], anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise GraphError(
            f"graph {ctx.name!r} was captured as a whole function, so no gradient passes through its outputs: run "
            "the backward inside the function, or use make_graphed_callables"
        )


_opaque: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Opaque).apply


@dataclass(eq=False)
class FunctionVariant:
    """A recorded function that replays. Its outputs are valid until the next replay in its arena."""

    spec: GraphSpec
    surface: Surface
    recording: Recording
    arena: Arena
    forward_capture_index: int
    outputs: OutputTree | None = None  # set at each run by the eager backend
    binding: Binding = field(default_factory=lambda: Binding(()))
    gradients: BoundGradients = field(default_factory=lambda: BoundGradients(()))
    hazards: InputHazards = field(default_factory=InputHazards)
    called_modules: Sequence[nn.Module] = ()
    statics: StaticTensors = field(default_factory=lambda: StaticTensors(()))

    def __post_init__(self) -> None:
        self._records = self.spec.backend.records
        self._lock: AbstractContextManager[Any] = self.arena.lock if self._records else nullcontext()
        self._anchor = torch.zeros((), requires_grad=True)  # an input for the node of opaque outputs
        self._static_outputs: StaticOutputs | None = None
        self.bind = self._make_bind()
        self.check = self._make_check()
        if self._records:
            self.recording.seal()
            self.gradients.record_baseline_references()
            self._static_outputs = static_outputs_of(self.recording)
            self.arena.static_outputs.append(self._static_outputs)

    def _make_bind(self) -> Bind:
        bind = checked_bind(self.surface, self.hazards)
        grad_enabled = self.surface.modes[0]
        if not grad_enabled or not self._records:
            return bind
        names = self.surface.names
        differentiable = [static.requires_grad for static in self.statics.tensors]

        def bind_and_check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
            inputs = bind(args, kwargs)
            for tensor, had_grad, name in zip(inputs, differentiable, names, strict=True):
                if tensor.requires_grad and not had_grad:
                    raise ReplayMismatch(NO_GRADIENT.format(name))
            return inputs

        return bind_and_check

    def _make_check(self) -> Callable[[], None]:
        check_binding = self.binding.check
        check_gradients = self.gradients.check
        if not self.gradients.leaves:
            return check_binding

        def check() -> None:
            check_binding()
            check_gradients()

        return check

    def recordings(self) -> Sequence[Recording]:
        return (self.recording,)

    def static_bytes(self) -> int:
        return self.statics.nbytes() + self.gradients.nbytes()

    def is_backward_pending(self) -> bool:
        return False  # its backward, if any, is part of the recording

    def release(self) -> None:
        self.recording.release()
        if self._static_outputs is not None:
            self.arena.static_outputs.remove(self._static_outputs)
            self._static_outputs = None

    def replay(self, inputs: Sequence[Tensor]) -> Any:
        if self._records and torch.is_grad_enabled():
            with torch.no_grad():
                tensors = self._run(inputs)
        else:
            tensors = self._run(inputs)
        return self._build(tensors)

    def first_call_result(self) -> Any:
        """Return the result of the first call, which was recorded as it ran."""
        return self._build([t.detach() for t in self.recording.outputs if t is not None])

    def _build(self, tensors: list[Tensor]) -> Any:
        outputs = self.outputs
        assert outputs is not None
        if outputs.differentiable:
            self._make_opaque(tensors, outputs.differentiable)
        return outputs.build(tensors)

    def _run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        arena = self.arena
        capture_index = self.forward_capture_index
        gradients = self.gradients
        with self._lock:
            if not arena.admits_after < capture_index < arena.admits_before:
                arena.admit(capture_index, self.spec.name)
            if arena.owning_thread != _thread():
                arena.enter_thread(self.spec.name)
            gradients.enter()
            tensors = [t.detach() for t in self.recording.replay(inputs) if t is not None]
            gradients.leave()
        return tensors

    def _make_opaque(self, tensors: list[Tensor], indices: list[int]) -> None:
        """Let outputs that require grad in eager require it here, so that a backward through them raises."""
        if torch.is_inference_mode_enabled():
            return
        with torch.enable_grad():
            attached = _opaque(self.spec.name, [tensors[index] for index in indices], self._anchor)
        for index, tensor in zip(indices, attached, strict=True):
            tensors[index] = tensor
