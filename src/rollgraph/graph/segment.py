"""A segment: one callable as a forward graph and a backward graph behind one autograd node.

Owns that autograd boundary at replay: which gradients leave it, in whose memory, and when a backward is
refused. `segment_recorder.py` makes segments. Knows nothing of how they were recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.autograd_leaves import leaves_under
from rollgraph.graph.backend import Recording
from rollgraph.graph.binding import Binding
from rollgraph.graph.capture_steps import Bind, checked_bind, own_outputs
from rollgraph.graph.errors import GraphError, MemoryInUse, ReplayMismatch, StaleGraph
from rollgraph.graph.hooks import check_guards
from rollgraph.graph.output_tree import OutputTree
from rollgraph.graph.passes import CallableSpec, GradientTargets
from rollgraph.graph.pool import FOREVER, Arena
from rollgraph.graph.saved_versions import SavedVersions
from rollgraph.graph.saved_versions import version as _version
from rollgraph.graph.static_outputs import StaticOutputs
from rollgraph.graph.surface import InputHazards, StaticTensors, Surface

_requires_grad = attrgetter("requires_grad")
_is_none = partial(is_, None)
_thread = threading.get_ident
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # of the backward that is running
_NO_GRADIENT = (
    "input {} of graph {!r} requires grad, but did not at capture, so its gradient was not recorded: capture with a "
    "sample that requires grad"
)
Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]


@dataclass(eq=False)
class ReplayableSegment:
    """One callable for one surface, recorded. Only the eager backend changes it, in `describe_outputs`."""

    spec: CallableSpec
    surface: Surface
    statics: StaticTensors
    arena: Arena
    forward: Recording
    backward: Recording | None
    forward_number: int  # -1 after `release`
    backward_number: int
    outputs: OutputTree
    targets: GradientTargets
    binding: Binding
    hazards: InputHazards
    saved: SavedVersions
    called: Sequence[nn.Module]
    retained: list[Tensor]  # results whose autograd graph keeps the activations, under retain_graph

    def __post_init__(self) -> None:
        spec = self.spec
        self._passed = self.targets.passed
        self._no_gradients = self.targets.no_gradients
        self._differentiable = [tensor.requires_grad for tensor in self.surface.tensors]
        self._all_differentiable = all(self._differentiable)
        self._lock = self.arena.lock if spec.backend.records else threading.RLock()
        # A retained backward reads its activations again, so no capture may lie in their memory.
        self._needed_until = FOREVER if spec.retain_graph else self.backward_number
        self._static_outputs: StaticOutputs | None = None
        self._static_gradients: StaticOutputs | None = None  # the results of the backward
        self.describe_outputs(self.outputs)
        self._seal()
        self.bind: Bind = checked_bind(self.surface, self.hazards)
        self.check: Callable[[], None] = self.binding.check
        if self.backward is not None:
            self._boundary = self._make_boundary()

    def describe_outputs(self, outputs: OutputTree) -> None:
        self.outputs = outputs
        self._differentiable_outputs = outputs.differentiable
        self._opaque_outputs = outputs.non_differentiable

    def _seal(self) -> None:
        self.forward.seal()
        if self.spec.backend.records:
            self._static_outputs = own_outputs(self.forward)
            self.arena.static_outputs.append(self._static_outputs)
        if self.backward is not None:
            self.backward.seal(versions=False)  # StaticOutputs returns aliases with version counters of their own
            if self.spec.backend.records:
                self._static_gradients = StaticOutputs(self.backward.outputs)

    def recordings(self) -> Sequence[Recording]:
        if self.backward is None:
            return (self.forward,)
        return (self.forward, self.backward)

    def static_bytes(self) -> int:
        """Memory of the static inputs and gradients."""
        if self._static_gradients is None:
            return self.statics.nbytes()
        return self.statics.nbytes() + self._static_gradients.nbytes()

    def is_open(self) -> bool:
        return self.arena.waits_for(self.forward_number)

    def release(self) -> None:
        for recording in self.recordings():
            recording.release()
        self.retained = []
        self.outputs.without_tensors()
        self.forward_number = -1
        if self._static_outputs is not None:
            self.arena.static_outputs.remove(self._static_outputs)
            self._static_outputs = None

    # -- forward ---------------------------------------------------------------------------------

    def replay(self, inputs: Sequence[Tensor]) -> Any:
        if self.backward is not None:
            result = self._boundary(*inputs, *self._passed)
            outputs = self.outputs
            return result if outputs.is_tensor else outputs.build(result)
        if not torch.is_grad_enabled():
            tensors: Sequence[Tensor] = self._replay_forward(inputs)
            return self.outputs.build(tensors)
        with torch.no_grad():
            tensors = self._replay_forward(inputs)
        unexpected = self._newly_required(tuple(map(_requires_grad, inputs)))
        if unexpected:
            message = _NO_GRADIENT.format(", ".join(unexpected), self.spec.name)
            tensors = _NoBackward.apply(message, tensors, *inputs)  # type: ignore[no-untyped-call]
        return self.outputs.build(tensors)

    def short_way(self) -> Call:
        """Bind, check and replay in one function, for calls that need nothing else."""
        if self.backward is not None and self.outputs.is_tensor:
            return self._call_boundary()
        grad_enabled = self.surface.modes[0]
        if self.backward is None and not grad_enabled and self.outputs.is_tensor:
            return self._call_without_gradients()
        bind = self.bind
        check = self.check
        replay = self.replay

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            inputs = bind(args, kwargs)
            check()
            return replay(inputs)

        return call

    def _call_boundary(self) -> Call:
        """Training that returns one tensor."""
        bind = self.bind
        check = self.check
        boundary = self._boundary
        passed = self._passed

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            inputs = bind(args, kwargs)
            check()
            return boundary(*inputs, *passed)

        return call

    def _call_without_gradients(self) -> Call:
        """Inference that returns one tensor: the call that costs almost nothing but host time."""
        arena = self.arena
        lock = self._lock
        number = self.forward_number
        replay = self.forward.replay
        bind = self.bind
        check = self.check
        replay_forward = self._replay_forward

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            inputs = bind(args, kwargs)
            check()
            with lock:
                if arena.low < number < arena.high and arena.owning_thread == _thread():
                    return replay(inputs)[0].detach()  # type: ignore[union-attr]
            return replay_forward(inputs)[0]

        return call

    def _replay_forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        arena = self.arena
        with self._lock:
            arena.admit(self.forward_number, self.spec.name)
            if arena.owning_thread != _thread():
                arena.enter_thread(self.spec.name)
            return [tensor.detach() for tensor in self.forward.replay(inputs) if tensor is not None]

    def _make_boundary(self) -> Callable[..., Any]:
        """The segment's autograd node: from `(*inputs, *passed)` to the output tensor, or to a tuple of them."""
        segment = self
        arena = self.arena
        name = self.spec.name
        inputs = len(self._differentiable)
        replay = self.forward.replay
        number = self.forward_number
        needed_until = self._needed_until
        saved = self.saved
        read = saved.tensors
        acquire = self._lock.acquire
        release = self._lock.release
        is_tensor = self.outputs.is_tensor

        class Boundary(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *tensors: Tensor) -> Any:
                acquire()
                try:
                    if arena.owning_thread != _thread():
                        arena.enter_thread(name)
                    if not arena.low < number < arena.high:
                        arena.admit(number, name)
                    outputs = replay(tensors[:inputs])
                    if read:
                        saved.noted = list(map(_version, read))
                    arena.open(name, number, needed_until, ctx)
                finally:
                    release()
                ctx.materialize_grads = False
                if is_tensor:
                    return outputs[0].detach()  # type: ignore[union-attr]
                results = tuple([output.detach() for output in outputs if output is not None])
                if segment._opaque_outputs and not segment._newly_required(ctx.needs_input_grad):
                    ctx.mark_non_differentiable(*[results[i] for i in segment._opaque_outputs])
                return results

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
                acquire()
                try:
                    return segment.replay_backward(ctx, gradients)
                finally:
                    release()

        # Function.apply without its scan of the arguments for functorch wrappers, which no graph can take.
        apply: Callable[..., Any] = super(torch.autograd.Function, Boundary).apply
        return apply

    # -- backward --------------------------------------------------------------------------------

    def replay_backward(self, ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The gradients of `(*inputs, *passed)`."""
        spec, arena, static = self.spec, self.arena, self._static_gradients
        self._check_backward(ctx)
        again = spec.retain_graph and _keeps_graph()
        if not again:
            arena.close(self.forward_number)
        if not arena.low < self.backward_number < arena.high:
            self._admit_backward(ctx, again)
        if spec.hooked:
            spec.hooks.run("pre_backward", "replay", spec.target)
        if spec.own_guards:
            self._ask_guards(ctx, again)
        if static is not None and static.referenced():
            static.preserve({*leaves_under(ctx), *self._passed})
        assert self.backward is not None
        absent = any(map(_is_none, gradients))
        if absent:
            incoming = [self._incoming(i, gradients[i]) for i in self._differentiable_outputs]
        else:
            incoming = [gradients[i] for i in self._differentiable_outputs]  # type: ignore[misc]
        made = self.backward.replay(incoming)
        spec.record.backward_replays += spec.backend.records
        if spec.hooked:
            spec.hooks.run("post_backward", "replay", spec.target)
        if static is not None:
            made = static.take()
        if absent:
            made = self._without_unreached(made, gradients)
        if self._all_differentiable:
            return (*made, *self._no_gradients)
        supply = iter(made)
        of_inputs = [next(supply) if differentiable else None for differentiable in self._differentiable]
        return (*of_inputs, *supply, *self._no_gradients)

    def _check_backward(self, ctx: Any) -> None:
        if torch.is_grad_enabled():
            raise GraphError(f"graph {self.spec.name!r} has no double backward: create_graph=True cannot pass it")
        if self.forward_number < 0:
            raise StaleGraph(f"graph {self.spec.name!r} was reset between its forward and its backward")
        if not self.arena.is_open(self.forward_number, ctx):
            raise StaleGraph(f"the backward of graph {self.spec.name!r} already ran, or was refused, for this forward")
        saved = self.saved
        if saved.tensors and list(map(_version, saved.tensors)) != saved.noted:
            self.arena.close(self.forward_number)  # it can never run; autograd's threads may hold its node for a while
            saved.refuse_change(self.spec.name)
        if self._all_differentiable:
            return
        unexpected = self._newly_required(ctx.needs_input_grad)
        if unexpected:
            raise ReplayMismatch(_NO_GRADIENT.format(", ".join(unexpected), self.spec.name))

    def _admit_backward(self, ctx: Any, again: bool) -> None:
        try:
            self.arena.admit(self.backward_number, self.spec.name)
        except MemoryInUse:
            if not again:
                self.arena.open(self.spec.name, self.forward_number, self._needed_until, ctx)
            raise

    def _ask_guards(self, ctx: Any, again: bool) -> None:
        """What is refused now can still run, once the reason is gone."""
        try:
            check_guards(self.spec.own_guards, self.spec.name)
        except BaseException:
            if not again:
                self.arena.open(self.spec.name, self.forward_number, self._needed_until, ctx)
            raise

    def _incoming(self, index: int, gradient: Tensor | None) -> Tensor:
        if gradient is not None:
            return gradient
        spec = self.outputs.specs[index]
        return torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)

    def _without_unreached(self, made: list[Tensor | None], incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
        """None for each leaf that no output with a gradient depends on, as in eager; the recording gives zeros."""
        reached: set[int] = set()
        for index, gradient in enumerate(incoming):
            if gradient is not None:
                reached |= self.targets.reached[index]
        places = [place for place, differentiable in enumerate(self._differentiable) if differentiable]
        for place, parameter in enumerate(self.targets.parameters, start=len(self._differentiable)):
            if parameter not in self.spec.grad_buffers:
                places.append(place)
        return [gradient if place in reached else None for gradient, place in zip(made, places, strict=True)]

    def _newly_required(self, needs: tuple[bool, ...]) -> list[str]:
        """Names of the inputs that require grad now but did not at capture."""
        flags = zip(needs, self._differentiable, self.surface.names, strict=False)
        return [name for needed, differentiable, name in flags if needed and not differentiable]


class _NoBackward(torch.autograd.Function):
    """The autograd node of outputs without a recorded backward; its backward raises."""

    @staticmethod
    def forward(ctx: Any, message: str, outputs: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ReplayMismatch(ctx.message)
