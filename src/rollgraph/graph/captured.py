"""The call path that captured functions and graphed callables share.

A captured graph keeps several variants, one for each surface it was captured with. A call looks for the
variant that fits, checks guards and bindings, runs the hooks and replays. Owns that path, what happens to
a call that does not fit (`on_mismatch`), and the counters of the report. Knows nothing of how a variant
is recorded or replayed: `capture.py` and `callables.py` add that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rollgraph.graph.backend import Backend, Recording
from rollgraph.graph.cuda_backend import CaptureMonitor
from rollgraph.graph.errors import CaptureError, GraphError, ReplayMismatch, StaleGraph
from rollgraph.graph.hooks import GraphHooks, Guard, check_guards
from rollgraph.graph.observer import current_observer
from rollgraph.graph.pool import Arena
from rollgraph.graph.report import GraphRecord
from rollgraph.graph.surface import InputHazards, Surface
from rollgraph.graph.tape import Recorder
from rollgraph.graph.undo_log import UndoLog

OnMismatch = Literal["raise", "eager", "recapture"]
FirstRun = Callable[[], AbstractContextManager[None]]
MAX_VARIANTS = 16  # variants that one graph keeps under on_mismatch="recapture"
_dispatch_modes = torch._C._len_torch_dispatch_stack


@dataclass
class GraphSpec:
    """What is captured, and how."""

    target: Any  # the module or function
    backend: Backend
    record: GraphRecord
    hooks: GraphHooks
    guards: Sequence[Guard]
    on_mismatch: OnMismatch
    warmup: int  # runs before the recording
    warmup_in_pool: bool = False  # these runs allocate from the pool, too
    first_run: FirstRun = nullcontext  # the context of the first of these runs
    own_guards: Sequence[Guard] = ()  # asked after the hooks, and again before a backward

    def __post_init__(self) -> None:
        if self.on_mismatch not in ("raise", "eager", "recapture"):
            raise ValueError(f"on_mismatch={self.on_mismatch!r}: expected 'raise', 'eager' or 'recapture'")
        self.hooked = self.hooks.at_replay
        self.original: Callable[..., Any] = self.target  # what runs in place of a graph

    @property
    def name(self) -> str:
        return self.record.name


class Variant(Protocol):
    """One capture of a target, for calls of one surface."""

    surface: Surface
    hazards: InputHazards
    arena: Arena
    forward_number: int  # the forward's place in the arena's order of captures
    called: Sequence[nn.Module]  # the modules that ran

    @property
    def bind(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Sequence[Tensor]]:
        """Returns the tensors of a call, or raises ReplayMismatch."""

    @property
    def check(self) -> Callable[[], None]:
        """Raises StaleGraph if the program has moved what the capture is bound to."""

    def replay(self, inputs: Sequence[Tensor]) -> Any: ...

    def is_open(self) -> bool:
        """Whether its forward ran and its backward can still follow."""

    def recordings(self) -> Sequence[Recording]: ...

    def static_bytes(self) -> int:
        """Memory of static tensors outside the recordings."""

    def release(self) -> None: ...


P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V", bound=Variant)


class Captured(ABC, Generic[P, R, V]):
    """A target whose calls replay; called like the original."""

    def __init__(self, spec: GraphSpec) -> None:
        self.target = spec.target
        self.record = spec.record
        self.enabled = True
        self.static_bytes = 0
        self._spec = spec
        self._original: Callable[..., R] = spec.original
        self._hooked = spec.hooked
        self._guards = list(spec.guards)
        self._own_guards = list(spec.own_guards)
        self._records = spec.backend.records
        self._observer = current_observer.get()
        self._variants: list[V] = []  # the most recently used one first

    @abstractmethod
    def _capture(self, surface: Surface, arena: Arena) -> V:
        """Capture a call of `surface` in `arena`. On an error nothing has changed."""

    @property
    def name(self) -> str:
        return self.record.name

    def enable(self) -> None:
        self.enabled = True

    def disable(self) -> None:
        """Run the original code, counted as eager, until enabled again."""
        self.enabled = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self.enabled or not self._variants:
            reason = "disabled" if self._variants else "reset"
            return self._run_original(reason, args, kwargs)
        if _dispatch_modes():
            refuse_nesting(self.name)
        try:
            variant, inputs = self._find(args, kwargs)
        except GraphError as error:
            if self._act_on(error) == "eager":
                return self._original(*args, **kwargs)
            variant = self._recapture(args, kwargs)
            inputs = Surface(args, kwargs).tensors
        if self._guards:
            check_guards(self._guards, self.name)
        if self._hooked:
            variant.arena.admit(variant.forward_number, self.name)  # before a hook has changed anything
            self._spec.hooks.run("pre_forward", "replay", self.target, args, kwargs)
        if self._own_guards:
            check_guards(self._own_guards, self.name)
        try:
            variant.check()
        except GraphError as error:
            output = self._run_stale(variant, error, inputs, args, kwargs)
        else:
            output = variant.replay(inputs)
            self._count_run()
        if self._hooked:
            self._spec.hooks.run("post_forward", "replay", self.target, args, kwargs, output)
        return output

    def _run_original(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        if not (_dispatch_modes() and _inside_capture()):  # there it becomes a part of another graph
            self.record.eager_runs[reason] += 1
        return self._original(*args, **kwargs)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[V, Sequence[Tensor]]:
        """The variant that fits the call; if none does, raise the mismatch of the most recently used one."""
        first: GraphError | None = None
        for variant in self._variants:
            try:
                inputs = variant.bind(args, kwargs)
            except ReplayMismatch as error:
                first = first or error
                continue
            if variant is not self._variants[0]:
                self._variants.remove(variant)
                self._variants.insert(0, variant)
            return variant, inputs
        assert first is not None
        raise first

    def _act_on(self, error: GraphError) -> OnMismatch:
        """Raise `error`, or count an eager run and return what to do instead."""
        policy = self._spec.on_mismatch
        if policy == "raise" or not isinstance(error, (ReplayMismatch, StaleGraph)):
            if self._observer is not None:
                self._observer.saw(self, error)
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
        """A call that fits a variant whose bindings the program has changed."""
        if self._act_on(error) == "eager":
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
        variant = self._capture(surface, Arena())  # memory of its own, so that it may replay at any time
        self.adopt(variant)
        variant.hazards.check(surface.tensors)
        return variant

    def _make_room(self) -> None:
        """Drop the least recently used variants, except those whose backward is pending."""
        surplus = len(self._variants) + 1 - MAX_VARIANTS
        if surplus <= 0:
            return
        idle = [variant for variant in reversed(self._variants) if not variant.is_open()]
        for variant in idle[:surplus]:
            self._drop(variant)
            self.record.dropped += 1

    def adopt(self, variant: V) -> None:
        """Use `variant` for calls from now on, and count it."""
        self._variants.insert(0, variant)
        if self._observer is not None:
            self._observer.captured(self, variant.called, variant.recordings())
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
        """Release the graphs; from now on calls run the original."""
        for variant in self._variants:
            variant.release()
        self._variants.clear()
        self.static_bytes = 0
        self.record.bytes_owned = 0


def identity(thing: Any) -> Any:
    """Unpickles a graph as what it was captured from."""
    return thing


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
