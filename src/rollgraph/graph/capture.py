"""`capture`: a whole function, with any backward and optimizer step inside it, as one graph.

Owns the steps every capture takes (warm up, record, bind) and what a captured thing does with a call
that does not fit. A captured function is opaque to autograd; `callables.py` has the autograd boundary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rollgraph.graph.autograd_leaves import leaves_behind
from rollgraph.graph.backend import Backend, CudaBackend, EagerBackend, Recording, Sentry, capture_errors
from rollgraph.graph.binding import Binding, BoundGradients
from rollgraph.graph.errors import CaptureError, GraphError, ReplayMismatch, StaleGraph, WarmupError
from rollgraph.graph.hooks import NO_HOOKS, GraphHooks, Guard, check_guards
from rollgraph.graph.live_objects import ProgramObjects, noting_calls
from rollgraph.graph.observer import creating_optimizer_state, watching
from rollgraph.graph.pool import Arena, GraphPool, PoolHandle
from rollgraph.graph.report import GraphRecord
from rollgraph.graph.slots import (
    growing,
    holders_of,
    hook_places,
    lists_gone_through,
    optimizer_slots,
    slots_of,
    stepped_optimizers,
)
from rollgraph.graph.static_outputs import StaticOutputs
from rollgraph.graph.surface import Overtaken, Span, StaticTensors, Surface, own_copy, same_constant
from rollgraph.graph.tape import Recorder, TapeBackend
from rollgraph.graph.undo_log import Transaction, UndoLog, storage_of

P = ParamSpec("P")
R = TypeVar("R")
OnMismatch = Literal["raise", "eager", "recapture"]
BackendName = Literal["auto", "cuda", "tape", "eager"]
Writes = list[list[tuple[int, Span]]]  # for each input: storages and places
_thread = threading.get_ident
_dispatch_modes = torch._C._len_torch_dispatch_stack
MAX_VARIANTS = 16  # captures that one function or callable keeps under on_mismatch="recapture"


class Captured:
    """What captured functions and callables share: counting, switching, and acting on a mismatch."""

    def __init__(self, target: Any, record: GraphRecord, backend: Backend, on_mismatch: OnMismatch) -> None:
        if on_mismatch not in ("raise", "eager", "recapture"):
            raise ValueError(f"on_mismatch={on_mismatch!r}: expected 'raise', 'eager' or 'recapture'")
        self.target = target
        self.record = record
        self.enabled = True
        self.static_bytes = 0
        self._backend = backend
        self._on_mismatch = on_mismatch
        self._watch = watching.get()

    @property
    def name(self) -> str:
        return self.record.name

    def enable(self) -> None:
        self.enabled = True

    def disable(self) -> None:
        """Run the original code, counted as eager, until enabled again."""
        self.enabled = False

    def _count_run(self) -> None:
        if self._backend.records:
            self.record.replays += 1
        else:
            self.record.eager_runs["backend is eager"] += 1

    def _act_on(self, error: GraphError) -> OnMismatch:
        """Raise, or count an eager run and say what to do instead."""
        if self._on_mismatch == "raise" or not isinstance(error, (ReplayMismatch, StaleGraph)):
            if self._watch is not None:
                self._watch.saw(self, error)
            error.add_note(f"in graph {self.name!r} (on_mismatch={self._on_mismatch!r})")
            raise error
        if self._on_mismatch == "eager":
            self.record.eager_runs[str(error)] += 1
        return self._on_mismatch


class OutputTree:
    """The structure of a function's output, with a fast way back from its tensors."""

    def __init__(self, output: Any, where: str | None) -> None:
        """`where` the output comes from, if it is refused that a replay could not make; None before a recording."""
        self._leaves, self._tree = pytree.tree_flatten(output)
        self.tensors: list[Tensor] = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._leaves = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in self._leaves]
        self.is_tensor = isinstance(output, Tensor)
        self.differentiable = [i for i, tensor in enumerate(self.tensors) if tensor.requires_grad]
        self._is_tuple = type(output) is tuple and all(isinstance(leaf, Tensor) for leaf in output)
        for leaf in self._leaves if where is not None else ():
            if leaf is not None and not isinstance(leaf[0], (type(None), bool, int, float, str)):
                raise CaptureError(
                    f"{where} returns a {type(leaf[0]).__name__}, which a replay would return unchanged for ever: "
                    "return tensors, or containers of them"
                )

    def refuse_change(self, last: OutputTree, where: str) -> None:
        """What is no tensor would be returned unchanged for ever: so it must have been the same in the run before."""
        if self._tree != last._tree or [leaf is None for leaf in self._leaves] != [v is None for v in last._leaves]:
            raise CaptureError(
                f"{where} returns another structure from one call to the next: return the same each time"
            )
        for leaf, before in zip(self._leaves, last._leaves, strict=True):
            if leaf is not None and before is not None and not same_constant(leaf[0], before[0]):
                raise CaptureError(
                    f"{where} returns {before[0]!r} in one call and {leaf[0]!r} in the next, which a replay would not "
                    "follow: return it as a tensor, or compute it outside"
                )

    def without_tensors(self) -> OutputTree:
        self.tensors = []  # so that nothing of the recording's autograd graph is kept
        return self

    def build(self, tensors: Sequence[Tensor]) -> Any:
        if self.is_tensor:
            return tensors[0]
        if self._is_tuple:
            return tuple(tensors)
        supply = iter(tensors)
        leaves = [next(supply) if leaf is None else leaf[0] for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._tree)


