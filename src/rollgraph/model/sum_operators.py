"""Makes operations of PyTorch of functions that add to a tensor, so that a capture sees what they write."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_library = torch.library.Library("rollgraph", "FRAGMENT")  # operations exist as long as it does


def sum_operator(function: Callable[..., None]) -> Callable[..., None]:
    """An operation of the function's name, which writes to its argument `total` and returns nothing.

    A capture then takes back what a warm-up adds. `torch.library.custom_op` would do the same, but it imports PyTorch's
    compiler when it is first called, which takes seconds.
    """

    @wraps(function)
    def run(total: torch.Tensor, *args: Any) -> None:
        function(total, *args)
        torch.autograd.graph.increment_version(total)

    name = function.__name__.removeprefix("_")
    _library.define(name + torch.library.infer_schema(function, mutates_args=("total",)))
    _library.impl(name, run, "CompositeExplicitAutograd")
    operation: Callable[..., None] = getattr(torch.ops.rollgraph, name).default
    return operation
