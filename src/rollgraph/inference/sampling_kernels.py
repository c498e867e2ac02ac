"""Triton kernels that sample at a temperature in one pass over the logits. `sampler.py` does the same in PyTorch.

The sums of a token's log-probability are those of training, see `model/logprob_kernels.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from rollgraph.model.chained_launch import can_chain
from rollgraph.model.logprob_kernels import PART, WARPS, lanes, normalizer, part_count, sum_part


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log(x, FAST: tl.constexpr):
    """An accurate logarithm would take most of the time of a draw, and errors of 1e-6 in the noise do not matter."""
    if FAST:
        return libdevice.fast_logf(x)
    return tl.log(x)


@triton.jit
def _scale(temperature):
    """1 / temperature, rounded as training rounds it, and whether the row takes the most likely token instead."""
    greedy = temperature == 0.0
    return tl.where(greedy, 1.0, tl.math.div_rn(1.0, tl.where(greedy, 1.0, temperature))), greedy


@triton.jit
def _draw_kernel(
    logits, seeds, positions, temperatures, parts, vocabulary, stride_seed, stride_position, stride_temperature,
    PARTS: tl.constexpr, PART: tl.constexpr, FAST: tl.constexpr, STARTS_NEXT: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Find the best token in one part of a row, and that part's sums of exponentials."""
    if STARTS_NEXT:
        gdc_launch_dependents()
    if WAITS:
        gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale, greedy = _scale(tl.load(temperatures + row * stride_temperature))
    ids = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * vocabulary + ids, mask=ids < vocabulary, other=-float("inf"))
    top, total = sum_part(x, scale)
    plain = total
    if scale != 1.0:
        _, plain = sum_part(x, 1.0)
    low = tl.load(seeds + row * stride_seed).to(tl.uint32, bitcast=True)
    high = tl.load(seeds + row * stride_seed + 1).to(tl.uint32, bitcast=True)
    position = tl.load(positions + row * stride_position).to(tl.uint32, bitcast=True)
    first = _mix(_mix(_mix(low) ^ high) + position)
    second = _mix(_mix(_mix(high ^ 0x5BD1E995) ^ low) + position)
    bits = _mix(_mix(ids.to(tl.uint32, bitcast=True) ^ first) + second)
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    small = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
    noise = -_log(tl.where(uniform < 0.00390625, small, -_log(1.0 - uniform, FAST)), FAST)
    scores = tl.where(greedy, x, x * scale + noise)
    score = tl.max(scores, 0)
    token = tl.min(tl.where(scores == score, ids, 2147483647), 0)
    logit = tl.max(tl.where(ids == token, x, -float("inf")), 0)
    target = parts + (row * PARTS + part) * 6
    tl.store(target, score)
    tl.store(target + 1, token.to(tl.float32, bitcast=True))
    tl.store(target + 2, logit)
    tl.store(target + 3, top)
    tl.store(target + 4, plain)
    tl.store(target + 5, total)


@triton.jit
def _join_draws_kernel(
    parts, temperatures, results, stride_temperature, PARTS: tl.constexpr, LANES: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    inside = lane < PARTS
    source = parts + (row * PARTS + lane) * 6
    scale, greedy = _scale(tl.load(temperatures + row * stride_temperature))
    scores = tl.load(source, mask=inside, other=-float("inf"))
    ids = tl.load(source + 1, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    tops = tl.load(source + 3, mask=inside, other=-1e30)
    score = tl.max(scores, 0)
    token = tl.min(tl.where((scores == score) & inside, ids, 2147483647), 0)
    won = (scores == score) & (ids == token) & inside
    logit = tl.max(tl.where(won, tl.load(source + 2, mask=inside, other=0.0), -float("inf")), 0)
    plain, _, _ = normalizer(tops, tl.load(source + 4, mask=inside, other=0.0), 1.0)
    scaled, _, _ = normalizer(tops, tl.load(source + 5, mask=inside, other=0.0), scale)
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
    parts = torch.empty((rows, count, 6), dtype=torch.float32, device=logits.device)
    chains = can_chain(logits.device)
    waits = chained and chains
    _draw_kernel[(rows, count)](
        logits, seed, position, temperature, parts, vocabulary, seed.stride(0), position.stride(0),
        temperature.stride(0), PARTS=count, PART=PART, FAST=logits.is_cuda, STARTS_NEXT=chains, WAITS=waits,
        num_warps=WARPS, launch_pdl=waits,
    )  # fmt: skip
    _join_draws_kernel[(rows,)](
        parts, temperature, results, temperature.stride(0), PARTS=count, LANES=lanes(count), CHAINED=chains,
        num_warps=1, launch_pdl=chains,
    )  # fmt: skip
