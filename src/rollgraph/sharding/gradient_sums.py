"""The backward of a whole step: each gradient is added to its buffer as it arrives, so that few are alive at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor

from rollgraph.graph.direct_sums import DirectSum, direct_sums


def add_gradients(loss: Tensor, buffers: Mapping[Tensor, Tensor]) -> None:
    """Add the gradient of a loss with respect to each parameter to its buffer. `.grad` is neither used nor changed.

    A parameter that is used in several places gets one gradient, which autograd has summed.
    """
    stand_ins: dict[torch.dtype, Tensor] = {}  # what autograd keeps in place of the gradients: one element each

    def adding_to(total: DirectSum) -> Callable[[Tensor], Tensor]:
        def add(gradient: Tensor) -> Tensor:
            total.add(gradient)
            if gradient.dtype not in stand_ins:
                stand_ins[gradient.dtype] = gradient.new_zeros(())
            return stand_ins[gradient.dtype].expand(gradient.shape)

        return add

    with ExitStack() as handles:
        for parameter, total in handles.enter_context(direct_sums(buffers)).items():
            handles.callback(parameter.register_hook(adding_to(total)).remove)
        torch.autograd.grad(loss, list(buffers))