@dataclass(eq=False)
class Variant:
    """One capture of a function, for one surface."""

    surface: Surface
    recording: Recording
    outputs: OutputTree | None
    binding: Binding
    gradients: BoundGradients
    arena: Arena
    capture: int  # its place in the arena's order of captures
    differentiable: list[bool] = field(default_factory=list)  # inputs that may require grad: none leaves through them
    overtaken: Overtaken = field(default_factory=lambda: Overtaken((), ()))
    lender: StaticOutputs | None = None

    def release(self) -> None:
        self.recording.release()
        if self.lender is not None:
            self.arena.lenders.remove(self.lender)
            self.lender = None


class _Opaque(torch.autograd.Function):
    """Stands behind outputs that require grad in eager: a captured function has no backward to go on with."""

    @staticmethod
    def forward(ctx: Any, name: str, outputs: Sequence[Tensor], anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise GraphError(
            f"graph {ctx.name!r} was captured as a whole function, so no gradient passes through what it returns: run "
            "the backward inside the function, or use make_graphed_callables"
        )


_opaque: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Opaque).apply


@dataclass
class Warmed:
    """What the warm-up of a function found out."""

    gradients: BoundGradients
    outputs: OutputTree  # of its last run
    writes: Writes


class GraphedFunction(Captured, Generic[P, R]):
    """A captured function: call it like the original, and it replays.

    What it returns is lent: the next replay writes over it.
    """

    def __init__(
        self,
        function: Callable[P, R],
        hooks: GraphHooks,
        guards: Sequence[Guard],
        backend: Backend,
        on_mismatch: OnMismatch,
        warmup: int,
        name: str,
    ) -> None:
        super().__init__(function, GraphRecord(name, backend.name), backend, on_mismatch)
        self._function = function
        self._hooks = hooks
        self._hooked = hooks.at_replay
        self._guards = list(guards)
        self._warmup = warmup
        self._called: dict[int, torch.nn.Module] = {}
        self._variants: list[Variant] = []  # the one that was used last comes first
        self._anchor = torch.zeros((), requires_grad=True)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self.enabled or not self._variants:
            self.record.eager_runs["disabled" if self._variants else "reset"] += 1
            return self._function(*args, **kwargs)
        if _dispatch_modes():
            refuse_nesting(self.name)
        try:
            variant, inputs = self._find(args, kwargs)
        except GraphError as error:
            if self._act_on(error) == "eager":
                return self._function(*args, **kwargs)
            variant, inputs = self._recapture(args, kwargs), Surface(args, kwargs).tensors
        if self._guards:
            check_guards(self._guards, self.name)
        if self._hooked:
            variant.arena.admit(variant.capture, self.name)  # before a hook has changed anything
            self._hooks.run("pre_forward", "replay", self.target, args, kwargs)
        try:
            variant.binding.check()
            variant.gradients.check()
        except GraphError as error:
            if self._act_on(error) == "eager":
                output: R = self._function(*args, **kwargs)
            else:
                self._variants.remove(variant)
                variant.release()
                output = self._replay(self._recapture(args, kwargs), inputs)
        else:
            output = self._replay(variant, inputs)
        if self._hooked:
            self._hooks.run("post_forward", "replay", self.target, args, kwargs, output)
        return output

    def reset(self) -> None:
        """Give the graphs back; calls run the original function from now on."""
        for variant in self._variants:
            variant.release()
        self._variants.clear()
        self.static_bytes = self.record.bytes_owned = 0

    def __reduce__(self) -> Any:
        """A copy or pickle is the function itself, ungraphed."""
        return identity, (self._function,)

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], arena: Arena) -> Variant:
        """Capture one call in `arena`; on an error nothing has changed."""
        surface = Surface(args, kwargs)
        statics = StaticTensors([own_copy(tensor) for tensor in surface.tensors])
        if not self._backend.records:
            variant = self._eager_variant(surface, arena)
        else:
            variant = self._recorded_variant(surface, statics, arena)
            variant.recording.seal()
            variant.gradients.settle()
            variant.lender = lent_outputs(variant.recording)
            arena.lenders.append(variant.lender)
        self._variants.insert(0, variant)
        if self._watch is not None:
            self._watch.captured(self, self._called.values(), [variant.recording])
        self.record.surface = str(surface)
        self.record.captures += variant.recording.operations > 0
        self.record.operations = variant.recording.operations
        owned = statics.nbytes() + variant.gradients.nbytes() if self._backend.records else 0
        self.record.bytes_owned += owned + variant.recording.nbytes
        self.static_bytes += owned + (variant.recording.nbytes if self._backend.name != "cuda" else 0)
        return variant

    def _recorded_variant(self, surface: Surface, statics: StaticTensors, arena: Arena) -> Variant:
        with Transaction(self.target) as transaction:
            warmed = self._warm_up(transaction, surface, statics, arena)
            return self._record(transaction, surface, statics, warmed, arena)

    def _eager_variant(self, surface: Surface, arena: Arena) -> Variant:
        def thunk(inputs: Sequence[Tensor]) -> list[Tensor | None]:
            args, kwargs = surface.arguments(inputs)
            variant.outputs = tree = OutputTree(self._function(*args, **kwargs), self.name)
            tensors: list[Tensor | None] = [tensor.detach() for tensor in tree.tensors]
            tree.without_tensors()  # their autograd graph would tie the parameters to this stream
            return tensors

        recording = self._backend.record(thunk, StaticTensors([]), arena, (), {})
        variant = Variant(surface, recording, None, Binding(()), BoundGradients(()), arena, arena.next_capture())
        variant.differentiable = [True] * len(surface.tensors)
        return variant

    def _warm_up(self, transaction: Transaction, surface: Surface, statics: StaticTensors, arena: Arena) -> Warmed:
        """Run the function for real: find the gradients it writes and the optimizer state it creates."""
        args, kwargs = surface.arguments(statics.tensors)
        gradients, last = BoundGradients(()), max(self._warmup, 2) - 1  # the second run shows what happens to gradients
        with self._backend.stage(arena), capture_errors(f"warm-up of {self.name!r}", WarmupError):
            for run in range(last + 1):
                gradients.bind()
                self._hooks.run("pre_forward", "warmup", self.target, args, kwargs)
                with transaction.undo_log.run(again=run > 0), noting_calls(self._called):
                    output = self._function(*args, **kwargs)
                self._hooks.run("post_forward", "warmup", self.target, args, kwargs, output)
                tree = OutputTree(output, None)
                _refuse_lost_gradients(surface, statics.tensors, tree.tensors)
                writes = overtaking_writes(transaction.undo_log, statics, tree.tensors)
                tree.without_tensors()
                del output
                leaves = transaction.changed_gradients()
                if len(leaves) > len(gradients.leaves):
                    if run == last:
                        raise CaptureError(f"a parameter first gets a gradient in run {run + 1}: raise warmup")
                    transaction.restore_gradients()
                    gradients = BoundGradients(leaves)
                if run == 0:
                    with creating_optimizer_state():
                        transaction.create_optimizer_state()
            gradients.prepare_recording()
        transaction.undo_log.expect(gradients.buffers)
        refuse_written(transaction.undo_log, surface, statics)
        return Warmed(gradients, tree, writes)

    def _record(
        self,
        transaction: Transaction,
        surface: Surface,
        statics: StaticTensors,
        warmed: Warmed,
        arena: Arena,
    ) -> Variant:
        args, kwargs = surface.arguments(statics.tensors)
        undo_log, gradients = transaction.undo_log, warmed.gradients
        trees: list[Any] = []

        def thunk(inputs: Sequence[Tensor]) -> list[Tensor | None]:
            args, kwargs = surface.arguments(inputs)
            output = self._function(*args, **kwargs)
            with torch.no_grad():
                gradients.keep_results()
            tree = OutputTree(output, self.name)
            if not trees:  # the recording; a sanitizer runs this again
                trees.append((output, tree))
            return [tensor.detach() for tensor in tree.tensors]

        self._hooks.run("pre_forward", "capture", self.target, args, kwargs)
        number = arena.next_capture()
        generators = [generator for generator, _ in undo_log.generators.values()]
        with capture_errors(f"capture of {self.name!r}"), transaction.recording(self._backend.executes):
            recording = self._backend.record(thunk, statics, arena, generators, {})
        try:
            output, tree = trees[0]
            trees[:] = [None]  # nothing of the recording's autograd graph is kept
            tree.refuse_change(warmed.outputs, self.name)
            undo_log.check_reads(recording.external)
            if len(transaction.changed_gradients()) > len(gradients.leaves):
                raise CaptureError(f"a parameter of {self.name!r} first gets a gradient in the recording: raise warmup")
            gradients.observe(recording.external)
            binding = self._bind(transaction, recording, statics, gradients)
            self._hooks.run("post_forward", "capture", self.target, args, kwargs, output)
        except BaseException:
            recording.release()
            raise
        variant = Variant(surface, recording, tree.without_tensors(), binding, gradients, arena, number)
        variant.differentiable = [static.requires_grad for static in statics.tensors]
        variant.overtaken = overtaken_inputs(surface, warmed.writes, recording)
        return variant

    def _bind(
        self, transaction: Transaction, recording: Recording, statics: StaticTensors, gradients: BoundGradients
    ) -> Binding:
        objects, given = transaction.objects, set(map(id, statics.tensors))
        tensors = [t for t in (*recording.external, *gradients.leaves) if id(t) not in given]
        modules = bound_modules(self.target, self._called, tensors, objects)
        optimizers = stepped_optimizers(objects, transaction.undo_log)
        slots = slots_of(self.target, modules, self._called, tensors, optimizers)
        return Binding(
            tensors,
            slots + optimizer_slots(optimizers, transaction.undo_log),
            modules,
            trained=gradients.leaves,
            growing=growing(modules, self._called),
            hooks=hook_places(self._called.values(), optimizers),
        )

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Variant, Sequence[Tensor]]:
        """The variant that fits the call; the newest one's difference if none does."""
        first: GraphError | None = None
        for variant in self._variants:
            try:
                inputs = variant.surface.bind(args, kwargs)
            except ReplayMismatch as error:
                first = first or error
                continue
            if torch.is_grad_enabled():
                _refuse_differentiable(inputs, variant)
            if variant.overtaken:
                variant.overtaken.check(inputs)
            if variant is not self._variants[0]:
                self._variants.remove(variant)
                self._variants.insert(0, variant)
            return variant, inputs
        assert first is not None
        raise first

    def _recapture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        while len(self._variants) >= MAX_VARIANTS:
            self._variants.pop().release()
            self.record.dropped += 1
        variant = self.capture(args, kwargs, Arena())  # memory of its own: it may be replayed at any moment
        variant.overtaken.check(variant.surface.tensors)
        return variant

    def _replay(self, variant: Variant, inputs: Sequence[Tensor]) -> R:
        if self._backend.records and torch.is_grad_enabled():
            with torch.no_grad():
                tensors = self._run_recording(variant, inputs)
        else:
            tensors = self._run_recording(variant, inputs)
        self._count_run()
        assert variant.outputs is not None
        if variant.outputs.differentiable:
            self._make_opaque(tensors, variant.outputs.differentiable)
        output: R = variant.outputs.build(tensors)
        return output

    def _run_recording(self, variant: Variant, inputs: Sequence[Tensor]) -> list[Tensor]:
        arena, number = variant.arena, variant.capture
        with arena.lock if self._backend.records else nullcontext():
            if not arena.low < number < arena.high:
                arena.admit(number, self.name)
            if arena.borrower != _thread():
                arena.claim(self.name)
            variant.gradients.enter()
            tensors = [t.detach() for t in variant.recording.replay(inputs) if t is not None]
            variant.gradients.leave()
        return tensors

    def _make_opaque(self, tensors: list[Tensor], places: list[int]) -> None:
        """Outputs that require grad in eager do so here, but only to raise where a gradient would be lost."""
        if torch.is_inference_mode_enabled():
            return
        with torch.enable_grad():
            attached = _opaque(self.name, [tensors[place] for place in places], self._anchor)
        for place, tensor in zip(places, attached, strict=True):
            tensors[place] = tensor


