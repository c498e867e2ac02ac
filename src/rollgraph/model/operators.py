"""Registers functions as PyTorch operators, so that a tape records them, and a capture sees what they write.

`torch.library.custom_op` would do the same, but its first call imports PyTorch's compiler, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

P = ParamSpec("P")
Result = TypeVar("Result")  # one tensor, or a tuple of them

_library = torch.library.Library("rollgraph", "FRAGMENT")  # the operators exist as long as it does


def operator(shaped: Callable[..., Any]) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """An operator of the function's name, which returns a new tensor, or several, without a gradient.

    `shaped` takes the same arguments and returns tensors of the same shapes. It is the kernel for meta tensors.
    """

    def define(function: Callable[P, Result]) -> Callable[P, Result]:
        operation: Callable[P, Result] = _define(function, function, ())
        _library.impl(function.__name__, shaped, "Meta")
        return operation

    return define


def sum_operator(function: Callable[..., None]) -> Callable[..., None]:
    """An operator of the function's name, which adds to its argument `total` and returns nothing.

    A capture rolls back what a warm-up adds.
    """

    @wraps(function)
    def run(total: Tensor, *args: Any) -> None:
        function(total, *args)
        torch.autograd.graph.increment_version(total)

    operation: Callable[..., None] = _define(function, run, ("total",))
    return operation


def as_array(tensor: Tensor) -> np.ndarray:
    """The memory of a tensor, or of a contiguous copy, as an array for the function of an operator."""
    with torch._C.DisableTorchFunction():  # a recording refuses host reads of tensors outside of operators
        return tensor.detach().contiguous().numpy()


def _define(function: Callable[..., Any], run: Callable[..., Any], writes: tuple[str, ...]) -> Any:
    name = function.__name__.removeprefix("_")
    _library.define(name + torch.library.infer_schema(function, mutates_args=writes))
    _library.impl(name, run, "CompositeExplicitAutograd")
    return getattr(torch.ops.rollgraph, name).default
