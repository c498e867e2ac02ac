"""Activation checkpointing: activations are recomputed in the backward pass instead of being kept.

A module calls `recompute` inside its own `forward`. So a graph of the module sees one call, and the backward of that
graph contains the recomputation. For the backward we save references to the arguments and to the module's tensors, as
autograd saves tensors: a backward refuses any that were modified in the meantime. The recomputation has the arithmetic
of the forward, and so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from rollgraph.graph.direct_sums import direct_sum_of, set_direct_sum

Output = TypeVar("Output")


def recompute(module: nn.Module, run: Callable[..., Output], *args: Any) -> Output:
    """`run(*args)`, a tensor or a tuple of tensors. The backward pass runs it again.

    Apart from its arguments, `run` may read only tensors of `module`. It must not draw random numbers.
    """
    leaves, structure = pytree.tree_flatten(args)

    def run_flat(*flat: Any) -> Output:
        return run(*pytree.tree_unflatten(flat, structure))

    module_tensors = (*module.parameters(), *module.buffers())
    output: Output = _Recomputed.apply(module, run_flat, len(leaves), *leaves, *module_tensors)  # type: ignore[no-untyped-call]
    return output


class _Recomputed(torch.autograd.Function):
    """The parameters are arguments, so their gradients leave this node as those of any node do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, run: Callable[..., Any], count: int, *values: Any) -> Any:
        output = run(*values[:count])
        # Saved after the run, because a hook of the module may gather parameters in it.
        ctx.save_for_backward(*[value if isinstance(value, Tensor) else None for value in values])
        ctx.constants = [None if isinstance(value, Tensor) else value for value in values[:count]]
        ctx.module = module
        ctx.run = run
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_grad = ctx.needs_input_grad[3:]
        leaves = []  # of a separate autograd graph, without hooks and streams of the outer one
        for saved, differentiable in zip(ctx.saved_tensors, needs_grad, strict=True):
            leaves.append(None if saved is None else saved.detach().requires_grad_(differentiable))
        count = len(ctx.constants)
        for parameter, leaf in zip(ctx.module.parameters(), leaves[count:], strict=False):
            if leaf is not None:
                set_direct_sum(leaf, direct_sum_of(parameter))
        pairs = zip(ctx.constants, leaves[:count], strict=True)
        args = [constant if leaf is None else leaf for constant, leaf in pairs]
        with torch.enable_grad(), _parameters_replaced(ctx.module, leaves[count:]):
            output = ctx.run(*args)
        outputs = (output,) if isinstance(output, Tensor) else output
        used_outputs = []
        for result, gradient in zip(outputs, gradients, strict=True):
            if gradient is not None and result.requires_grad:  # some outputs depend on no trained tensor
                used_outputs.append((result, gradient))
        grad_leaves = [leaf for leaf, differentiable in zip(leaves, needs_grad, strict=True) if differentiable]
        if not used_outputs:
            return (None,) * len(ctx.needs_input_grad)
        computed = torch.autograd.grad(
            [result for result, _ in used_outputs], cast(list[Tensor], grad_leaves),
            [gradient for _, gradient in used_outputs], allow_unused=True,
        )  # fmt: skip
        leaf_gradients = iter(computed)
        return (None, None, None, *(next(leaf_gradients) if differentiable else None for differentiable in needs_grad))


@contextmanager
def _parameters_replaced(module: nn.Module, leaves: Sequence[Tensor | None]) -> Iterator[None]:
    """Replace the module's parameters by these leaves, where they require gradients."""
    leaf_of = dict(zip(module.parameters(), leaves, strict=False))  # buffers follow
    originals: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter.requires_grad:
                originals.append((child._parameters, name, parameter))
    try:
        for parameters, name, parameter in originals:
            parameters[name] = cast(nn.Parameter, leaf_of[parameter])
        yield
    finally:
        for parameters, name, parameter in originals:
            parameters[name] = parameter
