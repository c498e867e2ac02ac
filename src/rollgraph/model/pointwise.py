"""The small operations between matrix products: norm, rotary positions, SwiGLU.

On a CPU they are plain PyTorch. On a GPU each is one kernel of `pointwise_kernels.py`: these are bound by memory, and
a chain of plain operations reads and writes it many times.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    if x.is_cuda:
        from rollgraph.model.pointwise_kernels import Norm

        return Norm.apply(x, weight, eps)
    wide = _widen(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _widen(x: Tensor) -> Tensor:
    """In fp32 at least: what is in fp64 stays there."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def add_norm(stream: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add an update to the residual stream: the norm of the sum, and the sum."""
    if stream.is_cuda:
        from rollgraph.model.pointwise_kernels import AddNorm

        return AddNorm.apply(stream, update, weight, eps)
    stream = stream + update
    return norm(stream, weight, eps), stream


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of the two halves."""
    if gate_up.is_cuda:
        from rollgraph.model.pointwise_kernels import SwiGLU

        return SwiGLU.apply(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def rotary_angles(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine for each position, [tokens, head_dim / 2] in fp32."""
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x, [tokens, heads, head_dim]."""
    if x.is_cuda:
        from rollgraph.model.pointwise_kernels import Rotate

        return Rotate.apply(x, cos, sin)
    first, second = _widen(x).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
