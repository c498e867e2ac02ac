"""Makes generation and training agree bit for bit, and checks whether attention agrees on this machine.

Attention, norms, rotary embeddings and log-probabilities use the same arithmetic in all phases in any case. What
remains are matmuls: a library may sum in another order for another number of rows. `model/gemm/autotune.py` finds
algorithms without this problem for the numbers of rows that a worker uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from rollgraph.errors import UserError
from rollgraph.inference import sizes
from rollgraph.model import Decoder
from rollgraph.model.attention import packed_attention, paged_decode
from rollgraph.model.gemm.autotune import GemmReport, OnAutotune, autotune_gemms
from rollgraph.model.kernels.launch import compiling_together
from rollgraph.model.logprobs import chunk_sizes
from rollgraph.policy.microbatch import Limits, TokenBucket

# -- attention -------------------------------------------------------------------------------------
# On CUDA, packed and paged attention are both our kernels. On a CPU they are small matmuls of a library, which need not
# compute the same bits at every batch size.

_LENGTH = 150  # of the test sequence: more than two tiles
_BLOCK = 16
_MAX_ROWS = 32  # we assume that larger batches behave like packed tokens


def attention_agrees(model: Decoder, row_counts: Sequence[int]) -> bool:
    """Whether packed and paged attention agree on random inputs, for all windows of the model and these batch sizes."""
    a = model.architecture
    weight = model.embed_tokens.weight
    rows = tuple(sorted({min(count, _MAX_ROWS) for count in row_counts}))
    windows = {a.window(layer) for layer in range(a.layers)}
    heads = (a.heads, a.kv_heads, a.head_dim)
    threads = torch.get_num_threads()  # part of the cache key: a library may split its work by it
    return all(_attention_agrees(*heads, window, weight.dtype, weight.device, rows, threads) for window in windows)


@cache
@torch.no_grad()
def _attention_agrees(
    heads: int, kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype, device: torch.device,
    row_counts: tuple[int, ...], threads: int,
) -> bool:  # fmt: skip
    generator = torch.Generator(device).manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randn((_LENGTH, count, head_dim), device=device, generator=generator).to(dtype)

    q, k, v = draw(heads), draw(kv_heads), draw(kv_heads)
    bounds = torch.tensor([0, _LENGTH], dtype=torch.int32, device=device)
    pages, table = _paged(k, v)

    def compare() -> bool:
        expected = packed_attention(q, k, v, bounds, _LENGTH, window)
        agree = True
        for rows in row_counts:
            positions = torch.arange(_LENGTH - rows, _LENGTH, device=device)
            lengths = (positions + 1).int()
            decoded = paged_decode(q[positions], pages, table.expand(rows, -1).contiguous(), lengths, window)
            agree &= torch.equal(decoded, expected[positions])
        return agree

    if device.type == "cuda":
        with compiling_together():
            compare()
    return compare()


def _paged(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence's keys and values as pages, and its block table."""
    blocks = -(-len(k) // _BLOCK)
    pages = torch.zeros((blocks, _BLOCK, 2, *k.shape[1:]), dtype=k.dtype, device=k.device)
    slots = pages.flatten(0, 1)
    slots[: len(k), 0] = k
    slots[: len(v), 1] = v
    table = torch.arange(blocks, dtype=torch.int32, device=k.device)[None]
    return pages, table


# -- the whole model -------------------------------------------------------------------------------

Exactness = Literal["auto", "must", "off"]


class ExactnessError(UserError, RuntimeError):
    """`exact: must` is set, and generation and training cannot agree here."""


def make_exact(
    model: Decoder,
    limits: Limits,
    buckets: Sequence[TokenBucket],
    whole_logits: bool,
    must: bool,
    on_autotune: OnAutotune | None = None,
) -> GemmReport:
    """Choose a GEMM algorithm for each matmul. With `must`, slow ones are allowed, and failure is an error."""
    prefill_tokens = limits.prefill_tokens or sizes.default_sizes(model.embed_tokens.weight.device.type).prefill_tokens
    logit_row_counts = set(sizes.row_buckets(limits.rows))
    largest = buckets[-1].tokens  # the bucket of most microbatches
    grad_row_counts = {largest}
    for bucket in buckets:
        scored = chunk_sizes(bucket.logits, model.architecture.vocabulary)
        trained = {bucket.logits} if whole_logits else scored
        logit_row_counts |= scored | trained
        if bucket.tokens == largest:
            grad_row_counts |= trained
    row_counts = (*sizes.gemm_rows(limits.rows, prefill_tokens), *(bucket.tokens for bucket in buckets))
    report = autotune_gemms(
        model,
        row_counts,
        sorted(logit_row_counts),
        grad_row_counts=sorted(grad_row_counts),
        at_any_cost=must,
        on_autotune=on_autotune,
    )
    report.attention_agrees = attention_agrees(model, sizes.row_buckets(limits.rows))
    if must and not report.exact:
        raise ExactnessError(f"exact: must, but {describe_exactness(report)}")
    return report


def describe_exactness(report: GemmReport) -> str:
    """One line on whether generation and training agree, and if not, why."""
    if not report.attention_agrees:
        return "generation and training differ by rounding here: attention of few rows is not that of many"
    if not report.exact:
        shapes = ", ".join(f"{shape} with {min(rows)} rows" for shape, rows in report.inexact.items())
        return f"generation and training differ by rounding here: no GEMM algorithm computes {shapes} like many rows"
    return "generation and training agree bit for bit"
