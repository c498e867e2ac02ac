"""A segment: one callable as a forward graph and a backward graph behind one autograd node.

Owns that autograd boundary at replay: which gradients leave it, in whose memory, and when a backward is refused.
`segment_recorder.py` makes segments. Knows nothing of how they were recorded.

The forward opens an interval of the arena and the backward closes it; `pool.py` explains intervals. A backward can
run into ten conditions. `replay_backward` handles them in this order:

    condition                                             consequence
    1. grad mode is on (`create_graph=True`)              GraphError: there is no double backward
    2. the graph was released after the forward           StaleGraph
    3. the interval is not open: it ran, or was refused   StaleGraph
    4. a saved tensor was modified in place               StaleGraph; the interval closes, since it can never run
    5. an input requires grad, but did not at capture     ReplayMismatch
    6. autograd retains its graph (`stays_open`)          the interval stays open, so that the backward can run again
    7. another open interval needs the memory             MemoryInUse; the interval opens again, so a retry may work
    8. a guard of the callable refuses                    StaleGraph; the interval opens again, so a retry may work
    9. the program still refers to earlier gradients      they are saved from the replay (`StaticOutputs.preserve`)
    10. an output got no gradient (`has_missing`)         it counts as zero; leaves that only it reaches get None
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

from rollgraph.graph.backend import Recording
from rollgraph.graph.captured import Bind, check_guards, checked_bind, static_outputs_of
from rollgraph.graph.errors import GraphError, MemoryInUse, ReplayMismatch, StaleGraph
from rollgraph.graph.outputs import OutputTree, StaticOutputs
from rollgraph.graph.passes import CallableSpec, GradientTargets, SavedVersions, leaves_under
from rollgraph.graph.passes import version as _version
from rollgraph.graph.pool import FOREVER, Arena
from rollgraph.graph.state.binding import Binding
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
    """One callable, recorded for one surface. Only the eager backend changes it, in `describe_outputs`."""

    spec: CallableSpec
    surface: Surface
    statics: StaticTensors
    arena: Arena
    forward: Recording
    backward: Recording | None
    forward_capture_index: int  # in the arena's order of captures; -1 after `release`
    backward_capture_index: int
    outputs: OutputTree
    targets: GradientTargets
    binding: Binding
    hazards: InputHazards
    saved: SavedVersions
    called_modules: Sequence[nn.Module]
    retained: list[Tensor]  # with retain_graph: results whose autograd graph keeps the activations alive

    def __post_init__(self) -> None:
        spec = self.spec
        self._boundary_leaves = self.targets.boundary_leaves
        self._anchor_gradients = self.targets.anchor_gradients
        self._differentiable = [tensor.requires_grad for tensor in self.surface.tensors]
        self._all_differentiable = all(self._differentiable)
        self._lock = self.arena.lock if spec.backend.records else threading.RLock()
        # A retained backward reads its activations again, so no later capture may reuse their memory.
        self._needed_until = FOREVER if spec.retain_graph else self.backward_capture_index
        self._static_outputs: StaticOutputs | None = None
        self._static_gradients: StaticOutputs | None = None  # the outputs of the backward
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
            self._static_outputs = static_outputs_of(self.forward)
            self.arena.static_outputs.append(self._static_outputs)
        if self.backward is not None:
            self.backward.seal(versions=False)  # StaticOutputs returns aliases, each with a new version counter
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

    def is_backward_pending(self) -> bool:
        return self.arena.is_backward_pending(self.forward_capture_index)

    def release(self) -> None:
        for recording in self.recordings():
            recording.release()
        self.retained = []
        self.outputs.drop_tensors()
        self.forward_capture_index = -1
        if self._static_outputs is not None:
            self.arena.static_outputs.remove(self._static_outputs)
            self._static_outputs = None

    # -- forward ---------------------------------------------------------------------------------

    def replay(self, inputs: Sequence[Tensor]) -> Any:
        """Replay the forward. Without a recorded backward, inputs that newly require grad make a backward raise."""
        if self.backward is not None:
            result = self._boundary(*inputs, *self._boundary_leaves)
            outputs = self.outputs
            return result if outputs.is_tensor else outputs.build(result)
        if not torch.is_grad_enabled():
            tensors: Sequence[Tensor] = self._replay_forward(inputs)
            return self.outputs.build(tensors)
        with torch.no_grad():  # autograd must not record the copy of an input that requires grad
            tensors = self._replay_forward(inputs)
        unexpected = self._inputs_newly_requiring_grad(tuple(map(_requires_grad, inputs)))
        if unexpected:
            message = _NO_GRADIENT.format(", ".join(unexpected), self.spec.name)
            tensors = _NoBackward.apply(message, tensors, *inputs)  # type: ignore[no-untyped-call]
        return self.outputs.build(tensors)

    def make_fast_call(self) -> Call:
        """Return one function that binds, checks and replays: all that a call without hooks and guards needs."""
        if self.backward is not None and self.outputs.is_tensor:
            return self._make_training_call()
        grad_enabled = self.surface.modes[0]
        if self.backward is None and not grad_enabled and self.outputs.is_tensor:
            return self._make_inference_call()
        bind = self.bind
        check = self.check
        replay = self.replay

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            inputs = bind(args, kwargs)
            check()
            return replay(inputs)

        return call

    def _make_training_call(self) -> Call:
        """The fast call for training a callable that returns one tensor."""
        bind = self.bind
        check = self.check
        boundary = self._boundary
        boundary_leaves = self._boundary_leaves

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            inputs = bind(args, kwargs)
            check()
            return boundary(*inputs, *boundary_leaves)

        return call

    def _make_inference_call(self) -> Call:
        """The fast call for inference that returns one tensor. Such graphs are small, so host time is what counts."""
        arena = self.arena
        lock = self._lock
        capture_index = self.forward_capture_index
        replay = self.forward.replay
        bind = self.bind
        check = self.check
        replay_forward = self._replay_forward

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            inputs = bind(args, kwargs)
            check()
            with lock:
                if arena.admits_after < capture_index < arena.admits_before and arena.owning_thread == _thread():
                    return replay(inputs)[0].detach()  # type: ignore[union-attr]
            return replay_forward(inputs)[0]

        return call

    def _replay_forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        arena = self.arena
        with self._lock:
            arena.admit(self.forward_capture_index, self.spec.name)
            if arena.owning_thread != _thread():
                arena.enter_thread(self.spec.name)
            return [tensor.detach() for tensor in self.forward.replay(inputs) if tensor is not None]

    def _make_boundary(self) -> Callable[..., Any]:
        """The segment's autograd node: from `(*inputs, *boundary_leaves)` to the output tensor, or a tuple of them."""
        segment = self
        arena = self.arena
        name = self.spec.name
        input_count = len(self._differentiable)
        replay = self.forward.replay
        capture_index = self.forward_capture_index
        needed_until = self._needed_until
        saved = self.saved
        versioned = saved.tensors
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
                    if not arena.admits_after < capture_index < arena.admits_before:
                        arena.admit(capture_index, name)
                    outputs = replay(tensors[:input_count])
                    if versioned:
                        saved.versions_at_forward = list(map(_version, versioned))
                    arena.open(name, capture_index, needed_until, ctx)
                finally:
                    release()
                ctx.materialize_grads = False
                if is_tensor:
                    return outputs[0].detach()  # type: ignore[union-attr]
                results = tuple([output.detach() for output in outputs if output is not None])
                if segment._opaque_outputs and not segment._inputs_newly_requiring_grad(ctx.needs_input_grad):
                    ctx.mark_non_differentiable(*[results[i] for i in segment._opaque_outputs])
                return results

            @staticmethod
            def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
                acquire()
                try:
                    return segment.replay_backward(ctx, grad_outputs)
                finally:
                    release()

        # Function.apply, but without scanning the arguments for functorch wrappers: no graph accepts those.
        apply: Callable[..., Any] = super(torch.autograd.Function, Boundary).apply
        return apply

    # -- backward --------------------------------------------------------------------------------

    def replay_backward(self, ctx: Any, grad_outputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the gradients of `(*inputs, *boundary_leaves)`. The module's header lists the conditions."""
        spec, arena, static_gradients = self.spec, self.arena, self._static_gradients
        self._check_backward(ctx)
        stays_open = spec.retain_graph and _keeps_graph()
        if not stays_open:
            arena.close(self.forward_capture_index)
        if not arena.admits_after < self.backward_capture_index < arena.admits_before:
            self._admit_backward(ctx, stays_open)
        if spec.has_replay_hooks:
            spec.hooks.run("pre_backward", "replay", spec.target)
        if spec.callable_guards:
            self._check_callable_guards(ctx, stays_open)
        if static_gradients is not None and static_gradients.is_referenced():
            static_gradients.preserve({*leaves_under(ctx), *self._boundary_leaves})
        assert self.backward is not None
        has_missing = any(map(_is_none, grad_outputs))
        if has_missing:
            filled_grad_outputs = [self._gradient_or_zeros(i, grad_outputs[i]) for i in self._differentiable_outputs]
        else:
            filled_grad_outputs = [grad_outputs[i] for i in self._differentiable_outputs]  # type: ignore[misc]
        gradients = self.backward.replay(filled_grad_outputs)
        spec.record.backward_replays += spec.backend.records
        if spec.has_replay_hooks:
            spec.hooks.run("post_backward", "replay", spec.target)
        if static_gradients is not None:
            gradients = static_gradients.collect_results()
        if has_missing:
            gradients = self._without_unreached_leaves(gradients, grad_outputs)
        if self._all_differentiable:
            return (*gradients, *self._anchor_gradients)
        remaining = iter(gradients)
        input_gradients = [next(remaining) if differentiable else None for differentiable in self._differentiable]
        return (*input_gradients, *remaining, *self._anchor_gradients)

    def _check_backward(self, ctx: Any) -> None:
        if torch.is_grad_enabled():
            raise GraphError(f"graph {self.spec.name!r} has no double backward: create_graph=True cannot pass it")
        if self.forward_capture_index < 0:
            raise StaleGraph(f"graph {self.spec.name!r} was reset between its forward and its backward")
        if not self.arena.is_open(self.forward_capture_index, ctx):
            raise StaleGraph(f"the backward of graph {self.spec.name!r} already ran, or was refused, for this forward")
        saved = self.saved
        if saved.tensors and list(map(_version, saved.tensors)) != saved.versions_at_forward:
            # This backward can never run, but autograd's threads may keep its node alive for a while.
            self.arena.close(self.forward_capture_index)
            saved.refuse_change(self.spec.name)
        if self._all_differentiable:
            return
        unexpected = self._inputs_newly_requiring_grad(ctx.needs_input_grad)
        if unexpected:
            raise ReplayMismatch(_NO_GRADIENT.format(", ".join(unexpected), self.spec.name))

    def _admit_backward(self, ctx: Any, stays_open: bool) -> None:
        try:
            self.arena.admit(self.backward_capture_index, self.spec.name)
        except MemoryInUse:
            if not stays_open:
                self.arena.open(self.spec.name, self.forward_capture_index, self._needed_until, ctx)
            raise

    def _check_callable_guards(self, ctx: Any, stays_open: bool) -> None:
        """Run the guards of this callable. If one objects, the backward can still run once the reason is gone."""
        try:
            check_guards(self.spec.callable_guards, self.spec.name)
        except BaseException:
            if not stays_open:
                self.arena.open(self.spec.name, self.forward_capture_index, self._needed_until, ctx)
            raise

    def _gradient_or_zeros(self, index: int, gradient: Tensor | None) -> Tensor:
        if gradient is not None:
            return gradient
        spec = self.outputs.specs[index]
        return torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)

    def _without_unreached_leaves(
        self, gradients: list[Tensor | None], grad_outputs: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Replace zeros by None for leaves that no output with a gradient depends on, as eager autograd does."""
        reached: set[int] = set()
        for index, gradient in enumerate(grad_outputs):
            if gradient is not None:
                reached |= self.targets.reached_leaves[index]
        leaf_indices = [leaf_index for leaf_index, differentiable in enumerate(self._differentiable) if differentiable]
        for leaf_index, parameter in enumerate(self.targets.parameters, start=len(self._differentiable)):
            if parameter not in self.spec.grad_buffers:
                leaf_indices.append(leaf_index)
        return [
            gradient if leaf_index in reached else None
            for gradient, leaf_index in zip(gradients, leaf_indices, strict=True)
        ]

    def _inputs_newly_requiring_grad(self, requires_grad: tuple[bool, ...]) -> list[str]:
        """Names of the inputs that require grad now but did not at capture."""
        flags = zip(requires_grad, self._differentiable, self.surface.names, strict=False)
        return [name for required, differentiable, name in flags if required and not differentiable]


class _NoBackward(torch.autograd.Function):
    """The autograd node of outputs without a recorded backward; its backward raises."""

    @staticmethod
    def forward(ctx: Any, message: str, outputs: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ReplayMismatch(ctx.message)
