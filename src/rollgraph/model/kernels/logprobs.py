"""Triton kernels of `model/logprobs.py`: one pass over a chunk of logits in the forward, one in the backward.

The sampler of the inference engine uses the same sums. So the log-probability of a token has the same bits when it is
drawn and when it is trained on. `partial_logsumexp` sums one part of a row, and `combine_logsumexp` combines the parts.
All kernels that call the former must have PART and WARPS, and those that call the latter must have one warp.

A target outside the vocabulary makes its row NaN in both passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollgraph.model.arithmetic import PART, part_count

WARPS = 8  # of a kernel that adds up a part
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def partial_logsumexp(x, scale):
    """The maximum of some logits, and the sum of exp((logit - maximum) scale). Logits of -inf add nothing."""
    max_logit = tl.maximum(tl.max(x, 0), -1e30)
    factor = scale * _LOG2_E
    return max_logit, tl.sum(tl.exp2(tl.fma(x, tl.full(x.shape, 1.0, tl.float32) * factor, -(max_logit * factor))), 0)


@triton.jit
def combine_logsumexp(part_maxima, totals, scale):
    """Combine the parts of a row: log(sum(exp(logits scale))), the maximal logit, and the sum relative to it."""
    max_logit = tl.max(part_maxima, 0)
    total = tl.sum(totals * tl.exp2((part_maxima - max_logit) * (scale * _LOG2_E)), 0)
    return tl.fma(max_logit, scale, tl.log2(total) * _LN_2), max_logit, total


@triton.jit
def _part_kernel(
    logits, scales, parts, vocabulary, scale_stride, PARTS: tl.constexpr, ENTROPY: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale = tl.load(scales + row * scale_stride)
    at = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=-float("inf"))
    max_logit, total = partial_logsumexp(x, scale)
    target = parts + (row * PARTS + part) * 3
    tl.store(target, max_logit)
    tl.store(target + 1, total)
    if ENTROPY:  # summed relative to the maximum, because sums of plain logits would cancel
        distance = tl.maximum((x - max_logit) * scale, -1e30)
        tl.store(target + 2, tl.sum(tl.exp(distance) * distance, 0))


@triton.jit
def _combine_kernel(
    parts, logits, scales, targets, logprobs, normalizers, entropies, vocabulary, scale_stride,
    PARTS: tl.constexpr, LANES: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales + row * scale_stride)
    lane = tl.arange(0, LANES)
    inside = lane < PARTS
    source = parts + (row * PARTS + lane) * 3
    part_maxima = tl.load(source, mask=inside, other=-1e30)
    totals = tl.load(source + 1, mask=inside, other=0.0)
    logsumexp, max_logit, total = combine_logsumexp(part_maxima, totals, scale)
    target = tl.load(targets + row)
    in_vocabulary = (target >= 0) & (target < vocabulary)
    logit = tl.load(logits + row * vocabulary + target, mask=in_vocabulary, other=float("nan"))
    tl.store(normalizers + row, logsumexp)
    tl.store(logprobs + row, tl.fma(logit, scale, -logsumexp))
    if ENTROPY:
        weighted = tl.load(source + 2, mask=inside, other=0.0)
        distance = (part_maxima - max_logit) * scale
        weighted = tl.where(inside, (weighted + totals * distance) * tl.exp(distance), 0.0)
        tl.store(entropies + row, tl.log(total) - tl.sum(weighted, 0) / total)


def fused_logprobs(logits: Tensor, scale: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target, normalizer and entropy of each row; see `logprobs.reduce_logits`."""
    rows, vocabulary = logits.shape
    count = part_count(vocabulary)
    parts = torch.empty((rows, count, 3), dtype=torch.float32, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    normalizers = torch.empty_like(logprobs)
    entropies = torch.empty_like(logprobs) if entropy else normalizers
    _part_kernel[(rows, count)](
        logits, scale, parts, vocabulary, scale.stride(0), PARTS=count, ENTROPY=entropy, PART=PART, num_warps=WARPS
    )
    _combine_kernel[(rows,)](
        parts, logits, scale, targets, logprobs, normalizers, entropies, vocabulary, scale.stride(0),
        PARTS=count, LANES=lanes(count), ENTROPY=entropy, num_warps=1,
    )  # fmt: skip
    return logprobs, normalizers, entropies


def lanes(parts: int) -> int:
    """How many lanes a kernel needs to combine the parts of a row."""
    return max(2, triton.next_power_of_2(parts))


@triton.jit
def _gradient_kernel(
    logits, targets, scales, normalizers, entropies, for_logprobs, for_entropies, out, vocabulary,
    scale_stride, logprob_stride, entropy_stride, ENTROPY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < vocabulary
    scale = tl.load(scales + row * scale_stride)
    log_p = tl.load(logits + row * vocabulary + at, mask=inside, other=0.0) * scale - tl.load(normalizers + row)
    p = tl.exp(log_p)
    target = tl.load(targets + row)
    in_vocabulary = (target >= 0) & (target < vocabulary)
    one_hot = tl.where(in_vocabulary, tl.where(at == target, 1.0, 0.0), float("nan"))
    grad = tl.load(for_logprobs + row * logprob_stride) * (one_hot - p)
    if ENTROPY:
        grad -= tl.load(for_entropies + row * entropy_stride) * p * (log_p + tl.load(entropies + row))
    tl.store(out + row * vocabulary + at, (grad * scale).to(out.dtype.element_ty), mask=inside)


def fused_logprobs_backward(
    logits: Tensor,
    dtype: torch.dtype,
    through_entropy: bool,
    targets: Tensor,
    scale: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    for_logprob: Tensor,
    for_entropy: Tensor,
) -> Tensor:
    """The gradient of the logits; see `logprobs._gradient`."""
    rows, vocabulary = logits.shape
    out = torch.empty((rows, vocabulary), dtype=dtype, device=logits.device)
    _gradient_kernel[(rows, part_count(vocabulary))](
        logits, targets, scale, normalizer, entropy, for_logprob, for_entropy, out, vocabulary,
        scale.stride(0), for_logprob.stride(0), for_entropy.stride(0),
        ENTROPY=through_entropy, TILE=PART, num_warps=WARPS,
    )  # fmt: skip
    return out
