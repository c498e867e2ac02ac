"""GEMMs with a chosen algorithm have correct gradients, for any operands, whichever of them needs one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from rollgraph.model.gemm.matmul import GemmAlgo, matmul

ROWS = 5
ALGOS = [GemmAlgo("fixed"), GemmAlgo("fixed", padded_rows=8), GemmAlgo("torch", padded_rows=8)]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("algo", ALGOS, ids=str)
def test_first_and_second_derivatives_are_right(algo: GemmAlgo, biased: bool) -> None:
    inputs = [draw(ROWS, 6), draw(4, 6)] + [draw(4)] * biased

    def gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return matmul(x, weight, bias, {ROWS: algo})

    assert gradcheck(gemm, inputs)
    assert gradgradcheck(gemm, inputs)


@pytest.mark.parametrize("algo", ALGOS, ids=str)
def test_inputs_may_be_strided_padded_or_constant(algo: GemmAlgo) -> None:
    weight = draw(4, 6)
    algos = {ROWS: algo}
    assert gradcheck(lambda x, w: matmul(x.t(), w.t(), None, algos), (draw(6, ROWS), draw(6, 4)))
    assert gradcheck(lambda x: matmul(x, weight, None, algos, rows=ROWS), (draw(8, 6),))
    assert gradcheck(lambda w: matmul(draw(ROWS, 6).detach(), w, None, algos), (weight,))
    assert gradcheck(lambda x: matmul(x, weight.detach(), None, algos), (draw(ROWS, 6),))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_under_autocast_each_gradient_has_the_dtype_of_its_input(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """The output of a layer is not in the dtype of the weights then."""
    x, weight = draw(ROWS, 6, dtype=dtypes[0]), draw(4, 6, dtype=dtypes[1])
    with torch.autocast("cpu", torch.bfloat16):
        out = matmul(x, weight, None, {ROWS: GemmAlgo("fixed")})
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.dtype, weight.grad.dtype) == dtypes
    torch.testing.assert_close(x.grad.double(), weight.double().sum(0).expand(ROWS, -1), rtol=0.05, atol=0.05)
    torch.testing.assert_close(weight.grad.double(), x.double().sum(0).expand(4, -1), rtol=0.05, atol=0.05)
