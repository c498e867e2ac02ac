"""Triton kernels of `pointwise.py`, each a single pass over memory, and the autograd functions that use them."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rollgraph.model.chained_launch import can_chain
from rollgraph.model.matmul_kernels import swish_product
from rollgraph.model.sum_kernels import summed_gradients

_PROGRAMS = 1056  # programs in the backward of a norm; each sums the weight's gradient over its share of the rows
_TILE = 1024


@triton.jit
def _add_norm_kernel(
    x, update, weight, out, stream, scales, width, eps,
    KEEP: tl.constexpr, WIDTH: tl.constexpr, WAITS: tl.constexpr, STARTS_NEXT: tl.constexpr,
):  # fmt: skip
    if STARTS_NEXT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < width
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if WAITS:
        gdc_wait()
    value = tl.load(x + row * width + at, mask=inside, other=0.0)
    added = value.to(tl.float32) + tl.load(update + row * width + at, mask=inside, other=0.0).to(tl.float32)
    value = added.to(value.dtype)
    tl.store(stream + row * width + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = (wide * scale).to(value.dtype).to(tl.float32)
    tl.store(out + row * width + at, (normed * gain).to(value.dtype), mask=inside)
    if KEEP:
        tl.store(scales + row, scale)


@triton.jit
def _add_norm_backward_kernel(
    d_out, d_stream, x, weight, scales, d_x, d_weights, rows, share, width, WIDTH: tl.constexpr
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
        total += tl.load(d_stream + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + here, total.to(d_x.dtype.element_ty), mask=inside)
        here += width
    tl.store(d_weights + program * width + at, d_weight, mask=inside)


class AddNorm(torch.autograd.Function):
    """See `pointwise.add_norm`."""

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, update: Tensor, weight: Tensor, eps: float, chained: bool
    ) -> tuple[Tensor, Tensor]:
        stream = stream.contiguous()
        keep = any(ctx.needs_input_grad)
        chains = can_chain(stream.device)
        waits = chained and chains
        width = stream.shape[-1]
        rows = stream.numel() // width
        block = triton.next_power_of_2(width)
        out = torch.empty_like(stream)
        total = torch.empty_like(stream)
        scales = torch.empty(rows if keep else 1, dtype=torch.float32, device=stream.device)
        _add_norm_kernel[(rows,)](
            stream, update.contiguous(), weight, out, total, scales, width, eps,
            KEEP=keep, WIDTH=block, WAITS=waits, STARTS_NEXT=chains, num_warps=_warps(block), launch_pdl=waits,
        )  # fmt: skip
        ctx.save_for_backward(total, weight, scales)
        ctx.weight = weight  # the parameter itself, which knows where its gradient is added up
        return out, total

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_stream: Tensor) -> tuple[Tensor | None, ...]:
        stream, weight, scales = ctx.saved_tensors
        width = stream.shape[-1]
        rows = stream.numel() // width
        block = triton.next_power_of_2(width)
        share = triton.cdiv(rows, _PROGRAMS)
        programs = triton.cdiv(rows, share)
        d_x = torch.empty_like(stream)
        d_weights = torch.empty((programs, 1, width), dtype=torch.float32, device=stream.device)
        _add_norm_backward_kernel[(programs,)](
            d_out.contiguous(), d_stream.contiguous(), stream, weight, scales, d_x, d_weights, rows, share, width,
            WIDTH=block, num_warps=_warps(block),
        )  # fmt: skip
        d_weight = None
        if ctx.needs_input_grad[2]:
            (d_weight,) = summed_gradients([ctx.weight], d_weights)
        return d_x, d_x, d_weight, None, None


@triton.jit
def _swiglu_kernel(gate_up, out, width, TILE: tl.constexpr, WAITS: tl.constexpr, STARTS_NEXT: tl.constexpr):
    if STARTS_NEXT:
        gdc_launch_dependents()
    if WAITS:
        gdc_wait()
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0)
    tl.store(out + row * width + at, swish_product(gate, up, gate.dtype), mask=inside)


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
    def forward(ctx: Any, gate_up: Tensor, padded: int, chained: bool) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((padded, width), dtype=gate_up.dtype, device=gate_up.device)
        chains = can_chain(gate_up.device)
        waits = chained and chains
        _swiglu_kernel[(rows, triton.cdiv(width, _TILE))](
            gate_up, out, width, TILE=_TILE, WAITS=waits, STARTS_NEXT=chains, launch_pdl=waits
        )
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        rows, width = gate_up.shape[0], d_out.shape[1]
        d_gate_up = torch.empty_like(gate_up)
        _swiglu_backward_kernel[(rows, triton.cdiv(width, _TILE))](
            d_out.contiguous(), gate_up, d_gate_up, width, TILE=_TILE
        )
        return d_gate_up, None, None


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))
