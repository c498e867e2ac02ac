"""One capture of a whole function, with any backward and optimizer step inside it.

`FunctionRecorder` warms the function up and records it, once; `FunctionVariant` replays it. Owns what a
captured function does with gradients: it writes those of the leaves that it reaches itself, and passes
none through its arguments and outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.autograd_leaves import leaves_behind
from rollgraph.graph.backend import Recording, capture_errors
from rollgraph.graph.binding import Binding
from rollgraph.graph.bound_gradients import BoundGradients
from rollgraph.graph.capture_steps import (
    Bind,
    Writes,
    bound_modules,
    checked_bind,
    input_hazards,
    own_outputs,
    record_pass,
    refuse_written_arguments,
    static_copies,
    writes_before_last_read,
)
from rollgraph.graph.captured import GraphSpec
from rollgraph.graph.errors import CaptureError, GraphError, ReplayMismatch, WarmupError
from rollgraph.graph.live_objects import noting_calls
from rollgraph.graph.observer import creating_optimizer_state
from rollgraph.graph.output_tree import OutputTree
from rollgraph.graph.pool import Arena
from rollgraph.graph.slots import growable_lists, hook_places, optimizer_slots, slots_of, stepped_optimizers
from rollgraph.graph.static_outputs import StaticOutputs
from rollgraph.graph.surface import InputHazards, StaticTensors, Surface
from rollgraph.graph.transaction import Transaction

_thread = threading.get_ident
_NO_GRADIENT = (
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
                    raise ReplayMismatch(_NO_GRADIENT.format(name))
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


class FunctionRecorder:
    """Captures one call of a function: warms it up, records it and binds it. Used once."""

    def __init__(self, spec: GraphSpec, surface: Surface, arena: Arena) -> None:
        self._spec = spec
        self._surface = surface
        self._arena = arena
        self._statics = static_copies(surface)
        self._called: dict[int, nn.Module] = {}
        self._gradients = BoundGradients(())
        self._writes: Writes = []
        self._last: OutputTree | None = None  # the output of the last run

    def capture(self) -> FunctionVariant:
        # The transaction has to be gone before the variant counts the references to its static tensors.
        recording, number, outputs, binding = self._warm_up_and_record()
        return FunctionVariant(
            self._spec,
            self._surface,
            recording,
            self._arena,
            number,
            outputs,
            binding,
            self._gradients,
            input_hazards(self._surface, self._writes, recording),
            list(self._called.values()),
            self._statics,
        )

    def _warm_up_and_record(self) -> tuple[Recording, int, OutputTree, Binding]:
        with Transaction(self._spec.target) as transaction:
            self._warm_up(transaction)
            return self._record(transaction)

    def _warm_up(self, transaction: Transaction) -> None:
        """Run the function for real: find the gradients it writes, and create the optimizer state it needs."""
        spec = self._spec
        runs = max(spec.warmup, 2)  # the second run shows what happens to existing gradients
        with spec.backend.stage(self._arena), capture_errors(f"warm-up of {spec.name!r}", WarmupError):
            for run in range(runs):
                self._gradients.bind()
                self._run_once(transaction, again=run > 0)
                leaves = transaction.changed_gradients()
                if len(leaves) > len(self._gradients.leaves):
                    if run == runs - 1:
                        raise CaptureError(f"a parameter first gets a gradient in run {run + 1}: raise warmup")
                    transaction.restore_gradients()
                    self._gradients = BoundGradients(leaves)
                if run == 0:
                    with creating_optimizer_state():
                        transaction.create_optimizer_state()
            self._gradients.prepare_recording()
        transaction.undo_log.expect(self._gradients.buffers)
        refuse_written_arguments(transaction.undo_log, self._surface, self._statics)

    def _run_once(self, transaction: Transaction, again: bool) -> None:
        spec = self._spec
        args, kwargs = self._surface.arguments(self._statics.tensors)
        spec.hooks.run("pre_forward", "warmup", spec.target, args, kwargs)
        with transaction.undo_log.run(again), noting_calls(self._called):
            output = spec.original(*args, **kwargs)
        spec.hooks.run("post_forward", "warmup", spec.target, args, kwargs, output)
        tree = OutputTree(output)
        _refuse_lost_gradients(self._surface, self._statics.tensors, tree.tensors)
        self._writes = writes_before_last_read(transaction.undo_log, self._statics, tree.tensors)
        self._last = tree.without_tensors()

    def _record(self, transaction: Transaction) -> tuple[Recording, int, OutputTree, Binding]:
        spec = self._spec
        args, kwargs = self._surface.arguments(self._statics.tensors)
        gradients = self._gradients
        recorded: list[Any] = []  # the output of the recording, and its tree

        def thunk(inputs: Sequence[Tensor]) -> list[Tensor | None]:
            args, kwargs = self._surface.arguments(inputs)
            output = spec.original(*args, **kwargs)
            with torch.no_grad():
                gradients.keep_results()
            tree = OutputTree(output)
            tree.refuse_objects(spec.name)
            if not recorded:  # a sanitizer runs this again after the recording
                recorded.append((output, tree))
            return [tensor.detach() for tensor in tree.tensors]

        spec.hooks.run("pre_forward", "capture", spec.target, args, kwargs)
        number = self._arena.next_capture()
        recording = record_pass(transaction, spec.backend, thunk, self._statics, self._arena, repr(spec.name), {})
        try:
            output, tree = recorded[0]
            recorded[:] = [None]  # keep nothing of the recording's autograd graph
            assert self._last is not None
            tree.refuse_change(self._last, spec.name)
            transaction.undo_log.check_reads(recording.external)
            if len(transaction.changed_gradients()) > len(gradients.leaves):
                raise CaptureError(f"a parameter of {spec.name!r} first gets a gradient in the recording: raise warmup")
            gradients.refuse_reads(recording.external)
            binding = self._bind(transaction, recording)
            spec.hooks.run("post_forward", "capture", spec.target, args, kwargs, output)
        except BaseException:
            recording.release()
            raise
        return recording, number, tree.without_tensors(), binding

    def _bind(self, transaction: Transaction, recording: Recording) -> Binding:
        leaves = self._gradients.leaves
        static = set(map(id, self._statics.tensors))
        tensors = [t for t in (*recording.external, *leaves) if id(t) not in static]
        target = self._spec.target
        modules = bound_modules(target, self._called, tensors, transaction.objects)
        optimizers = stepped_optimizers(transaction.objects, transaction.undo_log)
        slots = slots_of(target, modules, self._called, tensors, optimizers)
        slots += optimizer_slots(optimizers, transaction.undo_log)
        return Binding(
            tensors,
            slots,
            modules,
            trained=leaves,
            growable=growable_lists(modules, self._called),
            hooks=hook_places(self._called.values(), optimizers),
        )


def _refuse_lost_gradients(surface: Surface, statics: Sequence[Tensor], outputs: Iterable[Tensor]) -> None:
    """Raise CaptureError if a gradient would reach an argument: a captured function does not pass it on."""
    if not any(static.requires_grad for static in statics):
        return
    reached = set(map(id, leaves_behind(outputs)))
    for name, static in zip(surface.names, statics, strict=True):
        if id(static) in reached or static.grad is not None:
            raise CaptureError(_NO_GRADIENT.format(name))
