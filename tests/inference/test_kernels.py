"""The kernels at both ends of a decode step equal the PyTorch code of `decode_graphs.py`."""

from __future__ import annotations

import pytest
import torch

from rollgraph.inference.scheduler import IDLE
from tests.interpreter import run_interpreted

GO = -1
BLOCK = 4
BLOCKS = 5


def compare_kernels(device: str) -> None:
    from rollgraph.inference.kernels import advance_rows, prepare_rows

    torch.manual_seed(0)
    rows, half = 9, 12
    orders = torch.tensor([IDLE, GO, 7, GO, IDLE, 31, GO, 2, GO], dtype=torch.int32)
    state = torch.randint(50, (rows, 3 + BLOCKS), dtype=torch.int32)  # token, position, something else, table
    state[:, 1] = torch.randint(BLOCK * BLOCKS, (rows,))
    angles = (torch.randn(BLOCK * BLOCKS, half), torch.randn(BLOCK * BLOCKS, half))
    results = torch.randint(-1, 40, (rows, 3), dtype=torch.int32)
    results[1, 0] = -1  # logits that are not finite

    before, position, active = state.clone(), state[:, 1].long(), orders > IDLE
    all_rows = torch.arange(rows)
    expected = state.clone()
    appended = orders >= 0
    expected[all_rows[appended], 3 + position[appended] // BLOCK] = orders[appended]
    block = expected[all_rows, 3 + position // BLOCK]
    slots = torch.where(active, block * BLOCK + position % BLOCK, 0)

    state, orders, results = (x.to(device) for x in (state, orders, results))
    device_angles = tuple(x.to(device) for x in angles)
    device_slots, lengths, (cos, sin) = prepare_rows(orders, state[:, 1], state[:, 3:], device_angles, BLOCK, IDLE)
    assert torch.equal(device_slots.cpu(), slots.int())
    assert torch.equal(lengths.cpu(), torch.where(active, position + 1, 1).int())
    assert torch.equal(cos.cpu(), angles[0][position])
    assert torch.equal(sin.cpu(), angles[1][position])
    assert torch.equal(state.cpu(), expected)

    advance_rows(orders, results, state[:, 0], state[:, 1], IDLE)
    expected[:, 0] = torch.where(active, results.cpu()[:, 0].clamp_min(0), before[:, 0])
    expected[:, 1] += active
    assert torch.equal(state.cpu(), expected)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(compare_kernels)


@pytest.mark.gpu
def test_kernels_on_cuda() -> None:
    compare_kernels("cuda")
