"""The forward and the backward of a callable as plain functions.

Warm-up runs them and a backend records them; the eager backend and the sanitizer run them at each call. Owns the cut
at the autograd boundary of a callable: inputs, parameters and outputs. Knows nothing of recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from rollgraph.graph.captured import GraphSpec
from rollgraph.graph.direct_sums import direct_sums
from rollgraph.graph.errors import CaptureError, StaleGraph
from rollgraph.graph.outputs import OutputTree
from rollgraph.graph.state.undo_log import storage_of
from rollgraph.graph.surface import Surface, memory_span

# -- leaves of an autograd graph -------------------------------------------------------------------
# Owns the aliases that replace a module's parameters during a recording, and the gradients and hooks of leaves inside a
# recorded backward. Knows nothing of segments.

_LARGE_GRADIENT_BYTES = 2**20  # smaller gradients stay in the pool and are copied in one launch


@contextmanager
def aliased_parameters(
    module: nn.Module | None, aliases: dict[Tensor, Tensor], shared: Container[Tensor] = ()
) -> Iterator[None]:
    """Replace a module's trainable parameters by new leaves over the same memory.

    A parameter in one of the user's autograd graphs is tied to the stream of that graph, and a capture on another
    stream cannot use it. `shared` parameters are not replaced: the module also reaches them in another way, through a
    list or a closure.
    """
    modules = list(module.modules()) if module is not None else []
    replaced: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for child in modules:
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter not in shared:
                replaced.append((child._parameters, name, parameter))
    # An RNN module keeps a second list of its parameters, and rebuilds it when they change.
    lists = [(m, m._flat_weights, m._flat_weight_refs) for m in modules if isinstance(m, nn.RNNBase)]
    for parameters, name, parameter in replaced:
        if parameter not in aliases:
            aliases[parameter] = _alias(parameter)
        parameters[name] = cast(nn.Parameter, aliases[parameter])
    try:
        yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter
        for rnn, weights, references in lists:
            rnn._flat_weights = weights
            rnn._flat_weight_refs = references


def _alias(parameter: nn.Parameter) -> Tensor:
    """A new leaf with the class, attributes and version counter of the parameter: only `is` tells them apart."""
    kind = type(parameter)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:  # a wrapper subclass
        alias = parameter.data.requires_grad_()
        alias._is_param = True
        return alias
    alias = Tensor._make_subclass(kind, parameter, True)
    alias.__dict__ = parameter.__dict__
    return alias


@contextmanager
def without_tensor_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Inside, the leaves have no tensor hooks."""
    removed: list[tuple[Any, dict[Any, Any]]] = []
    for leaf in leaves:
        hooks = leaf._backward_hooks
        if hooks:
            removed.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, saved in removed:
            hooks.update(saved)


