"""`make_graphed_callables`: modules and functions as graphs inside a training program.

Owns how a graphed callable takes the place of the original (outside the module tree), the short way of a
usual call, and how samples, schedule and static inputs are laid out. `segment.py` has the graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.capture import BackendName, choose_backend
from rollgraph.graph.capture_steps import static_copies
from rollgraph.graph.captured import Captured, OnMismatch, callable_name, identity, refuse_nesting
from rollgraph.graph.errors import CaptureError, GraphError
from rollgraph.graph.hooks import GraphHooks, Guard, guards_per_callable, hooks_per_callable
from rollgraph.graph.passes import CallableSpec
from rollgraph.graph.pool import Arena, GraphPool
from rollgraph.graph.pool_memory import PoolHandle
from rollgraph.graph.report import GraphRecord
from rollgraph.graph.schedule import Schedule, assign_slots, check_slots, parse_order, sequential
from rollgraph.graph.segment import Call, ReplayableSegment
from rollgraph.graph.segment_recorder import SegmentRecorder, WarmupHook, capture_segments
from rollgraph.graph.surface import StaticTensors, Surface, TensorSpec

_dispatch_modes = torch._C._len_torch_dispatch_stack
_references = sys.getrefcount


class GraphedCallable(Captured[..., Any, ReplayableSegment]):
    """A callable whose calls replay. For a module it replaces `forward`, outside the module tree."""

    def __init__(self, spec: CallableSpec) -> None:
        super().__init__(spec)
        self.spec = spec
        self.module = spec.module
        self.original = spec.original
        self.hooks = spec.hooks
        self._training = self.module.training if self.module is not None else False
        self._replaced: Any = None  # a forward that the module instance had of its own
        # Once installed, the module's dict of parameters. A shallow copy of the module refers to it, too.
        self._module_parameters: dict[str, Any] = {}
        self._own_references = _references(self._module_parameters)
        self._short_way: Call | None = None  # of the only variant, if there are neither hooks nor guards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay. A usual call takes the short way; any other takes the call path of `Captured`."""
        if _references(self._module_parameters) != self._own_references:
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
        """Whether a call, in the training mode of the capture, replays a graph instead of the original."""
        return self.enabled and bool(self._variants)

    def _call_with_care(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.module is not None and self.module.training is not self._training:
            return self._run_original("called in the other training mode", args, kwargs)
        return super().__call__(*args, **kwargs)

    def _run_copy(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.record.eager_runs["called through a shallow copy of the module"] += 1
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    # -- variants --------------------------------------------------------------------------------

    def _capture(self, surface: Surface, arena: Arena) -> ReplayableSegment:
        recorder = SegmentRecorder(self.spec, surface, static_copies(surface), arena)
        (segment,) = capture_segments([recorder], sequential(1), self.spec.warmup)
        return segment

    def adopt(self, variant: ReplayableSegment) -> None:
        super().adopt(variant)
        self._short_way = None
        if self._records:
            if len(self._variants) == 1 and not self._guards and not self._own_guards and not self._hooked:
                self._short_way = variant.short_way()
            self._note_inner_hooks()

    def _note_inner_hooks(self) -> None:
        if self.module is None:
            return
        inner = [module for module in self.module.modules() if module is not self.module]
        hooked = sum(bool(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks) for m in inner)
        if hooked:
            self.record.notes.append(f"hooks on {hooked} sub-modules ran at capture and do not run at replay")

    def _drop(self, variant: ReplayableSegment) -> None:
        self._short_way = None
        super()._drop(variant)

    def reset(self) -> None:
        """Release the graphs and restore the original forward."""
        super().reset()
        self._short_way = None
        if self.module is not None and self.module.__dict__.get("forward") is self:
            if self._replaced is None:
                del self.module.forward
            else:
                self.module.forward = self._replaced

    # -- in place of a module's forward ----------------------------------------------------------

    def install(self) -> None:
        """Replace the module's forward."""
        assert self.module is not None
        self._replaced = self.module.__dict__.get("forward")
        self.module.forward = self
        self._module_parameters = self.module.__dict__["_parameters"]
        self._own_references = _references(self._module_parameters)

    def _shallow_copy(self, caller: FrameType) -> nn.Module | None:
        """The calling module, if it is not the graphed one but a copy that still has this object as its forward."""
        if caller.f_globals.get("__name__") != nn.Module.__module__:
            return None
        module = caller.f_locals.get("self")
        if module is self.module or not isinstance(module, nn.Module) or module.__dict__.get("forward") is not self:
            return None
        return module

    def __reduce__(self) -> Any:
        """A copy or pickle of the module gets its own, ungraphed forward."""
        if self.module is None:
            return identity, (self.original,)
        if self._replaced is not None:
            return identity, (self._replaced,)
        return getattr, (self.module, "forward")  # the copy has no attributes yet, so its class answers


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
    guards: Sequence[Guard] | Sequence[Sequence[Guard]] = (),
    pre_warmup_hook: WarmupHook | None = None,
    post_warmup_hook: WarmupHook | None = None,
    grad_buffers: Mapping[Tensor, Tensor] | None = None,
    retain_graph: bool = False,
    backend: BackendName = "auto",
    on_mismatch: OnMismatch = "raise",
) -> Any:
    """Graph modules or functions, each a drop-in replacement inside a training program.

    The arguments are those of `torch.cuda.make_graphed_callables`: one callable and its sample arguments, or tuples of
    both. A module is returned as itself, with its `forward` replaced. Samples are copied, never written.

    With `order`, +c is the forward of chunk c's next microbatch and -c the backward of its oldest pending one. The
    result is then a tuple with a callable for each chunk, microbatch and layer, in that nesting; `sample_args` has an
    entry for each of them, or one for each layer.

    `grad_buffers` maps parameters to tensors, of any dtype, to which the backward graph adds their gradient;
    `param.grad` stays untouched.

    `guards` are asked before each replay of a forward, and before its hooks. With a list of guards for each callable,
    its guards are asked after its pre_forward hooks and, again, after its pre_backward hooks.

    With `retain_graph` a backward can run again as long as autograd retains its graph; the memory that a forward
    leaves for it is then never given to another graph.
    """
    single = not isinstance(callables, (tuple, list))
    targets = [callables] if single else list(callables)
    args, kwargs = _samples(single and order is None, sample_args, sample_kwargs)
    pool = GraphPool.of(pool)
    modules = nn.ModuleList(target for target in targets if isinstance(target, nn.Module))
    chosen = choose_backend(backend, (args, kwargs), modules)
    _check_targets(targets, num_warmup_iters)
    schedule = sequential(len(targets)) if order is None else parse_order(order, len(targets), layers_per_chunk)
    samples = _spread(schedule, args, kwargs)
    per_callable = hooks_per_callable(hooks, len(targets))
    common_guards, own_guards = guards_per_callable(guards, len(targets))
    graphs: list[GraphedCallable] = []
    for chunk, microbatch, layer in _entries(schedule):
        index = schedule.callable_index(chunk, layer)
        name = callable_name(targets[index])
        if order is not None:
            name = f"{name}[{layer}]@{microbatch}"
        record = GraphRecord(pool.unique_name(name), chosen.name)
        buffers = dict(grad_buffers or {})
        spec = CallableSpec(
            targets[index], chosen, record, per_callable[index], common_guards, on_mismatch, num_warmup_iters,
            own_guards=own_guards[index], allow_unused=allow_unused_input, grad_buffers=buffers,
            retain_graph=retain_graph,
        )  # fmt: skip
        graphs.append(GraphedCallable(spec))
    reuse = reuse_buffers and order is not None and not retain_graph  # a backward that runs again reads its inputs
    recorders = _recorders(graphs, schedule, samples, reuse, pool.arena)
    segments = capture_segments(recorders, schedule, num_warmup_iters, pre_warmup_hook, post_warmup_hook)
    results = [_publish(graph, segment, pool, order) for graph, segment in zip(graphs, segments, strict=True)]
    return results[0] if single and order is None else tuple(results)


def _publish(graph: GraphedCallable, segment: ReplayableSegment, pool: GraphPool, order: Sequence[int] | None) -> Any:
    """Put a captured graph to use, and return what the user calls: the module itself, or the graph."""
    graph.adopt(segment)
    pool.add(graph)
    if order is not None or graph.module is None:
        return graph
    graph.install()
    return graph.module


def _recorders(
    graphs: Sequence[GraphedCallable],
    schedule: Schedule,
    samples: Sequence[tuple[Any, Any]],
    reuse: bool,
    arena: Arena,
) -> list[SegmentRecorder]:
    surfaces = [Surface(*sample) for sample in samples]
    statics = _static_inputs(schedule, surfaces, reuse)
    recorders = []
    for graph, surface, inputs in zip(graphs, surfaces, statics, strict=True):
        recorders.append(SegmentRecorder(graph.spec, surface, inputs, arena))
    return recorders


def _samples(single: bool, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """The sample arguments, as one tuple and one dict for each entry."""
    if single:
        args = (args,)
        if kwargs is not None:
            kwargs = (kwargs,)
    args = list(args)
    if any(not isinstance(sample, (tuple, list)) for sample in args):
        raise CaptureError("sample_args must be a tuple of arguments for each callable")
    if kwargs is None:
        kwargs = [{}] * len(args)
    kwargs = list(kwargs)
    if len(kwargs) != len(args):
        raise CaptureError(f"{len(args)} sample_args, but {len(kwargs)} sample_kwargs")
    return [tuple(sample) for sample in args], kwargs


def _spread(schedule: Schedule, args: list[Any], kwargs: list[Any]) -> list[tuple[Any, Any]]:
    """A sample for each entry; if there is one for each callable, its microbatches share it."""
    pairs = list(zip(args, kwargs, strict=True))
    if len(pairs) == schedule.entries:
        return pairs
    if len(pairs) != schedule.callables:
        expected = f"{schedule.callables} (one for each callable)"
        if schedule.microbatches > 1:
            expected += f" or {schedule.entries} (one for each callable and microbatch)"
        raise CaptureError(f"{len(pairs)} sample_args: expected {expected}")
    return [pairs[schedule.callable_index(chunk, layer)] for chunk, _, layer in _entries(schedule)]


def _entries(schedule: Schedule) -> Iterable[tuple[int, int, int]]:
    """(chunk, microbatch, layer) of each entry."""
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
                raise CaptureError(f"callables[{index}] is already graphed: call `module.forward.reset()` first")
            trainable = [name for name, buffer in target.named_buffers() if buffer.requires_grad]
            if trainable:
                raise CaptureError(f"buffers of callables[{index}] require grad: {', '.join(trainable)}")
    refuse_nesting(callable_name(targets[0]))


def _static_inputs(schedule: Schedule, surfaces: list[Surface], reuse: bool) -> list[StaticTensors]:
    """Static inputs for each entry; with `reuse`, entries that are never live together share theirs."""
    if not reuse:
        return [static_copies(surface) for surface in surfaces]
    keys = [tuple((TensorSpec.of(t), t.stride(), t.requires_grad) for t in s.tensors) for s in surfaces]
    ranges = schedule.live_ranges()
    slots = assign_slots(ranges, keys)
    check_slots(ranges, keys, slots)
    made: dict[int, StaticTensors] = {}
    for slot, surface in zip(slots, surfaces, strict=True):
        if slot not in made:
            made[slot] = static_copies(surface)
    return [made[slot] for slot in slots]
