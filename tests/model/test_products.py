"""Products by routes have the gradients of the library's, whatever is multiplied and whatever needs one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from rollgraph.model.gemm.matmul import GemmAlgo, matmul

ROWS = 5
ALGOS = [GemmAlgo("fixed"), GemmAlgo("fixed", padded_rows=8), GemmAlgo("torch", padded_rows=8)]


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("algo", ALGOS, ids=str)
def test_first_and_second_derivatives_are_those_of_the_product(algo: GemmAlgo, biased: bool) -> None:
    inputs = [drawn(ROWS, 6), drawn(4, 6)] + [drawn(4)] * biased

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return matmul(x, weight, bias, {ROWS: algo})

    assert gradcheck(product, inputs)
    assert gradgradcheck(product, inputs)


@pytest.mark.parametrize("algo", ALGOS, ids=str)
def test_inputs_may_be_strided_padded_or_constant(algo: GemmAlgo) -> None:
    weight = drawn(4, 6)
    algos = {ROWS: algo}
    assert gradcheck(lambda x, w: matmul(x.t(), w.t(), None, algos), (drawn(6, ROWS), drawn(6, 4)))
    assert gradcheck(lambda x: matmul(x, weight, None, algos, rows=ROWS), (drawn(8, 6),))
    assert gradcheck(lambda w: matmul(drawn(ROWS, 6).detach(), w, None, algos), (weight,))
    assert gradcheck(lambda x: matmul(x, weight.detach(), None, algos), (drawn(ROWS, 6),))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_autocast_multiplies_in_its_dtype_and_gives_each_input_a_gradient_of_its_own(
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    """What one layer gives to the next is not in the dtype of the weights then."""
    x, weight = drawn(ROWS, 6, dtype=dtypes[0]), drawn(4, 6, dtype=dtypes[1])
    with torch.autocast("cpu", torch.bfloat16):
        product = matmul(x, weight, None, {ROWS: GemmAlgo("fixed")})
    assert product.dtype == torch.bfloat16
    product.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.dtype, weight.grad.dtype) == dtypes
    torch.testing.assert_close(x.grad.double(), weight.double().sum(0).expand(ROWS, -1), rtol=0.05, atol=0.05)
    torch.testing.assert_close(weight.grad.double(), x.double().sum(0).expand(4, -1), rtol=0.05, atol=0.05)