@contextmanager
def copying_large_gradients(
    leaves: Sequence[Tensor], static_gradients: Sequence[Tensor | None], program_leaves: Sequence[Tensor]
) -> Iterator[None]:
    """Copy each large gradient to its static tensor as soon as autograd makes it: they must not pile up in the pool.

    We use tensor hooks on our aliases. `program_leaves` belong to the program and get no hook.
    """

    def copy_into(static: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda gradient: static.copy_(gradient)

    program_ids = set(map(id, program_leaves))
    handles = []
    for leaf, static in zip(leaves, static_gradients, strict=False):
        if static is not None and static.nbytes >= _LARGE_GRADIENT_BYTES and id(leaf) not in program_ids:
            handles.append(leaf.register_hook(copy_into(static)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def nodes_behind(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """Every node of the autograd graph behind the outputs."""
    pending = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        pending += [parent for parent, _ in node.next_functions if parent is not None]


def leaves_behind(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Every leaf that the outputs depend on, according to the autograd graph."""
    for node in nodes_behind(outputs):
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable


def leaves_under(node: Any) -> list[Tensor]:
    """The leaves that receive gradients from an autograd node."""
    return [parent.variable for parent, _ in node.next_functions if hasattr(parent, "variable")]


# -- tensors that autograd saved -------------------------------------------------------------------
# Eager autograd refuses a backward if a saved tensor was modified in place since the forward. A graph would read the
# modified memory. So a segment compares the same version counters: those of outputs and of tensors from outside that
# the recorded forward saved, and no others.

version = attrgetter("_version")


class SavedVersions:
    """Version counters of tensors that a backward reads and the program can modify."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self._names = list(tensors or ())
        # Detached tensors share the version counter, and reading it is faster than from a parameter.
        self.tensors = [tensor.detach() for tensor in (tensors or {}).values()]
        self.versions_at_forward: list[int] = []  # after the last forward

    @classmethod
    def of(cls, results: Sequence[Tensor], candidates: Mapping[str, Tensor]) -> SavedVersions:
        """Watch the `candidates` that the autograd graph behind `results` saved."""
        saved = [(memory_span(t), t.device) for t in saved_tensors(results) if storage_of(t) is not None and t.numel()]
        changeable = {}
        for name, tensor in candidates.items():
            if tensor.is_inference() or storage_of(tensor) is None or not tensor.numel():
                continue
            low, high = memory_span(tensor)
            if any(start < high and low < end and device == tensor.device for (start, end), device in saved):
                changeable[name] = tensor
        return cls(changeable)

    def refuse_change(self, graph: str) -> NoReturn:
        """Raise StaleGraph: a tensor changed since the forward."""
        triples = zip(self._names, self.versions_at_forward, self.tensors, strict=True)
        changed = [name for name, version, tensor in triples if tensor._version != version]
        raise StaleGraph(
            f"{', '.join(changed[:3])} of graph {graph!r} was modified in place between its forward and its backward, "
            "which needs the value that the forward saw: run the backward first, or change a clone"
        )


def saved_tensors(results: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors that the nodes behind `results` saved, without those packed by a saved-tensor hook."""
    for node in nodes_behind(results):
        for name in dir(node):
            if not name.startswith("_raw_saved_"):
                continue
            for saved in _flat(getattr(node, name)):
                if saved.unpack_hook is None and isinstance(saved.data, Tensor):
                    yield saved.data


def _flat(saved: Any) -> Iterable[Any]:
    if isinstance(saved, torch._C._autograd.SavedTensor):
        return (saved,)
    return [entry for entry in saved or () if isinstance(entry, torch._C._autograd.SavedTensor)]


# -- the passes ------------------------------------------------------------------------------------


@dataclass
class CallableSpec(GraphSpec):
    """The target of a graphed callable, and its settings."""

    allow_unused: bool = False
    grad_buffers: Mapping[Tensor, Tensor] = field(default_factory=dict)
    retain_graph: bool = False  # keep activations after the backward, so that it can run again

    def __post_init__(self) -> None:
        super().__post_init__()
        self.module: nn.Module | None = None
        if isinstance(self.target, nn.Module):
            self.module = self.target
            self.original = self.target.forward


@dataclass
class GradientTargets:
    """The leaves that receive gradients from a callable, besides its inputs."""

    parameters: list[Tensor] = field(default_factory=list)
    boundary_leaves: tuple[Tensor, ...] = ()  # parameters that autograd must see as inputs of the boundary
    # (None,) if the last boundary leaf is only an anchor, whose gradient goes to a buffer.
    anchor_gradients: tuple[None, ...] = ()
    reached_leaves: list[set[int]] = field(default_factory=list)  # per output: indices in (*inputs, *parameters)
    has_backward: bool = False  # otherwise there is no backward to record


class CallablePasses:
    """The passes of one callable for one surface. `run_backward` belongs to the last `run_forward`."""

    def __init__(self, spec: CallableSpec, surface: Surface) -> None:
        self.spec = spec
        self.surface = surface
        self.differentiable = [tensor.requires_grad for tensor in surface.tensors]
        self.targets = GradientTargets()  # set by `find_gradient_targets`, after a forward
        self.outputs: OutputTree | None = None  # of the last forward
        self.raw_output: Any = None  # as the callable returned it
        self.results: list[Tensor] = []  # its tensors, with their autograd graph, until the backward has run
        self.unused: list[int] = []  # indices in (*inputs, *parameters) to which the last backward gave no gradient
        self.static_gradients: list[Tensor | None] | None = None  # the recorded backward copies its results here
        self.aliases: dict[Tensor, Tensor] = {}  # parameter -> the leaf that replaces it
        # Parameters that the callable also reaches without going through the module: they have no alias.
        self.shared: set[Tensor] = set()
        self.capturing = False  # False in the sanitizer and the eager backend: the callable then runs without aliases
        self._inputs: Sequence[Tensor] = ()  # of the last forward

    def run_forward(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        spec = self.spec
        if not spec.backend.records:  # eager: detach from the caller's autograd graph, as a recording does
            inputs = [t.detach().requires_grad_(d) for t, d in zip(inputs, self.differentiable, strict=True)]
        self._inputs = inputs
        args, kwargs = self.surface.arguments(inputs)
        self.aliases = {}
        aliasing: AbstractContextManager[None] = nullcontext()
        if self.capturing:
            aliasing = aliased_parameters(spec.module, self.aliases, self.shared)
        grad_enabled = self.surface.modes[0]
        with torch.set_grad_enabled(grad_enabled), aliasing:
            output = spec.original(*args, **kwargs)
        outputs = OutputTree(output)
        outputs.refuse_objects(spec.name)
        self.outputs = outputs
        self.results = outputs.tensors
        self.raw_output = output
        return [result.detach() for result in self.results]

    def run_backward(self, grad_outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients that leave the boundary; add those of parameters with a buffer to that buffer."""
        parameters = self.targets.parameters
        buffers = self.spec.grad_buffers
        inputs = [t for t, differentiable in zip(self._inputs, self.differentiable, strict=True) if differentiable]
        leaves = [*inputs, *(self.aliases.get(p, p) for p in parameters)]
        originals = (*inputs, *parameters)
        leaving = [leaf for leaf, original in zip(leaves, originals, strict=True) if original not in buffers]
        results = [result for result in self.results if result.requires_grad]
        with (
            without_tensor_hooks(parameters),  # they run at replay, where the gradients leave
            copying_large_gradients(leaving, self.static_gradients or (), parameters),
            direct_sums({p: buffers[p] for p in parameters if p in buffers}) as sums,
        ):
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                results, leaves, grad_outputs, allow_unused=True, retain_graph=self.spec.retain_graph
            )
        boundary_gradients: list[Tensor | None] = list(gradients[: len(inputs)])
        for parameter, gradient in zip(parameters, gradients[len(inputs) :], strict=True):
            if parameter not in sums:
                boundary_gradients.append(gradient)
            elif gradient is not None:
                sums[parameter].add(gradient)
        self.unused = [index for index, gradient in enumerate(gradients) if gradient is None]
        if self.static_gradients is None:
            return boundary_gradients
        return self._copy_to_static(boundary_gradients, self.static_gradients)

    def _copy_to_static(
        self, gradients: list[Tensor | None], static_gradients: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Copy the gradients out of the pool, whose memory other graphs overwrite, to their static tensors."""
        sources: list[Tensor] = []
        destinations: list[Tensor] = []
        for gradient, static in zip(gradients, static_gradients, strict=True):
            if (gradient is None) != (static is None):
                raise CaptureError(
                    f"{self.spec.name!r} does not give the same inputs and parameters a gradient as in its last "
                    "warm-up run: raise the number of warm-up runs"
                )
            if gradient is not None and static is not None and static is not gradient:
                sources.append(gradient)
                destinations.append(static)
        if sources:
            torch._foreach_copy_(destinations, sources)
        return static_gradients

    def find_gradient_targets(self) -> None:
        """After a forward: find the module's trainable parameters, and every other leaf that an output depends on."""
        buffers = self.spec.grad_buffers
        parameters = self._find_parameters()
        buffered = [p for p in parameters if p in buffers]
        for parameter in buffered:
            if parameter._backward_hooks:
                raise CaptureError(
                    f"{self.spec.name!r}: a parameter of shape {tuple(parameter.shape)} has a gradient buffer and a "
                    "tensor hook, which would never get its gradient: the backward graph adds it to the buffer. "
                    "Remove the hook, or leave the parameter out of grad_buffers"
                )
        boundary_leaves = tuple(p for p in parameters if p not in buffers)
        anchor_gradients: tuple[None, ...] = ()
        if buffered:  # the anchor: it keeps the node in the autograd graph; its gradient goes to its buffer
            boundary_leaves += (buffered[0],)
            anchor_gradients = (None,)
        reached_leaves = self._leaves_reached(parameters)
        trainable = any(self.differentiable) or bool(parameters)
        has_backward = trainable and any(result.requires_grad for result in self.results)
        self.targets = GradientTargets(parameters, boundary_leaves, anchor_gradients, reached_leaves, has_backward)

    def _find_parameters(self) -> list[Tensor]:
        leaves: dict[int, Tensor] = {}
        if self.spec.module is not None:
            leaves = {id(p): p for p in self.spec.module.parameters() if p.requires_grad}
        parameter_of = {id(alias): parameter for parameter, alias in self.aliases.items()}
        for leaf in leaves_behind(self.results):
            if leaf in self.aliases:  # reached in both ways: from the next run on it is one leaf with one gradient
                self.shared.add(leaf)
            leaf = parameter_of.get(id(leaf), leaf)
            leaves.setdefault(id(leaf), leaf)
        inputs = {id(tensor) for tensor in self._inputs}
        return [leaf for key, leaf in leaves.items() if key not in inputs]

    def _leaves_reached(self, parameters: list[Tensor]) -> list[set[int]]:
        index_of: dict[int, int] = {}
        for index, leaf in enumerate([*self._inputs, *parameters]):
            index_of[id(leaf)] = index
            if leaf in self.aliases:
                index_of[id(self.aliases[leaf])] = index
        reached: list[set[int]] = []
        for result in self.results:
            leaves = leaves_behind([result])
            reached.append({index_of[id(leaf)] for leaf in leaves if id(leaf) in index_of})
        return reached

    def drop_results(self) -> None:
        """Drop the autograd graph: on CUDA, later captures can then reuse its activations."""
        self.results = []
        self.raw_output = None
        if self.outputs is not None:
            self.outputs.drop_tensors()
