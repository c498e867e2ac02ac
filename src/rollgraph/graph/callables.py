"""`make_graphed_callables`: modules and functions as graphs inside a training program.

Owns how a graphed callable takes the place of the original (outside the module tree), what it does
with a call, and how samples, schedule and static inputs are laid out. `segment.py` has the graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.capture import (
    MAX_VARIANTS,
    BackendName,
    Captured,
    OnMismatch,
    callable_name,
    choose_backend,
    identity,
    refuse_nesting,
)
from rollgraph.graph.errors import CaptureError, GraphError, ReplayMismatch
from rollgraph.graph.hooks import GraphHooks, Guard, check_guards, hooks_per_callable
from rollgraph.graph.pool import Arena, GraphPool, PoolHandle
from rollgraph.graph.report import GraphRecord
from rollgraph.graph.schedule import Schedule, assign_slots, check_slots, parse_order, sequential
from rollgraph.graph.segment import CallableSpec, Segment, WarmupHook, capture_segments
from rollgraph.graph.surface import StaticTensors, Surface, TensorSpec, own_copy

_dispatch_modes = torch._C._len_torch_dispatch_stack
_references = sys.getrefcount


class GraphedCallable(Captured):
    """A callable whose calls replay. For a module it stands in for `forward`, outside the module tree."""

    def __init__(self, spec: CallableSpec, on_mismatch: OnMismatch, guards: Sequence[Guard], warmup: int) -> None:
        super().__init__(spec.target, spec.record, spec.backend, on_mismatch)
        self.spec = spec
        self.module = spec.module
        self.original = spec.original
        self.hooks = spec.hooks
        self._warmup = warmup
        self._guards = list(guards)
        self._training = self.module.training if self.module is not None else False
        self._replaced: Any = None
        self._segments: list[Segment] = []
        self._state: dict[str, Any] = {}  # where installed, the module's parameters, and how many hold that dict
        self._state_holders = _references(self._state)
        self._short_way: Any = None  # that of the only segment, where there are neither hooks nor guards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay. The usual call takes the short way; whatever is special about one is sorted out with care."""
        if _references(self._state) != self._state_holders:
            copied = self._shallow_copy(sys._getframe(1))
            if copied is not None:
                return self._run_copy(copied, args, kwargs)
        short_way = self._short_way
        if short_way is None or not self.enabled or _dispatch_modes():
            return self._call_with_care(args, kwargs)
        try:
            output = short_way(args, kwargs)
        except GraphError:  # nothing has run yet
            return self._call_with_care(args, kwargs)
        self.record.replays += 1
        return output

    @property
    def replays(self) -> bool:
        """Whether a call, in the training mode of the capture, replays a graph and not the original."""
        return self.enabled and bool(self._segments)

    def _call_with_care(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.module is not None and self.module.training is not self._training:
            return self._run_original("called in the other training mode", args, kwargs)
        if not self.enabled or not self._segments:
            return self._run_original("disabled" if self._segments else "reset", args, kwargs)
        refuse_nesting(self.name)
        try:
            segment, inputs = self._find(args, kwargs)
        except GraphError as error:
            if self._act_on(error) == "eager":
                return self.original(*args, **kwargs)
            segment, inputs = self._recapture(args, kwargs), Surface(args, kwargs).tensors
        if self._guards:
            check_guards(self._guards, self.name)
        if self.spec.hooked:
            segment.arena.admit(segment.forward_number, self.name)  # before a hook has changed anything
            self.hooks.run("pre_forward", "replay", self.target, args, kwargs)
        try:
            segment.binding.check()
        except GraphError as error:
            if self._act_on(error) == "eager":
                output = self.original(*args, **kwargs)
            else:
                self._drop(segment)
                output = self._recapture(args, kwargs).replay(inputs)
                self._count_run()
        else:
            output = segment.replay(inputs)
            self._count_run()
        if self.spec.hooked:
            self.hooks.run("post_forward", "replay", self.target, args, kwargs, output)
        return output

    def _run_copy(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.record.eager_runs["called through a shallow copy of the module"] += 1
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def _run_original(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.record.eager_runs[reason] += 1
        return self.original(*args, **kwargs)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Segment, Sequence[Tensor]]:
        first: GraphError | None = None
        for segment in self._segments:
            try:
                inputs = segment.bind(args, kwargs)
            except ReplayMismatch as error:
                first = first or error
                continue
            if segment is not self._segments[0]:
                self._segments.remove(segment)
                self._segments.insert(0, segment)
            return segment, inputs
        assert first is not None
        raise first

    def _recapture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Segment:
        self._make_room()
        surface = Surface(args, kwargs)
        statics = StaticTensors([own_copy(t) for t in surface.tensors])
        segment = Segment(self.spec, surface, statics, Arena())  # memory of its own: it may be replayed at any moment
        capture_segments([segment], sequential(1), self._warmup)
        self.adopt(segment)
        segment.overtaken.check(surface.tensors)
        return segment

    def _make_room(self) -> None:
        """Drop what was not used for longest, of those that wait for no backward."""
        idle = [segment for segment in reversed(self._segments) if not segment.is_open()]
        for segment in idle[: max(0, len(self._segments) + 1 - MAX_VARIANTS)]:
            self._drop(segment)
            self.record.dropped += 1

    def adopt(self, segment: Segment) -> None:
        segment.seal()
        self._segments.insert(0, segment)
        if self._watch is not None:
            self._watch.captured(self, segment.called(), segment.recordings())
        simple = len(self._segments) == 1 and not self._guards and not self.spec.hooked and self._backend.records
        self._short_way = segment.short_way() if simple else None
        record = self.record
        record.surface = str(segment.surface)
        record.captures += self._backend.records
        record.operations = segment.operations()
        if self._backend.records:
            self._own(1, segment)
        inner = [m for m in self.module.modules() if m is not self.module] if self.module is not None else []
        hooked = sum(bool(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks) for m in inner)
        if hooked and self._backend.records:
            record.notes.append(f"hooks on {hooked} sub-modules ran at capture and do not run at replay")

    def _drop(self, segment: Segment) -> None:
        self._segments.remove(segment)
        self._short_way = None
        if self._backend.records:
            self._own(-1, segment)
        segment.release()

    def _own(self, sign: int, segment: Segment) -> None:
        recorded = segment.nbytes() if self._backend.name != "cuda" else 0
        self.record.bytes_owned += sign * (segment.static_bytes() + segment.nbytes())
        self.static_bytes += sign * (segment.static_bytes() + recorded)

    def install(self) -> None:
        """Stand in for the module's forward."""
        assert self.module is not None
        self._replaced = self.module.__dict__.get("forward")
        self.module.forward = self
        self._watch_for_copies()

    def _watch_for_copies(self) -> None:
        """A shallow copy of the module has this stand-in too. It shares the dict of parameters, which shows it."""
        assert self.module is not None
        self._state = self.module.__dict__["_parameters"]
        self._state_holders = _references(self._state)

    def _shallow_copy(self, caller: FrameType) -> nn.Module | None:
        """The module that calls, if it is not ours but a copy that still has our stand-in."""
        if caller.f_globals.get("__name__") != nn.Module.__module__:
            return None
        module = caller.f_locals.get("self")
        if module is self.module or not isinstance(module, nn.Module) or module.__dict__.get("forward") is not self:
            return None
        return module

    def reset(self) -> None:
        """Give the graphs back and put the original forward in place."""
        for segment in self._segments:
            segment.release()
        self._segments.clear()
        self._short_way = None
        self.static_bytes = self.record.bytes_owned = 0
        if self.module is not None and self.module.__dict__.get("forward") is self:
            if self._replaced is None:
                del self.module.forward
            else:
                self.module.forward = self._replaced

    def __reduce__(self) -> Any:
        """A copy or pickle of the module gets its own, ungraphed forward."""
        if self.module is None:
            return identity, (self.original,)
        if self._replaced is not None:
            return identity, (self._replaced,)
        return getattr, (self.module, "forward")  # the copy is still empty here: its class answers


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: GraphPool | PoolHandle | None = None,
    *,
    sample_kwargs: Any = None,
    order: Sequence[int] | None = None,
    layers_per_chunk: int | Sequence[int] | None = None,
    reuse_buffers: bool = True,
    hooks: GraphHooks | Sequence[GraphHooks | None] | None = None,
    guards: Sequence[Guard] = (),
    pre_warmup_hook: WarmupHook | None = None,
    post_warmup_hook: WarmupHook | None = None,
    grad_buffers: Mapping[Tensor, Tensor] | None = None,
    retain_graph: bool = False,
    backend: BackendName = "auto",
    on_mismatch: OnMismatch = "raise",
) -> Any:
    """Graph modules or functions, each a drop-in replacement inside a training program.

    Takes the calls of `torch.cuda.make_graphed_callables`: one callable and its arguments, or tuples of both; a
    module comes back as itself, with its `forward` replaced. Samples are copied, never written to.

    With `order`, +c is the forward of chunk c's next microbatch and -c the backward of its oldest pending one. The
    result is then a tuple with a callable for each chunk, microbatch and layer, in that nesting;
    `sample_args` has an entry for each of them, or one for each layer.

    `grad_buffers` maps parameters to tensors, of any dtype, into which the backward graph adds their gradient;
    `param.grad` stays untouched.

    With `retain_graph` a backward can run again, as long as autograd retains its graph: what a forward leaves for it
    is memory that no other graph gets.
    """
    single = not isinstance(callables, (tuple, list))
    targets = [callables] if single else list(callables)
    args, kwargs = _samples(single and order is None, sample_args, sample_kwargs)
    pool = GraphPool.of(pool)
    chosen = choose_backend(backend, (args, kwargs), nn.ModuleList(t for t in targets if isinstance(t, nn.Module)))
    _check_targets(targets, num_warmup_iters)
    schedule = sequential(len(targets)) if order is None else parse_order(order, len(targets), layers_per_chunk)
    samples = _spread(schedule, args, kwargs)
    per_callable = hooks_per_callable(hooks, len(targets))
    graphs: list[GraphedCallable] = []
    for chunk, microbatch, layer in _entries(schedule):
        index = schedule.callable_index(chunk, layer)
        name = callable_name(targets[index])
        name = pool.unique_name(name if order is None else f"{name}[{layer}]@{microbatch}")
        record, buffers = GraphRecord(name, chosen.name), dict(grad_buffers or {})
        spec = CallableSpec(
            targets[index], chosen, record, per_callable[index], allow_unused_input, buffers, retain_graph
        )
        graphs.append(GraphedCallable(spec, on_mismatch, guards, num_warmup_iters))
    surfaces = [Surface(*sample) for sample in samples]
    reuse = reuse_buffers and order is not None and not retain_graph  # a backward that runs again reads its inputs
    statics = _static_inputs(schedule, surfaces, reuse)
    segments = [Segment(g.spec, u, s, pool.arena) for g, u, s in zip(graphs, surfaces, statics, strict=True)]
    capture_segments(segments, schedule, num_warmup_iters, pre_warmup_hook, post_warmup_hook)
    for graph, segment in zip(graphs, segments, strict=True):
        graph.adopt(segment)
        pool.add(graph)
        if order is None and graph.module is not None:
            graph.install()
    results = [graph.target if order is None and graph.module is not None else graph for graph in graphs]
    return results[0] if single and order is None else tuple(results)


def _samples(single: bool, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """Sample arguments as one tuple and one dict for each of the given entries."""
    if single:
        args, kwargs = (args,), None if kwargs is None else (kwargs,)
    args = list(args)
    if any(not isinstance(sample, (tuple, list)) for sample in args):
        raise CaptureError("sample_args must be a tuple of arguments for each callable")
    kwargs = [{}] * len(args) if kwargs is None else list(kwargs)
    if len(kwargs) != len(args):
        raise CaptureError(f"{len(args)} sample_args, but {len(kwargs)} sample_kwargs")
    return [tuple(sample) for sample in args], kwargs


def _spread(schedule: Schedule, args: list[Any], kwargs: list[Any]) -> list[tuple[Any, Any]]:
    """A sample for each entry; one for each callable serves all of its microbatches."""
    pairs = list(zip(args, kwargs, strict=True))
    if len(pairs) == schedule.entries:
        return pairs
    if len(pairs) != schedule.callables:
        raise CaptureError(
            f"{len(pairs)} sample_args: expected {schedule.callables} (one for each callable)"
            + (f" or {schedule.entries} (one for each microbatch too)" if schedule.microbatches > 1 else "")
        )
    return [pairs[schedule.callable_index(chunk, layer)] for chunk, _, layer in _entries(schedule)]


def _entries(schedule: Schedule) -> Iterable[tuple[int, int, int]]:
    for chunk, layers in enumerate(schedule.layers_per_chunk):
        for microbatch in range(schedule.microbatches):
            for layer in range(layers):
                yield chunk, microbatch, layer


def _check_targets(targets: list[Any], warmup: int) -> None:
    if warmup < 1:
        raise CaptureError(f"num_warmup_iters={warmup}: at least one run is needed, to find what a callable writes")
    for index, target in enumerate(targets):
        if not callable(target):
            raise CaptureError(f"callables[{index}] is a {type(target).__name__}, not a module or function")
        if any(target is other for other in targets[:index]):
            raise CaptureError(f"callables[{index}] is given twice: use `order` to graph several microbatches")
        if isinstance(target, nn.Module):
            if isinstance(target.__dict__.get("forward"), GraphedCallable):
                raise CaptureError(f"callables[{index}] is graphed already: `module.forward.reset()` first")
            trainable = [name for name, buffer in target.named_buffers() if buffer.requires_grad]
            if trainable:
                raise CaptureError(f"buffers of callables[{index}] require grad: {', '.join(trainable)}")
    refuse_nesting(callable_name(targets[0]))


def _static_inputs(schedule: Schedule, surfaces: list[Surface], reuse: bool) -> list[StaticTensors]:
    """Static inputs for each entry; entries that are never alive together share theirs."""
    if not reuse:
        return [StaticTensors([own_copy(t) for t in surface.tensors]) for surface in surfaces]
    keys = [tuple((TensorSpec.of(t), t.stride(), t.requires_grad) for t in s.tensors) for s in surfaces]
    ranges = schedule.live_ranges()
    slots = assign_slots(ranges, keys)
    check_slots(ranges, keys, slots)
    made: dict[int, StaticTensors] = {}
    for slot, surface in zip(slots, surfaces, strict=True):
        if slot not in made:
            made[slot] = StaticTensors([own_copy(t) for t in surface.tensors])
    return [made[slot] for slot in slots]
