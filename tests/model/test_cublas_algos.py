"""The algorithms of cuBLAS give PyTorch's results, and choosing one of them changes only the speed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rollgraph.graph import GraphPool, capture
from rollgraph.graph.direct_sums import DirectSum
from rollgraph.model.gemm import matmul as gemm
from rollgraph.model.gemm.candidates import CublasAlgo, GemmKind, GemmProblem, cublas_algos
from rollgraph.model.gemm.matmul import (
    GemmAlgo,
    add_weight_gradient,
    find_gradient_algo,
    input_gradient,
    matmul,
    set_gradient_algo,
)

ROWS, COLUMNS, DEPTH = 320, 192, 256
HALF = [torch.bfloat16, torch.float16]
GRADIENTS: list[GemmKind] = ["input gradient", "weight gradient"]
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_algo_chosen() -> Iterator[None]:
    gemm._gradient_algos.clear()
    yield
    gemm._gradient_algos.clear()


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, device: torch.device = CUDA) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def test_a_gradient_without_a_chosen_algorithm_is_pytorchs() -> None:
    d_out, weight = draw(5, 4, device=CPU), draw(4, 6, device=CPU)
    assert torch.equal(input_gradient(d_out, weight), d_out @ weight)
    assert cublas_algos(GemmProblem("input gradient", 5, 4, 6, torch.float32), CPU) == ()


@pytest.mark.parametrize(
    ("kind", "left", "right"),
    [
        ("forward", draw(5, 6, device=CPU), draw(4, 8, device=CPU)),
        ("forward", draw(5, 8, device=CPU), draw(4, 8, device=CPU, dtype=torch.float32)),
        ("input gradient", draw(5, 8, device=CPU), draw(4, 8, device=CPU)),
        ("weight gradient", draw(5, 4, device=CPU), draw(4, 8, device=CPU)),
    ],
)
def test_operands_of_another_gemm_are_refused(kind: GemmKind, left: Tensor, right: Tensor) -> None:
    """Before cuBLAS is called, which knows only addresses."""
    algo = CublasAlgo(GemmProblem(kind, 5, 4, 8, torch.bfloat16), (), None, None)
    out = torch.zeros(5, 4)
    with pytest.raises(ValueError, match=rf"a GEMM \({kind}\) of \(5, .* was called with \(5, "):
        algo.run(left, right, out)
    assert not out.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("fp32_out", "has_bias"), [(False, False), (False, True), (True, False)])
def test_every_algorithm_computes_the_gemm(dtype: torch.dtype, fp32_out: bool, has_bias: bool) -> None:
    x, weight = draw(ROWS, DEPTH, dtype=dtype), draw(COLUMNS, DEPTH, dtype=dtype)
    bias = draw(COLUMNS, dtype=dtype) if has_bias else None
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    algos = cublas_algos(GemmProblem("forward", ROWS, COLUMNS, DEPTH, dtype, fp32_out, has_bias), CUDA)
    assert algos
    for index in range(len(algos)):
        out = matmul(x, weight, bias, {ROWS: GemmAlgo("cublas", variant=index)}, fp32_out=fp32_out)
        assert out.dtype == (torch.float32 if fp32_out else dtype)
        assert error(out, expected) < (1e-6 if fp32_out else 5e-3), index


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
def test_every_algorithm_computes_both_gradients(dtype: torch.dtype) -> None:
    d_out, weight = draw(ROWS, COLUMNS, dtype=dtype), draw(COLUMNS, DEPTH, dtype=dtype)
    x, before = draw(ROWS, DEPTH, dtype=dtype), draw(COLUMNS, DEPTH, dtype=torch.float32)
    with torch.no_grad():
        for kind in GRADIENTS:
            problem = GemmProblem(kind, ROWS, COLUMNS, DEPTH, dtype)
            assert cublas_algos(problem, CUDA)
            for index in range(len(cublas_algos(problem, CUDA))):
                set_gradient_algo(problem, CUDA, index)
                if kind == "input gradient":
                    gradient = input_gradient(d_out, weight)
                    assert error(gradient, d_out.double() @ weight.double()) < 5e-3, index
                else:
                    total = before.clone()
                    add_weight_gradient(DirectSum(total, total.new_zeros(())), d_out, x)
                    assert error(total, before.double() + d_out.double().t() @ x.double()) < 1e-6, index


@pytest.mark.gpu
def test_operands_may_be_unaligned_and_strided() -> None:
    flat = draw(COLUMNS * DEPTH + 3)
    weight = flat[3:].view(COLUMNS, DEPTH)  # 6 bytes after a boundary
    x = draw(DEPTH, ROWS).t()
    expected = x.double() @ weight.double().t()
    assert error(matmul(x, weight, None, {ROWS: GemmAlgo("cublas")}), expected) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_chosen_algorithm_has_pytorchs_bits(kind: GemmKind) -> None:
    problem = GemmProblem(kind, 4096, 1536, 8960, torch.bfloat16)
    set_gradient_algo(problem, CUDA, find_gradient_algo(problem, CUDA))
    d_out, weight, x = draw(4096, 1536), draw(1536, 8960), draw(4096, 8960)
    with torch.no_grad():
        if kind == "input gradient":
            assert torch.equal(input_gradient(d_out, weight), d_out @ weight)
            return
        totals = [torch.zeros(1536, 8960, device=CUDA) for _ in range(2)]
        add_weight_gradient(DirectSum(totals[0], totals[0].new_zeros(())), d_out, x)
        torch.addmm(totals[1], d_out.t(), x, out_dtype=torch.float32, out=totals[1])
        assert torch.equal(*totals)


@pytest.mark.gpu
def test_a_capture_rolls_back_its_additions_and_a_replay_adds_once() -> None:
    problem = GemmProblem("weight gradient", ROWS, COLUMNS, DEPTH, torch.bfloat16)
    set_gradient_algo(problem, CUDA, 0)
    d_out, x = draw(ROWS, COLUMNS), draw(ROWS, DEPTH)
    total = torch.ones(COLUMNS, DEPTH, device=CUDA)
    direct_sum = DirectSum(total, total.new_zeros(()))

    @torch.no_grad()
    def step() -> None:
        add_weight_gradient(direct_sum, d_out, x)

    captured = capture(step, pool=GraphPool(), backend="cuda", name="step")
    assert torch.equal(total, torch.ones_like(total))
    captured()
    captured()
    expected = 1 + 2 * (d_out.double().t() @ x.double())
    assert error(total, expected) < 1e-6


@pytest.mark.gpu
def test_second_derivatives_ignore_the_chosen_algorithm() -> None:
    set_gradient_algo(GemmProblem("input gradient", ROWS, COLUMNS, DEPTH, torch.bfloat16), CUDA, 0)
    x, weight = draw(ROWS, DEPTH).requires_grad_(), draw(COLUMNS, DEPTH).requires_grad_()
    (first,) = torch.autograd.grad(matmul(x, weight, None, {}).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    assert torch.equal(second, torch.full_like(weight, ROWS))
