"""GEMMs whose rows have the same bits at any number of rows, and their gradients.

A BLAS library picks an algorithm by the number of rows, and some algorithms add up along K in another order than
others. A `GemmAlgo` says how to run a GEMM with one number of rows so that its bits are those of the GEMM with many
rows. `autotune.py` finds the algorithms of a model. Without one, a GEMM is PyTorch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rollgraph.graph.direct_sums import DirectSum, direct_sum_for
from rollgraph.model.gemm.candidates import CublasAlgo, GemmProblem, cublas_algos, row_digests, sustained_times
from rollgraph.model.operators import sum_operator

# -- gradients -------------------------------------------------------------------------------------
# A gradient may be computed by the fastest cuBLAS algorithm that has the bits of PyTorch's own. The choice holds for
# all weights of one shape. The forward follows `GemmAlgo`, see below.

_MIN_GAIN = 0.01  # of PyTorch's time

_gradient_algos: dict[tuple[GemmProblem, torch.device], CublasAlgo] = {}


def input_gradient(d_out: Tensor, weight: Tensor) -> Tensor:
    """`d_out @ weight`."""
    columns, depth = weight.shape
    algo = _gradient_algo(GemmProblem("input gradient", len(d_out), columns, depth, d_out.dtype), d_out.device)
    if algo is None or weight.dtype != d_out.dtype:
        return d_out @ weight
    out = d_out.new_empty(len(d_out), depth)
    algo.run(d_out, weight, out)
    return out


def add_weight_gradient(total: DirectSum, d_out: Tensor, x: Tensor) -> None:
    """Add `d_out.T @ x` to the sum of a weight's gradients."""
    if _gradient_algo(_weight_gradient_problem(d_out, x), x.device) is None or d_out.dtype != x.dtype:
        total.add_matmul(d_out.t(), x)
    else:
        _add_weight_gradient(total.buffer(), d_out, x)


@sum_operator
def _add_weight_gradient(total: Tensor, d_out: Tensor, x: Tensor) -> None:
    _gradient_algos[_weight_gradient_problem(d_out, x), x.device].run(d_out, x, total)


def _weight_gradient_problem(d_out: Tensor, x: Tensor) -> GemmProblem:
    return GemmProblem("weight gradient", len(x), d_out.shape[1], x.shape[1], x.dtype)


def _gradient_algo(problem: GemmProblem, device: torch.device) -> CublasAlgo | None:
    """None also where autograd has to see the GEMM, for second derivatives."""
    if not _gradient_algos or torch.is_grad_enabled():
        return None
    return _gradient_algos.get((problem, device))


def set_gradient_algo(problem: GemmProblem, device: torch.device, index: int | None) -> None:
    """Compute a gradient by the cuBLAS algorithm with this index from now on; None: as PyTorch does."""
    _gradient_algos.pop((problem, device), None)
    if index is not None:
        _gradient_algos[problem, device] = cublas_algos(problem, device)[index]