def capture(
    fn: Callable[P, R],
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    pool: GraphPool | PoolHandle | None = None,
    hooks: GraphHooks | None = None,
    guards: Sequence[Guard] = (),
    backend: BackendName = "auto",
    on_mismatch: OnMismatch = "raise",
    warmup: int = 3,
    name: str | None = None,
) -> GraphedFunction[P, R]:
    """Capture `fn(*example_inputs, **example_kwargs)`, backward and optimizer step inside it included.

    Afterwards everything is as it was: parameters, gradients, optimizer state, RNG. The result replays when
    called with arguments of the same surface; what it does with others is `on_mismatch`. A gradient that
    exists at capture is the buffer that replays accumulate into.
    """
    if not callable(fn):
        raise CaptureError(f"capture takes a function, got {type(fn).__name__}")
    if isinstance(example_inputs, Tensor) or not isinstance(example_inputs, (tuple, list)):
        raise CaptureError(f"example_inputs must be a tuple of arguments, got {type(example_inputs).__name__}")
    if warmup < 1:
        raise CaptureError(f"warmup={warmup}: at least one run is needed, to find what the function writes")
    hooks = hooks or NO_HOOKS
    if hooks.pre_backward or hooks.post_backward:
        raise CaptureError("a captured function has no backward of its own: use make_graphed_callables")
    kwargs = example_kwargs or {}
    chosen = choose_backend(backend, (example_inputs, kwargs), fn)
    pool = GraphPool.of(pool)
    refuse_nesting(name or callable_name(fn))
    graphed = GraphedFunction(
        fn, hooks, guards, chosen, on_mismatch, warmup, pool.unique_name(name or callable_name(fn))
    )
    graphed.capture(tuple(example_inputs), kwargs, pool.arena)
    pool.add(graphed)
    return graphed


