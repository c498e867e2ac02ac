"""Recording a callable as a segment: warm-up, forward, backward, and the binding of both to the program's memory.

Owns the order in which the passes of several callables are recorded, and the memory of their gradients. A recorder is
used once and makes a segment (`segment.py`). Knows nothing of `GraphedCallable`, which replaces a module's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.backend import EagerRecording, PassFunction, Recording, capture_errors
from rollgraph.graph.errors import CaptureError, WarmupError
from rollgraph.graph.function_recorder import (
    Writes,
    input_hazards,
    modules_to_bind,
    record_pass,
    refuse_written_arguments,
    writes_before_last_read,
)
from rollgraph.graph.hooks import run_warmup_hook
from rollgraph.graph.outputs import allocate_together
from rollgraph.graph.passes import CallablePasses, CallableSpec, SavedVersions
from rollgraph.graph.pool import Arena
from rollgraph.graph.schedule import Schedule
from rollgraph.graph.segment import ReplayableSegment
from rollgraph.graph.state.binding import Binding
from rollgraph.graph.state.slots import growable_lists, hook_dicts, slots_of
from rollgraph.graph.state.transaction import ProgramObjects, Transaction, collecting_calls
from rollgraph.graph.surface import InputHazards, StaticTensors, Surface, TensorSpec

WarmupHook = Callable[[Any], None]


class SegmentRecorder:
    """Warms up and records one callable for one surface."""

    def __init__(self, spec: CallableSpec, surface: Surface, statics: StaticTensors, arena: Arena) -> None:
        self.spec = spec
        self.arena = arena
        self.passes = CallablePasses(spec, surface)
        self._surface = surface
        self._statics = statics  # the inputs of the forward graph
        # Filled by the warm-up.
        # The shape (a meta tensor) and device of each gradient that the backward returns; None for one that is missing.
        self.gradient_templates: list[tuple[Tensor, torch.device] | None] = []
        self._writes: Writes = [[] for _ in surface.tensors]  # for each input, the writes before it is last read
        self._called_modules: dict[int, nn.Module] = {}  # by id
        # Filled by the recording.
        self._forward: Recording | None = None
        self._backward: Recording | None = None  # stays None if no output requires a gradient
        self._forward_capture_index = 0  # its place in the arena's order of captures
        self._backward_capture_index = 0
        self._binding = Binding(())  # what must stay as it was at the capture
        self._hazards = InputHazards()  # arguments must not lie in memory that the forward writes before it reads them
        self._saved_versions = SavedVersions()  # of tensors that must not change between forward and backward
        self._backend_state: dict[Any, Any] = {}  # the backend keeps it from recording the forward to the backward

    # -- warm-up ---------------------------------------------------------------------------------

    def warm_up(self, transaction: Transaction, runs: int) -> None:
        passes = self.passes
        run = 0
        shared = -1
        # The last run must have the same leaves as the recording. A newly shared parameter changes them.
        while run < runs or shared != len(passes.shared):
            run += 1
            shared = len(passes.shared)
            self._run_warmup(transaction, is_rerun=run > 1)
        refuse_written_arguments(transaction.undo_log, self._surface, self._statics)

    def _run_warmup(self, transaction: Transaction, is_rerun: bool) -> None:
        """Run the forward and the backward eagerly once, and note what the recording needs to know about both."""
        passes = self.passes
        target = self.spec.target
        hooks = self.spec.hooks
        args, kwargs = self._surface.arguments(self._statics.tensors)
        hooks.run("pre_forward", "warmup", target, args, kwargs)
        with transaction.undo_log.run(is_rerun), collecting_calls(self._called_modules):
            passes.run_forward(self._statics.tensors)
        self._writes = writes_before_last_read(transaction.undo_log, self._statics, passes.results)
        hooks.run("post_forward", "warmup", target, args, kwargs, passes.raw_output)
        passes.find_gradient_targets()
        if passes.targets.has_backward:
            hooks.run("pre_backward", "warmup", target)
            grad_outputs = [torch.zeros_like(result) for result in passes.results if result.requires_grad]
            # Programs call `backward` outside of autocast, even if the forward ran inside.
            with transaction.undo_log.run(), torch._C._DisableAutocast():
                gradients = passes.run_backward(grad_outputs)
            self.gradient_templates = list(map(_template, gradients))
            del gradients
            hooks.run("post_backward", "warmup", target)
        passes.drop_results()

    def reuse_warmup_of(self, warmed_up: SegmentRecorder, transaction: Transaction) -> None:
        """Reuse the warm-up of another microbatch. Run this recorder's inputs once only if their surface differs."""
        if str(self._surface) != str(warmed_up._surface):
            self.warm_up(transaction, 1)
        self.gradient_templates = self.gradient_templates or warmed_up.gradient_templates
        reached_leaves = self.passes.targets.reached_leaves or warmed_up.passes.targets.reached_leaves
        self.passes.targets = replace(warmed_up.passes.targets, reached_leaves=reached_leaves)
        self.passes.shared = warmed_up.passes.shared
        if not self.spec.backend.records:  # a recording replaces them anyway
            self.passes.outputs = self.passes.outputs or warmed_up.passes.outputs
        self._called_modules = warmed_up._called_modules
        self._writes = warmed_up._writes

    # -- recording -------------------------------------------------------------------------------

    def record_forward(self, transaction: Transaction) -> None:
        spec = self.spec
        passes = self.passes
        args, kwargs = self._surface.arguments(self._statics.tensors)
        spec.hooks.run("pre_forward", "capture", spec.target, args, kwargs)
        self._forward_capture_index = self.arena.next_capture_index()
        warmup_outputs = passes.outputs
        recording = self._record(transaction, passes.run_forward, self._statics, "forward")
        self._forward = recording
        if spec.backend.records:
            passes.find_gradient_targets()
            if warmup_outputs is not None and passes.outputs is not None:
                passes.outputs.refuse_change(warmup_outputs, spec.name)
            self._hazards = input_hazards(self._surface, self._writes, recording)
        transaction.undo_log.check_reads(recording.external)
        self._bind(recording, transaction.objects)
        if passes.targets.has_backward and spec.backend.records:
            self._saved_versions = SavedVersions.of(passes.results, self._changeable_tensors(recording))
        spec.hooks.run("post_forward", "capture", spec.target, args, kwargs, passes.raw_output)

    def record_backward(self, transaction: Transaction) -> None:
        spec = self.spec
        passes = self.passes
        if not passes.targets.has_backward:
            passes.drop_results()
            return
        spec.hooks.run("pre_backward", "capture", spec.target)
        self._backward_capture_index = self.arena.next_capture_index()
        grad_outputs = StaticTensors(self._scratch())
        if passes.static_gradients is not None:
            transaction.undo_log.allow_writes(buffer for buffer in passes.static_gradients if buffer is not None)
        with torch._C._DisableAutocast():
            self._backward = self._record(transaction, passes.run_backward, grad_outputs, "backward")
        self._check_unused()
        spec.hooks.run("post_backward", "capture", spec.target)
        if not spec.retain_graph:
            passes.drop_results()

    def _record(
        self, transaction: Transaction, run_pass: PassFunction, inputs: StaticTensors, pass_name: str
    ) -> Recording:
        label = f"{self.spec.name!r} ({pass_name})"
        return record_pass(transaction, self.spec.backend, run_pass, inputs, self.arena, label, self._backend_state)

    def _scratch(self) -> list[Tensor]:
        """Static tensors for grad_outputs. They are in use only during a backward, so all segments share them."""
        buffers: list[Tensor] = []
        scratch = self.arena.scratch
        differentiable = [result for result in self.passes.results if result.requires_grad]
        for index, result in enumerate(differentiable):
            key = (index, TensorSpec.of(result), result.stride())
            if key not in scratch:
                scratch[key] = torch.empty_like(result, requires_grad=False)
            buffers.append(scratch[key])
        return buffers

    def _check_unused(self) -> None:
        unused = self.passes.unused
        if not unused or self.spec.allow_unused:
            return
        inputs = zip(self._surface.names, self.passes.differentiable, strict=True)
        names = [f"input {name}" for name, differentiable in inputs if differentiable]
        parameter_names: dict[int, str] = {}
        if self.spec.module is not None:
            parameter_names = {id(p): name for name, p in self.spec.module.named_parameters()}
        names += [f"parameter {parameter_names.get(id(p), tuple(p.shape))}" for p in self.passes.targets.parameters]
        raise CaptureError(
            f"{', '.join(names[index] for index in unused)} of {self.spec.name!r} did not take part in the output: "
            "pass allow_unused_input=True if that is intended"
        )

    def _bind(self, recording: Recording, objects: ProgramObjects) -> None:
        spec = self.spec
        parameters = self.passes.targets.parameters
        static_ids = {id(t) for t in (*self._statics.tensors, *self.passes.aliases.values())}
        tensors = [t for t in (*recording.external, *parameters) if id(t) not in static_ids and t.is_leaf]
        modules = modules_to_bind(spec.target, self._called_modules, tensors, objects)
        if spec.module is not None:
            tensors += [*spec.module.parameters(), *spec.module.buffers()]
        buffered = [p for p in parameters if p in spec.grad_buffers]
        self._binding = Binding(
            tensors,
            slots_of(spec.target, modules, self._called_modules, tensors),
            modules,
            trained=buffered,
            sums=[spec.grad_buffers[p] for p in buffered],
            growable=growable_lists(modules, self._called_modules),
            hooks=hook_dicts(self._called_modules.values()),
        )

    def _changeable_tensors(self, recording: Recording) -> dict[str, Tensor]:
        """By name, the tensors that the program can modify between forward and backward: bound tensors and outputs."""
        names: dict[int, str] = {}
        if self.spec.module is not None:
            names = {id(p): f"parameter {name}" for name, p in self.spec.module.named_parameters()}
            names.update({id(b): f"buffer {name}" for name, b in self.spec.module.named_buffers()})
        tensors: dict[str, Tensor] = {}
        for tensor in self._binding.tensors:
            name = names.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)} ({len(tensors)})")
            tensors[name] = tensor
        for index, output in enumerate(recording.outputs):
            if output is not None:
                tensors[f"output {index}"] = output
        return tensors

    # -- the end ---------------------------------------------------------------------------------

    def finish(self) -> ReplayableSegment:
        """Make the segment that replays both recordings."""
        passes = self.passes
        passes.aliases = {}
        passes.static_gradients = None
        forward = self._forward
        if not self.spec.backend.records:
            forward = EagerRecording(lambda inputs: _run_eagerly(segment, passes, inputs))
        assert forward is not None
        assert passes.outputs is not None
        segment = ReplayableSegment(
            self.spec,
            self._surface,
            self._statics,
            self.arena,
            forward,
            self._backward,
            self._forward_capture_index,
            self._backward_capture_index,
            passes.outputs,
            passes.targets,
            self._binding,
            self._hazards,
            self._saved_versions,
            list(self._called_modules.values()),
            retained=passes.results,
        )
        return segment

    def release(self) -> None:
        """Release the recordings after a failure."""
        for recording in (self._forward, self._backward):
            if recording is not None:
                recording.release()
        self.passes.drop_results()


