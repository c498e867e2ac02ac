"""The CPU kernels of a model: loops that Numba compiles. `cpu_operators.py` calls them.

The order of every sum is written out, and compilers may not change it. So a row gets the same bits in any batch, with
any number of threads, and on any processor. In attention, SIMD vectors run along the dimension that is not summed: keys
for dot products with a query, head_dim for sums over keys.

Work is divided into `parts`, one thread each. Everything that the loops call is in this file: Numba's cache on disk
notices changes of this file only.

Keys and values are in pages, [pages, size, 2, kv_heads, head_dim]: keys, then values. Position p of sequence i is in
page `table[table_start[i] + p // size]`. The rows `cu_rows[i]` to `cu_rows[i + 1]` of the queries are the last
positions of sequence i, which has `lengths[i]` positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

# -- compiling -------------------------------------------------------------------------------------

_compile: Any = partial(njit, nogil=True, error_model="numpy")


def compiled(function: Callable[..., Any]) -> Any:
    try:
        return _compile(cache=True)(function)
    except RuntimeError:  # no cache folder is writable: each process compiles for itself
        return _compile()(function)


# -- loops -----------------------------------------------------------------------------------------

TILE = 64  # neighbouring keys whose weights are computed at once
LANES = 16  # of a sum: entry i is added to lane i % 16, and then the lanes are added up
ROWS = 16  # neighbouring queries for which a tile of keys is loaded once

_MIN_SCORE = -np.inf

# -- numbers -----------------------------------------------------------------------------------------------------------

_LOG2_E = np.float32(math.log2(math.e))
_LN2_HIGH = np.float32(0.693359375)  # has few bits, so that its products with small integers are exact
_LN2_LOW = np.float32(math.log(2) - 0.693359375)
_ROUND = np.float32(1.5 * 2**23)  # adding this rounds to the nearest integer, which the low bits of the sum hold
_ROUND_BITS = np.int32(_ROUND.view(np.int32))
_MIN_EXPONENT = np.float32(-87)  # exp of less would not be a normal number
_MAX_EXPONENT = np.float32(87)
# 1 / n!
_ONE, _INV_2, _INV_6, _INV_24, _INV_120, _INV_720, _INV_5040 = (np.float32(1 / math.factorial(n)) for n in range(1, 8))


def _exp(x: Any) -> Any:
    """exp(x) for x <= 0; NaN stays NaN."""


@overload(_exp)
def _exp_of_type(x):
    if x == types.float32:
        return lambda x: _exp_by_series(x)
    return lambda x: math.exp(x)


@compiled
def _exp_by_series(x):
    """exp(x) in fp32 for x <= 0: with x = n ln 2 + r, it is 2^n times the Taylor series of exp(r)."""
    x = _MIN_EXPONENT if x < _MIN_EXPONENT else x
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    remainder = (x - n * _LN2_HIGH) - n * _LN2_LOW  # ln 2 in two pieces, so that little cancels
    exponent = np.float32(shifted).view(np.int32) - _ROUND_BITS + np.int32(127)  # n with the bias of fp32
    power = np.int32(exponent << np.int32(23)).view(np.float32)  # 2^n, built from its bits
    series = _INV_5040 * remainder + _INV_720
    series = series * remainder + _INV_120
    series = series * remainder + _INV_24
    series = series * remainder + _INV_6
    series = series * remainder + _INV_2
    series = series * remainder + _ONE
    return (series * remainder + _ONE) * power


def _widened(stored: Any, is_float16: bool) -> Any:
    """A stored number as float: it is one already, or the bits of a float16 (`is_float16`) or a bfloat16."""


@overload(_widened)
def _widened_from(stored, is_float16):
    if isinstance(stored, types.Float):
        return lambda stored, is_float16: stored

    def widen(stored, is_float16):
        bits = np.uint32(stored)
        if not is_float16:
            return np.uint32(bits << np.uint32(16)).view(np.float32)
        sign = (bits & np.uint32(0x8000)) << np.uint32(16)
        magnitude = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
        infinite = np.uint32(0x7F800000) if bits & np.uint32(0x7C00) == np.uint32(0x7C00) else np.uint32(0)
        return np.uint32(np.float32(magnitude).view(np.uint32) | sign | infinite).view(np.float32)

    return widen


# -- tiles -------------------------------------------------------------------------------------------------------------


@compiled
def _page(table, table_start, size, position):
    """The page of a position, and the offset in that page."""
    return table[table_start + position // size], position % size


@compiled
def _dot_columns(rows, row, columns, width, dots):
    """Dot products of one row with the first `width` columns of a tile. The length of a row is a multiple of 4."""
    for j in range(width):
        dots[j] = 0
    for d in range(0, rows.shape[1], 4):
        x, y, z, w = rows[row, d], rows[row, d + 1], rows[row, d + 2], rows[row, d + 3]
        for j in range(width):
            dots[j] = (
                dots[j] + x * columns[d, j] + y * columns[d + 1, j] + z * columns[d + 2, j] + w * columns[d + 3, j]
            )


@compiled
def _add_weighted(weights, low, high, rows, totals, row):
    """Add the rows `low` to `high`, each times its weight, to a row of totals."""
    width = totals.shape[1]
    j = low
    while j + 4 <= high:
        x, y, z, w = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for d in range(width):
            totals[row, d] = (
                totals[row, d] + x * rows[j, d] + y * rows[j + 1, d] + z * rows[j + 2, d] + w * rows[j + 3, d]
            )
        j += 4
    for k in range(j, high):
        for d in range(width):
            totals[row, d] = totals[row, d] + weights[k] * rows[k, d]


@compiled
def _add_outer(weights, low, high, rows, row, totals):
    """Add weight times row (an outer product) to rows `low` to `high` of totals."""
    for j in range(low, high):
        for d in range(totals.shape[1]):
            totals[j, d] = totals[j, d] + weights[j] * rows[row, d]


@compiled
def _mask_outside(tile, low, high, width, value):
    """Overwrite all entries but `low` to `high`."""
    for j in range(low):
        tile[j] = value
    for j in range(high, width):
        tile[j] = value


@compiled
def _largest(tile, width, start, lanes):
    """The largest entry, or `start` if that is larger."""
    for lane in range(LANES):
        lanes[lane] = start
    for j in range(0, width, LANES):
        for lane in range(LANES):
            lanes[lane] = tile[j + lane] if tile[j + lane] > lanes[lane] else lanes[lane]
    largest = start
    for lane in range(LANES):
        largest = lanes[lane] if lanes[lane] > largest else largest
    return largest


@compiled
def _sum(tile, width, lanes):
    for lane in range(LANES):
        lanes[lane] = 0
    for j in range(0, width, LANES):
        for lane in range(LANES):
            lanes[lane] += tile[j + lane]
    return _add_up(lanes)


@compiled
def _add_up(lanes):
    """The sum of the lanes, by halves."""
    half = LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return lanes[0]


# -- attention ---------------------------------------------------------------------------------------------------------


@compiled
def attend(part, parts, q, pages, is_float16, table, table_start, lengths, cu_rows, window, out, normalizers):
    """Write the attention of each query, [rows, heads, head_dim], and its logsumexp."""
    heads, dim = q.shape[1], q.shape[2]
    size, kv_heads = pages.shape[1], pages.shape[3]
    group = heads // kv_heads
    padded = (dim + 3) // 4 * 4
    keys = np.zeros((padded, TILE), q.dtype)  # transposed
    values = np.zeros((TILE, dim), q.dtype)
    queries = np.zeros((ROWS * group, padded), q.dtype)
    acc = np.zeros((ROWS * group, dim), q.dtype)  # of the values, so far
    largest = np.zeros(ROWS * group, q.dtype)  # score, so far
    total = np.zeros(ROWS * group, q.dtype)  # of the weights, relative to the largest, so far
    weights = np.zeros(TILE, q.dtype)
    lanes = np.zeros(LANES, q.dtype)
    scale = q.dtype.type(dim**-0.5)
    item = 0
    for i in range(len(lengths)):
        count = cu_rows[i + 1] - cu_rows[i]
        for block in range(0, count, ROWS):
            for head in range(kv_heads):
                item += 1
                if item % parts != part:
                    continue
                begin = cu_rows[i] + block
                position = lengths[i] - count + block
                rows = min(ROWS, count - block)
                end = position + rows
                for b in range(rows * group):
                    for d in range(dim):
                        queries[b, d] = q[begin + b // group, head * group + b % group, d] * scale
                        acc[b, d] = 0
                    largest[b] = _MIN_SCORE
                    total[b] = 0
                for start in range(max(0, position - window + 1) // TILE * TILE, end, TILE):
                    loaded = min(TILE, end - start)
                    width = -(-loaded // LANES) * LANES
                    for j in range(loaded):
                        page, offset = _page(table, table_start[i], size, start + j)
                        for d in range(dim):
                            keys[d, j] = _widened(pages[page, offset, 0, head, d], is_float16)
                        for d in range(dim):
                            values[j, d] = _widened(pages[page, offset, 1, head, d], is_float16)
                    for b in range(rows * group):
                        query_position = position + b // group - start
                        low, high = max(0, query_position - window + 1), min(TILE, query_position + 1)
                        if low >= high:
                            continue
                        _dot_columns(queries, b, keys, width, weights)
                        _mask_outside(weights, low, high, width, _MIN_SCORE)
                        highest = _largest(weights, width, largest[b], lanes)
                        for j in range(width):
                            weights[j] = _exp(weights[j] - highest)
                        _mask_outside(weights, low, high, width, 0)
                        rescale = _exp(largest[b] - highest)
                        largest[b] = highest
                        total[b] = total[b] * rescale + _sum(weights, width, lanes)
                        for d in range(dim):
                            acc[b, d] = acc[b, d] * rescale
                        _add_weighted(weights, low, high, values, acc, b)
                for b in range(rows * group):
                    row, query_head = begin + b // group, head * group + b % group
                    for d in range(dim):
                        out[row, query_head, d] = acc[b, d] / total[b]
                    normalizers[row, query_head] = largest[b] + math.log(total[b])


@compiled
def attend_backward(
    part,
    parts,
    d_out,
    q,
    pages,
    is_float16,
    table,
    table_start,
    lengths,
    cu_rows,
    window,
    out,
    normalizers,
    d_q,
    d_pages,
):
    """Write the gradients of `attend` over packed sequences, whose pages are their rows.

    A prompt and the sequences that share it follow each other. One thread handles all of them, since they add to the
    gradients of the same keys.
    """
    heads, dim = q.shape[1], q.shape[2]
    kv_heads = pages.shape[3]
    group = heads // kv_heads
    padded = (dim + 3) // 4 * 4
    keys = np.zeros((padded, TILE), q.dtype)  # transposed
    values = np.zeros((padded, TILE), q.dtype)  # transposed
    key_rows = np.zeros((TILE, dim), q.dtype)
    d_keys = np.zeros((TILE, dim), q.dtype)
    d_values = np.zeros((TILE, dim), q.dtype)
    queries = np.zeros((ROWS * group, padded), q.dtype)
    upstream = np.zeros((ROWS * group, padded), q.dtype)
    d_queries = np.zeros((ROWS * group, dim), q.dtype)
    deltas = np.zeros(ROWS * group, q.dtype)  # sum(out * d_out) of each query
    weights = np.zeros(TILE, q.dtype)
    d_scores = np.zeros(TILE, q.dtype)
    scale = q.dtype.type(dim**-0.5)
    prompt_index = -1  # of the prompt that the following sequences share
    for i in range(len(lengths)):
        count = cu_rows[i + 1] - cu_rows[i]
        if count and table[table_start[i]] == cu_rows[i]:
            prompt_index += 1
        for head in range(kv_heads):
            if (prompt_index * kv_heads + head) % parts != part:
                continue
            for block in range(0, count, ROWS):
                begin = cu_rows[i] + block
                position = lengths[i] - count + block
                rows = min(ROWS, count - block)
                end = position + rows
                for b in range(rows * group):
                    row, query_head = begin + b // group, head * group + b % group
                    deltas[b] = 0
                    for d in range(dim):
                        queries[b, d] = q[row, query_head, d] * scale
                        upstream[b, d] = d_out[row, query_head, d]
                        deltas[b] += d_out[row, query_head, d] * out[row, query_head, d]
                        d_queries[b, d] = 0
                for start in range(max(0, position - window + 1) // TILE * TILE, end, TILE):
                    loaded = min(TILE, end - start)
                    width = -(-loaded // LANES) * LANES
                    for j in range(loaded):
                        page, _ = _page(table, table_start[i], 1, start + j)
                        for d in range(dim):
                            key_rows[j, d] = keys[d, j] = _widened(pages[page, 0, 0, head, d], is_float16)
                            values[d, j] = _widened(pages[page, 0, 1, head, d], is_float16)
                            d_keys[j, d] = 0
                            d_values[j, d] = 0
                    for b in range(rows * group):
                        query_position = position + b // group - start
                        low, high = max(0, query_position - window + 1), min(TILE, query_position + 1)
                        if low >= high:
                            continue
                        normalizer = normalizers[begin + b // group, head * group + b % group]
                        _dot_columns(queries, b, keys, width, weights)
                        _dot_columns(upstream, b, values, width, d_scores)
                        for j in range(width):
                            weights[j] = _exp(weights[j] - normalizer)
                            d_scores[j] = weights[j] * (d_scores[j] - deltas[b])
                        _add_outer(weights, low, high, upstream, b, d_values)
                        _add_outer(d_scores, low, high, queries, b, d_keys)
                        _add_weighted(d_scores, low, high, key_rows, d_queries, b)
                    for j in range(loaded):
                        page, _ = _page(table, table_start[i], 1, start + j)
                        for d in range(dim):
                            d_pages[page, 0, 0, head, d] += d_keys[j, d]
                            d_pages[page, 0, 1, head, d] += d_values[j, d]
                for b in range(rows * group):
                    for d in range(dim):
                        d_q[begin + b // group, head * group + b % group, d] = d_queries[b, d] * scale


# -- between matmuls ---------------------------------------------------------------------------------------------------


@compiled
def _dot(x, y, row, lanes):
    """The dot product of row `row` of x and of y. `lanes` is scratch memory."""
    lanes[:] = 0
    width = x.shape[1]
    full_width = width // LANES * LANES
    for start in range(0, full_width, LANES):
        for lane in range(LANES):
            lanes[lane] += x[row, start + lane] * y[row, start + lane]
    for i in range(full_width, width):
        lanes[i - full_width] += x[row, i] * y[row, i]
    return _add_up(lanes)


@compiled
def normalize(part, parts, x, eps, out, scales):
    """Divide each row by its root mean square, and write the reciprocal of that to `scales`."""
    rows, width = x.shape
    one = x.dtype.type(1)
    lanes = np.zeros(LANES, x.dtype)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        scale = one / np.sqrt(_dot(x, x, row, lanes) / x.dtype.type(width) + x.dtype.type(eps))
        scales[row] = scale
        for i in range(width):
            out[row, i] = x[row, i] * scale


@compiled
def normalize_backward(part, parts, d_out, out, scales, d_x):
    rows, width = d_out.shape
    lanes = np.zeros(LANES, d_out.dtype)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        mean = _dot(d_out, out, row, lanes) / d_out.dtype.type(width)
        for i in range(width):
            d_x[row, i] = (d_out[row, i] - out[row, i] * mean) * scales[row]


@compiled
def rotate(part, parts, x, cos, sin, out):
    """Rotate the pairs (i, i + head_dim / 2) of each head."""
    rows, heads, dim = x.shape
    half = dim // 2
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        for head in range(heads):
            for i in range(half):
                out[row, head, i] = x[row, head, i] * cos[row, i] - x[row, head, i + half] * sin[row, i]
            for i in range(half):
                out[row, head, i + half] = x[row, head, i + half] * cos[row, i] + x[row, head, i] * sin[row, i]


@compiled
def silu(part, parts, x, out):
    rows = len(x)
    one = x.dtype.type(1)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        for i in range(out.shape[1]):
            size = abs(x[row, i])
            small = _exp(-size) if size < _MAX_EXPONENT else size * 0
            out[row, i] = x[row, i] * (one if x[row, i] >= 0 else small) / (one + small)