def choose_backend(name: BackendName, arguments: Any, target: Any) -> Backend:
    """The backend by name, or by the device of the arguments and of the module's parameters."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    if isinstance(target, torch.nn.Module):
        tensors += list(target.parameters())
    device = next((t.device for t in tensors if t.is_cuda), None)
    watch = watching.get()
    if watch is not None:
        return watch.backend(_choose(name, device, bool(tensors)))
    return _choose(name, device, bool(tensors))


def _choose(name: BackendName, device: torch.device | None, given: bool) -> Backend:
    if name == "eager":
        return EagerBackend()
    if name == "tape" or (name == "auto" and device is None and (given or not torch.cuda.is_available())):
        return TapeBackend()
    if name == "cuda" and not torch.cuda.is_available():
        raise CaptureError("backend='cuda' needs a CUDA device; use 'tape' or 'auto' on a CPU")
    if name == "auto" and device is None:
        raise CaptureError("no tensor argument to tell the device by: pass backend='cuda' or backend='tape'")
    if name in ("cuda", "auto"):
        return CudaBackend(device or torch.device("cuda"))
    raise ValueError(f"backend={name!r}: expected 'auto', 'cuda', 'tape' or 'eager'")


def identity(thing: Any) -> Any:
    """What a pickled graph is read back with."""
    return thing


def callable_name(target: Any) -> str:
    return getattr(target, "__name__", None) or type(target).__name__


def refuse_nesting(name: str) -> None:
    """A graph cannot hold another graph's replay."""
    if any(isinstance(mode, (UndoLog, Recorder, Sentry)) for mode in _get_current_dispatch_mode_stack()):
        raise CaptureError(
            f"graph {name!r} is used inside another capture: switch it off there, `with pool.disabled(): capture(...)`"
        )


