"""Triton kernels of the embedding's gradient: the rows of all tokens, added to the rows of their ids.

The ids are sorted, so that the tokens of one id are a run. One program adds up a run and adds it to its row, so no two
write the same row, and the order of every sum is fixed. Padding repeats one id thousands of times, so runs are cut
where a chunk of places ends. A second kernel adds up the pieces of those that were cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollgraph.model.operators import sum_operator

_CHUNK = 32  # places in the order of ids; also, how many pieces of a run are added up at a time
_COLUMNS = 256


@triton.jit
def _add_runs_kernel(
    total, pieces, ids, order, gradients, tokens, width, CHUNK: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """If a run begins at this place, or its piece in a chunk does, add it up.

    A run that is not cut goes to its row of the total. Of the two pieces that a chunk can have, the first is the one
    that begins where the chunk does.
    """
    place = tl.program_id(0)
    own = tl.load(ids + place)
    begins = tl.load(ids + place - 1, mask=place > 0, other=-1) != own
    in_front = place % CHUNK == 0
    if begins | in_front:
        chunk = (place // CHUNK).to(tl.int64)
        end = tl.minimum((place // CHUNK + 1) * CHUNK, tokens)
        at = place + tl.arange(0, CHUNK)
        mine = tl.load(ids + at, mask=at < end, other=-1) == own
        token = tl.load(order + at, mask=mine, other=0).to(tl.int64)
        whole = begins & (tl.load(ids + end, mask=end < tokens, other=-1) != own)
        to_total = total + own.to(tl.int64) * width
        to_piece = pieces + (2 * chunk + tl.where(in_front, 0, 1)) * width
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < width
            before = tl.load(to_total + column, mask=inside & whole, other=0.0)
            source = gradients + token[:, None] * width + column[None, :]
            rows = tl.load(source, mask=mine[:, None] & inside[None, :], other=0.0)
            found = tl.sum(rows.to(tl.float32), 0)
            tl.store(to_total + column, before + found, mask=inside & whole)
            tl.store(to_piece + column, found, mask=inside & (whole == 0))


@triton.jit
def _add_pieces_kernel(total, pieces, ids, tokens, width, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """If a run begins in this chunk and goes on in the next, add its pieces to its row of the total."""
    chunk = tl.program_id(0)
    first = chunk * CHUNK
    own = tl.load(ids + first + CHUNK - 1)
    begins = tl.load(ids + first - 1, mask=chunk > 0, other=-1) != own
    goes_on = tl.load(ids + first + CHUNK) == own
    if begins & goes_on:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        piece = 2 * chunk.to(tl.int64) + tl.where(tl.load(ids + first) == own, 0, 1)
        found = tl.load(pieces + piece * width + column, mask=inside, other=0.0)
        later = chunk + 1 + tl.arange(0, CHUNK)
        mine = tl.load(ids + later * CHUNK, mask=later * CHUNK < tokens, other=-1) == own
        while tl.max(mine.to(tl.int32), 0) > 0:
            source = pieces + 2 * later.to(tl.int64)[:, None] * width + column[None, :]
            found += tl.sum(tl.load(source, mask=mine[:, None] & inside[None, :], other=0.0), 0)
            later += CHUNK
            mine = tl.load(ids + later * CHUNK, mask=later * CHUNK < tokens, other=-1) == own
        target = total + own.to(tl.int64) * width + column
        tl.store(target, tl.load(target, mask=inside, other=0.0) + found, mask=inside)


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
