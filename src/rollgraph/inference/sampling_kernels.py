"""Triton kernels that sample at a temperature in one pass over the logits. `sampler.py` does the same in PyTorch.

The pass does no more than add up the parts of each row, because noise for all logits takes three times as long as
reading them. A second kernel draws a part of each row, and a token from that part. It has one warp, as the kernel that
joins the sums in training has: both must add them up in the same order, see `model/logprob_kernels.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from rollgraph.model.chained_launch import can_chain
from rollgraph.model.logprob_kernels import WARPS, lanes, normalizer, sum_part
from rollgraph.model.vocabulary_parts import PART, part_count

_CHUNK = 512  # logits that a token is drawn from at a time: all of a part do not fit into the registers of a warp
_STAGES = tl.constexpr(4)  # chunks that are being loaded or drawn from


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log(x, FAST: tl.constexpr):
    """An accurate logarithm would take most of the time of a draw, and errors of 1e-6 in a score do not matter."""
    if FAST:
        return libdevice.fast_logf(x)
    return tl.log(x)


@triton.jit
def _scale(temperature):
    """1 / temperature, rounded as training rounds it, and whether the row takes the most likely token instead."""
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
    """`sampler.gumbel` of one row, given its keys."""
    bits = _mix(_mix(ids.to(tl.uint32, bitcast=True) ^ first) + second)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    small = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
    return -_log(tl.where(uniform < 0.00390625, small, -_log(1.0 - uniform, FAST)), FAST)


@triton.jit
def _find_first_largest(scores, ids):
    """The lowest id with the largest score; more than any id if no score is a number."""
    return tl.min(tl.where(scores == tl.max(scores, 0), ids, 2147483647), 0)


@triton.jit
def _draw_part(tops, totals, scale, greedy, first, second, lane, FAST: tl.constexpr):
    """Parts are drawn by their totals. One of nothing but -inf has a total of 0, whose logarithm never wins."""
    scores = _log(totals, FAST) + tops * scale + _noise(~lane, first, second, FAST)
    return _find_first_largest(tl.where(greedy, tops, scores), lane)


@triton.jit
def _draw_token(
    logits, vocabulary, part, scale, greedy, first, second, PART: tl.constexpr, CHUNK: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """The best token of each place in a chunk, and the best of those. If no score is a number, the part's first."""
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
    STARTS_NEXT: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Find the largest logit in one part of a row, and the part's sums of exponentials, plain and scaled."""
    if STARTS_NEXT:
        gdc_launch_dependents()
    if WAITS:
        gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale = _scale(tl.load(temperatures + row * stride_temperature))[0]
    ids = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * vocabulary + ids, mask=ids < vocabulary, other=-float("inf"))
    top, total = sum_part(x, scale)
    plain = total
    if scale != 1.0:
        _, plain = sum_part(x, 1.0)
    target = parts + (row * PARTS + part) * 3
    tl.store(target, top)
    tl.store(target + 1, plain)
    tl.store(target + 2, total)


@triton.jit
def _draw_kernel(
    parts, logits, seeds, positions, temperatures, results, vocabulary, stride_seed, stride_position,
    stride_temperature, PARTS: tl.constexpr, LANES: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    FAST: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Join the sums of a row, draw one of its parts, and draw a token from that part."""
    if CHAINED:
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
    plain, _, _ = normalizer(tops, tl.load(source + 1, mask=inside, other=0.0), 1.0)
    scaled, _, _ = normalizer(tops, totals, scale)
    # Where the logits are not numbers, there may be no best part. Any part will do: the result is -1.
    part = tl.minimum(_draw_part(tops, totals, scale, greedy, first, second, lane, FAST), PARTS - 1)
    token = _draw_token(logits + row * vocabulary, vocabulary, part, scale, greedy, first, second, PART, CHUNK, FAST)
    logit = tl.load(logits + row * vocabulary + token)
    policy = logit - plain
    logprob = tl.where(greedy, 0.0, tl.fma(logit, scale, -scaled))
    finite = (tl.abs(policy) < float("inf")) & (tl.abs(logprob) < float("inf"))  # false for NaN
    target = results + row * 3
    tl.store(target, tl.where(finite, token, -1))
    tl.store(target + 1, logprob.to(tl.int32, bitcast=True))
    tl.store(target + 2, policy.to(tl.int32, bitcast=True))


def draw(
    results: Tensor, logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, chained: bool = False
) -> None:
    """Write to `results`, [rows, 3] int32: a token, and the bits of its log-probabilities at the temperature and
    under the policy. The token is -1 where the logits are not finite. `chained` is as for `sampler.sample_into`.
    """
    rows, vocabulary = logits.shape
    count = part_count(vocabulary)
    parts = torch.empty((rows, count, 3), dtype=torch.float32, device=logits.device)
    chains = can_chain(logits.device)
    waits = chained and chains
    _logit_sums_kernel[(rows, count)](
        logits, temperature, parts, vocabulary, temperature.stride(0), PARTS=count, PART=PART, STARTS_NEXT=chains,
        WAITS=waits, num_warps=WARPS, launch_pdl=waits,
    )  # fmt: skip
    _draw_kernel[(rows,)](
        parts, logits, seed, position, temperature, results, vocabulary, seed.stride(0), position.stride(0),
        temperature.stride(0), PARTS=count, LANES=lanes(count), PART=PART, CHUNK=_CHUNK, FAST=logits.is_cuda,
        CHAINED=chains, num_warps=1, launch_pdl=chains,
    )  # fmt: skip
