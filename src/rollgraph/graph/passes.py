"""The forward and the backward of a callable as plain functions, from tensors to tensors.

Warm-up runs them and a backend records them; the eager backend and the sanitizer run them at each call.
Owns what is cut at the autograd boundary of a callable: its inputs, its parameters, its outputs. Knows
nothing of recordings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.autograd_leaves import (
    aliased_parameters,
    leaves_behind,
    moving_out,
    without_tensor_hooks,
)
from rollgraph.graph.captured import GraphSpec
from rollgraph.graph.direct_sums import direct_sums
from rollgraph.graph.errors import CaptureError
from rollgraph.graph.output_tree import OutputTree
from rollgraph.graph.surface import Surface


@dataclass
class CallableSpec(GraphSpec):
    """What is graphed as a callable, and how."""

    allow_unused: bool = False
    grad_buffers: Mapping[Tensor, Tensor] = field(default_factory=dict)
    retain_graph: bool = False  # keep what the backward needs after it ran, so that it can run again

    def __post_init__(self) -> None:
        super().__post_init__()
        self.module: nn.Module | None = None
        if isinstance(self.target, nn.Module):
            self.module = self.target
            self.original = self.target.forward


@dataclass
class GradientTargets:
    """The leaves that a callable gives gradients to, besides its inputs."""

    parameters: list[Tensor] = field(default_factory=list)
    passed: tuple[Tensor, ...] = ()  # those that autograd has to see as inputs of the boundary
    no_gradients: tuple[None, ...] = ()  # returned for the one among `passed` whose gradient goes to a buffer
    reached: list[set[int]] = field(default_factory=list)  # for each output, its leaves: places in (inputs, parameters)
    trains: bool = False  # there is a backward to record


class CallablePasses:
    """The passes of one callable for one surface. The backward belongs to the forward that ran last."""

    def __init__(self, spec: CallableSpec, surface: Surface) -> None:
        self.spec = spec
        self.surface = surface
        self.differentiable = [tensor.requires_grad for tensor in surface.tensors]
        self.targets = GradientTargets()
        self.outputs: OutputTree | None = None  # of the last forward
        self.raw_output: Any = None  # as the callable returned it
        self.results: list[Tensor] = []  # its tensors, with their autograd graph, until the backward has run
        self.unused: list[int] = []  # places in (inputs, parameters) without a gradient
        self.gradient_buffers: list[Tensor | None] | None = None  # where the recorded backward leaves its results
        self.aliases: dict[Tensor, Tensor] = {}  # parameter -> the leaf that stands in for it
        # Parameters that the callable also reaches other than through the module: they have no stand-in.
        self.shared: set[Tensor] = set()
        self.capturing = False  # otherwise (sanitizer, eager backend) the callable runs on its own parameters
        self._inputs: Sequence[Tensor] = ()

    def run_forward(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        spec = self.spec
        if not spec.backend.records:  # eager: cut from the caller's autograd graph, as a recording is
            inputs = [t.detach().requires_grad_(d) for t, d in zip(inputs, self.differentiable, strict=True)]
        self._inputs = inputs
        args, kwargs = self.surface.arguments(inputs)
        self.aliases = {}
        stand_ins: AbstractContextManager[None] = nullcontext()
        if self.capturing:
            stand_ins = aliased_parameters(spec.module, self.aliases, self.shared)
        grad_enabled = self.surface.modes[0]
        with torch.set_grad_enabled(grad_enabled), stand_ins:
            output = spec.original(*args, **kwargs)
        outputs = OutputTree(output)
        outputs.refuse_objects(spec.name)
        self.outputs = outputs
        self.results = outputs.tensors
        self.raw_output = output
        return [result.detach() for result in self.results]

    def run_backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the inputs and parameters that leave the boundary; others are added to their buffers."""
        parameters = self.targets.parameters
        buffers = self.spec.grad_buffers
        inputs = [t for t, differentiable in zip(self._inputs, self.differentiable, strict=True) if differentiable]
        leaves = [*inputs, *(self.aliases.get(p, p) for p in parameters)]
        originals = (*inputs, *parameters)
        leaving = [leaf for leaf, original in zip(leaves, originals, strict=True) if original not in buffers]
        results = [result for result in self.results if result.requires_grad]
        with (
            without_tensor_hooks(parameters),  # they run at replay, where the gradients leave
            moving_out(leaving, self.gradient_buffers or (), parameters),
            direct_sums({p: buffers[p] for p in parameters if p in buffers}) as sums,
        ):
            found: Sequence[Tensor | None] = torch.autograd.grad(
                results, leaves, gradients, allow_unused=True, retain_graph=self.spec.retain_graph
            )
        kept: list[Tensor | None] = list(found[: len(inputs)])
        for parameter, gradient in zip(parameters, found[len(inputs) :], strict=True):
            if parameter not in sums:
                kept.append(gradient)
            elif gradient is not None:
                sums[parameter].add(gradient)
        self.unused = [place for place, gradient in enumerate(found) if gradient is None]
        if self.gradient_buffers is None:
            return kept
        return self._moved_out(kept, self.gradient_buffers)

    def _moved_out(self, made: list[Tensor | None], buffers: list[Tensor | None]) -> list[Tensor | None]:
        """Copy the gradients to memory that no other graph writes; all graphs reuse the memory of the pool."""
        sources: list[Tensor] = []
        destinations: list[Tensor] = []
        for gradient, buffer in zip(made, buffers, strict=True):
            if (gradient is None) != (buffer is None):
                raise CaptureError(
                    f"{self.spec.name!r} does not give the same inputs and parameters a gradient as in its last "
                    "warm-up run: raise the number of warm-up runs"
                )
            if gradient is not None and buffer is not None and buffer is not gradient:
                sources.append(gradient)
                destinations.append(buffer)
        if sources:
            torch._foreach_copy_(destinations, sources)
        return buffers

    def find_targets(self) -> None:
        """After a forward: find the module's trainable parameters, and every other leaf that an output depends on."""
        buffers = self.spec.grad_buffers
        parameters = self._find_parameters()
        buffered = [p for p in parameters if p in buffers]
        for parameter in buffered:
            if parameter._backward_hooks:
                raise CaptureError(
                    f"{self.spec.name!r}: a parameter of shape {tuple(parameter.shape)} has a gradient buffer and a "
                    "tensor hook, which would never be given its gradient: the backward graph adds it to the buffer. "
                    "Remove the hook, or leave the parameter out of grad_buffers"
                )
        passed = tuple(p for p in parameters if p not in buffers)
        no_gradients: tuple[None, ...] = ()
        if buffered:  # one of them keeps the node in the autograd graph; its gradient goes to its buffer
            passed += (buffered[0],)
            no_gradients = (None,)
        reached = self._reached_by_outputs(parameters)
        trainable = any(self.differentiable) or bool(parameters)
        trains = trainable and any(result.requires_grad for result in self.results)
        self.targets = GradientTargets(parameters, passed, no_gradients, reached, trains)

    def _find_parameters(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        if self.spec.module is not None:
            found = {id(p): p for p in self.spec.module.parameters() if p.requires_grad}
        original = {id(alias): parameter for parameter, alias in self.aliases.items()}
        for leaf in leaves_behind(self.results):
            if leaf in self.aliases:  # reached both ways: from the next run on it is one leaf, with one gradient
                self.shared.add(leaf)
            leaf = original.get(id(leaf), leaf)
            found.setdefault(id(leaf), leaf)
        inputs = {id(tensor) for tensor in self._inputs}
        return [leaf for key, leaf in found.items() if key not in inputs]

    def _reached_by_outputs(self, parameters: list[Tensor]) -> list[set[int]]:
        places: dict[int, int] = {}
        for place, leaf in enumerate([*self._inputs, *parameters]):
            places[id(leaf)] = place
            if leaf in self.aliases:
                places[id(self.aliases[leaf])] = place
        reached: list[set[int]] = []
        for result in self.results:
            leaves = leaves_behind([result])
            reached.append({places[id(leaf)] for leaf in leaves if id(leaf) in places})
        return reached

    def forget_results(self) -> None:
        """Drop the autograd graph: on CUDA its activations become free for later captures."""
        self.results = []
        self.raw_output = None
        if self.outputs is not None:
            self.outputs.without_tensors()
