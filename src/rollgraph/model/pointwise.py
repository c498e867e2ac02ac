"""The small operations between matrix products: RMS norm, rotary positions, SwiGLU.

On a CPU they are plain PyTorch. On a GPU each is one kernel of `pointwise_kernels.py`, because they are bound by memory
bandwidth and a chain of plain operations would read and write the same memory many times. The norm and the rotation of
heads are part of a kernel of `head_kernels.py` there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollgraph.model.linear import Unexpanded


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    wide = _widen(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _widen(x: Tensor) -> Tensor:
    """Convert to fp32; fp64 stays fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def add_norm(
    residual: Tensor, update: Tensor, weight: Tensor, eps: float, *, chained: bool = False
) -> tuple[Tensor, Tensor]:
    """Add an update to the residual stream. Gives the norm of the sum, and the sum.

    `chained` says that the update comes from a kernel that lets the next one start early; see `chained_launch.py`.
    """
    if residual.is_cuda:
        from rollgraph.model.pointwise_kernels import AddNorm

        both: tuple[Tensor, Tensor] = AddNorm.apply(residual, update, weight, eps, chained)  # type: ignore[no-untyped-call]
        return both
    residual = residual + update
    return norm(residual, weight, eps), residual


def swiglu(gate_up: Tensor | Unexpanded, rows: int = 0, *, chained: bool = False) -> Tensor:
    """`silu(gate) * up`, where gate and up are the two halves of the last dimension.

    On CUDA, the result has `rows` rows if that is more, and the additional ones hold anything: a product of so many
    rows then needs no copy. `chained` is as for `add_norm`; an unexpanded product says so by itself.
    """
    activated: Tensor
    if isinstance(gate_up, Unexpanded):
        from rollgraph.model.adapter_kernels import AdaptedSwiGLU

        product, b, adapter, own_kernel = gate_up
        padded = max(rows, len(product))
        activated = AdaptedSwiGLU.apply(product, b, adapter.scale, adapter, padded, own_kernel)  # type: ignore[no-untyped-call]
        return activated
    if gate_up.is_cuda:
        from rollgraph.model.pointwise_kernels import SwiGLU

        activated = SwiGLU.apply(gate_up, max(rows, len(gate_up)), chained)  # type: ignore[no-untyped-call]
        return activated
    gate, up = gate_up.chunk(2, -1)
    opened: Tensor = _Silu.apply(gate)  # type: ignore[no-untyped-call]
    return opened * up


class _Silu(torch.autograd.Function):
    """`silu` of plain PyTorch operations.

    PyTorch's own computes the numbers that do not fill a vector in another way. Which these are depends on where rows
    are divided among threads, hence on the number of rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = _widen(x)
        return (wide / (1 + (-wide).exp())).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        d_x: Tensor = torch.ops.aten.silu_backward(d_out, x)
        return d_x


def rotary_angles(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine for each position, [tokens, head_dim / 2] in fp32."""
    angles = positions[:, None].float() * frequencies
    cos = angles.cos()
    sin = angles.sin()
    if factor == 1.0:
        return cos, sin
    return cos * factor, sin * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x, [tokens, heads, head_dim]."""
    first, second = _widen(x).chunk(2, -1)
    cos = cos[:, None]
    sin = sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
