"""Sums the gradients of keys and values over the sequences that share a prompt.

The backward of attention gives every sequence gradients of its own for the keys of the prompt that it shares. They are
added up in fp32 in the order of the sequences, so the sum is deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["sequences"])  # specialized to 1, the loop does not compile
def _sum_kernel(
    d_keys, d_values, out_keys, out_values, tokens, cu_rows, cu_keys, sequences, width,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of all copies of one token's key, and of its value."""
    token, at = tl.program_id(0), tl.arange(0, WIDTH)
    inside = at < width
    low, high = 0, sequences
    while high - low > 1:  # find the token's sequence: the last one that does not begin after it
        middle = (low + high) // 2
        found = tl.load(cu_rows + middle) <= token
        low = tl.where(found, middle, low)
        high = tl.where(found, high, middle)
    begin, key = tl.load(cu_rows + low), tl.load(cu_keys + low)
    shared = tl.load(cu_keys + low + 1) - key - (tl.load(cu_rows + low + 1) - begin)
    row = (key + shared + token - begin).to(tl.int64)
    d_key = tl.load(d_keys + row * width + at, mask=inside, other=0.0).to(tl.float32)
    d_value = tl.load(d_values + row * width + at, mask=inside, other=0.0).to(tl.float32)
    sharing = low + 1
    more = sharing < sequences
    while more:  # the sequences that share this one's tokens follow it
        key = tl.load(cu_keys + sharing)
        shared = tl.load(cu_keys + sharing + 1) - key
        shared -= tl.load(cu_rows + sharing + 1) - tl.load(cu_rows + sharing)
        more = shared > 0
        if more:
            more = tl.load(tokens + key) == begin
        if more:
            row = (key + token - begin).to(tl.int64)
            d_key += tl.load(d_keys + row * width + at, mask=inside, other=0.0).to(tl.float32)
            d_value += tl.load(d_values + row * width + at, mask=inside, other=0.0).to(tl.float32)
        sharing += 1
        more = more & (sharing < sequences)
    target = token.to(tl.int64) * width + at
    tl.store(out_keys + target, d_key.to(out_keys.dtype.element_ty), mask=inside)
    tl.store(out_values + target, d_value.to(out_values.dtype.element_ty), mask=inside)


def sum_over_copies(
    d_keys: Tensor, d_values: Tensor, tokens: Tensor, cu_rows: Tensor, cu_keys: Tensor, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradients of `rows` keys and values, given those of their copies: row i is a copy of token `tokens[i]`."""
    d_keys = d_keys.contiguous()
    d_values = d_values.contiguous()
    sequences = len(cu_rows) - 1
    width = d_keys[0].numel()
    out_keys = torch.empty((rows, *d_keys.shape[1:]), dtype=dtype, device=d_keys.device)
    out_values = torch.empty_like(out_keys)
    _sum_kernel[(rows,)](
        d_keys, d_values, out_keys, out_values, tokens, cu_rows, cu_keys, sequences, width,
        WIDTH=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return out_keys, out_values
