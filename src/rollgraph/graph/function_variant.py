"""A captured function that replays, for calls of one surface.

Owns what a captured function does with gradients at replay: it writes those of the leaves that it reaches
itself, and passes none through its arguments and outputs. `function_recorder.py` records it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.backend import Recording
from rollgraph.graph.binding import Binding
from rollgraph.graph.bound_gradients import BoundGradients
from rollgraph.graph.capture_steps import (
    Bind,
    checked_bind,
    own_outputs,
)
from rollgraph.graph.captured import GraphSpec
from rollgraph.graph.errors import GraphError, ReplayMismatch
from rollgraph.graph.output_tree import OutputTree
from rollgraph.graph.pool import Arena
from rollgraph.graph.static_outputs import StaticOutputs
from rollgraph.graph.surface import InputHazards, StaticTensors, Surface

_thread = threading.get_ident
NO_GRADIENT = (
    "argument {} requires grad, but a captured function passes no gradient to it: detach it, or use "
    "make_graphed_callables"
)


class _Opaque(torch.autograd.Function):
    """The autograd node of outputs that require grad in eager; its backward raises, since nothing was recorded."""

    @staticmethod
    def forward(ctx: Any, name: str, outputs: Sequence[Tensor], anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise GraphError(
            f"graph {ctx.name!r} was captured as a whole function, so no gradient passes through what it returns: run "
            "the backward inside the function, or use make_graphed_callables"
        )


_opaque: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Opaque).apply


@dataclass(eq=False)
class FunctionVariant:
    """A recorded function that replays. What it returns is valid until the next replay in its arena."""

    spec: GraphSpec
    surface: Surface
    recording: Recording
    arena: Arena
    forward_number: int
    outputs: OutputTree | None = None  # the eager backend sets it at each run
    binding: Binding = field(default_factory=lambda: Binding(()))
    gradients: BoundGradients = field(default_factory=lambda: BoundGradients(()))
    hazards: InputHazards = field(default_factory=InputHazards)
    called: Sequence[nn.Module] = ()
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
            self.gradients.count_own_references()
            self._static_outputs = own_outputs(self.recording)
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
            for tensor, known, name in zip(inputs, differentiable, names, strict=True):
                if tensor.requires_grad and not known:
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

    def is_open(self) -> bool:
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
        outputs = self.outputs
        assert outputs is not None
        if outputs.differentiable:
            self._make_opaque(tensors, outputs.differentiable)
        return outputs.build(tensors)

    def _run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        arena = self.arena
        number = self.forward_number
        gradients = self.gradients
        with self._lock:
            if not arena.low < number < arena.high:
                arena.admit(number, self.spec.name)
            if arena.owning_thread != _thread():
                arena.enter_thread(self.spec.name)
            gradients.enter()
            tensors = [t.detach() for t in self.recording.replay(inputs) if t is not None]
            gradients.leave()
        return tensors

    def _make_opaque(self, tensors: list[Tensor], places: list[int]) -> None:
        """Make outputs that require grad in eager require it here, so that a backward through them raises."""
        if torch.is_inference_mode_enabled():
            return
        with torch.enable_grad():
            attached = _opaque(self.spec.name, [tensors[place] for place in places], self._anchor)
        for place, tensor in zip(places, attached, strict=True):
            tensors[place] = tensor


def eager_variant(spec: GraphSpec, surface: Surface, arena: Arena) -> FunctionVariant:
    """A variant of the eager backend, which runs the function at each replay."""

    def thunk(inputs: Sequence[Tensor]) -> list[Tensor | None]:
        args, kwargs = surface.arguments(inputs)
        tree = OutputTree(spec.original(*args, **kwargs))
        tree.refuse_objects(spec.name)
        variant.outputs = tree
        tensors: list[Tensor | None] = [tensor.detach() for tensor in tree.tensors]
        tree.without_tensors()  # their autograd graph would tie the parameters to this stream
        return tensors

    recording = spec.backend.record(thunk, StaticTensors([]), arena, (), {})
    variant = FunctionVariant(spec, surface, recording, arena, arena.next_capture())
    return variant
