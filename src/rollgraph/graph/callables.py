"""`make_graphed_callables`: modules and functions as graphs inside a training program.

Owns how a graphed callable replaces the original (outside the module tree), the fast path of a usual call, and the
layout of samples, schedule and static inputs. `segment.py` has the graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.capture import BackendName, choose_backend
from rollgraph.graph.captured import GraphedTarget, OnMismatch, callable_name, identity, refuse_nesting
from rollgraph.graph.errors import CaptureError, GraphError
from rollgraph.graph.function_recorder import static_copies
from rollgraph.graph.hooks import GraphHooks, Guard, guards_per_callable, hooks_per_callable
from rollgraph.graph.passes import CallableSpec
from rollgraph.graph.pool import Arena, GraphPool, GraphRecord, PoolHandle
from rollgraph.graph.schedule import Schedule, assign_slots, check_slots, parse_order, sequential
from rollgraph.graph.segment import Call, ReplayableSegment
from rollgraph.graph.segment_recorder import SegmentRecorder, WarmupHook, capture_segments
from rollgraph.graph.surface import StaticTensors, Surface, TensorSpec

_dispatch_modes = torch._C._len_torch_dispatch_stack
_reference_count = sys.getrefcount


class GraphedCallable(GraphedTarget[..., Any, ReplayableSegment]):
    """A graphed module or function: its calls replay. For a module it is set as `module.forward`."""

    def __init__(self, spec: CallableSpec) -> None:
        super().__init__(spec)
        self.spec = spec
        self.module = spec.module
        self.original = spec.original
        self.hooks = spec.hooks
        self._training = self.module.training if self.module is not None else False
        self._instance_forward: Any = None  # the `forward` in the module's __dict__, if it had one
        # Once installed, the module's dict of parameters, and its reference count. A shallow copy of the module shares
        # this dict and this `forward`, so a call finds a copy by a count that has changed.
        self._module_parameters: dict[str, Any] = {}
        self._baseline_reference_count = _reference_count(self._module_parameters)
        self._fast_call: Call | None = None  # for a single variant without hooks and guards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay. A usual call takes the fast path; any other call takes the path of `GraphedTarget`."""
        if _reference_count(self._module_parameters) != self._baseline_reference_count:
            copied = self._find_shallow_copy(sys._getframe(1))
            if copied is not None:
                return self._run_copy(copied, args, kwargs)
        make_fast_call = self._fast_call
        if make_fast_call is None or not self.enabled or _dispatch_modes():
            return self._call_with_checks(args, kwargs)
        try:
            output = make_fast_call(args, kwargs)
        except GraphError:  # nothing has run yet
            return self._call_with_checks(args, kwargs)
        self.record.replays += 1
        return output

    @property
    def replays(self) -> bool:
        """Whether a call replays a graph, given the training mode of the capture."""
        return self.enabled and bool(self._variants)

    def _call_with_checks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.module is not None and self.module.training is not self._training:
            return self._run_original("called in the other training mode", args, kwargs)
        return super().__call__(*args, **kwargs)

    def _run_copy(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.record.eager_runs["called through a shallow copy of the module"] += 1
        if self._instance_forward is not None:
            return self._instance_forward(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    # -- variants --------------------------------------------------------------------------------

    def _capture(self, surface: Surface, arena: Arena) -> ReplayableSegment:
        recorder = SegmentRecorder(self.spec, surface, static_copies(surface), arena)
        (segment,) = capture_segments([recorder], sequential(1), self.spec.warmup)
        return segment

    def add_variant(self, variant: ReplayableSegment) -> None:
        super().add_variant(variant)
        self._fast_call = None
        if self._records:
            if (
                len(self._variants) == 1
                and not self._guards
                and not self._callable_guards
                and not self._has_replay_hooks
            ):
                self._fast_call = variant.make_fast_call()
            self._note_inner_hooks()

    def _note_inner_hooks(self) -> None:
        if self.module is None:
            return
        inner = [module for module in self.module.modules() if module is not self.module]
        has_replay_hooks = sum(bool(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks) for m in inner)
        if has_replay_hooks:
            self.record.notes.append(f"hooks on {has_replay_hooks} sub-modules ran at capture and do not run at replay")

    def _drop(self, variant: ReplayableSegment) -> None:
        self._fast_call = None
        super()._drop(variant)

    def reset(self) -> None:
        """Release the graphs and restore the original forward."""
        super().reset()
        self._fast_call = None
        if self.module is not None and self.module.__dict__.get("forward") is self:
            if self._instance_forward is None:
                del self.module.forward
            else:
                self.module.forward = self._instance_forward

    # -- in place of a module's forward ----------------------------------------------------------

    def install(self) -> None:
        """Replace the module's forward."""
        assert self.module is not None
        self._instance_forward = self.module.__dict__.get("forward")
        self.module.forward = self
        self._module_parameters = self.module.__dict__["_parameters"]
        self._baseline_reference_count = _reference_count(self._module_parameters)

    def _find_shallow_copy(self, caller: FrameType) -> nn.Module | None:
        """Return the calling module if it is a copy of the graphed module that still has this object as `forward`."""
        if caller.f_globals.get("__name__") != nn.Module.__module__:
            return None
        module = caller.f_locals.get("self")
        if module is self.module or not isinstance(module, nn.Module) or module.__dict__.get("forward") is not self:
            return None
        return module

    def __reduce__(self) -> Any:
        """A copy or pickle of the module gets the original `forward`."""
        if self.module is None:
            return identity, (self.original,)
        if self._instance_forward is not None:
            return identity, (self._instance_forward,)
        # The copy has no attributes yet, so this finds the method of its class.
        return getattr, (self.module, "forward")


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

    `guards` run before each replay of a forward, and before its hooks. If there is one list of guards per callable,
    they run after its pre_forward hooks and once more after its pre_backward hooks.

    With `retain_graph` a backward can run again as long as autograd retains its graph. No other graph then reuses the
    activations of its forward.
    """
    single = not isinstance(callables, (tuple, list))
    targets = [callables] if single else list(callables)
    args, kwargs = _as_lists(single and order is None, sample_args, sample_kwargs)
    pool = GraphPool.of(pool)
    modules = nn.ModuleList(target for target in targets if isinstance(target, nn.Module))
    resolved_backend = choose_backend(backend, (args, kwargs), modules)
    _check_targets(targets, num_warmup_iters)
    refuse_nesting(callable_name(targets[0]))  # the captures of all targets; the name is for the error
    schedule = sequential(len(targets)) if order is None else parse_order(order, len(targets), layers_per_chunk)
    samples = _samples_per_entry(schedule, args, kwargs)
    per_callable = hooks_per_callable(hooks, len(targets))
    common_guards, callable_guards = guards_per_callable(guards, len(targets))
    graphs: list[GraphedCallable] = []
    for chunk, microbatch, layer in _entries(schedule):
        index = schedule.callable_index(chunk, layer)
        name = callable_name(targets[index])
        if order is not None:
            name = f"{name}[{layer}]@{microbatch}"
        record = GraphRecord(pool.unique_name(name), resolved_backend.name)
        buffers = dict(grad_buffers or {})
        spec = CallableSpec(
            targets[index], resolved_backend, record, per_callable[index], common_guards, on_mismatch, num_warmup_iters,
            callable_guards=callable_guards[index], allow_unused=allow_unused_input, grad_buffers=buffers,
            retain_graph=retain_graph,
        )  # fmt: skip
        graphs.append(GraphedCallable(spec))
    reuse = reuse_buffers and order is not None and not retain_graph  # a second backward reads the static inputs
    recorders = _recorders(graphs, schedule, samples, reuse, pool.arena)
    segments = capture_segments(recorders, schedule, num_warmup_iters, pre_warmup_hook, post_warmup_hook)
    results = [_publish(graph, segment, pool, order) for graph, segment in zip(graphs, segments, strict=True)]
    return results[0] if single and order is None else tuple(results)


def _publish(graph: GraphedCallable, segment: ReplayableSegment, pool: GraphPool, order: Sequence[int] | None) -> Any:
    """Install a captured graph, and return the object that the user calls: the module itself, or the graph."""
    graph.add_variant(segment)
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
    static_inputs = _static_inputs(schedule, surfaces, reuse)
    recorders = []
    for graph, surface, inputs in zip(graphs, surfaces, static_inputs, strict=True):
        recorders.append(SegmentRecorder(graph.spec, surface, inputs, arena))
    return recorders


def _as_lists(single: bool, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """The sample arguments as two lists: a tuple and a dict per entry."""
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


def _samples_per_entry(schedule: Schedule, args: list[Any], kwargs: list[Any]) -> list[tuple[Any, Any]]:
    """One sample per entry. With one sample per callable, all its microbatches share it."""
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
        if any(target is earlier for earlier in targets[:index]):
            raise CaptureError(f"callables[{index}] appears twice: use `order` to graph several microbatches")
        if isinstance(target, nn.Module):
            if isinstance(target.__dict__.get("forward"), GraphedCallable):
                raise CaptureError(f"callables[{index}] is already graphed: call `module.forward.reset()` first")
            trainable = [name for name, buffer in target.named_buffers() if buffer.requires_grad]
            if trainable:
                raise CaptureError(f"buffers of callables[{index}] require grad: {', '.join(trainable)}")


def _static_inputs(schedule: Schedule, surfaces: list[Surface], reuse: bool) -> list[StaticTensors]:
    """Static inputs per entry; with `reuse`, entries that are never live at the same time share them."""
    if not reuse:
        return [static_copies(surface) for surface in surfaces]
    keys = [tuple((TensorSpec.of(t), t.stride(), t.requires_grad) for t in s.tensors) for s in surfaces]
    ranges = schedule.live_ranges()
    slots = assign_slots(ranges, keys)
    check_slots(ranges, keys, slots)
    by_slot: dict[int, StaticTensors] = {}
    for slot, surface in zip(slots, surfaces, strict=True):
        if slot not in by_slot:
            by_slot[slot] = static_copies(surface)
    return [by_slot[slot] for slot in slots]
