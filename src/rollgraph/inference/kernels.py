"""Triton kernels of a decode step outside the model: preparing the rows, sampling, and advancing the state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from rollgraph.model.arithmetic import PART, part_count
from rollgraph.model.kernels.launch import supports_pdl
from rollgraph.model.kernels.logprobs import WARPS, combine_logsumexp, lanes, partial_logsumexp

# -- sampling --------------------------------------------------------------------------------------
# `sampler.py` does the same in PyTorch.
#
# The first kernel only sums up the parts of each row, because computing noise for all logits takes three times as long
# as reading them. A second kernel draws a part of each row, and a token from that part. It has one warp, like the
# kernel of training that joins these sums: both must add in the same order, see `model/kernels/logprobs.py`.

_CHUNK = 512  # logits to draw from at a time: a whole part does not fit into the registers of a warp
_STAGES = tl.constexpr(4)  # chunks in flight


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log(x, FAST: tl.constexpr):
    """A fast logarithm: an accurate one would take most of a draw's time, and errors of 1e-6 do not matter here."""
    if FAST:
        return libdevice.fast_logf(x)
    return tl.log(x)


@triton.jit
def _scale(temperature):
    """1 / temperature, rounded as in training, and whether the row is greedy (temperature 0)."""
    greedy = temperature == 0.0
    return tl.where(greedy, 1.0, tl.math.div_rn(1.0, tl.where(greedy, 1.0, temperature))), greedy


@triton.jit
def _keys(seeds, positions, row, stride_seed, stride_position):
    """The two keys of a row's noise."""
    low = tl.load(seeds + row * stride_seed).to(tl.uint32, bitcast=True)
    high = tl.load(seeds + row * stride_seed + 1).to(tl.uint32, bitcast=True)
    position = tl.load(positions + row * stride_position).to(tl.uint32, bitcast=True)
    return _mix(_mix(_mix(low) ^ high) + position), _mix(_mix(_mix(high ^ 0x5BD1E995) ^ low) + position)


@triton.jit
def _noise(ids, first, second, FAST: tl.constexpr):
    """`sampler.gumbel` of one row, from its keys."""
    bits = _mix(_mix(ids.to(tl.uint32, bitcast=True) ^ first) + second)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    small = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
    return -_log(tl.where(uniform < 0.00390625, small, -_log(1.0 - uniform, FAST)), FAST)


@triton.jit
def _find_first_largest(scores, ids):
    """The lowest id with the largest score; 2^31 - 1 if all scores are NaN."""
    return tl.min(tl.where(scores == tl.max(scores, 0), ids, 2147483647), 0)


@triton.jit
def _sample_part(tops, totals, scale, greedy, first, second, lane, FAST: tl.constexpr):
    """Draw a part by its sum of weights. A part of only -inf has a sum of 0, whose logarithm never wins."""
    scores = _log(totals, FAST) + tops * scale + _noise(~lane, first, second, FAST)
    return _find_first_largest(tl.where(greedy, tops, scores), lane)