def bound_modules(
    target: Any, called: dict[int, torch.nn.Module], tensors: Iterable[Tensor], objects: ProgramObjects
) -> list[torch.nn.Module]:
    """The modules whose state a recording depends on."""
    found = dict(called)
    if isinstance(target, torch.nn.Module):
        found.update((id(module), module) for module in target.modules())
    else:
        found.update((id(module), module) for module in lists_gone_through(called, objects.modules))
    found.update((id(module), module) for module in holders_of(tensors, objects.modules))
    for module in found.values():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{callable_name(target)} runs the TorchScript module {module.original_name}, whose state a graph "
                "cannot follow: capture the module it was scripted or traced from"
            )
    return list(found.values())


def refuse_written(undo_log: UndoLog, surface: Surface, statics: StaticTensors) -> None:
    """A function may not write its arguments: a graph would write its own copies of them."""
    for name, static in zip(surface.names, statics.tensors, strict=True):
        if undo_log.wrote(static):
            where = undo_log.written_at(static)
            raise CaptureError(
                f"argument {name} is written in place at {where}, which the caller would not see: let the function "
                "reach that tensor from outside its arguments, or write to a copy",
                where,
            )


def overtaking_writes(undo_log: UndoLog, statics: StaticTensors, outputs: Iterable[Tensor]) -> Writes:
    """For each input, what the run that just ended wrote outside before it was done with the input."""
    returned = {storage._cdata for t in outputs if (storage := storage_of(t)) is not None}
    storages = map(storage_of, statics.tensors)
    ends = [storage is not None and storage._cdata in returned for storage in storages]
    return [undo_log.overtaking(t, at_end) for t, at_end in zip(statics.tensors, ends, strict=True)]


