"""Steps that every capture takes, whether of a whole function or of the passes of a callable.

Owns how a pass is recorded inside a transaction, which modules a recording depends on, which uses of an
argument a static copy cannot stand for, and which outputs lie in a recording's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.backend import Backend, Recording, Thunk, capture_errors
from rollgraph.graph.captured import callable_name
from rollgraph.graph.errors import CaptureError
from rollgraph.graph.live_objects import ProgramObjects
from rollgraph.graph.pool import Arena
from rollgraph.graph.slots import fully_called_lists, modules_with
from rollgraph.graph.static_outputs import StaticOutputs
from rollgraph.graph.surface import InputHazards, Span, StaticTensors, Surface, own_copy
from rollgraph.graph.transaction import Transaction
from rollgraph.graph.undo_log import UndoLog, storage_keys, storage_of

Writes = list[list[tuple[int, Span]]]  # for each input, the storage and the span of each write
Bind = Callable[[tuple[Any, ...], dict[str, Any]], Sequence[Tensor]]


def static_copies(surface: Surface) -> StaticTensors:
    """Static tensors for the inputs of a captured call."""
    return StaticTensors([own_copy(tensor) for tensor in surface.tensors])


def record_pass(
    transaction: Transaction,
    backend: Backend,
    thunk: Thunk,
    inputs: StaticTensors,
    arena: Arena,
    what: str,
    marks: dict[Any, Any],
) -> Recording:
    """Record one pass; `what` names it in an error."""
    generators = [generator for generator, _ in transaction.undo_log.generators.values()]
    with capture_errors(f"capture of {what}"), transaction.recording(backend.executes):
        return backend.record(thunk, inputs, arena, generators, marks)


def bound_modules(
    target: Any, called: dict[int, nn.Module], tensors: Iterable[Tensor], objects: ProgramObjects
) -> list[nn.Module]:
    """The modules whose state a recording depends on."""
    found = dict(called)
    if isinstance(target, nn.Module):
        found.update((id(module), module) for module in target.modules())
    else:
        found.update((id(module), module) for module in fully_called_lists(called, objects.modules))
    found.update((id(module), module) for module in modules_with(tensors, objects.modules))
    for module in found.values():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{callable_name(target)} runs the TorchScript module {module.original_name}, whose state a graph "
                "cannot follow: capture the module that it was scripted or traced from"
            )
    return list(found.values())


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
    """For each input, what the last run wrote outside itself before it was done with that input."""
    returned = storage_keys(outputs)
    writes: Writes = []
    for static in statics.tensors:
        storage = storage_of(static)
        at_end = storage is not None and storage._cdata in returned
        writes.append(undo_log.writes_before_last_read(static, at_end))
    return writes


def input_hazards(surface: Surface, writes: Writes, recording: Recording) -> InputHazards:
    """Of those writes, the ones to memory that the recording keeps alive; other memory may be reused by now."""
    kept = storage_keys(recording.external)
    spans = [[span for key, span in written if key in kept] for written in writes]
    return InputHazards(surface.names, spans)


def checked_bind(surface: Surface, hazards: InputHazards) -> Bind:
    """A function that returns the tensors of a call that fits, and raises ReplayMismatch for any other."""
    bind = surface.quick_bind()
    if not hazards:
        return bind

    def bind_and_check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
        inputs = bind(args, kwargs)
        hazards.check(inputs)
        return inputs

    return bind_and_check


def own_outputs(recording: Recording) -> StaticOutputs:
    """The outputs that lie in the recording's own memory. Call this once the recording is sealed."""
    outside = storage_keys(recording.external)
    own = [t for t in recording.outputs if t is not None and t.untyped_storage()._cdata not in outside]
    return StaticOutputs(own)
