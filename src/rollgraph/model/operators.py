"""Makes operations of PyTorch of functions, so that a tape records them, and a capture sees what they write.

`torch.library.custom_op` would do the same, but it imports PyTorch's compiler when it is first called, which takes
seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("rollgraph", "FRAGMENT")  # operations exist as long as it does


def operator(shaped: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """An operation of the function's name, which returns a new tensor without a gradient.

    `shaped` takes the same arguments and gives a tensor of the same shape: it is called for tensors without memory.
    """

    def define(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        operation: Callable[..., Tensor] = _define(function, function, ())
        _library.impl(function.__name__, shaped, "Meta")
        return operation

    return define


def sum_operator(function: Callable[..., None]) -> Callable[..., None]:
    """An operation of the function's name, which writes to its argument `total` and returns nothing.

    A capture takes back what a warm-up adds.
    """

    @wraps(function)
    def run(total: Tensor, *args: Any) -> None:
        function(total, *args)
        torch.autograd.graph.increment_version(total)

    operation: Callable[..., None] = _define(function, run, ("total",))
    return operation


def _define(function: Callable[..., Any], run: Callable[..., Any], writes: tuple[str, ...]) -> Any:
    name = function.__name__.removeprefix("_")
    _library.define(name + torch.library.infer_schema(function, mutates_args=writes))
    _library.impl(name, run, "CompositeExplicitAutograd")
    return getattr(torch.ops.rollgraph, name).default
