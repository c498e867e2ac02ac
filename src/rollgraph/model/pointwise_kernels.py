"""Triton kernels of `pointwise.py`, each a single pass over memory, and the autograd functions that use them."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 1056  # programs in the backward of a norm; each sums the weight's gradient over its share of the rows
_TILE = 1024


@triton.jit
def _norm_kernel(
    x, update, weight, out, stream, scales, width, eps, ADD: tl.constexpr, KEEP: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0)
    if ADD:
        added = value.to(tl.float32) + tl.load(update + row * width + at, mask=inside, other=0.0).to(tl.float32)
        value = added.to(value.dtype)
        tl.store(stream + row * width + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = (wide * scale).to(value.dtype).to(tl.float32)
    normed = normed * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, normed.to(value.dtype), mask=inside)
    if KEEP:
        tl.store(scales + row, scale)


@triton.jit
def _norm_backward_kernel(
    d_out, d_stream, x, weight, scales, d_x, d_weights, rows, share, width, ADD: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    program, at = tl.program_id(0), tl.arange(0, WIDTH)
    inside = at < width
    begin = program * share
    here = begin.to(tl.int64) * width + at
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((WIDTH,), tl.float32)
    for row in range(begin, tl.minimum(begin + share, rows)):
        scale = tl.load(scales + row)
        unit = tl.load(x + here, mask=inside, other=0.0).to(tl.float32) * scale
        gradient = tl.load(d_out + here, mask=inside, other=0.0).to(tl.float32)
        d_weight += gradient * unit
        gradient = gradient * w
        total = scale * (gradient - unit * (tl.sum(gradient * unit, 0) / width))
        if ADD:
            total += tl.load(d_stream + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + here, total.to(d_x.dtype.element_ty), mask=inside)
        here += width
    tl.store(d_weights + program * width + at, d_weight, mask=inside)


def _norm_forward(x: Tensor, update: Tensor | None, weight: Tensor, eps: float, keep: bool) -> tuple[Tensor, ...]:
    width = x.shape[-1]
    rows, block = x.numel() // width, triton.next_power_of_2(width)
    out = torch.empty_like(x)
    stream = torch.empty_like(x) if update is not None else x
    scales = torch.empty(rows if keep else 1, dtype=torch.float32, device=x.device)
    _norm_kernel[(rows,)](
        x, update if update is not None else x, weight, out, stream, scales, width, eps,
        ADD=update is not None, KEEP=keep, WIDTH=block, num_warps=_warps(block),
    )  # fmt: skip
    return out, stream, scales


def _norm_backward(d_out: Tensor, d_stream: Tensor | None, saved: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    stream, weight, scales = saved
    width = stream.shape[-1]
    rows, block = stream.numel() // width, triton.next_power_of_2(width)
    share = triton.cdiv(rows, _PROGRAMS)
    programs = triton.cdiv(rows, share)
    d_x = torch.empty_like(stream)
    d_weights = torch.empty((programs, width), dtype=torch.float32, device=stream.device)
    d_out = d_out.contiguous()
    d_stream = d_stream.contiguous() if d_stream is not None else None
    _norm_backward_kernel[(programs,)](
        d_out, d_stream if d_stream is not None else d_out, stream, weight, scales, d_x, d_weights, rows, share, width,
        ADD=d_stream is not None, WIDTH=block, num_warps=_warps(block),
    )  # fmt: skip
    return d_x, d_weights.sum(0).to(weight.dtype)


class Norm(torch.autograd.Function):
    """See `pointwise.norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, _, scales = _norm_forward(x, None, weight, eps, any(ctx.needs_input_grad))
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return (*_norm_backward(d_out, None, ctx.saved_tensors), None)


class AddNorm(torch.autograd.Function):
    """See `pointwise.add_norm`."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, total, scales = _norm_forward(
            stream.contiguous(), update.contiguous(), weight, eps, any(ctx.needs_input_grad)
        )
        ctx.save_for_backward(total, weight, scales)
        return out, total

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_stream: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_weight = _norm_backward(d_out, d_stream, ctx.saved_tensors)
        return d_x, d_x, d_weight, None


@triton.jit
def _swiglu_kernel(gate_up, out, width, TILE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    opened = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + at, (opened * up).to(gate.dtype), mask=inside)


@triton.jit
def _swiglu_backward_kernel(d_out, gate_up, d_gate_up, width, TILE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(d_out + row * width + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    d_gate = gradient * up * share * (1.0 + gate * (1.0 - share))
    d_up = gradient * gate * share
    target = d_gate_up + row * 2 * width + at
    tl.store(target, d_gate.to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(target + width, d_up.to(d_gate_up.dtype.element_ty), mask=inside)


class SwiGLU(torch.autograd.Function):
    """See `pointwise.swiglu`."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
        _swiglu_kernel[(rows, triton.cdiv(width, _TILE))](gate_up, out, width, TILE=_TILE)
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        rows, width = d_out.shape
        d_gate_up = torch.empty_like(gate_up)
        _swiglu_backward_kernel[(rows, triton.cdiv(width, _TILE))](
            d_out.contiguous(), gate_up, d_gate_up, width, TILE=_TILE
        )
        return d_gate_up


@triton.jit
def _rotate_kernel(
    x, cos, sin, out, token_stride, head_stride, SIGN: tl.constexpr, HEADS: tl.constexpr, ALL: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token, head, at = tl.program_id(0).to(tl.int64), tl.arange(0, ALL)[:, None], tl.arange(0, HALF)
    inside = (head < HEADS) & (at < DIM // 2)
    source, target = x + token * token_stride + head * head_stride + at, out + (token * HEADS + head) * DIM + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * (DIM // 2) + at, mask=at < DIM // 2, other=0.0)
    s = tl.load(sin + token * (DIM // 2) + at, mask=at < DIM // 2, other=0.0) * SIGN
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + DIM // 2, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    tokens, heads, dim = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    _rotate_kernel[(tokens,)](
        x, cos, sin, out, x.stride(0), x.stride(1), SIGN=sign, HEADS=heads, ALL=triton.next_power_of_2(heads), DIM=dim,
        HALF=triton.next_power_of_2(dim // 2), num_warps=4 if heads > 2 else 1,
    )  # fmt: skip
    return out


class Rotate(torch.autograd.Function):
    """See `pointwise.rotate`. The backward of a rotation is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(d_out, cos, sin, -1), None, None


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))
