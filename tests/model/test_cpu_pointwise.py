"""Norms, rotations and SwiGLU on a CPU: values, gradients, and rows that do not depend on their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rollgraph.model.kernels.cpu_kernels import compiled
from rollgraph.model.layers import add_norm, norm, rotate, swiglu

HEADS, DIM = 3, 10
Function = Callable[[Tensor], Tensor]


def normed(x: Tensor) -> Tensor:
    return norm(x, torch.linspace(0.5, 2, x.shape[-1]).to(x.dtype), 1e-5)


def exact_norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], torch.linspace(0.5, 2, x.shape[-1]).to(x.dtype), 1e-5)


def angles(rows: int) -> tuple[Tensor, Tensor]:
    turned = torch.arange(rows)[:, None] * torch.linspace(0.1, 1, DIM // 2)
    return turned.cos(), turned.sin()


def rotated(x: Tensor) -> Tensor:
    return rotate(x.view(-1, HEADS, DIM), *angles(len(x))).flatten(1)


def exact_rotation(x: Tensor) -> Tensor:
    cos, sin = (part[:, None].double() for part in angles(len(x)))
    pairs = torch.complex(*x.view(-1, HEADS, DIM).chunk(2, -1)) * torch.complex(cos, sin)
    return torch.cat((pairs.real, pairs.imag), -1).flatten(1)


def exact_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


FUNCTIONS = [(normed, exact_norm), (rotated, exact_rotation), (swiglu, exact_swiglu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def values_and_gradients(function: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = function(x)
    (gradient,) = torch.autograd.grad(out, x, torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))
    return out, gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("function", "exact"), FUNCTIONS)
def test_values_and_gradients_equal_float64(function: Function, exact: Function, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(20, HEADS * DIM) * 3).to(dtype)
    error = 8 * torch.finfo(dtype if dtype != torch.float64 else torch.float32).eps  # angles are in fp32
    pairs = zip(values_and_gradients(function, x), values_and_gradients(exact, x.double()), strict=True)
    for values, expected in pairs:
        assert values.dtype == dtype
        assert (values.double() - expected).abs().max() <= error * expected.abs().max()


@pytest.mark.parametrize(("function", "_"), FUNCTIONS)
def test_a_row_has_the_same_bits_alone_and_beside_others(function: Function, _: Function) -> None:
    before = torch.get_num_threads()
    x = torch.randn(20_000, HEADS * DIM)
    x[7] = torch.nan
    all_rows = [function(x)]
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        all_rows.append(function(x))
    torch.set_num_threads(before)
    for rows in all_rows:
        assert torch.equal(rows[:5], function(x[:5]))
        assert torch.equal(rows[8:], all_rows[0][8:])
        assert rows[7].isnan().all()


def test_angles_for_another_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 3, 10\) with angles of \(3, 5\)"):
        rotate(torch.randn(4, HEADS, DIM), *angles(3))


@pytest.mark.parametrize("x", [-1e30, -88.0, -0.0, 0.0, 1e-30, 88.0, 1e30])
def test_silu_is_right_at_extreme_inputs(x: float) -> None:
    gate_up = torch.tensor([[x, 1.0]])
    assert swiglu(gate_up).item() == pytest.approx(exact_swiglu(gate_up.double()).item(), rel=1e-5, abs=1e-30)


def test_add_norm_returns_the_sum_as_its_stream() -> None:
    x, update = torch.randn(2, 4, 30)
    out, stream = add_norm(x, update, torch.ones(30), 1e-5)
    assert torch.equal(stream, x + update)
    assert torch.equal(out, norm(stream, torch.ones(30), 1e-5))


def test_loops_are_compiled_without_a_cache_folder() -> None:
    """Numba has no cache folder for a function without a file, as for one in a folder that is not writable."""
    namespace: dict[str, Any] = {}
    exec("def double(x):\n    return 2 * x", namespace)
    assert compiled(namespace["double"])(21) == 42