def overtaken_inputs(surface: Surface, writes: Writes, recording: Recording) -> Overtaken:
    """Of those writes, the ones to memory that the recording holds: other memory may be somebody else's by now."""
    held = {storage._cdata for t in recording.external if (storage := storage_of(t)) is not None}
    return Overtaken(surface.names, [[span for key, span in found if key in held] for found in writes])


def lent_outputs(recording: Recording) -> StaticOutputs:
    """The outputs that lie in memory of the recording's own, once it is sealed."""
    outside = {storage._cdata for t in recording.external if (storage := storage_of(t)) is not None}
    own = [t for t in recording.outputs if t is not None and t.untyped_storage()._cdata not in outside]
    return StaticOutputs(own)


def _refuse_lost_gradients(surface: Surface, statics: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """A captured function passes no gradient to its arguments: refuse one that would."""
    if not any(static.requires_grad for static in statics):
        return
    reached = set(map(id, leaves_behind(outputs)))
    for name, static in zip(surface.names, statics, strict=True):
        if id(static) in reached or static.grad is not None:
            raise CaptureError(_NO_GRADIENT.format(name))


def _refuse_differentiable(inputs: Iterable[Tensor], variant: Variant) -> None:
    for tensor, known, name in zip(inputs, variant.differentiable, variant.surface.names, strict=True):
        if tensor.requires_grad and not known:
            raise ReplayMismatch(_NO_GRADIENT.format(name))


_NO_GRADIENT = (
    "argument {} requires grad, but a captured function passes none through: detach it, or use make_graphed_callables"
)
