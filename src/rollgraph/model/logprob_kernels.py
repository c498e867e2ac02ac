"""Triton kernels of `logprobs.py`: one pass over a chunk of logits in the forward pass, one in the backward pass.

A target outside the vocabulary makes its row NaN in both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096


@triton.jit
def _reduce_kernel(
    logits, scales, targets, logprobs, normalizers, entropies, vocabulary, scale_stride,
    ENTROPY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales + row * scale_stride)
    source = logits + row * vocabulary
    top = tl.full((TILE,), -1e30, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    weighted = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocabulary, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(source + at, mask=at < vocabulary, other=-float("inf")) * scale
        higher = tl.maximum(top, x)
        shrink, weight = tl.exp(top - higher), tl.exp(x - higher)
        if ENTROPY:  # summed over distances to the maximum, because sums of plain logits would cancel
            weighted = shrink * (weighted + total * (top - higher)) + weight * tl.maximum(x - higher, -1e30)
        total = total * shrink + weight
        top = higher
    highest = tl.max(top, 0)
    shrink = tl.exp(top - highest)
    total_sum = tl.sum(total * shrink, 0)
    normalizer = highest + tl.log(total_sum)
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocabulary)
    tl.store(normalizers + row, normalizer)
    tl.store(logprobs + row, tl.load(source + target, mask=known, other=float("nan")) * scale - normalizer)
    if ENTROPY:
        weighted = shrink * (weighted + total * (top - highest))
        tl.store(entropies + row, tl.log(total_sum) - tl.sum(weighted, 0) / total_sum)


def reduce(logits: Tensor, scale: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the target, normalizer and entropy of each row; see `logprobs._reduce`."""
    rows, vocabulary = logits.shape
    logprobs, normalizers = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    entropies = torch.empty_like(logprobs) if entropy else normalizers
    _reduce_kernel[(rows,)](
        logits, scale, targets, logprobs, normalizers, entropies, vocabulary, scale.stride(0),
        ENTROPY=entropy, TILE=_TILE, num_warps=8,
    )  # fmt: skip
    return logprobs, normalizers, entropies


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
    known = (target >= 0) & (target < vocabulary)
    hit = tl.where(known, tl.where(at == target, 1.0, 0.0), float("nan"))
    gradient = tl.load(for_logprobs + row * logprob_stride) * (hit - p)
    if ENTROPY:
        gradient -= tl.load(for_entropies + row * entropy_stride) * p * (log_p + tl.load(entropies + row))
    tl.store(out + row * vocabulary + at, (gradient * scale).to(out.dtype.element_ty), mask=inside)


def gradient(
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
    _gradient_kernel[(rows, triton.cdiv(vocabulary, _TILE))](
        logits, targets, scale, normalizer, entropy, for_logprob, for_entropy, out, vocabulary,
        scale.stride(0), for_logprob.stride(0), for_entropy.stride(0), ENTROPY=through_entropy, TILE=_TILE, num_warps=8,
    )  # fmt: skip
    return out