def _run_eagerly(segment: ReplayableSegment, passes: CallablePasses, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """A forward of the eager backend. The structure of its output may differ from run to run."""
    results = passes.run_forward(inputs)
    assert passes.outputs is not None
    segment.describe_outputs(passes.outputs)
    return results


def _template(gradient: Tensor | None) -> tuple[Tensor, torch.device] | None:
    if gradient is None:
        return None
    return torch.empty_like(gradient, device="meta"), gradient.device


def capture_segments(
    recorders: Sequence[SegmentRecorder],
    schedule: Schedule,
    warmup: int,
    pre_warmup_hook: WarmupHook | None = None,
    post_warmup_hook: WarmupHook | None = None,
) -> list[ReplayableSegment]:
    """Warm up each callable, then record every pass in the order of its replays."""
    for recorder in recorders:
        recorder.passes.capturing = recorder.spec.backend.records
    try:
        # The transaction must be gone before the segments count references to their static tensors.
        _record_all(recorders, schedule, warmup, pre_warmup_hook, post_warmup_hook)
    except BaseException:
        for recorder in recorders:
            recorder.release()
        raise
    finally:
        for recorder in recorders:
            recorder.passes.capturing = False
    return [recorder.finish() for recorder in recorders]


def _record_all(
    recorders: Sequence[SegmentRecorder],
    schedule: Schedule,
    warmup: int,
    pre_warmup_hook: WarmupHook | None,
    post_warmup_hook: WarmupHook | None,
) -> None:
    backend = recorders[0].spec.backend
    runs = warmup if backend.records else 1
    targets = [recorder.spec.target for recorder in recorders]
    with Transaction(*targets, unsaved=recorders[0].arena.unsaved) as transaction:
        for first, *later_microbatches in _microbatches(recorders, schedule):
            run_warmup_hook(pre_warmup_hook, "pre_warmup_hook", first.spec.target)
            with backend.stream_context(first.arena), capture_errors(f"warm-up of {first.spec.name!r}", WarmupError):
                first.warm_up(transaction, runs)
                for later in later_microbatches:
                    later.reuse_warmup_of(first, transaction)
            run_warmup_hook(post_warmup_hook, "post_warmup_hook", first.spec.target)
        if backend.records:
            _allocate_gradients(recorders)
        for step in schedule.steps:
            recorder = recorders[schedule.entry(step)]
            if step.kind == "forward":
                recorder.record_forward(transaction)
            else:
                recorder.record_backward(transaction)


def _allocate_gradients(recorders: Sequence[SegmentRecorder]) -> None:
    """Allocate the gradients of all recorders together."""
    templates = [template for recorder in recorders for template in recorder.gradient_templates]
    buffers = iter(allocate_together(templates))
    for recorder in recorders:
        recorder.passes.static_gradients = list(islice(buffers, len(recorder.gradient_templates)))


def _microbatches(recorders: Sequence[SegmentRecorder], schedule: Schedule) -> Iterable[list[SegmentRecorder]]:
    """The recorders of each callable, in the order of their forwards."""
    by_callable: dict[int, list[SegmentRecorder]] = {}
    for step in schedule.steps:
        if step.kind == "forward":
            index = schedule.callable_index(step.chunk, step.layer)
            by_callable.setdefault(index, []).append(recorders[schedule.entry(step)])
    return by_callable.values()
