"""Recording: the steps that every capture shares, and the recorder of whole functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.backend import (
    Backend,
    PassFunction,
    RecordCall,
    Recording,
    capture_errors,
    creating_optimizer_state,
)
from rollgraph.graph.captured import NO_GRADIENT, FunctionVariant, GraphSpec, callable_name
from rollgraph.graph.errors import CaptureError, NeedsWarmup, ReplayMismatch, WarmupError
from rollgraph.graph.outputs import OutputTree
from rollgraph.graph.passes import leaves_behind
from rollgraph.graph.pool import Arena, becomes_free
from rollgraph.graph.state.binding import Binding, BoundGradients
from rollgraph.graph.state.slots import (
    fully_called_lists,
    growable_lists,
    hook_dicts,
    modules_with,
    optimizer_slots,
    slots_of,
    stepped_optimizers,
)
from rollgraph.graph.state.transaction import ProgramObjects, Transaction, collecting_calls
from rollgraph.graph.state.undo_log import UndoLog, storage_keys, storage_of
from rollgraph.graph.surface import InputHazards, Span, StaticTensors, Surface, static_copy

# -- the steps of a capture ------------------------------------------------------------------------
# Owns how a pass is recorded inside a transaction, which modules a recording depends on, and which uses of an argument
# rule out a static copy.

Writes = list[list[tuple[int, Span]]]  # for each input, the storage and the span of each write


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


# -- whole functions -------------------------------------------------------------------------------
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
