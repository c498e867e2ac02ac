"""The model's operations on a CPU, as PyTorch operators that a tape records: attention, norms, RoPE, SiLU, gradients.

Owns the conversion of tensors to the arrays of `cpu_kernels.py`. That module, and Numba with it, is imported when a
kernel first runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollgraph.model.operators import as_array, operator

# -- threads ---------------------------------------------------------------------------------------

_PER_THREAD = 1 << 18  # multiplications that are worth one more thread; at most as many threads as PyTorch has

Kernel = Callable[..., None]  # first arguments: its part and the number of parts; it releases the GIL


def run_in_threads(kernel: Kernel, multiplications: int, *args: Any) -> None:
    """Run all parts of a kernel that takes about this many multiplications, in threads."""
    parts = min(torch.get_num_threads(), 1 + multiplications // _PER_THREAD)
    if parts == 1:
        kernel(0, 1, *args)
        return
    futures = [_threads(os.getpid(), parts - 1).submit(kernel, part, parts, *args) for part in range(1, parts)]
    kernel(0, parts, *args)
    for future in futures:
        future.result()


@cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """The pool of a process: threads do not survive a fork."""
    return ThreadPoolExecutor(count, "kernels")


# -- attention -------------------------------------------------------------------------------------
# The header of `cpu_kernels.py` describes pages and tables.

_NO_WINDOW = 1 << 30


def _like_queries(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=_wide(q))


@operator(_like_queries)
def attend_packed_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, tokens: Tensor | None, cu_keys: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """See `attention.packed_attention`. Also returns the logsumexp of each query, [tokens, heads]."""
    return _attend(q, *_packed_layout(k, v, cu_rows, tokens, cu_keys), window)


@operator(lambda q, *_: q.new_empty(q.shape))
def attend_paged_on_cpu(
    q: Tensor, pages: Tensor, table: Tensor, cu_rows: Tensor | None, lengths: Tensor, window: int | None
) -> Tensor:
    """See `attention.paged_prefill`, and `attention.paged_decode` if there are no `cu_rows`."""
    sequences, width = table.shape
    table_start = np.arange(0, sequences * width, width, dtype=np.int32)
    rows = np.arange(sequences + 1, dtype=np.int32) if cu_rows is None else as_array(cu_rows)
    out, _ = _attend(q, pages, as_array(table).reshape(-1), table_start, as_array(lengths), rows, window)
    return out


@operator(lambda d_out, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)))
def attend_packed_backward_on_cpu(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, tokens: Tensor | None, cu_keys: Tensor,
    out: Tensor, normalizers: Tensor, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values."""
    from rollgraph.model.kernels.cpu_kernels import attend_backward

    pages, *layout = _packed_layout(k, v, cu_rows, tokens, cu_keys)
    d_q = torch.zeros(q.shape, dtype=_wide(q))
    d_pages = torch.zeros(pages.shape, dtype=_wide(q))
    run_in_threads(
        attend_backward, _count_multiplications(q, *layout),
        _to_fp32_or_more(d_out), _to_fp32_or_more(q), *_to_numpy(pages), *layout,
        window or _NO_WINDOW, _to_fp32_or_more(out), as_array(normalizers), as_array(d_q), as_array(d_pages),
    )  # fmt: skip
    d_k, d_v = d_pages[:, 0].to(k.dtype).unbind(1)
    return d_q.to(q.dtype), d_k.contiguous(), d_v.contiguous()


# -- arrays ------------------------------------------------------------------------------------------------------------


