"""Triton kernels that only tests use, so that nothing else has compiled them. Import this only if there is a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_kernel(x, out, SHIFT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) + SHIFT)


def add(x: Tensor, shift: int) -> Tensor:
    """x + shift, by a separate kernel for each shift."""
    out = torch.empty_like(x)
    _add_kernel[(1,)](x, out, SHIFT=shift, SIZE=x.numel())
    return out


@triton.jit
def _large_kernel(x, out, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    row, at = tl.arange(0, SIZE), tl.arange(0, DEPTH)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, 4 * DEPTH, DEPTH):
        left = tl.load(x + row[:, None] * DEPTH + at + start)
        total = tl.dot(left, tl.trans(left), total)
    tl.store(out + row[:, None] * SIZE + row, total)


def take_too_much(x: Tensor) -> Tensor:
    """Launch a kernel that needs more shared memory than any device has."""
    out = torch.empty_like(x)
    _large_kernel[(1,)](x, out, SIZE=64, DEPTH=1024, num_stages=4)
    return out
