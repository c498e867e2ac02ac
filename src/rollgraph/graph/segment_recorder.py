"""Recording a callable as a segment: warm-up, the forward, the backward, and what they are bound to.

Owns the order in which the passes of several callables are recorded, and the memory of their gradients.
A recorder is used once; `segment.py` has what it makes. Knows nothing of modules standing in for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.backend import EagerRecording, Recording, Thunk, capture_errors
from rollgraph.graph.binding import Binding
from rollgraph.graph.capture_steps import (
    Writes,
    bound_modules,
    input_hazards,
    record_pass,
    refuse_written_arguments,
    writes_before_last_read,
)
from rollgraph.graph.errors import CaptureError, WarmupError
from rollgraph.graph.hooks import run_warmup_hook
from rollgraph.graph.live_objects import ProgramObjects, noting_calls
from rollgraph.graph.passes import CallablePasses, CallableSpec
from rollgraph.graph.pool import Arena
from rollgraph.graph.saved_versions import SavedVersions
from rollgraph.graph.schedule import Schedule
from rollgraph.graph.segment import ReplayableSegment
from rollgraph.graph.slots import growable_lists, hook_places, slots_of
from rollgraph.graph.static_outputs import allocate_together
from rollgraph.graph.surface import InputHazards, StaticTensors, Surface, TensorSpec
from rollgraph.graph.transaction import Transaction

WarmupHook = Callable[[Any], None]


class SegmentRecorder:
    """Warms up and records one callable for one surface."""

    def __init__(self, spec: CallableSpec, surface: Surface, statics: StaticTensors, arena: Arena) -> None:
        self.spec = spec
        self.arena = arena
        self.passes = CallablePasses(spec, surface)
        self.gradient_templates: list[tuple[Tensor, torch.device] | None] = []  # what each leaving gradient looks like
        self._surface = surface
        self._statics = statics
        self._forward: Recording | None = None
        self._backward: Recording | None = None
        self._forward_number = 0
        self._backward_number = 0
        self._binding = Binding(())
        self._hazards = InputHazards()
        self._saved = SavedVersions()
        self._writes: Writes = [[] for _ in surface.tensors]
        self._called: dict[int, nn.Module] = {}
        self._marks: dict[Any, Any] = {}  # shared by the recordings of both passes

    # -- warm-up ---------------------------------------------------------------------------------

    def warm_up(self, transaction: Transaction, runs: int) -> None:
        passes = self.passes
        run = 0
        shared = -1
        # The last run must have had the same leaves as the recording will have.
        while run < runs or shared != len(passes.shared):
            run += 1
            shared = len(passes.shared)
            self._run_once(transaction, again=run > 1)
        refuse_written_arguments(transaction.undo_log, self._surface, self._statics)

    def _run_once(self, transaction: Transaction, again: bool) -> None:
        passes = self.passes
        target = self.spec.target
        hooks = self.spec.hooks
        args, kwargs = self._surface.arguments(self._statics.tensors)
        hooks.run("pre_forward", "warmup", target, args, kwargs)
        with transaction.undo_log.run(again), noting_calls(self._called):
            passes.run_forward(self._statics.tensors)
        self._writes = writes_before_last_read(transaction.undo_log, self._statics, passes.results)
        hooks.run("post_forward", "warmup", target, args, kwargs, passes.raw_output)
        passes.find_targets()
        if passes.targets.trains:
            hooks.run("pre_backward", "warmup", target)
            incoming = [torch.zeros_like(result) for result in passes.results if result.requires_grad]
            with transaction.undo_log.run(), torch._C._DisableAutocast():
                made = passes.run_backward(incoming)
            self.gradient_templates = list(map(_template, made))
            del made
            hooks.run("post_backward", "warmup", target)
        passes.forget_results()

    def learn_from(self, warmed: SegmentRecorder, transaction: Transaction) -> None:
        """Take over the warm-up of another microbatch; run one of its own only if the inputs differ."""
        if str(self._surface) != str(warmed._surface):
            self.warm_up(transaction, 1)
        self.gradient_templates = self.gradient_templates or warmed.gradient_templates
        reached = self.passes.targets.reached or warmed.passes.targets.reached
        self.passes.targets = replace(warmed.passes.targets, reached=reached)
        self.passes.shared = warmed.passes.shared
        if not self.spec.backend.records:  # a recording finds out itself
            self.passes.outputs = self.passes.outputs or warmed.passes.outputs
        self._called = warmed._called
        self._writes = warmed._writes

    # -- recording -------------------------------------------------------------------------------

    def record_forward(self, transaction: Transaction) -> None:
        spec = self.spec
        passes = self.passes
        args, kwargs = self._surface.arguments(self._statics.tensors)
        spec.hooks.run("pre_forward", "capture", spec.target, args, kwargs)
        self._forward_number = self.arena.next_capture()
        last = passes.outputs
        recording = self._record(transaction, passes.run_forward, self._statics, "forward")
        self._forward = recording
        if spec.backend.records:
            passes.find_targets()
            if last is not None and passes.outputs is not None:
                passes.outputs.refuse_change(last, spec.name)
            self._hazards = input_hazards(self._surface, self._writes, recording)
        transaction.undo_log.check_reads(recording.external)
        self._bind(recording, transaction.objects)
        if passes.targets.trains and spec.backend.records:
            self._saved = SavedVersions.of(passes.results, self._nameable(recording))
        spec.hooks.run("post_forward", "capture", spec.target, args, kwargs, passes.raw_output)

    def record_backward(self, transaction: Transaction) -> None:
        spec = self.spec
        passes = self.passes
        if not passes.targets.trains:
            passes.forget_results()
            return
        spec.hooks.run("pre_backward", "capture", spec.target)
        self._backward_number = self.arena.next_capture()
        incoming = StaticTensors(self._scratch())
        if passes.gradient_buffers is not None:
            transaction.undo_log.expect(buffer for buffer in passes.gradient_buffers if buffer is not None)
        with torch._C._DisableAutocast():
            self._backward = self._record(transaction, passes.run_backward, incoming, "backward")
        self._check_unused()
        spec.hooks.run("post_backward", "capture", spec.target)
        if not spec.retain_graph:
            passes.forget_results()

    def _record(self, transaction: Transaction, thunk: Thunk, inputs: StaticTensors, which: str) -> Recording:
        what = f"{self.spec.name!r} ({which})"
        return record_pass(transaction, self.spec.backend, thunk, inputs, self.arena, what, self._marks)

    def _scratch(self) -> list[Tensor]:
        """Static tensors for incoming gradients. They are used only during a backward, so all segments share them."""
        buffers: list[Tensor] = []
        scratch = self.arena.scratch
        differentiable = [result for result in self.passes.results if result.requires_grad]
        for place, result in enumerate(differentiable):
            key = (place, TensorSpec.of(result), result.stride())
            if key not in scratch:
                scratch[key] = torch.empty_like(result, requires_grad=False)
            buffers.append(scratch[key])
        return buffers

    def _check_unused(self) -> None:
        unused = self.passes.unused
        if not unused or self.spec.allow_unused:
            return
        pairs = zip(self._surface.names, self.passes.differentiable, strict=True)
        names = [f"input {name}" for name, differentiable in pairs if differentiable]
        known: dict[int, str] = {}
        if self.spec.module is not None:
            known = {id(p): name for name, p in self.spec.module.named_parameters()}
        names += [f"parameter {known.get(id(p), tuple(p.shape))}" for p in self.passes.targets.parameters]
        raise CaptureError(
            f"{', '.join(names[place] for place in unused)} of {self.spec.name!r} did not take part in the output: "
            "pass allow_unused_input=True if that is intended"
        )

    def _bind(self, recording: Recording, objects: ProgramObjects) -> None:
        spec = self.spec
        parameters = self.passes.targets.parameters
        ours = {id(t) for t in (*self._statics.tensors, *self.passes.aliases.values())}
        tensors = [t for t in (*recording.external, *parameters) if id(t) not in ours and t.is_leaf]
        modules = bound_modules(spec.target, self._called, tensors, objects)
        if spec.module is not None:
            tensors += [*spec.module.parameters(), *spec.module.buffers()]
        buffered = [p for p in parameters if p in spec.grad_buffers]
        self._binding = Binding(
            tensors,
            slots_of(spec.target, modules, self._called, tensors),
            modules,
            trained=buffered,
            sums=[spec.grad_buffers[p] for p in buffered],
            growable=growable_lists(modules, self._called),
            hooks=hook_places(self._called.values()),
        )

    def _nameable(self, recording: Recording) -> dict[str, Tensor]:
        """What the program can change between forward and backward: tensors from outside, and the outputs."""
        known: dict[int, str] = {}
        if self.spec.module is not None:
            known = {id(p): f"parameter {name}" for name, p in self.spec.module.named_parameters()}
            known.update({id(b): f"buffer {name}" for name, b in self.spec.module.named_buffers()})
        found: dict[str, Tensor] = {}
        for tensor in self._binding.tensors:
            name = known.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)} ({len(found)})")
            found[name] = tensor
        for index, output in enumerate(recording.outputs):
            if output is not None:
                found[f"output {index}"] = output
        return found

    # -- the end ---------------------------------------------------------------------------------

    def finish(self) -> ReplayableSegment:
        """The segment that replays what was recorded."""
        passes = self.passes
        passes.aliases = {}
        passes.gradient_buffers = None
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
            self._forward_number,
            self._backward_number,
            passes.outputs,
            passes.targets,
            self._binding,
            self._hazards,
            self._saved,
            list(self._called.values()),
            retained=passes.results,
        )
        return segment

    def release(self) -> None:
        """Give up after a failure."""
        for recording in (self._forward, self._backward):
            if recording is not None:
                recording.release()
        self.passes.forget_results()


def _run_eagerly(segment: ReplayableSegment, passes: CallablePasses, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """A forward of the eager backend, whose output may have another structure each time."""
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
    """Warm up each callable, then record every pass in the order in which it will replay."""
    for recorder in recorders:
        recorder.passes.capturing = recorder.spec.backend.records
    try:
        # The transaction has to be gone before the segments count the references to their static tensors.
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
        for first, *others in _microbatches(recorders, schedule):
            run_warmup_hook(pre_warmup_hook, "pre_warmup_hook", first.spec.target)
            with backend.stage(first.arena), capture_errors(f"warm-up of {first.spec.name!r}", WarmupError):
                first.warm_up(transaction, runs)
                for other in others:
                    other.learn_from(first, transaction)
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
    """Allocate the memory of all gradients together."""
    templates = [template for recorder in recorders for template in recorder.gradient_templates]
    buffers = iter(allocate_together(templates))
    for recorder in recorders:
        recorder.passes.gradient_buffers = list(islice(buffers, len(recorder.gradient_templates)))


def _microbatches(recorders: Sequence[SegmentRecorder], schedule: Schedule) -> Iterable[list[SegmentRecorder]]:
    """The recorders of each callable, in the order of their forwards."""
    found: dict[int, list[SegmentRecorder]] = {}
    for step in schedule.steps:
        if step.kind == "forward":
            index = schedule.callable_index(step.chunk, step.layer)
            found.setdefault(index, []).append(recorders[schedule.entry(step)])
    return found.values()
