"""The embedding's gradient, which kernels add to a sum: compared with float64, and with the same bits each time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import capture
from rollgraph.graph.direct_sums import direct_sums
from rollgraph.model.layers import Embedding
from tests.interpreter import run_interpreted

VOCABULARY = 70


def many_ids() -> dict[str, Tensor]:
    """Runs of equal ids that end within chunks of 32 ids, at their ends, and after more than 32 chunks."""
    torch.manual_seed(0)
    examples = {f"{count} equal": torch.full((count,), 5) for count in (1, 31, 32, 33, 64, 65, 1200)}
    examples |= {f"{count} random": torch.randint(VOCABULARY, (count,)) for count in (2, 32, 200, 500)}
    examples["all different"] = torch.randperm(VOCABULARY)
    for name, lengths in {
        "whole chunks": (32, 32, 64, 32),
        "cut": (31, 2, 63, 1, 40),
        "shifted": (1, 32, 95, 33),
    }.items():
        ids = torch.randperm(VOCABULARY)[: len(lengths)].repeat_interleave(torch.tensor(lengths))
        examples[name] = ids[torch.randperm(len(ids))]
    padded = torch.randint(VOCABULARY, (300,))
    padded[100:] = 0
    examples["padding"] = padded
    return examples


def compare_rows(device: str) -> None:
    from rollgraph.model.kernels.pointwise import add_to_rows

    for name, ids in many_ids().items():
        for width in (8, 300):
            gradients = torch.randn(len(ids), width).to(device, torch.bfloat16)
            before = torch.randn(VOCABULARY, width, device=device)
            totals = [before.clone(), before.clone()]
            for total, kind in zip(totals, (torch.int64, torch.int32), strict=True):
                add_to_rows(total, ids.to(device, kind), gradients)
            expected = before.double().index_add(0, ids.to(device), gradients.double())
            size = before.double().abs().index_add(0, ids.to(device), gradients.double().abs())
            assert ((totals[0].double() - expected).abs() <= 1e-6 * size).all(), name
            assert torch.equal(*totals), name
            untouched = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, ids, False)
            assert torch.equal(totals[0][untouched], before[untouched]), name


def check_captured(device: str) -> None:
    """A capture rolls back the additions of its warm-up, and each replay adds once."""
    from rollgraph.model.kernels.pointwise import add_to_rows

    tokens = 100 if device == "cpu" else 5000
    total = torch.ones(VOCABULARY, 8, device=device)

    def step(ids: Tensor, gradients: Tensor) -> None:
        add_to_rows(total, ids, gradients)

    gradients = torch.ones(tokens, 8, device=device, dtype=torch.bfloat16)
    zeros = torch.zeros(tokens, dtype=torch.long, device=device)
    graph = capture(step, (zeros, gradients), backend="tape" if device == "cpu" else "cuda")
    assert (total == 1).all()
    expected = torch.ones(VOCABULARY)
    for seed in range(2):
        ids = torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed))
        graph(ids.to(device), gradients)
        expected += ids.bincount(minlength=VOCABULARY)
    assert torch.equal(total.cpu(), expected[:, None].expand(-1, 8))


def check_all(device: str) -> None:
    compare_rows(device)
    check_captured(device)


def test_kernels_in_the_interpreter() -> None:
    run_interpreted(check_all)


@pytest.mark.gpu
def test_kernels_on_cuda() -> None:
    check_all("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_without_a_direct_sum_the_gradient_equals_pytorchs(dtype: torch.dtype) -> None:
    embedding = Embedding(VOCABULARY, 24).to("cuda", dtype)
    plain = nn.Embedding.from_pretrained(embedding.weight.detach(), freeze=False)
    ids = torch.randint(VOCABULARY, (900,), device="cuda")
    upstream = torch.randn(900, 24, device="cuda", dtype=dtype)
    actual, expected = (torch.autograd.grad(module(ids), module.weight, upstream) for module in (embedding, plain))
    assert torch.equal(embedding(ids), plain(ids))
    assert torch.equal(actual[0], expected[0])


@pytest.mark.gpu
def test_with_a_direct_sum_autograd_gets_only_a_stand_in() -> None:
    """Also if the weight is used twice, so that autograd adds two stand-ins."""
    embedding = Embedding(VOCABULARY, 24).to("cuda", torch.bfloat16)
    ids = torch.randint(VOCABULARY, (900,), device="cuda")
    rows = embedding(ids), embedding(ids)
    upstream = torch.randn(900, 24, device="cuda", dtype=torch.bfloat16)
    buffer = torch.zeros(VOCABULARY, 24, device="cuda")
    with direct_sums({embedding.weight: buffer}) as sums:
        (gradient,) = torch.autograd.grad(rows, embedding.weight, (upstream, upstream))
        added = buffer.clone()
        sums[embedding.weight].add(gradient)
    assert torch.equal(buffer, added)
    assert set(gradient.stride()) == {0}
    expected = torch.zeros(VOCABULARY, 24, device="cuda", dtype=torch.double).index_add(0, ids, 2 * upstream.double())
    assert (buffer.double() - expected).norm() <= 1e-5 * expected.norm()
