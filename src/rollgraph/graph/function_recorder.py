"""Recording a whole function, with any backward and optimizer step inside it.

Owns the warm-up, which finds the gradients that the function writes and creates the optimizer state that
it needs, and the recording. A recorder is used once; `function_variant.py` has what it makes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.autograd_leaves import leaves_behind
from rollgraph.graph.backend import Recording, capture_errors
from rollgraph.graph.binding import Binding
from rollgraph.graph.bound_gradients import BoundGradients
from rollgraph.graph.capture_steps import (
    Writes,
    bound_modules,
    input_hazards,
    record_pass,
    refuse_written_arguments,
    static_copies,
    writes_before_last_read,
)
from rollgraph.graph.captured import GraphSpec
from rollgraph.graph.errors import CaptureError, WarmupError
from rollgraph.graph.function_variant import NO_GRADIENT, FunctionVariant
from rollgraph.graph.live_objects import noting_calls
from rollgraph.graph.observer import creating_optimizer_state
from rollgraph.graph.output_tree import OutputTree
from rollgraph.graph.pool import Arena
from rollgraph.graph.slots import growable_lists, hook_places, optimizer_slots, slots_of, stepped_optimizers
from rollgraph.graph.surface import Surface
from rollgraph.graph.transaction import Transaction

_PATIENCE = 5  # how often to look again whether what warm-up made is free


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
        with Transaction(self._spec.target, unsaved=self._arena.unsaved) as transaction:
            self._warm_up(transaction)
            return self._record(transaction)

    def _warm_up(self, transaction: Transaction) -> None:
        """Run the function for real: find the gradients it writes, and create the optimizer state it needs."""
        spec = self._spec
        runs = max(spec.warmup, 2)  # the second run shows what happens to existing gradients
        stage = spec.backend.stage(self._arena, spec.warmup_in_pool)
        with stage, capture_errors(f"warm-up of {spec.name!r}", WarmupError):
            for run in range(runs):
                self._gradients.bind()
                with spec.first_run() if run == 0 else nullcontext():
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
            if spec.warmup_in_pool:
                self._refuse_survivors(transaction)
        transaction.undo_log.expect(self._gradients.buffers)
        refuse_written_arguments(transaction.undo_log, self._surface, self._statics)

    def _refuse_survivors(self, transaction: Transaction) -> None:
        """Raise CaptureError if something that warm-up made is still in use: replays of other graphs overwrite it."""
        gradients = self._gradients.nbytes()
        for _ in range(_PATIENCE):
            survivors = transaction.undo_log.survivors() + gradients
            if not survivors:
                return
            gc.collect()  # an autograd graph may be part of a reference cycle,
            time.sleep(0.001)  # and autograd's own thread lets go of its last node a little after the backward
        raise CaptureError(
            f"{survivors} bytes that {self._spec.name!r} made in warm-up are still in use, and other graphs of the "
            "pool would overwrite them: make that state before capturing, or capture with warmup_in_pool=False"
        )

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
            raise CaptureError(NO_GRADIENT.format(name))
