"""Triton kernels between GEMMs, each one pass over memory: RMS norm, SwiGLU, sums over rows of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rollgraph.graph.direct_sums import DirectSum, direct_sum_for
from rollgraph.model.kernels.launch import supports_pdl
from rollgraph.model.kernels.matmul import silu_mul
from rollgraph.model.operators import sum_operator

# -- sums over rows --------------------------------------------------------------------------------
# Many programs add up some rows each, and write a row of partial sums. A last kernel adds these rows up, and adds the
# result to the fp32 sum over microbatches. The order of every sum is fixed, and there are no atomics.

_BLOCK = 128  # rows that a program adds up


@triton.jit
def _sum_blocks_kernel(x, partials, rows, columns, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of one block of rows, in some columns."""
    block = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    row = block * BLOCK + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in tl.static_range(BLOCK // ROWS):
        mask = (row < rows)[:, None] & inside[None, :]
        total += tl.load(x + row[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
        row += ROWS
    tl.store(partials + block * columns + column, tl.sum(total, 0), mask=inside)


@triton.jit
def _add_rows_kernel(total, partials, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add all rows of partial sums to the total, in some columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    old_total = tl.load(total + column, mask=inside, other=0.0)
    block_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        source = partials + row.to(tl.int64)[:, None] * stride + column[None, :]
        block_sum += tl.load(source, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
    tl.store(total + column, old_total + tl.sum(block_sum, 0), mask=inside)


def sum_blocks(x: Tensor) -> Tensor:
    """The sums of blocks of rows of x, [blocks, columns] in fp32."""
    x = x.contiguous()
    rows, columns = x.shape
    blocks = triton.cdiv(rows, _BLOCK)
    partials = torch.empty((blocks, columns), dtype=torch.float32, device=x.device)
    _sum_blocks_kernel[(triton.cdiv(columns, 128), blocks)](
        x, partials, rows, columns, BLOCK=_BLOCK, ROWS=32, COLUMNS=128, num_warps=4
    )
    return partials


@sum_operator
def add_rows(total: Tensor, partials: Tensor) -> None:
    """Add all rows of partial sums, which are fp32, to a contiguous total."""
    rows, columns = partials.shape
    _add_rows_kernel[(triton.cdiv(columns, 16),)](
        total, partials, rows, columns, partials.stride(0), ROWS=256, COLUMNS=16, num_warps=8
    )


def sum_or_accumulate(weights: Sequence[Tensor], partials: Tensor) -> list[Tensor | None]:
    """The gradients of weights: the sums over the rows of `partials`, [rows, weights, columns] in fp32.

    If every weight has an fp32 gradient sum, the gradients are added there, and placeholders are returned.
    """
    totals: list[DirectSum] = []
    for weight in weights:
        total = direct_sum_for(weight, weight.dtype)
        if total is None:
            return list(partials.sum(0).to(weight.dtype))
        totals.append(total)
    for total, rows in zip(totals, partials.unbind(1), strict=True):
        add_rows(total.buffer(), rows)
    return [total.placeholder() for total in totals]


# -- rows of the embedding's gradient --------------------------------------------------------------
# The ids are sorted, so that the tokens of one id are a run. One program adds up a run and adds it to its row. So no
# two programs write the same row, and the order of every sum is fixed. Padding repeats one id thousands of times, so we
# cut runs at the ends of chunks. A second kernel adds up the pieces of the cut runs.

_CHUNK = 32  # positions in the sorted ids; also, how many pieces of a run are added up at a time
_COLUMNS = 256


@triton.jit
def _add_runs_kernel(
    total, pieces, ids, order, gradients, tokens, width, CHUNK: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """If a run, or its piece in a chunk, starts at this position, add it up.

    A run that is not cut goes to its row of the total. A chunk can have two pieces. The first is the one that starts
    where the chunk does.
    """
    position = tl.program_id(0)
    run_id = tl.load(ids + position)
    starts_run = tl.load(ids + position - 1, mask=position > 0, other=-1) != run_id
    starts_chunk = position % CHUNK == 0
    if starts_run | starts_chunk:
        chunk = (position // CHUNK).to(tl.int64)
        end = tl.minimum((position // CHUNK + 1) * CHUNK, tokens)
        run_positions = position + tl.arange(0, CHUNK)
        in_run = tl.load(ids + run_positions, mask=run_positions < end, other=-1) == run_id
        token = tl.load(order + run_positions, mask=in_run, other=0).to(tl.int64)
        is_uncut = starts_run & (tl.load(ids + end, mask=end < tokens, other=-1) != run_id)
        to_total = total + run_id.to(tl.int64) * width
        to_piece = pieces + (2 * chunk + tl.where(starts_chunk, 0, 1)) * width
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < width
            old_total = tl.load(to_total + column, mask=inside & is_uncut, other=0.0)
            source = gradients + token[:, None] * width + column[None, :]
            rows = tl.load(source, mask=in_run[:, None] & inside[None, :], other=0.0)
            run_sum = tl.sum(rows.to(tl.float32), 0)
            tl.store(to_total + column, old_total + run_sum, mask=inside & is_uncut)
            tl.store(to_piece + column, run_sum, mask=inside & (is_uncut == 0))


@triton.jit
def _add_pieces_kernel(total, pieces, ids, tokens, width, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """If a run starts in this chunk and continues in the next, add its pieces to its row of the total."""
    chunk = tl.program_id(0)
    first = chunk * CHUNK
    run_id = tl.load(ids + first + CHUNK - 1)
    starts_run = tl.load(ids + first - 1, mask=chunk > 0, other=-1) != run_id
    continues = tl.load(ids + first + CHUNK) == run_id
    if starts_run & continues:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        piece = 2 * chunk.to(tl.int64) + tl.where(tl.load(ids + first) == run_id, 0, 1)
        run_sum = tl.load(pieces + piece * width + column, mask=inside, other=0.0)
        next_chunks = chunk + 1 + tl.arange(0, CHUNK)
        in_run = tl.load(ids + next_chunks * CHUNK, mask=next_chunks * CHUNK < tokens, other=-1) == run_id
        while tl.max(in_run.to(tl.int32), 0) > 0:
            source = pieces + 2 * next_chunks.to(tl.int64)[:, None] * width + column[None, :]
            run_sum += tl.sum(tl.load(source, mask=in_run[:, None] & inside[None, :], other=0.0), 0)
            next_chunks += CHUNK
            in_run = tl.load(ids + next_chunks * CHUNK, mask=next_chunks * CHUNK < tokens, other=-1) == run_id
        target = total + run_id.to(tl.int64) * width + column
        tl.store(target, tl.load(target, mask=inside, other=0.0) + run_sum, mask=inside)


@sum_operator
def add_to_rows(total: Tensor, ids: Tensor, gradients: Tensor) -> None:
    """Add each token's gradient, [tokens, width], to the row of its id in a contiguous total, [vocabulary, width]."""
    tokens, width = gradients.shape
    chunks = triton.cdiv(tokens, _CHUNK)
    ordered, order = torch.sort(ids.int(), stable=True)  # fewer bits are sorted faster
    pieces = torch.empty((chunks, 2, width), dtype=torch.float32, device=total.device)
    _add_runs_kernel[(tokens,)](
        total, pieces, ordered, order, gradients.contiguous(), tokens, width,
        CHUNK=_CHUNK, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
    if chunks > 1:
        _add_pieces_kernel[(chunks - 1, triton.cdiv(width, _COLUMNS))](
            total, pieces, ordered, tokens, width, CHUNK=_CHUNK, COLUMNS=_COLUMNS, num_warps=4
        )


# -- RMS norm and SwiGLU ---------------------------------------------------------------------------

_PROGRAMS = 1056  # programs in the backward of a norm; each sums the weight's gradient over some of the rows
_TILE = 1024


@triton.jit
def _add_norm_kernel(
    x, update, weight, out, stream, scales, width, eps,
    SAVE_SCALES: tl.constexpr, WIDTH: tl.constexpr, WAITS: tl.constexpr, TRIGGERS_PDL: tl.constexpr,
):  # fmt: skip
    if TRIGGERS_PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if WAITS:
        gdc_wait()
    value = tl.load(x + row * width + column, mask=inside, other=0.0)
    summed = value.to(tl.float32) + tl.load(update + row * width + column, mask=inside, other=0.0).to(tl.float32)
    value = summed.to(value.dtype)
    tl.store(stream + row * width + column, value, mask=inside)
    value_fp32 = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value_fp32 * value_fp32, 0) / width + eps)
    normed = (value_fp32 * scale).to(value.dtype).to(tl.float32)
    tl.store(out + row * width + column, (normed * gain).to(value.dtype), mask=inside)
    if SAVE_SCALES:
        tl.store(scales + row, scale)


@triton.jit
def _add_norm_backward_kernel(
    d_out, d_stream, stream, weight, scales, d_x, weight_partials, rows, rows_per_program, width, WIDTH: tl.constexpr
):  # fmt: skip
    """The gradients of `stream` = x + update and of out = norm(stream) * weight.

    `d_stream` is the part of the stream's gradient that does not come through the norm. `d_x` is the whole gradient of
    the stream, which x and update share. `scales` has 1 / RMS of each row. A program takes consecutive rows, and writes
    its part of the weight's gradient to one row of `weight_partials`.
    """
    program, column = tl.program_id(0), tl.arange(0, WIDTH)
    inside = column < width
    begin = program * rows_per_program
    offset = begin.to(tl.int64) * width + column
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((WIDTH,), tl.float32)
    for row in range(begin, tl.minimum(begin + rows_per_program, rows)):
        scale = tl.load(scales + row)
        normed = tl.load(stream + offset, mask=inside, other=0.0).to(tl.float32) * scale
        gradient = tl.load(d_out + offset, mask=inside, other=0.0).to(tl.float32)
        d_weight += gradient * normed
        d_normed = gradient * w
        d_row = scale * (d_normed - normed * (tl.sum(d_normed * normed, 0) / width))
        d_row += tl.load(d_stream + offset, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + offset, d_row.to(d_x.dtype.element_ty), mask=inside)
        offset += width
    tl.store(weight_partials + program * width + column, d_weight, mask=inside)


class AddNorm(torch.autograd.Function):
    """See `layers.add_norm`."""

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, update: Tensor, weight: Tensor, eps: float, pdl: bool
    ) -> tuple[Tensor, Tensor]:
        stream = stream.contiguous()
        save_scales = any(ctx.needs_input_grad)
        triggers_pdl = supports_pdl(stream.device)
        waits = pdl and triggers_pdl
        width = stream.shape[-1]
        rows = stream.numel() // width
        block = triton.next_power_of_2(width)
        out = torch.empty_like(stream)
        total = torch.empty_like(stream)
        scales = torch.empty(rows if save_scales else 1, dtype=torch.float32, device=stream.device)
        _add_norm_kernel[(rows,)](
            stream, update.contiguous(), weight, out, total, scales, width, eps,
            SAVE_SCALES=save_scales, WIDTH=block, WAITS=waits, TRIGGERS_PDL=triggers_pdl,
            num_warps=_warps(block), launch_pdl=waits,
        )  # fmt: skip
        ctx.save_for_backward(total, weight, scales)
        ctx.weight = weight  # the parameter itself, for its direct gradient sum
        return out, total

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_stream: Tensor) -> tuple[Tensor | None, ...]:
        stream, weight, scales = ctx.saved_tensors
        width = stream.shape[-1]
        rows = stream.numel() // width
        block = triton.next_power_of_2(width)
        rows_per_program = triton.cdiv(rows, _PROGRAMS)
        programs = triton.cdiv(rows, rows_per_program)
        d_x = torch.empty_like(stream)
        weight_partials = torch.empty((programs, 1, width), dtype=torch.float32, device=stream.device)
        _add_norm_backward_kernel[(programs,)](
            d_out.contiguous(), d_stream.contiguous(), stream, weight, scales, d_x, weight_partials, rows,
            rows_per_program, width, WIDTH=block, num_warps=_warps(block),
        )  # fmt: skip
        d_weight = None
        if ctx.needs_input_grad[2]:
            (d_weight,) = sum_or_accumulate([ctx.weight], weight_partials)
        return d_x, d_x, d_weight, None, None


@triton.jit
def _swiglu_kernel(gate_up, out, width, TILE: tl.constexpr, WAITS: tl.constexpr, TRIGGERS_PDL: tl.constexpr):
    if TRIGGERS_PDL:
        gdc_launch_dependents()
    if WAITS:
        gdc_wait()
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0)
    tl.store(out + row * width + column, silu_mul(gate, up, gate.dtype), mask=inside)


@triton.jit
def _swiglu_backward_kernel(d_out, gate_up, d_gate_up, width, TILE: tl.constexpr):
    """The gradients of gate and of up in a tile of one row, given that of silu(gate) * up."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(d_out + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = gradient * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = gradient * gate * sigmoid
    target = d_gate_up + row * 2 * width + column
    tl.store(target, d_gate.to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(target + width, d_up.to(d_gate_up.dtype.element_ty), mask=inside)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, for `layers.swiglu`.

    The output has `padded_rows` rows, so that a padded GEMM after it needs no copy. Rows past those of the input are
    never written. `pdl` says that the kernel before triggers programmatic dependent launch.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, padded_rows: int, pdl: bool) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((padded_rows, width), dtype=gate_up.dtype, device=gate_up.device)
        triggers_pdl = supports_pdl(gate_up.device)  # the next kernel may always start early, if the device can
        waits = pdl and triggers_pdl  # this one may have started early, so it waits for the results of the one before
        _swiglu_kernel[(rows, triton.cdiv(width, _TILE))](
            gate_up, out, width, TILE=_TILE, WAITS=waits, TRIGGERS_PDL=triggers_pdl, launch_pdl=waits
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