def _attend(
    q: Tensor, pages: Tensor, table: np.ndarray, table_start: np.ndarray, lengths: np.ndarray, cu_rows: np.ndarray,
    window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from rollgraph.model.kernels.cpu_kernels import attend

    layout = (table, table_start, lengths, cu_rows)
    out = torch.zeros(q.shape, dtype=_wide(q))
    normalizers = torch.zeros(q.shape[:2], dtype=_wide(q))
    run_in_threads(
        attend, _count_multiplications(q, *layout), _to_fp32_or_more(q), *_to_numpy(pages), *layout,
        window or _NO_WINDOW, as_array(out), as_array(normalizers),
    )  # fmt: skip
    return out.to(q.dtype), normalizers


def _packed_layout(
    k: Tensor, v: Tensor, cu_rows: Tensor, tokens: Tensor | None, cu_keys: Tensor
) -> tuple[Tensor, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows as pages of one position, the table of pages, its start for each sequence, lengths, and rows."""
    table = np.arange(len(k), dtype=np.int32) if tokens is None else as_array(tokens.int())
    table_start = as_array(cu_keys)
    return torch.stack((k, v), 1)[:, None], table, table_start[:-1], np.diff(table_start), as_array(cu_rows)


def _to_numpy(pages: Tensor) -> tuple[np.ndarray, bool]:
    """The pages as an array, or as bits if NumPy lacks the dtype; and whether these are the bits of a float16."""
    if pages.dtype == _wide(pages):
        return as_array(pages), False
    return as_array(pages.view(torch.uint16)), pages.dtype == torch.float16


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _to_fp32_or_more(tensor: Tensor) -> np.ndarray:
    return as_array(tensor.to(_wide(tensor)))


def _count_multiplications(
    q: Tensor, table: np.ndarray, table_start: np.ndarray, lengths: np.ndarray, cu_rows: np.ndarray
) -> int:
    """About how many multiplications attention takes."""
    return int(np.dot(np.diff(cu_rows).astype(np.int64), lengths)) * q.shape[1] * q.shape[2]


# -- between matmuls -------------------------------------------------------------------------------
# Tensors are fp32 or fp64.


def _like_input(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _rows(tensor: Tensor) -> Any:
    return as_array(tensor).reshape(-1, tensor.shape[-1])


@operator(lambda x, eps: (x.new_empty(x.shape), x.new_empty(x.shape[:-1])))
def normalize_on_cpu(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rows divided by their root mean squares, and the reciprocals of these."""
    from rollgraph.model.kernels.cpu_kernels import normalize

    out, scales = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape[:-1], dtype=x.dtype)
    run_in_threads(normalize, 2 * x.numel(), _rows(x), eps, _rows(out), as_array(scales).reshape(-1))
    return out, scales


@operator(_like_input)
def normalize_backward_on_cpu(d_out: Tensor, out: Tensor, scales: Tensor) -> Tensor:
    from rollgraph.model.kernels.cpu_kernels import normalize_backward

    d_x = torch.empty(out.shape, dtype=out.dtype)
    rows = (_rows(tensor) for tensor in (d_out, out))
    run_in_threads(normalize_backward, 3 * out.numel(), *rows, as_array(scales).reshape(-1), _rows(d_x))
    return d_x


@operator(_like_input)
def rotate_on_cpu(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from rollgraph.model.kernels.cpu_kernels import rotate

    if not cos.shape == sin.shape == (len(x), x.shape[2] // 2):  # the kernel would read past their ends
        raise ValueError(f"{tuple(x.shape)} with angles of {tuple(cos.shape)} and {tuple(sin.shape)}")
    out = torch.empty(x.shape, dtype=x.dtype)
    run_in_threads(rotate, 2 * x.numel(), *map(as_array, (x, cos, sin, out)))
    return out


@operator(_like_input)
def silu_on_cpu(x: Tensor) -> Tensor:
    from rollgraph.model.kernels.cpu_kernels import silu

    out = torch.empty(x.shape, dtype=x.dtype)
    run_in_threads(silu, 10 * x.numel(), _rows(x), _rows(out))
    return out


class Normalized(torch.autograd.Function):
    """Rows divided by their root mean squares."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        out, scales = normalize_on_cpu(x, eps)
        ctx.save_for_backward(out, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        return normalize_backward_on_cpu(d_out, *ctx.saved_tensors), None


class Rotated(torch.autograd.Function):
    """See `layers.rotate`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_on_cpu(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate_on_cpu(d_out, cos, -sin), None, None


class Silu(torch.autograd.Function):
    """`silu`. PyTorch's own gives other bits at the end of a row, where the numbers do not fill a SIMD vector."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return silu_on_cpu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        d_x: Tensor = torch.ops.aten.silu_backward(d_out, x)
        return d_x
