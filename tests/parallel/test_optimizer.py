"""ShardedAdamW: schedules, skipped steps, captured updates and master weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import capture
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.optim.schedules import cosine, linear, warm_up
from tests.parallel.small_net import ALONE, DECAY, RATE, Net, build, loss, microbatch


def test_a_non_finite_gradient_skips_the_step() -> None:
    model = build()
    sharded = ShardedModel(model, ALONE)
    optimizer = ShardedAdamW(sharded, RATE)
    before = copy.deepcopy(dict(model.named_parameters()))
    loss(model, microbatch(0, 0, 0)).backward()
    next(iter(sharded.flat.grad_buffers.values())).fill_(float("nan"))
    sharded.gradients.finish()
    optimizer.step()
    assert optimizer.skipped == 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    loss(model, microbatch(0, 0, 0)).backward()
    sharded.gradients.finish()
    optimizer.step(loss=torch.tensor(float("inf")))
    assert optimizer.skipped == 2
    assert torch.equal(model.head.weight, before["embedding.weight"])
    loss(model, microbatch(0, 0, 0)).backward()
    sharded.gradients.finish()
    optimizer.step(loss=torch.tensor(1.0))
    assert optimizer.skipped == 2
    assert not torch.equal(model.head.weight, before["embedding.weight"])


def test_the_schedules_and_their_warm_up() -> None:
    schedule = warm_up(4, cosine(10, floor=0.1))
    values = [schedule(step) for step in range(20)]
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert values == sorted(values[:5]) + sorted(values[5:], reverse=True)
    assert values[14:] == pytest.approx([0.1] * 6)
    assert [linear(4)(step) for step in (0, 2, 4, 9)] == [1.0, 0.5, 0.0, 0.0]
    model = build()
    sharded = ShardedModel(model, ALONE)
    optimizer = ShardedAdamW(sharded, 0.5, schedule=linear(4))
    optimizer.step()
    optimizer.step()
    assert optimizer.lr.item() == pytest.approx(0.5 * 0.75)


def test_a_captured_update_follows_the_rate_and_the_step_count() -> None:
    def run(captured: bool) -> list[Tensor]:
        model = build()
        sharded = ShardedModel(model, ALONE)
        optimizer = ShardedAdamW(sharded, RATE, weight_decay=DECAY, schedule=linear(4))
        if captured:
            optimizer.update = capture(optimizer.update)  # type: ignore[method-assign]
        for step in range(4):
            loss(model, microbatch(step, 0, 0)).backward()
            sharded.gradients.finish()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(p, q) for p, q in zip(run(True), run(False), strict=True))


def test_read_shards_makes_loaded_weights_permanent() -> None:
    model, loaded = build(), Net()
    sharded = ShardedModel(model, ALONE)
    optimizer = ShardedAdamW(sharded, RATE)
    sharded.flat.load(loaded.state_dict())
    optimizer.read_shards()
    optimizer.step()  # on zero gradients
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), loaded.parameters(), strict=True))


def test_bf16_parameters_have_fp32_masters() -> None:
    """Updates too small for bf16 accumulate in the master weights."""
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    twin = copy.deepcopy(model).float()
    sharded = ShardedModel(model, ALONE)
    optimizer = ShardedAdamW(sharded, 1e-4)
    reference = torch.optim.AdamW(
        twin.parameters(), lr=torch.tensor(1e-4), weight_decay=0.0, fused=True, capturable=True
    )
    for _ in range(20):
        sharded.flat.grad_buffers[model.weight].fill_(1.0)
        sharded.gradients.finish()
        optimizer.step()
        twin.weight.grad, twin.bias.grad = torch.ones(8, 8), torch.zeros(8)
        reference.step()
    assert torch.equal(model.weight, twin.weight.bfloat16())
    assert model.weight.dtype is torch.bfloat16
    assert sharded.flat.grad_buffers[model.weight].dtype is torch.float32
