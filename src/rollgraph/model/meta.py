"""Models on the meta device, and models whose parameters get their memory from somebody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollgraph.model.architecture import Architecture
from rollgraph.model.decoder import Decoder
from rollgraph.model.tensor_parallel import TensorParallelGroup

_INIT_FUNCTIONS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Inside, tensors and modules are created on the meta device, and random initialization is skipped.

    Initialization on the meta device does nothing, but PyTorch would import its compiler for it, which takes seconds.
    """
    with torch.device("meta"), _SkipInit():
        yield


class _SkipInit(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INIT_FUNCTIONS:
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


def empty_decoder(
    architecture: Architecture,
    dtype: torch.dtype | None,
    device: str | torch.device,
    *,
    checkpointing: int = 0,
    group: TensorParallelGroup | None = None,
) -> Decoder:
    """A model with uninitialized weights. Allocates nothing else."""
    with shapes_only():
        model = Decoder(architecture, checkpointing=checkpointing, group=group).to(dtype=dtype)
    model.to_empty(device=device)
    frequencies, _ = architecture.frequencies()
    model.frequencies.copy_(frequencies)
    return model


def unallocated_decoder(
    architecture: Architecture, dtype: torch.dtype | None, device: str | torch.device, *, checkpointing: int = 0
) -> Decoder:
    """A model whose parameters have a device but no memory yet: each is one element, expanded to the shape.

    The caller moves the parameters to other memory before anything writes or reads them.
    """
    with shapes_only():
        model = Decoder(architecture, checkpointing=checkpointing).to(dtype=dtype)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            element = torch.zeros((), dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(element.expand(parameter.shape)))
    frequencies, _ = architecture.frequencies()
    model.frequencies = frequencies.to(device)
    return model
