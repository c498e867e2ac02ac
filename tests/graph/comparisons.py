"""Sample tensors, and bit-for-bit comparisons of outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def example() -> Tensor:
    return torch.linspace(-2, 2, 16).view(4, 4).cos() - 0.1


def second_example() -> Tensor:
    return torch.linspace(3, -1, 16).view(4, 4).sin() * 2


def doubles(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def equal(a: Any, b: Any) -> bool:
    """Equal bit for bit, with the same structure, dtypes, shapes and strides."""
    (left, left_tree), (right, right_tree) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    if left_tree != right_tree:
        return False
    for x, y in zip(left, right, strict=True):
        if not isinstance(x, Tensor):
            if type(x) is not type(y) or x != y:
                return False
        elif (x.dtype, x.shape, x.stride()) != (y.dtype, y.shape, y.stride()) or not torch.equal(x, y):
            return False
    return True
