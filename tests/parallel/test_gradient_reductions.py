"""Gradients: when they are reduced, averaged and clipped, and which ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.ranks.world import World
from tests.parallel.lockstep import Room, run_ranks
from tests.parallel.small_net import ALONE, RATE, build, loss, microbatch, same, simulated, values
from tests.parallel.worlds import run_world


def test_a_gradient_after_the_reduction_is_refused() -> None:
    model = ShardedModel(build(), ALONE).model
    loss(model, microbatch(0, 0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"no_sync\(\)"):
        loss(model, microbatch(0, 0, 1)).backward()


def test_gradients_are_averaged_over_tokens_and_clipped() -> None:
    model, twin = build(), build()
    sharded = ShardedModel(model, ALONE)
    ids = microbatch(0, 0, 0)
    (loss(model, ids) * ids.numel()).backward()
    sharded.gradients.finish(tokens=torch.tensor(float(ids.numel())))
    trained = [p for p in twin.parameters() if p.requires_grad]
    loss(twin, ids).backward()
    expected = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    torch.testing.assert_close(sharded.gradients.clip(0.01), expected)
    torch.testing.assert_close(sharded.gradients.norm(), torch.tensor(0.01), rtol=1e-3, atol=0)


def test_an_aborted_step_can_be_dropped() -> None:
    model = build()
    sharded = ShardedModel(model, ALONE)
    loss(model, microbatch(0, 0, 0)).backward()
    sharded.gradients.drop()
    loss(model, microbatch(0, 0, 0)).backward()
    sharded.gradients.finish()
    twin = build()
    loss(twin, microbatch(0, 0, 0)).backward()
    gradient = sharded.flat.grad_buffers[model.head.weight]
    assert twin.head.weight.grad is not None
    assert torch.equal(gradient, twin.head.weight.grad)


def train_unevenly(world: World) -> Any:
    """Train such that a layer in the middle gets no gradient on rank 1."""
    model = build()
    sharded = ShardedModel(model, world, bucket_bytes=400, reduction="ordered")
    optimizer = ShardedAdamW(sharded, RATE)
    for step in range(2):
        x = model.embedding(microbatch(step, world.rank, 0))
        for number, layer in enumerate(model.layers):
            hidden = layer(x)
            x = x if number == 1 and world.rank == 1 else hidden
        model.head(model.frozen(x)).square().mean().backward()
        sharded.gradients.finish()
        optimizer.step()
    sharded.gather()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.multi
def test_a_gradient_that_is_missing_on_one_rank_counts_as_zero(tmp_path: Path) -> None:
    first, second = run_world(2, tmp_path, train_unevenly)
    assert not isinstance(first, str), first
    assert not isinstance(second, str), second
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


def clip_by_tokens(world: World) -> tuple[Tensor, Tensor]:
    """Average over the tokens of all ranks, which have different numbers of them, and clip."""
    model = build()
    sharded = ShardedModel(model, world, bucket_bytes=400)
    ids = microbatch(0, world.rank, 0)[: world.rank + 1]
    (loss(model, ids) * ids.numel()).backward()
    sharded.gradients.finish(tokens=torch.tensor(float(ids.numel())))
    norm = sharded.gradients.clip(0.01)
    return norm, sharded.gradients.norm()


@pytest.mark.multi
def test_tokens_and_norms_are_summed_over_all_ranks(tmp_path: Path) -> None:
    model = build()
    batches = [microbatch(0, rank, 0)[: rank + 1] for rank in range(2)]
    total = sum(loss(model, ids) * ids.numel() for ids in batches) / sum(ids.numel() for ids in batches)
    trained = [p for p in model.parameters() if p.requires_grad]
    expected = nn.utils.get_total_norm(torch.autograd.grad(total, trained))  # type: ignore[arg-type]
    for norm, clipped in run_world(2, tmp_path, clip_by_tokens):
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(clipped, torch.tensor(0.01), rtol=1e-3, atol=0)


@pytest.mark.parametrize("how", ["added", "unfrozen"])
def test_a_parameter_that_requires_grad_later_is_refused(how: str) -> None:
    model = build()
    sharded = ShardedModel(model, ALONE)
    if how == "added":
        model.adapter = nn.Linear(8, 8)
    else:
        model.frozen.requires_grad_(True)
    loss(model, microbatch(0, 0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"(adapter|frozen).weight, .* requires grad but did not"):
        sharded.gradients.finish()


def test_zeroing_gradients_waits_for_the_reductions() -> None:
    def work(rank: int, room: Room) -> Tensor:
        model, sharded, _ = simulated(rank, room)
        loss(model, microbatch(0, rank, 0)).backward()
        sharded.flat.zero_gradients()
        sharded.gradients.finish()
        return sharded.gradients.norm()

    assert run_ranks(3, work) == [0, 0, 0]


def test_a_step_needs_finished_gradients_and_uses_them_once() -> None:
    model = build()
    sharded = ShardedModel(model, ALONE)
    optimizer, before = ShardedAdamW(sharded, RATE), values(model)
    with sharded.gradients.no_sync():
        loss(model, microbatch(0, 0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"gradients.finish\(\) first"):
        optimizer.step()
    sharded.gradients.finish()
    with pytest.raises(RuntimeError, match="are finished"):
        sharded.gradients.finish()
    assert same(values(model), before)
    optimizer.step()
    assert not same(values(model), before)
    with sharded.hooks.paused():
        loss(model, microbatch(1, 0, 0)).backward()  # stays in param.grad, because no hook moved it
    with pytest.raises(RuntimeError, match=r"gradients.finish\(\) first"):
        optimizer.step()