@torch.no_grad()
def find_gradient_algo(problem: GemmProblem, device: torch.device) -> int | None:
    """The index of the fastest cuBLAS algorithm that has the bits of PyTorch's gradient; None if PyTorch is fastest."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn((rows, columns), dtype=problem.dtype, device=device, generator=generator)

    d_out = draw(problem.rows, problem.columns)
    if problem.kind == "input gradient":
        operand = draw(problem.columns, problem.depth)
        out = torch.empty((problem.rows, problem.depth), dtype=problem.dtype, device=device)
    else:
        operand = draw(problem.rows, problem.depth)
        out = torch.empty((problem.columns, problem.depth), dtype=torch.float32, device=device)

    def run_torch() -> None:
        if problem.kind == "input gradient":
            torch.mm(d_out, operand, out=out)
        else:
            torch.addmm(out, d_out.t(), operand, out_dtype=torch.float32, out=out)

    def run_algo(index: int) -> None:
        cublas_algos(problem, device)[index].run(d_out, operand, out)

    out.zero_()
    run_torch()
    expected = row_digests(out)
    equal = []
    for index in range(len(cublas_algos(problem, device))):
        out.zero_()
        run_algo(index)
        if torch.equal(row_digests(out), expected):
            equal.append(index)
    if not equal:
        return None
    torch_time, *times = sustained_times([run_torch, *(partial(run_algo, index) for index in equal)])
    best = min(range(len(equal)), key=times.__getitem__)
    return equal[best] if times[best] < (1 - _MIN_GAIN) * torch_time else None


# -- forward ---------------------------------------------------------------------------------------

_BLOCK = 16  # rows of one GEMM of the fixed-order algorithm on a CPU


class GemmAlgo(NamedTuple):
    """One way to compute a GEMM, e.g. GemmAlgo("fixed", variant=2).

    - torch: PyTorch's GEMM of a weight without a bias, or with its bias.
    - cublas: one of the algorithms of cuBLAS, of which PyTorch takes the first; see `candidates.py`.
    - fixed: adds up along K in one order at any number of rows: our kernel on CUDA, blocks of rows elsewhere.
    - swiglu: like fixed, and the kernel ends with SwiGLU.
    """

    kind: Literal["torch", "cublas", "fixed", "swiglu"]
    padded_rows: int = 0  # the rows are padded to this number; 0: they are not
    variant: int = 0  # index of the kernel's tiling, or of the cuBLAS algorithm

    def __str__(self) -> str:
        padded = f", padded to {self.padded_rows} rows" if self.padded_rows else ""
        return f"{self.kind}{padded}"


GemmAlgos = Mapping[int, GemmAlgo]  # by number of rows
TORCH_GEMM = GemmAlgo("torch")


def matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, algos: GemmAlgos, *, rows: int | None = None, fp32_out: bool = False
) -> Tensor:
    """`x @ weight.T + bias` by the algorithm for x's number of rows; with `fp32_out`, in fp32 or more.

    `rows` says how many rows of x count, if x is padded already. The result has only those.
    """
    count = len(x) if rows is None else rows
    algo = algos.get(count, TORCH_GEMM)
    if algo == TORCH_GEMM:
        if count < len(x):  # even a slice of all rows would cost a copy in the backward
            x = x[:count]
        if not (x.is_cuda and weight.requires_grad and torch.is_grad_enabled()):
            return _torch_matmul(x, weight, bias, fp32_out)
    out: Tensor = _Matmul.apply(x, weight, bias, algo, count, fp32_out)  # type: ignore[no-untyped-call]
    return out


def matmul_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None, algo: GemmAlgo) -> Tensor:
    """SwiGLU of the GEMM with the weights of gate and up, in one kernel; `algo` is of kind swiglu."""
    from rollgraph.model.kernels.matmul import SWIGLU_TILINGS, fixed_order_matmul_swiglu

    return fixed_order_matmul_swiglu(x.contiguous(), weight, bias, SWIGLU_TILINGS[algo.variant])


def weight_gradient(weight: Tensor, d_out: Tensor, x: Tensor) -> Tensor | None:
    """The gradient of a weight, `d_out.T @ x`, or a placeholder if it was added to the fp32 sum already."""
    total = direct_sum_for(weight, x.dtype)
    if total is not None:
        add_weight_gradient(total, d_out, x)
        return total.placeholder()
    return d_out.t() @ x


def bias_gradient(bias: Tensor, d_out: Tensor) -> Tensor | None:
    """The gradient of a bias, the sum of all rows of `d_out`, or a placeholder, as for a weight."""
    total = direct_sum_for(bias, d_out.dtype)
    if total is not None:
        from rollgraph.model.kernels.pointwise import add_rows, sum_blocks

        add_rows(total.buffer(), sum_blocks(d_out))
        return total.placeholder()
    return d_out.sum(0)


def padded_row_count(algos: GemmAlgos, rows: int) -> int:
    """The number of rows that a GEMM of `rows` rows runs with, padding included."""
    return max(rows, algos.get(rows, TORCH_GEMM).padded_rows)


def matmul_with_algo(
    x: Tensor, weight: Tensor, bias: Tensor | None, algo: GemmAlgo, count: int, fp32_out: bool
) -> Tensor:
    """The first `count` rows of the result, without a gradient."""
    if algo.padded_rows and len(x) != algo.padded_rows:
        x = functional.pad(x[:count], (0, 0, 0, algo.padded_rows - count))
    if algo.kind == "fixed":
        return _fixed_order_matmul(x, weight, bias, algo, fp32_out)[:count]
    if algo.kind == "cublas":
        return _cublas_matmul(x[:count], weight, bias, algo.variant, fp32_out)
    return _torch_matmul(x, weight, bias, fp32_out)[:count]


def _torch_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, fp32_out: bool) -> Tensor:
    if not fp32_out:
        return functional.linear(x, weight, bias)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x, weight, bias).to(torch.promote_types(x.dtype, torch.float32))


def forward_cublas_algos(rows: int, weight: Tensor, fp32_out: bool, has_bias: bool) -> tuple[CublasAlgo, ...]:
    """The cuBLAS algorithms for the forward of a weight with this number of rows."""
    columns, depth = weight.shape
    return cublas_algos(GemmProblem("forward", rows, columns, depth, weight.dtype, fp32_out, has_bias), weight.device)


def _cublas_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, index: int, fp32_out: bool) -> Tensor:
    algo = forward_cublas_algos(len(x), weight, fp32_out, bias is not None)[index]
    out = torch.empty((len(x), len(weight)), dtype=torch.float32 if fp32_out else x.dtype, device=x.device)
    algo.run(x, weight, out, bias)
    return out


def _fixed_order_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, algo: GemmAlgo, fp32_out: bool) -> Tensor:
    if x.is_cuda:
        from rollgraph.model.kernels.matmul import TILINGS, fixed_order_matmul

        dtype = torch.promote_types(x.dtype, torch.float32) if fp32_out else x.dtype
        return fixed_order_matmul(x.contiguous(), weight, bias, TILINGS[algo.variant], dtype)
    padding = -len(x) % _BLOCK
    blocks = functional.pad(x, (0, 0, 0, padding)).split(_BLOCK)
    return torch.cat([_torch_matmul(block, weight, bias, fp32_out) for block in blocks])[: len(x)]


class _Matmul(torch.autograd.Function):
    """`matmul_with_algo`, with gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, algo: GemmAlgo, count: int, fp32_out: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # the parameters themselves, for their direct gradient sums
        ctx.bias = bias
        ctx.count = count
        return matmul_with_algo(x, weight, bias, algo, count, fp32_out)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_out = d_out.to(x.dtype)
        d_x = d_weight = d_bias = None
        if ctx.needs_input_grad[0]:
            d_x = input_gradient(d_out, weight.to(x.dtype))  # dtypes differ under autocast
            if len(x) > ctx.count:
                d_x = functional.pad(d_x, (0, 0, 0, len(x) - ctx.count))
        if ctx.needs_input_grad[1]:
            d_weight = weight_gradient(ctx.weight, d_out, x[: ctx.count])
        if ctx.needs_input_grad[2]:
            d_bias = bias_gradient(ctx.bias, d_out)
        return d_x, d_weight, d_bias, None, None, None