@triton.jit
def _sample_token(
    logits, vocabulary, part, scale, greedy, first, second, PART: tl.constexpr, CHUNK: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """The best token at each offset over all chunks, then the best of those. If all are NaN, the part's first."""
    chosen = part * PART + tl.arange(0, CHUNK)
    best = tl.full((CHUNK,), -float("inf"), tl.float32)
    for start in tl.range(0, PART, CHUNK, num_stages=_STAGES):
        ids = part * PART + start + tl.arange(0, CHUNK)
        x = tl.load(logits + ids, mask=ids < vocabulary, other=-float("inf"))
        scores = tl.where(greedy, x, x * scale + _noise(ids, first, second, FAST))
        better = scores > best
        best = tl.where(better, scores, best)
        chosen = tl.where(better, ids, chosen)
    return _find_first_largest(best, chosen)


@triton.jit
def _logit_sums_kernel(
    logits, temperatures, parts, vocabulary, stride_temperature, PARTS: tl.constexpr, PART: tl.constexpr,
    TRIGGERS_PDL: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Compute the largest logit of one part of a row, and the part's sums of exponentials, plain and scaled."""
    if TRIGGERS_PDL:
        gdc_launch_dependents()
    if WAITS:
        gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale = _scale(tl.load(temperatures + row * stride_temperature))[0]
    ids = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * vocabulary + ids, mask=ids < vocabulary, other=-float("inf"))
    top, total = partial_logsumexp(x, scale)
    plain = total
    if scale != 1.0:
        _, plain = partial_logsumexp(x, 1.0)
    target = parts + (row * PARTS + part) * 3
    tl.store(target, top)
    tl.store(target + 1, plain)
    tl.store(target + 2, total)


@triton.jit
def _sample_kernel(
    parts, logits, seeds, positions, temperatures, results, vocabulary, stride_seed, stride_position,
    stride_temperature, PARTS: tl.constexpr, LANES: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the sums of a row's parts, draw a part, and draw a token from that part."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    scale, greedy = _scale(tl.load(temperatures + row * stride_temperature))
    first, second = _keys(seeds, positions, row, stride_seed, stride_position)
    lane = tl.arange(0, LANES)
    inside = lane < PARTS
    source = parts + (row * PARTS + lane) * 3
    tops = tl.load(source, mask=inside, other=-1e30)
    totals = tl.load(source + 2, mask=inside, other=0.0)
    plain, _, _ = combine_logsumexp(tops, tl.load(source + 1, mask=inside, other=0.0), 1.0)
    scaled, _, _ = combine_logsumexp(tops, totals, scale)
    # If logits are NaN, there may be no best part. Any part will do, because the result is -1.
    part = tl.minimum(_sample_part(tops, totals, scale, greedy, first, second, lane, FAST), PARTS - 1)
    token = _sample_token(logits + row * vocabulary, vocabulary, part, scale, greedy, first, second, PART, CHUNK, FAST)
    logit = tl.load(logits + row * vocabulary + token)
    policy = logit - plain
    logprob = tl.where(greedy, 0.0, tl.fma(logit, scale, -scaled))
    finite = (tl.abs(policy) < float("inf")) & (tl.abs(logprob) < float("inf"))  # false for NaN
    target = results + row * 3
    tl.store(target, tl.where(finite, token, -1))
    tl.store(target + 1, logprob.to(tl.int32, bitcast=True))
    tl.store(target + 2, policy.to(tl.int32, bitcast=True))


def sample_rows(
    results: Tensor, logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, pdl: bool = False
) -> None:
    """Write to `results`, [rows, 3] int32: a token, and the bits of its log-probabilities at the temperature and
    under the policy. The token is -1 if the logits are not finite. `pdl` is as for `sampler.sample_into`.
    """
    rows, vocabulary = logits.shape
    count = part_count(vocabulary)
    parts = torch.empty((rows, count, 3), dtype=torch.float32, device=logits.device)
    triggers_pdl = supports_pdl(logits.device)
    waits = pdl and triggers_pdl
    _logit_sums_kernel[(rows, count)](
        logits, temperature, parts, vocabulary, temperature.stride(0), PARTS=count, PART=PART,
        TRIGGERS_PDL=triggers_pdl, WAITS=waits, num_warps=WARPS, launch_pdl=waits,
    )  # fmt: skip
    _sample_kernel[(rows,)](
        parts, logits, seed, position, temperature, results, vocabulary, seed.stride(0), position.stride(0),
        temperature.stride(0), PARTS=count, LANES=lanes(count), PART=PART, CHUNK=_CHUNK, FAST=logits.is_cuda,
        PDL=triggers_pdl, num_warps=1, launch_pdl=triggers_pdl,
    )  # fmt: skip


# -- the two ends of a step ------------------------------------------------------------------------
# `decode_graphs.py` does the same in PyTorch, in some twenty kernels whose launches take longer than their work. These
# bypass PyTorch's dispatcher, so the undo log of a capture does not see them. It does not need to: they change only the
# state of rows that are not idle, and `DecodeGraphs.decode` makes all rows idle for a capture.

_LANES = 128


@triton.jit
def _prepare_kernel(
    orders, positions, table, cos_of, sin_of, slots, lengths, cos, sin, state_stride, BLOCK: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, IDLE: tl.constexpr,
):  # fmt: skip
    """Append a row's new block to its table, and compute its cache slot, its length and its rotary angles."""
    row = tl.program_id(0)
    order = tl.load(orders + row)
    position = tl.load(positions + row * state_stride)
    active = order > IDLE
    entry = table + row * state_stride + position // BLOCK
    block = tl.load(entry, mask=active & (order < 0), other=0)
    block = tl.where(order < 0, block, order)
    tl.store(entry, block, mask=order >= 0)
    tl.store(slots + row, tl.where(active, block * BLOCK + position % BLOCK, 0))
    tl.store(lengths + row, tl.where(active, position + 1, 1))
    at = tl.arange(0, WIDTH)
    inside = at < HALF
    tl.store(cos + row * HALF + at, tl.load(cos_of + position * HALF + at, mask=inside, other=0.0), mask=inside)
    tl.store(sin + row * HALF + at, tl.load(sin_of + position * HALF + at, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _advance_kernel(orders, results, tokens, positions, rows, state_stride, IDLE: tl.constexpr, LANES: tl.constexpr):
    """Make each sampled token the next input of its row, and advance the row by one position."""
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    active = (row < rows) & (tl.load(orders + row, mask=row < rows, other=IDLE) > IDLE)
    token = tl.load(results + row * 3, mask=active, other=0)
    offset = row * state_stride
    tl.store(tokens + offset, tl.maximum(token, 0), mask=active)
    tl.store(positions + offset, tl.load(positions + offset, mask=active, other=0) + 1, mask=active)


def prepare_rows(
    orders: Tensor, positions: Tensor, table: Tensor, angles: tuple[Tensor, Tensor], block_size: int, idle: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Append new blocks to `table`; return cache slots, lengths, and (cos, sin) of all rows.

    `positions` and `table` are columns of one state tensor. `angles` are cos and sin of every position.
    """
    rows = len(orders)
    half = angles[0].shape[1]
    slots = torch.empty_like(orders)
    lengths = torch.empty_like(orders)
    cos, sin = (each.new_empty(rows, half) for each in angles)
    _prepare_kernel[(rows,)](
        orders, positions, table, *angles, slots, lengths, cos, sin, table.stride(0),
        BLOCK=block_size, HALF=half, WIDTH=triton.next_power_of_2(half), IDLE=idle, num_warps=1,
    )  # fmt: skip
    return slots, lengths, (cos, sin)


def advance_rows(orders: Tensor, results: Tensor, tokens: Tensor, positions: Tensor, idle: int) -> None:
    """Write the tokens of `results`, [rows, 3], to the state of rows that are not idle, and advance these rows."""
    rows = len(orders)
    _advance_kernel[(triton.cdiv(rows, _LANES),)](
        orders, results, tokens, positions, rows, positions.stride(0), IDLE=idle, LANES=_LANES, num_warps=4
    )
