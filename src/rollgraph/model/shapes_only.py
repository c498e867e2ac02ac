"""Models without memory, of which only the names, shapes and dtypes of tensors are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWING = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Inside, tensors and modules are made on the meta device, and no values are drawn for them.

    For drawing nothing, PyTorch would import its compiler, which takes seconds.
    """
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWING:
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)
