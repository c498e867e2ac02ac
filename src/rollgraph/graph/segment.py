"""A segment: one callable as a forward graph and a backward graph behind one autograd node.

Owns that boundary: what is recorded, which gradients leave it and in whose memory, and the order in
which the passes of several segments are recorded. Knows nothing of modules standing in for others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.autograd_leaves import (
    aliased_parameters,
    leaves_behind,
    leaves_under,
    moving_out,
    without_tensor_hooks,
)
from rollgraph.graph.backend import Backend, EagerRecording, Recording, capture_errors
from rollgraph.graph.binding import Binding
from rollgraph.graph.capture import (
    OutputTree,
    Writes,
    bound_modules,
    lent_outputs,
    overtaken_inputs,
    overtaking_writes,
    refuse_written,
)
from rollgraph.graph.errors import CaptureError, GraphError, MemoryInUse, ReplayMismatch, StaleGraph, WarmupError
from rollgraph.graph.hooks import GraphHooks, run_warmup_hook
from rollgraph.graph.live_objects import ProgramObjects, noting_calls
from rollgraph.graph.pool import FOREVER, Arena
from rollgraph.graph.report import GraphRecord
from rollgraph.graph.saved_versions import SavedVersions
from rollgraph.graph.saved_versions import version as _version
from rollgraph.graph.schedule import Schedule
from rollgraph.graph.slots import growing, hook_places, slots_of
from rollgraph.graph.static_outputs import StaticOutputs, side_by_side
from rollgraph.graph.surface import Overtaken, StaticTensors, Surface, TensorSpec
from rollgraph.graph.undo_log import Transaction

_requires_grad = attrgetter("requires_grad")
_is_none = partial(is_, None)
_thread = threading.get_ident
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # of the backward that is running
WarmupHook = Callable[[Any], None]


@dataclass
class CallableSpec:
    """What is to be graphed, and how."""

    target: Any  # the module or function
    backend: Backend
    record: GraphRecord
    hooks: GraphHooks
    allow_unused: bool = False
    grad_buffers: Mapping[Tensor, Tensor] = field(default_factory=dict)
    retain_graph: bool = False  # what the backward needs is kept after it, so that it can run again

    def __post_init__(self) -> None:
        self.hooked = self.hooks.at_replay
        self.module = self.target if isinstance(self.target, nn.Module) else None
        self.original: Callable[..., Any] = self.target.forward if self.module is not None else self.target

    @property
    def name(self) -> str:
        return self.record.name


class Segment:
    """One callable for one surface: its forward and backward recordings and what lies between them."""

    def __init__(self, spec: CallableSpec, surface: Surface, statics: StaticTensors, arena: Arena) -> None:
        self.spec = spec
        self.surface = surface
        self.statics = statics
        self.arena = arena
        self.forward: Recording = EagerRecording(self._run_forward)
        self.backward: Recording | None = None
        self.outputs: OutputTree | None = None
        self.parameters: list[Tensor] = []  # leaves that get a gradient, besides the inputs
        self.passed: tuple[Tensor, ...] = ()  # those that autograd must see
        self.binding = Binding(())
        self.forward_number = self.backward_number = 0
        self._inputs: Sequence[Tensor] = ()
        self._results: list[Tensor] = []  # outputs with their autograd graph, until the backward is recorded
        self._trains = False
        self._output_specs: list[TensorSpec] = []
        self._opaque_outputs: list[int] = []
        self._differentiable_outputs: list[int] = []
        self._unused: list[int] = []
        self._reached: list[set[int]] = []  # for each output, the places in (inputs, parameters) behind it
        self.raw_output: Any = None
        self._differentiable = [t.requires_grad for t in surface.tensors]
        self._all_differentiable = all(self._differentiable)
        self._no_gradients: tuple[None, ...] = ()  # for parameters whose gradient goes to a buffer
        self._marks: dict[Any, Any] = {}
        self._called: dict[int, nn.Module] = {}
        self._like: list[tuple[Tensor, torch.device] | None] = []  # what each gradient looks like
        self._gradients: list[Tensor | None] | None = None  # where the recorded backward leaves them
        self._lent: StaticOutputs | None = None  # the backward's results, where they are static
        self._aliases: dict[Tensor, Tensor] = {}  # parameter -> the leaf that stands for it
        self._shared: set[Tensor] = set()  # parameters that are also reached past the module: they have no alias
        self.capturing = False  # else whoever runs the callable, a sanitizer or the eager backend, gets it untouched
        self._saved = SavedVersions()
        self._writes: Writes = [[] for _ in surface.tensors]
        self.overtaken = Overtaken((), ())
        self._lender: StaticOutputs | None = None  # the forward's outputs
        self._lock = arena.lock if spec.backend.records else threading.RLock()

    # -- the Python that is recorded -------------------------------------------------------------

    def _run_forward(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        if not self.spec.backend.records:  # eager: cut from the caller's autograd, as a graph is
            inputs = [t.detach().requires_grad_(d) for t, d in zip(inputs, self._differentiable, strict=True)]
        self._inputs = inputs
        args, kwargs = self.surface.arguments(inputs)
        self._aliases = {}
        stand_ins: AbstractContextManager[None] = nullcontext()
        if self.capturing:
            stand_ins = aliased_parameters(self.spec.module, self._aliases, self._shared)
        with torch.set_grad_enabled(self.surface.modes[0]), stand_ins:
            output = self.spec.original(*args, **kwargs)
        self.outputs = OutputTree(output, self.spec.name)
        self._results = self.outputs.tensors
        self._opaque_outputs = [i for i, result in enumerate(self._results) if not result.requires_grad]
        self._differentiable_outputs = [i for i, result in enumerate(self._results) if result.requires_grad]
        self._output_specs = [TensorSpec.of(result) for result in self._results]
        self.raw_output = output
        return [result.detach() for result in self._results]

    def _run_backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        inputs = [t for t, d in zip(self._inputs, self._differentiable, strict=True) if d]
        targets = [*inputs, *(self._aliases.get(p, p) for p in self.parameters)]
        results = [result for result in self._results if result.requires_grad]
        buffers = self.spec.grad_buffers
        leaving = [t for t, p in zip(targets, (*inputs, *self.parameters), strict=True) if p not in buffers]
        with (
            without_tensor_hooks(self.parameters),  # they run where the gradients leave, at replay
            moving_out(leaving, self._gradients or (), self.parameters),
        ):
            found: Sequence[Tensor | None] = torch.autograd.grad(
                results, targets, gradients, allow_unused=True, retain_graph=self.spec.retain_graph
            )
        kept: list[Tensor | None] = list(found[: len(inputs)])
        for parameter, gradient in zip(self.parameters, found[len(inputs) :], strict=True):
            buffer = buffers.get(parameter)
            if buffer is None:
                kept.append(gradient)
            elif gradient is not None:
                buffer.add_(gradient)
        self._unused = [i for i, gradient in enumerate(found) if gradient is None]
        return kept if self._gradients is None else self._moved_out(kept, self._gradients)

    def _moved_out(self, made: list[Tensor | None], buffers: list[Tensor | None]) -> list[Tensor | None]:
        """The results in memory that no other graph writes: that of the pool is reused by all of them."""
        if [g is None for g in made] != [b is None for b in buffers]:
            raise CaptureError(
                f"{self.spec.name!r} gives other inputs or parameters a gradient than in its last warm-up run: raise "
                "the number of warm-up runs"
            )
        moves = [(b, g) for b, g in zip(buffers, made, strict=True) if b is not None and g is not None and b is not g]
        if moves:
            torch._foreach_copy_([b for b, _ in moves], [g for _, g in moves])
        return buffers

    def _find_parameters(self) -> None:
        """The module's trainable parameters, and every other leaf its output depends on."""
        module, given = self.spec.module, {id(t) for t in self._inputs}
        original = {id(alias): parameter for parameter, alias in self._aliases.items()}
        found: dict[int, Tensor] = {
            id(p): p for p in (module.parameters() if module is not None else ()) if p.requires_grad
        }
        for leaf in leaves_behind(self._results):
            if leaf in self._aliases:  # from the next run on, it is one leaf again, with one gradient
                self._shared.add(leaf)
            leaf = original.get(id(leaf), leaf)
            found.setdefault(id(leaf), leaf)
        self.parameters = [leaf for key, leaf in found.items() if key not in given]
        buffered = [p for p in self.parameters if p in self.spec.grad_buffers]
        self.passed = tuple(p for p in self.parameters if p not in self.spec.grad_buffers)
        if buffered:  # one of them keeps the node in the autograd graph; its gradient goes to its buffer
            self.passed += (buffered[0],)
            self._no_gradients = (None,)
        leaves = [self._aliases.get(p, p) for p in self.parameters]
        places = {id(t): i for i, t in enumerate([*self._inputs, *self.parameters])}
        places.update({id(t): i for i, t in enumerate([*self._inputs, *leaves])})
        self._reached = [{places[id(leaf)] for leaf in leaves_behind([r]) if id(leaf) in places} for r in self._results]
        trainable = any(self._differentiable) or bool(self.parameters)
        self._trains = trainable and any(result.requires_grad for result in self._results)

    # -- capture ---------------------------------------------------------------------------------

    def warm_up(self, transaction: Transaction, iterations: int) -> None:
        spec, hooks = self.spec, self.spec.hooks
        args, kwargs = self.surface.arguments(self.statics.tensors)
        iteration, shared = 0, -1
        while iteration < iterations or shared != len(self._shared):  # the last run had the leaves of the recording
            iteration, shared = iteration + 1, len(self._shared)
            hooks.run("pre_forward", "warmup", spec.target, args, kwargs)
            with transaction.undo_log.run(again=iteration > 1), noting_calls(self._called):
                self._run_forward(self.statics.tensors)
            self._writes = overtaking_writes(transaction.undo_log, self.statics, self._results)
            hooks.run("post_forward", "warmup", spec.target, args, kwargs, self.raw_output)
            self._find_parameters()
            if self._trains:
                hooks.run("pre_backward", "warmup", spec.target)
                gradients = [torch.zeros_like(r) for r in self._results if r.requires_grad]
                with transaction.undo_log.run(), torch._C._DisableAutocast():
                    made = self._run_backward(gradients)
                self._like = [None if g is None else (torch.empty_like(g, device="meta"), g.device) for g in made]
                del made
                hooks.run("post_backward", "warmup", spec.target)
            self._forget_results()
        refuse_written(transaction.undo_log, self.surface, self.statics)

    def learn_from(self, warmed: Segment, transaction: Transaction) -> None:
        """Another microbatch of a callable that was warmed up; its own run only if its inputs differ."""
        if str(self.surface) != str(warmed.surface):
            self.warm_up(transaction, 1)
        self._like, self._trains = self._like or warmed._like, warmed._trains
        self.parameters, self.passed, self._no_gradients = warmed.parameters, warmed.passed, warmed._no_gradients
        self._called, self._writes, self._shared = warmed._called, warmed._writes, warmed._shared

    def record_forward(self, transaction: Transaction) -> None:
        spec = self.spec
        args, kwargs = self.surface.arguments(self.statics.tensors)
        spec.hooks.run("pre_forward", "capture", spec.target, args, kwargs)
        self.forward_number = self.arena.next_capture()
        last = self.outputs
        self.forward = self._record(transaction, self._run_forward, self.statics, "forward")
        if spec.backend.records:
            self._find_parameters()
            self._refuse_change_since(last)
            self.overtaken = overtaken_inputs(self.surface, self._writes, self.forward)
        transaction.undo_log.check_reads(self.forward.external)
        self._bind(transaction.objects)
        if self._trains and spec.backend.records:
            self._saved = SavedVersions.of(self._results, self._nameable())
        spec.hooks.run("post_forward", "capture", spec.target, args, kwargs, self.raw_output)

    def _refuse_change_since(self, warmup: OutputTree | None) -> None:
        if warmup is not None and self.outputs is not None:
            self.outputs.refuse_change(warmup, self.spec.name)

    def record_backward(self, transaction: Transaction) -> None:
        if not self._trains:
            self._forget_results()
            return
        spec = self.spec
        spec.hooks.run("pre_backward", "capture", spec.target)
        self.backward_number = self.arena.next_capture()
        incoming = StaticTensors(self._scratch())
        if self._gradients is not None:
            transaction.undo_log.expect(g for g in self._gradients if g is not None)
        with torch._C._DisableAutocast():
            self.backward = self._record(transaction, self._run_backward, incoming, "backward")
        self._check_unused()
        self._boundary = self._make_boundary()
        spec.hooks.run("post_backward", "capture", spec.target)
        if not spec.retain_graph:
            self._forget_results()

    def _record(self, transaction: Transaction, thunk: Any, statics: StaticTensors, which: str) -> Recording:
        backend, undo_log = self.spec.backend, transaction.undo_log
        generators = [generator for generator, _ in undo_log.generators.values()]
        with capture_errors(f"capture of {self.spec.name!r} ({which})"), transaction.recording(backend.executes):
            return backend.record(thunk, statics, self.arena, generators, self._marks)

    def _scratch(self) -> list[Tensor]:
        """Buffers for incoming gradients. Full only during a backward, so all segments share them."""
        buffers: list[Tensor] = []
        for place, result in enumerate(r for r in self._results if r.requires_grad):
            key = (place, TensorSpec.of(result), result.stride())
            if key not in self.arena.scratch:
                self.arena.scratch[key] = torch.empty_like(result, requires_grad=False)
            buffers.append(self.arena.scratch[key])
        return buffers

    def _check_unused(self) -> None:
        if not self._unused or self.spec.allow_unused:
            return
        names = [f"input {n}" for n, d in zip(self.surface.names, self._differentiable, strict=True) if d]
        module = self.spec.module
        known = {id(p): n for n, p in module.named_parameters()} if module is not None else {}
        names += [f"parameter {known.get(id(p), tuple(p.shape))}" for p in self.parameters]
        raise CaptureError(
            f"{', '.join(names[i] for i in self._unused)} of {self.spec.name!r} did not take part in the output: pass "
            "allow_unused_input=True if that is meant"
        )

    def _bind(self, objects: ProgramObjects) -> None:
        given = {id(t) for t in (*self.statics.tensors, *self._aliases.values())}
        buffers = self.spec.grad_buffers
        tensors = [t for t in (*self.forward.external, *self.parameters) if id(t) not in given and t.is_leaf]
        modules = bound_modules(self.spec.target, self._called, tensors, objects)
        if self.spec.module is not None:
            tensors += [*self.spec.module.parameters(), *self.spec.module.buffers()]
        buffered = [p for p in self.parameters if p in buffers]
        self.binding = Binding(
            tensors,
            slots_of(self.spec.target, modules, self._called, tensors),
            modules,
            trained=buffered,
            sums=[buffers[p] for p in buffered],
            growing=growing(modules, self._called),
            hooks=hook_places(self._called.values()),
        )

    def _nameable(self) -> dict[str, Tensor]:
        """What the program can change between forward and backward: tensors from outside, and the outputs."""
        module = self.spec.module
        known: dict[int, str] = {}
        if module is not None:
            known = {id(p): f"parameter {name}" for name, p in module.named_parameters()}
            known.update({id(b): f"buffer {name}" for name, b in module.named_buffers()})
        found: dict[str, Tensor] = {}
        for tensor in self.binding.tensors:
            found[known.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)} ({len(found)})")] = tensor
        for index, output in enumerate(self.forward.outputs):
            if output is not None:
                found[f"output {index}"] = output
        return found

    def _forget_results(self) -> None:
        """Drop the autograd graph: on CUDA its activations become free for the captures that follow."""
        self._results, self.raw_output = [], None
        if self.outputs is not None:
            self.outputs.without_tensors()

    def nbytes(self) -> int:
        """Memory of the recordings, in the pool where there is one."""
        return self.forward.nbytes + (self.backward.nbytes if self.backward is not None else 0)

    def static_bytes(self) -> int:
        """Memory of the static inputs and gradients."""
        return self.statics.nbytes() + (self._lent.nbytes() if self._lent is not None else 0)

    def is_open(self) -> bool:
        """Its forward ran, and its backward can still come."""
        return self.arena.waits_for(self.forward_number)

    def called(self) -> Iterable[nn.Module]:
        return self._called.values()

    def recordings(self) -> list[Recording]:
        return [self.forward] if self.backward is None else [self.forward, self.backward]

    def operations(self) -> int:
        return self.forward.operations + (self.backward.operations if self.backward is not None else 0)

    def seal(self) -> None:
        self.forward.seal()
        self._aliases = {}
        if self.spec.backend.records:
            self._lender = lent_outputs(self.forward)
            self.arena.lenders.append(self._lender)
        if self.backward is not None:
            self.backward.seal(versions=False)  # StaticOutputs hands out aliases that have their own
            if self.spec.backend.records:
                self._lent = StaticOutputs(self.backward.outputs)
                self._gradients = None

    def release(self) -> None:
        self.forward.release()
        if self.backward is not None:
            self.backward.release()
        self._forget_results()
        self.forward_number = -1
        if self._lender is not None:
            self.arena.lenders.remove(self._lender)
            self._lender = None

    # -- replay ----------------------------------------------------------------------------------

    def replay(self, inputs: Sequence[Tensor]) -> Any:
        outputs = self.outputs
        assert outputs is not None
        if self.backward is not None:
            result = self._boundary(*inputs, *self.passed)
            return result if outputs.is_tensor else outputs.build(result)
        if not torch.is_grad_enabled():
            return outputs.build(self._replay_forward(inputs))
        with torch.no_grad():
            tensors: Sequence[Tensor] = self._replay_forward(inputs)
        unexpected = self._newly_required(tuple(map(_requires_grad, inputs)))
        if unexpected:
            message = _NO_GRADIENT.format(", ".join(unexpected), self.spec.name)
            tensors = _NoBackward.apply(message, tensors, *inputs)  # type: ignore[no-untyped-call]
        return outputs.build(tensors)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Tensor]:
        """The tensors of a call that fits; ReplayMismatch if it does not."""
        inputs = self.surface.bind(args, kwargs)
        if self.overtaken:
            self.overtaken.check(inputs)
        return inputs

    def short_way(self) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """Bind, check and replay in one function, for a segment that nothing else has to be done for."""
        bind = self.bind if self.overtaken else self.surface.quick_bind()
        check, replay, passed = self.binding.check, self.replay, self.passed
        if self.backward is None or self.outputs is None or not self.outputs.is_tensor:

            def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                inputs = bind(args, kwargs)
                check()
                return replay(inputs)

            grad_off = not self.surface.modes[0]
            return self._call_without_gradients(bind) if grad_off and self._returns_tensor() else call
        boundary = self._boundary

        def call_boundary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            inputs = bind(args, kwargs)
            check()
            return boundary(*inputs, *passed)

        return call_boundary

    def _returns_tensor(self) -> bool:
        return self.outputs is not None and self.outputs.is_tensor

    def _call_without_gradients(
        self, bind: Callable[[tuple[Any, ...], dict[str, Any]], Sequence[Tensor]]
    ) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """Inference that returns one tensor: the call whose cost is nearly all host time."""
        arena, lock, number, replay = self.arena, self._lock, self.forward_number, self.forward.replay
        check, with_care = self.binding.check, self._replay_forward

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            inputs = bind(args, kwargs)
            check()
            with lock:
                if arena.low < number < arena.high and arena.borrower == _thread():
                    return replay(inputs)[0].detach()  # type: ignore[union-attr]
            return with_care(inputs)[0]

        return call

    def _replay_forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        arena = self.arena
        with self._lock:
            arena.admit(self.forward_number, self.spec.name)
            if arena.borrower != _thread():
                arena.claim(self.spec.name)
            return [tensor.detach() for tensor in self.forward.replay(inputs) if tensor is not None]

    def _make_boundary(self) -> Callable[..., Any]:
        """The one autograd node of the segment: `(*inputs, *passed)` to the output tensor, or a tuple of them."""
        segment, arena, name, inputs = self, self.arena, self.spec.name, len(self._differentiable)
        replay, forward, last = self.forward.replay, self.forward_number, self._needed_until()
        saved, acquire, release = self._saved, self._lock.acquire, self._lock.release
        read = saved.tensors
        assert self.outputs is not None
        bare = self.outputs.is_tensor

        class Boundary(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *tensors: Tensor) -> Any:
                acquire()
                try:
                    if arena.borrower != _thread():
                        arena.claim(name)
                    if not arena.low < forward < arena.high:
                        arena.admit(forward, name)
                    outputs = replay(tensors[:inputs])
                    if read:
                        saved.noted = list(map(_version, read))
                    arena.open(name, forward, last, ctx)
                finally:
                    release()
                ctx.materialize_grads = False
                if bare:
                    return outputs[0].detach()  # type: ignore[union-attr]
                results = tuple([output.detach() for output in outputs if output is not None])
                if segment._opaque_outputs and not segment._newly_required(ctx.needs_input_grad):
                    ctx.mark_non_differentiable(*[results[i] for i in segment._opaque_outputs])
                return results

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
                acquire()
                try:
                    return segment.replay_backward(ctx, gradients)
                finally:
                    release()

        # Function.apply without its scan of the arguments for functorch wrappers, which no graph can take.
        apply: Callable[..., Any] = super(torch.autograd.Function, Boundary).apply
        return apply

    def _needed_until(self) -> int:
        """The first capture that may lie in memory of a forward; none, if that was never given back."""
        return FOREVER if self.spec.retain_graph else self.backward_number

    def replay_backward(self, ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Gradients for `(inputs, passed)`."""
        spec, arena, lent = self.spec, self.arena, self._lent
        self._check_backward(ctx)
        again = spec.retain_graph and _keeps_graph()
        if not again:
            arena.close(self.forward_number)
        if not arena.low < self.backward_number < arena.high:
            self._admit_backward(ctx, again)
        if spec.hooked:
            spec.hooks.run("pre_backward", "replay", spec.target)
        if lent is not None and lent.held():
            lent.make_way({*leaves_under(ctx), *self.passed})
        assert self.backward is not None
        absent = any(map(_is_none, gradients))
        if absent:
            incoming = [self._incoming(i, gradients[i]) for i in self._differentiable_outputs]
        else:
            incoming = [gradients[i] for i in self._differentiable_outputs]  # type: ignore[misc]
        made = self.backward.replay(incoming)
        spec.record.backward_replays += spec.backend.records
        if spec.hooked:
            spec.hooks.run("post_backward", "replay", spec.target)
        if lent is not None:
            made = lent.lend()
        if absent:
            made = self._without_unreached(made, gradients)
        if self._all_differentiable:
            return (*made, *self._no_gradients)
        supply = iter(made)
        of_inputs = [next(supply) if d else None for d in self._differentiable]
        return (*of_inputs, *supply, *self._no_gradients)

    def _admit_backward(self, ctx: Any, again: bool) -> None:
        try:
            self.arena.admit(self.backward_number, self.spec.name)
        except MemoryInUse:
            if not again:
                self.arena.open(self.spec.name, self.forward_number, self._needed_until(), ctx)
            raise

    def _without_unreached(self, made: list[Tensor | None], incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Where no output with a gradient depends on a leaf, eager gives it None, not zeros."""
        reached = set().union(*(self._reached[i] for i, gradient in enumerate(incoming) if gradient is not None))
        inputs, buffers = len(self._differentiable), self.spec.grad_buffers
        places = [i for i, differentiable in enumerate(self._differentiable) if differentiable]
        places += [inputs + i for i, parameter in enumerate(self.parameters) if parameter not in buffers]
        return [gradient if place in reached else None for gradient, place in zip(made, places, strict=True)]

    def _check_backward(self, ctx: Any) -> None:
        if torch.is_grad_enabled():
            raise GraphError(f"graph {self.spec.name!r} has no double backward: create_graph=True cannot pass it")
        if self.forward_number < 0:
            raise StaleGraph(f"graph {self.spec.name!r} was reset between its forward and its backward")
        if not self.arena.is_open(self.forward_number, ctx):
            raise StaleGraph(f"the backward of graph {self.spec.name!r} already ran for this forward")
        saved = self._saved
        if saved.tensors and list(map(_version, saved.tensors)) != saved.noted:
            saved.refuse_change(self.spec.name)
        unexpected = [] if self._all_differentiable else self._newly_required(ctx.needs_input_grad)
        if unexpected:
            raise ReplayMismatch(_NO_GRADIENT.format(", ".join(unexpected), self.spec.name))

    def _newly_required(self, needs: tuple[bool, ...]) -> list[str]:
        """Inputs that require grad and did not at capture."""
        flags = zip(needs, self._differentiable, self.surface.names, strict=False)
        return [name for needed, differentiable, name in flags if needed and not differentiable]

    def _incoming(self, index: int, gradient: Tensor | None) -> Tensor:
        if gradient is not None:
            return gradient
        shape = self._output_specs[index]
        return torch.zeros(shape.shape, dtype=shape.dtype, device=shape.device)


_NO_GRADIENT = (
    "input {} of graph {!r} requires grad, but did not at capture: its gradient was not recorded. Give a sample that "
    "requires grad"
)


class _NoBackward(torch.autograd.Function):
    """Stands where a backward graph would be, so that a gradient that was not recorded raises."""

    @staticmethod
    def forward(ctx: Any, message: str, outputs: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ReplayMismatch(ctx.message)


def capture_segments(
    segments: Sequence[Segment],
    schedule: Schedule,
    warmup: int,
    pre_warmup_hook: WarmupHook | None = None,
    post_warmup_hook: WarmupHook | None = None,
) -> None:
    """Warm up each callable, then record every pass in the order in which it will be replayed."""
    backend = segments[0].spec.backend
    targets = [segment.spec.target for segment in segments]
    for segment in segments:
        segment.capturing = backend.records
    try:
        with Transaction(*targets) as transaction:
            for first, *others in _microbatches(segments, schedule):
                run_warmup_hook(pre_warmup_hook, "pre_warmup_hook", first.spec.target)
                with backend.stage(first.arena), capture_errors(f"warm-up of {first.spec.name!r}", WarmupError):
                    first.warm_up(transaction, warmup if backend.records else 1)
                    for other in others:
                        other.learn_from(first, transaction)
                run_warmup_hook(post_warmup_hook, "post_warmup_hook", first.spec.target)
            if backend.records:
                _give_buffers(segments)
            for step in schedule.steps:
                segment = segments[schedule.entry(step)]
                if step.kind == "forward":
                    segment.record_forward(transaction)
                else:
                    segment.record_backward(transaction)
    except BaseException:
        for segment in segments:
            segment.release()
        raise
    finally:
        for segment in segments:
            segment.capturing = False


def _give_buffers(segments: Sequence[Segment]) -> None:
    """Memory for the gradients of all of them."""
    buffers = iter(side_by_side([like for segment in segments for like in segment._like]))
    for segment in segments:
        segment._gradients = list(islice(buffers, len(segment._like)))


def _microbatches(segments: Sequence[Segment], schedule: Schedule) -> Iterable[list[Segment]]:
    """The segments of each callable, in the order of their forwards."""
    found: dict[int, list[Segment]] = {}
    for step in schedule.steps:
        if step.kind == "forward":
            index = schedule.callable_index(step.chunk, step.layer)
            found.setdefault(index, []).append(segments[schedule.entry(step)])
    return found.values()
