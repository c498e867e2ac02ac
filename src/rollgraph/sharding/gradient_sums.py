"""The backward of a whole step: each gradient is added to its buffer as it arrives, so that few are alive at once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch import Tensor

from rollgraph.graph.direct_sums import direct_sums


def add_gradients(loss: Tensor, buffers: Mapping[Tensor, Tensor]) -> None:
    """Add the gradient of a loss with respect to each parameter to its buffer. `.grad` is neither used nor changed.

    A parameter that is used in several places gets one gradient, which autograd has summed.
    """
    with ExitStack() as handles:
        for parameter, total in handles.enter_context(direct_sums(buffers)).items():
            handles.callback(parameter.register_hook(total.add).remove)
        torch.autograd.grad(loss, list(buffers))
