"""Triton kernels that sample at a temperature in one pass over the logits. `sampler.py` does the same in PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

_TILE = 2048
_PROGRAMS = 1024  # enough to fill a GPU


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
def _draw_kernel(
    logits, seeds, positions, temperatures, parts, vocabulary, stride_seed, stride_position, stride_temperature,
    SPLITS: tl.constexpr, TILE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Find the best token in one of SPLITS parts of a row, and that part's sums of exponentials."""
    row, split = tl.program_id(0), tl.program_id(1)
    low = tl.load(seeds + row * stride_seed).to(tl.uint32, bitcast=True)
    high = tl.load(seeds + row * stride_seed + 1).to(tl.uint32, bitcast=True)
    position = tl.load(positions + row * stride_position).to(tl.uint32, bitcast=True)
    temperature = tl.load(temperatures + row * stride_temperature)
    greedy = temperature == 0.0
    scale = tl.where(greedy, 1.0, 1.0 / tl.where(greedy, 1.0, temperature))
    first = _mix(_mix(_mix(low) ^ high) + position)
    second = _mix(_mix(_mix(high ^ 0x5BD1E995) ^ low) + position)

    size = tl.cdiv(tl.cdiv(vocabulary, TILE), SPLITS) * TILE
    begin = split * size
    end = tl.minimum(begin + size, vocabulary)
    best = tl.full((TILE,), -float("inf"), tl.float32)  # score of each lane; lanes are compared only at the end
    winner = tl.zeros((TILE,), tl.int32)
    chosen = tl.zeros((TILE,), tl.float32)
    plain = tl.zeros((TILE,), tl.float32)
    scaled = tl.zeros((TILE,), tl.float32)
    top = -1e30  # largest logit of all lanes
    source = logits + row.to(tl.int64) * vocabulary
    for start in range(begin, end, TILE):
        ids = start + tl.arange(0, TILE)
        x = tl.load(source + ids, mask=ids < end, other=-float("inf"))
        bits = _mix(_mix(ids.to(tl.uint32, bitcast=True) ^ first) + second)
        uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
        small = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
        noise = -_log(tl.where(uniform < 0.00390625, small, -_log(1.0 - uniform, FAST)), FAST)
        score = tl.where(greedy, x, x * scale + noise)
        wins = score > best
        best = tl.where(wins, score, best)
        winner = tl.where(wins, ids, winner)
        chosen = tl.where(wins, x, chosen)
        higher = tl.maximum(top, tl.max(x, 0))
        plain = plain * tl.exp(top - higher) + tl.exp(x - higher)
        if scale != 1.0:
            scaled = scaled * tl.exp((top - higher) * scale) + tl.exp((x - higher) * scale)
        top = higher
    plain_sum = tl.sum(plain, 0)
    scaled_sum = tl.where(scale != 1.0, tl.sum(scaled, 0), plain_sum)
    score = tl.max(best, 0)
    token = tl.min(tl.where(best == score, winner, 2147483647), 0)
    logit = tl.max(tl.where((best == score) & (winner == token), chosen, -float("inf")), 0)
    part = parts + (row * SPLITS + split) * 6
    tl.store(part, score)
    tl.store(part + 1, token.to(tl.float32, bitcast=True))
    tl.store(part + 2, logit)
    tl.store(part + 3, top)
    tl.store(part + 4, plain_sum)
    tl.store(part + 5, scaled_sum)


@triton.jit
def _join_kernel(
    parts, temperatures, tokens, logprobs, policy_logprobs, stride_temperature, SPLITS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    part = parts + (row * SPLITS + tl.arange(0, SPLITS)) * 6
    temperature = tl.load(temperatures + row * stride_temperature)
    greedy = temperature == 0.0
    scale = tl.where(greedy, 1.0, 1.0 / tl.where(greedy, 1.0, temperature))
    scores, ids = tl.load(part), tl.load(part + 1).to(tl.int32, bitcast=True)
    tops = tl.load(part + 3)
    score, top = tl.max(scores, 0), tl.max(tops, 0)
    token = tl.min(tl.where(scores == score, ids, 2147483647), 0)
    logit = tl.max(tl.where((scores == score) & (ids == token), tl.load(part + 2), -float("inf")), 0)
    plain = tl.log(tl.sum(tl.load(part + 4) * tl.exp(tops - top), 0)) + top
    scaled = tl.log(tl.sum(tl.load(part + 5) * tl.exp((tops - top) * scale), 0)) + top * scale
    policy = logit - plain
    logprob = tl.where(greedy, 0.0, logit * scale - scaled)
    finite = (tl.abs(policy) < float("inf")) & (tl.abs(logprob) < float("inf"))  # false for NaN
    tl.store(tokens + row, tl.where(finite, token, -1))
    tl.store(logprobs + row, logprob)
    tl.store(policy_logprobs + row, policy)


def draw(logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The token of each row, its log-probability at the temperature, and under the policy. The token is -1 where the
    logits are not finite."""
    rows, vocabulary = logits.shape
    splits = max(1, min(64, triton.next_power_of_2(max(1, _PROGRAMS // rows)), _floor_power(vocabulary // _TILE)))
    parts = torch.empty((rows, splits, 6), dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    logprobs, policy = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    _draw_kernel[(rows, splits)](
        logits, seed, position, temperature, parts, vocabulary,
        seed.stride(0), position.stride(0), temperature.stride(0), SPLITS=splits, TILE=_TILE,
        FAST=logits.is_cuda, num_warps=4,
    )  # fmt: skip
    _join_kernel[(rows,)](
        parts, temperature, tokens, logprobs, policy, temperature.stride(0), SPLITS=splits, num_warps=1
    )
    return tokens, logprobs, policy


def _floor_power(number: int) -> int:
    """The largest power of two that is not above a number; 1 for 0."""
    return 1 << max(0, number.bit_length() - 1)
