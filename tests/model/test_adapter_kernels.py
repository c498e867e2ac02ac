"""The kernels of LoRA: compared with plain PyTorch, and with the same bits at any number of rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rollgraph.model.layers import Linear, PendingLoRA
from rollgraph.model.lora_layer import add_lora_by_matmul
from tests.interpreter import run_interpreted

ROWS = (1, 5, 37, 150)  # in small tiles, and in large ones


def pending_lora(widths: list[int], targeted: list[int], rank: int, rows: int, like: Tensor) -> PendingLoRA:
    """A pending LoRA of random numbers, for a layer with parts of these widths, some of which have an adapter."""
    torch.manual_seed(rank)
    bounds = [sum(widths[:index]) for index in range(len(widths) + 1)]
    columns = [slice(*bound) for bound in pairwise(bounds)]
    layer = Linear(4, bounds[-1], bias=False)
    scale = torch.tensor(0.5, device=like.device)
    layer.attach_adapter([columns[index] for index in targeted], torch.zeros(rank * len(targeted), 4), scale, 0.0)
    assert layer.adapter is not None
    base_and_xa = torch.randn(rows, len(layer.adapter.base_and_a)).to(like)
    return PendingLoRA(base_and_xa, torch.randn(layer.lora_b.shape).to(like), layer.adapter)


def take_rows(rows: int, pending: PendingLoRA) -> PendingLoRA:
    return pending._replace(base_and_xa=pending.base_and_xa[:rows])


def _same_rows(actual: Tensor, expected: Tensor) -> None:
    """Compare bits, or, in the interpreter, values: its GEMMs are NumPy's, whose bits depend on the number of rows."""
    tolerance = 0.0 if actual.is_cuda else 1e-5
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def compare_expand(like: Tensor) -> None:
    from rollgraph.model.kernels.lora import fused_add_lora

    for widths, targeted, rank in (([24, 8, 8], [0, 1, 2], 4), ([24, 8, 8], [2], 3), ([150], [0], 16)):
        pending = pending_lora(widths, targeted, rank, max(ROWS), like)
        wide = pending._replace(base_and_xa=pending.base_and_xa.double(), b=pending.b.double())
        out = fused_add_lora(*pending)
        torch.testing.assert_close(
            out.double(), add_lora_by_matmul(*wide[:3]), rtol=1e-2 if like.is_cuda else 1e-5, atol=1e-5
        )
        for rows in ROWS:
            _same_rows(fused_add_lora(*take_rows(rows, pending)), out[:rows])
        pending.adapter.scale.zero_()
        pending.b.fill_(torch.inf)
        assert torch.equal(fused_add_lora(*pending), pending.base_and_xa[:, : pending.adapter.outputs])


def compare_swiglu(like: Tensor) -> None:
    from rollgraph.model.kernels.lora import AdaptedSwiGLU

    for targeted, rank in (([0, 1], 4), ([1], 20), ([0], 70)):
        base_and_xa, b, adapter, _ = pending_lora([70, 70], targeted, rank, max(ROWS), like)
        leaves = [base_and_xa.requires_grad_(), b.requires_grad_()]
        out = AdaptedSwiGLU.apply(base_and_xa, b, adapter.scale, adapter, max(ROWS), False)
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        low = wide[0][:, adapter.xa_columns].split(rank, 1)
        base = list(wide[0][:, :140].split(70, 1))
        for index, part in enumerate(targeted):
            base[part] = base[part] + 0.5 * low[index] @ wide[1][:, adapter.projections[index].b_columns]
        expected = torch.nn.functional.silu(base[0]) * base[1]
        tolerance = {"rtol": 0.1, "atol": 0.2} if like.is_cuda else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(out.double(), expected, **tolerance)
        direction = torch.randn(expected.shape).to(like)
        gradients = torch.autograd.grad(out, leaves, direction)
        for one, other in zip(gradients, torch.autograd.grad(expected, wide, direction.double()), strict=True):
            assert (one.double() - other).norm() <= (0.02 if like.is_cuda else 1e-5) * other.norm()
        for rows in ROWS:
            alone = AdaptedSwiGLU.apply(base_and_xa[:rows], b, adapter.scale, adapter, rows + 3, False)
            _same_rows(alone[:rows], out[:rows])


def compare_heads(like: Tensor) -> None:
    """The heads of a pending LoRA equal those of its expanded output, also in the cache."""
    from rollgraph.model.kernels.heads import rotate_and_store, rotate_and_store_adapted
    from rollgraph.model.kernels.lora import fused_add_lora

    heads, kv_heads = 3, 1
    for dim, targeted, rank in ((8, [0, 1, 2], 4), (128, [0, 2], 20), (80, [1], 70), (64, [2], 32)):
        widths = [heads * dim, kv_heads * dim, kv_heads * dim]
        pending = pending_lora(widths, targeted, rank, max(ROWS), like)
        angles = torch.randn(max(ROWS), dim // 2, device=like.device)
        slots = torch.randperm(2 * max(ROWS))[: max(ROWS)].int().to(like.device)
        for rows in ROWS:
            part = take_rows(rows, pending)
            rest = (angles[:rows].cos(), angles[:rows].sin())
            pages = torch.zeros(2, 2 * max(ROWS) // 4, 4, 2, kv_heads, dim).to(like)
            expected = rotate_and_store(fused_add_lora(*part), *rest, None, 1e-6, slots[:rows], pages[0], heads)
            out = rotate_and_store_adapted(part, *rest, slots[:rows], pages[1], heads)
            _same_rows(out, expected)
            _same_rows(pages[1], pages[0])


def compare_all(device: str) -> None:
    like = torch.zeros((), dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device)
    compare_expand(like)
    compare_swiglu(like)
    compare_heads(like)


@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    run_interpreted(compare_all)


@pytest.mark.gpu
def test_kernels_on_cuda() -> None:
    compare_all("cuda")
