"""Activations that are computed again in the backward pass instead of being kept.

A module calls `recompute` inside its own `forward`, so that a graph of the module sees one call, and the backward of
that graph contains the recomputation. What is kept for the backward are references to the arguments and to the module's
own tensors. They are saved as autograd saves tensors, so a backward refuses those that were changed in the meantime.
The arithmetic is that of the forward, and so are the bits.
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
    """`run(*args)`, which gives a tensor or a tuple of them, and which the backward pass runs again.

    Whatever `run` reads beside its arguments belongs to `module`. It must not draw random numbers.
    """
    leaves, structure = pytree.tree_flatten(args)

    def run_flat(*flat: Any) -> Output:
        return run(*pytree.tree_unflatten(flat, structure))

    own = (*module.parameters(), *module.buffers())
    output: Output = _Recomputed.apply(module, run_flat, len(leaves), *leaves, *own)  # type: ignore[no-untyped-call]
    return output


class _Recomputed(torch.autograd.Function):
    """The parameters are arguments, so that their gradients leave this node as those of other nodes do."""

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
        needed = ctx.needs_input_grad[3:]
        leaves = []  # of an autograd graph that ends here: nobody's hooks and nobody's streams are attached to it
        for saved, differentiable in zip(ctx.saved_tensors, needed, strict=True):
            leaves.append(None if saved is None else saved.detach().requires_grad_(differentiable))
        count = len(ctx.constants)
        for parameter, leaf in zip(ctx.module.parameters(), leaves[count:], strict=False):
            if leaf is not None:
                set_direct_sum(leaf, direct_sum_of(parameter))
        pairs = zip(ctx.constants, leaves[:count], strict=True)
        args = [constant if leaf is None else leaf for constant, leaf in pairs]
        with torch.enable_grad(), _standing_in(ctx.module, leaves[count:]):
            output = ctx.run(*args)
        outputs = (output,) if isinstance(output, Tensor) else output
        reached = []
        for one, gradient in zip(outputs, gradients, strict=True):
            if gradient is not None and one.requires_grad:  # some depend on nothing that is trained
                reached.append((one, gradient))
        wanted = [leaf for leaf, differentiable in zip(leaves, needed, strict=True) if differentiable]
        if not reached:
            return (None,) * len(ctx.needs_input_grad)
        found = torch.autograd.grad(
            [one for one, _ in reached], cast(list[Tensor], wanted), [gradient for _, gradient in reached],
            allow_unused=True,
        )  # fmt: skip
        supply = iter(found)
        return (None, None, None, *(next(supply) if differentiable else None for differentiable in needed))


@contextmanager
def _standing_in(module: nn.Module, leaves: Sequence[Tensor | None]) -> Iterator[None]:
    """Put the leaves that require gradients in the place of the module's parameters."""
    stand_ins = dict(zip(module.parameters(), leaves, strict=False))  # buffers follow
    places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter.requires_grad:
                places.append((child._parameters, name, parameter))
    try:
        for parameters, name, parameter in places:
            parameters[name] = cast(nn.Parameter, stand_ins[parameter])
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter
