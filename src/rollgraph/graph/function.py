"""Whole functions as one graph, with any backward and optimizer step inside: replay first, then recording."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.backend import RecordCall, Recording, capture_errors, creating_optimizer_state
from rollgraph.graph.captured import (
    Bind,
    GraphSpec,
    Writes,
    checked_bind,
    input_hazards,
    modules_to_bind,
    record_call,
    record_pass,
    refuse_written_arguments,
    static_copies,
    static_outputs_of,
    writes_before_last_read,
)
from rollgraph.graph.errors import CaptureError, GraphError, NeedsWarmup, ReplayMismatch, WarmupError
from rollgraph.graph.outputs import OutputTree, StaticOutputs
from rollgraph.graph.passes import leaves_behind
from rollgraph.graph.pool import Arena, becomes_free
from rollgraph.graph.state.binding import Binding, BoundGradients
from rollgraph.graph.state.slots import growable_lists, hook_dicts, optimizer_slots, slots_of, stepped_optimizers
from rollgraph.graph.state.transaction import Transaction, collecting_calls
from rollgraph.graph.state.undo_log import UndoLog
from rollgraph.graph.surface import InputHazards, StaticTensors, Surface

# -- replay, for calls of one surface --------------------------------------------------------------
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


def eager_variant(spec: GraphSpec, surface: Surface, arena: Arena) -> FunctionVariant:
    """A variant of the eager backend: it runs the function at each replay."""

    def run_pass(inputs: Sequence[Tensor]) -> list[Tensor | None]:
        args, kwargs = surface.arguments(inputs)
        tree = OutputTree(spec.original(*args, **kwargs))
        tree.refuse_objects(spec.name)
        variant.outputs = tree
        tensors: list[Tensor | None] = [tensor.detach() for tensor in tree.tensors]
        tree.drop_tensors()  # their autograd graph would tie the parameters to this stream
        return tensors

    recording = spec.backend.record(run_pass, StaticTensors([]), arena, (), {})
    variant = FunctionVariant(spec, surface, recording, arena, arena.next_capture_index())
    return variant


# -- recording -------------------------------------------------------------------------------------
# Owns warm-up and recording. Warm-up finds the gradients that the function writes, and creates optimizer state that the
# function needs. A recorder is used once.

_TIMEOUT_S = 0.5  # seconds after which we assume that memory still in use is kept on purpose


class FunctionRecorder:
    """Captures one call of a function: warms it up, records it and binds it. Used once.

    With `saves_all`, memory passed to `GraphPool.leave_unsaved` is restored like any other memory.
    """

    def __init__(self, spec: GraphSpec, surface: Surface, arena: Arena, saves_all: bool = False) -> None:
        self._spec = spec
        self._surface = surface
        self._arena = arena
        self._unsaved: Container[int] = () if saves_all else arena.unsaved
        self._statics = static_copies(surface)
        self._called_modules: dict[int, nn.Module] = {}
        self._gradients = BoundGradients(())
        self._writes: Writes = []
        self._last_output: OutputTree | None = None  # of the last warm-up run, without its tensors

    def capture(self) -> FunctionVariant:
        # The transaction must be gone before the variant counts references to its static tensors.
        return self._variant(*self._warm_up_and_record())

    def record_call(self, record: RecordCall) -> FunctionVariant:
        """Record a call as it runs. Its writes and random draws stay; on an error they are rolled back.

        Raises NeedsWarmup if this call alone does not show what a replay has to do, and ReplayMismatch if the function
        writes memory of an argument. In both cases the call can be repeated.
        """
        return self._variant(*self._call_and_record(record))

    def _variant(
        self, recording: Recording, capture_index: int, outputs: OutputTree, binding: Binding
    ) -> FunctionVariant:
        return FunctionVariant(
            self._spec,
            self._surface,
            recording,
            self._arena,
            capture_index,
            outputs,
            binding,
            self._gradients,
            input_hazards(self._surface, self._writes, recording),
            list(self._called_modules.values()),
            self._statics,
        )

    def _warm_up_and_record(self) -> tuple[Recording, int, OutputTree, Binding]:
        with Transaction(self._spec.target, unsaved=self._unsaved) as transaction:
            self._warm_up(transaction)
            return self._record(transaction)

    def _warm_up(self, transaction: Transaction) -> None:
        """Run the function for real, to find the gradients it writes and to create optimizer state it needs."""
        spec = self._spec
        runs = max(spec.warmup, 2)  # the second run shows what happens to existing gradients
        stream_context = spec.backend.stream_context(self._arena, spec.warmup_in_pool)
        with stream_context, capture_errors(f"warm-up of {spec.name!r}", WarmupError):
            for run in range(runs):
                self._gradients.bind()
                with spec.first_run() if run == 0 else nullcontext():
                    self._run_warmup(transaction, is_rerun=run > 0)
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
            if spec.warmup_in_pool:
                self._refuse_surviving_memory(transaction)
        transaction.undo_log.allow_writes(self._gradients.buffers)
        refuse_written_arguments(transaction.undo_log, self._surface, self._statics)

    def _refuse_surviving_memory(self, transaction: Transaction) -> None:
        """Raise CaptureError if memory from warm-up is still in use: replays of other graphs would overwrite it."""
        gradients = self._gradients.nbytes()

        def count_survivors() -> int:
            return transaction.undo_log.surviving_bytes() + gradients

        if becomes_free(count_survivors, _TIMEOUT_S):
            return
        raise CaptureError(
            f"{count_survivors()} bytes that {self._spec.name!r} made in warm-up are still in use, and other graphs of "
            "the pool would overwrite them: make that state before capturing, or capture with warmup_in_pool=False"
        )

    def _run_warmup(self, transaction: Transaction, is_rerun: bool) -> None:
        spec = self._spec
        args, kwargs = self._surface.arguments(self._statics.tensors)
        spec.hooks.run("pre_forward", "warmup", spec.target, args, kwargs)
        with transaction.undo_log.run(is_rerun), collecting_calls(self._called_modules):
            output = spec.original(*args, **kwargs)
        spec.hooks.run("post_forward", "warmup", spec.target, args, kwargs, output)
        tree = OutputTree(output)
        _refuse_lost_gradients(self._surface, self._statics.tensors, tree.tensors)
        self._writes = writes_before_last_read(transaction.undo_log, self._statics, tree.tensors)
        self._last_output = tree.drop_tensors()

    def _record(self, transaction: Transaction) -> tuple[Recording, int, OutputTree, Binding]:
        spec = self._spec
        args, kwargs = self._surface.arguments(self._statics.tensors)
        gradients = self._gradients
        output_and_tree: list[Any] = []  # set by the first run of the pass, as one pair

        def run_pass(inputs: Sequence[Tensor]) -> list[Tensor | None]:
            """What is recorded: the original function, and then copies of its new gradients."""
            args, kwargs = self._surface.arguments(inputs)
            output = spec.original(*args, **kwargs)
            with torch.no_grad():
                gradients.copy_gradients_out_of_pool()
            tree = OutputTree(output)
            tree.refuse_objects(spec.name)
            if not output_and_tree:  # a sanitizer runs this again after the recording
                output_and_tree.append((output, tree))
            return [tensor.detach() for tensor in tree.tensors]

        spec.hooks.run("pre_forward", "capture", spec.target, args, kwargs)
        capture_index = self._arena.next_capture_index()
        recording = record_pass(transaction, spec.backend, run_pass, self._statics, self._arena, repr(spec.name), {})
        try:
            output, tree = output_and_tree[0]
            output_and_tree[:] = [None]  # keep nothing of the recording's autograd graph
            assert self._last_output is not None
            tree.refuse_change(self._last_output, spec.name)
            transaction.undo_log.check_reads(recording.external)
            if len(transaction.changed_gradients()) > len(gradients.leaves):
                raise CaptureError(f"a parameter of {spec.name!r} first gets a gradient in the recording: raise warmup")
            gradients.refuse_reads(recording.external)
            binding = self._bind(transaction, recording)
            spec.hooks.run("post_forward", "capture", spec.target, args, kwargs, output)
        except BaseException:
            recording.release()
            raise
        return recording, capture_index, tree.drop_tensors(), binding

    def _call_and_record(self, record: RecordCall) -> tuple[Recording, int, OutputTree, Binding]:
        spec = self._spec
        output_trees: list[OutputTree] = []  # the structure of the one output

        with Transaction(spec.target, unsaved=self._unsaved) as transaction:
            undo_log = transaction.undo_log

            def run_pass(inputs: Sequence[Tensor]) -> list[Tensor | None]:
                """Call the function, and refuse an output that replays could not return. Runs once, while recorded."""
                args, kwargs = self._surface.arguments(inputs)
                tree = OutputTree(spec.original(*args, **kwargs))
                tree.refuse_objects(spec.name)
                tree.refuse_constants(spec.name)
                _refuse_lost_gradients(self._surface, inputs, tree.tensors)
                outputs: list[Tensor | None] = [tensor.detach() for tensor in tree.tensors]
                self._writes = writes_before_last_read(undo_log, self._statics, tree.tensors)
                output_trees.append(tree.drop_tensors())  # the autograd graph must not count as retained
                _refuse_retained_memory(undo_log, outputs)
                return outputs

            try:
                with collecting_calls(self._called_modules):
                    recording = record_call(transaction, record, run_pass, self._statics, repr(spec.name))
                refuse_written_arguments(undo_log, self._surface, self._statics)
                input_hazards(self._surface, self._writes, recording).check(self._surface.tensors)
                transaction.refuse_new_gradients()
                transaction.refuse_new_optimizer_state()
            except (NeedsWarmup, ReplayMismatch) as error:
                if undo_log.wrote_unsaved:
                    raise CaptureError(f"{spec.name!r} cannot be recorded by its first call: {error}") from error
                raise
            self._gradients = BoundGradients(transaction.changed_gradients())
            binding = self._bind(transaction, recording)
            transaction.commit()
        return recording, self._arena.next_capture_index(), output_trees[0], binding

    def _bind(self, transaction: Transaction, recording: Recording) -> Binding:
        leaves = self._gradients.leaves
        static = set(map(id, self._statics.tensors))
        tensors = [t for t in (*recording.external, *leaves) if id(t) not in static]
        target = self._spec.target
        modules = modules_to_bind(target, self._called_modules, tensors, transaction.objects)
        optimizers = stepped_optimizers(transaction.objects, transaction.undo_log)
        slots = slots_of(target, modules, self._called_modules, tensors, optimizers)
        slots += optimizer_slots(optimizers, transaction.undo_log)
        return Binding(
            tensors,
            slots,
            modules,
            trained=leaves,
            growable=growable_lists(modules, self._called_modules),
            hooks=hook_dicts(self._called_modules.values(), optimizers),
        )


def _refuse_retained_memory(undo_log: UndoLog, outputs: Iterable[Tensor | None]) -> None:
    """Raise NeedsWarmup if the program keeps a tensor that the first call created: later calls may start from it."""
    tensors = Counter(output.untyped_storage()._cdata for output in outputs if output is not None)
    if not becomes_free(lambda: undo_log.has_references_besides(tensors), _TIMEOUT_S):
        raise NeedsWarmup("the first call makes a tensor that it keeps")


def _refuse_lost_gradients(surface: Surface, statics: Sequence[Tensor], outputs: Iterable[Tensor]) -> None:
    """Raise CaptureError if a gradient would reach an argument: a captured function passes none through."""
    if not any(static.requires_grad for static in statics):
        return
    reached = set(map(id, leaves_behind(outputs)))
    for name, static in zip(surface.names, statics, strict=True):
        if id(static) in reached or static.grad is not None:
            raise CaptureError(NO_GRADIENT.format(name))
