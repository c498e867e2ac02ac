"""The hooks of a sharded model follow changes of its module tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.parallel.data.gathers import StaleWeights
from rollgraph.parallel.data.sharded_model import ShardedModel
from tests.parallel.lockstep import Room, run_ranks
from tests.parallel.small_net import ALONE, Net, build, loss, microbatch, one_step, simulated


def plain_gradient(change: Any) -> dict[str, Tensor]:
    """The gradients of a plain model whose tree was changed in the same way."""
    model = build()
    change(model)
    loss(model, microbatch(0, 0, 0)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def untie(model: Net) -> None:
    """Remove the embedding from the tree; its weight stays in the head."""
    weight = model.embedding.weight
    model.embedding = nn.Embedding.from_pretrained(torch.ones(13, 8))
    assert model.head.weight is weight


def freeze_and_unfreeze(model: Net) -> None:
    model.layers.requires_grad_(False)
    model.layers.requires_grad_(True)


@pytest.mark.parametrize("change", [untie, freeze_and_unfreeze])
@pytest.mark.parametrize("covers", ["enable", "pause", "forward"])
def test_a_parameter_is_trained_whichever_module_holds_it(change: Any, covers: str) -> None:
    model = build()
    sharded = ShardedModel(model, ALONE)
    if change is freeze_and_unfreeze:
        model.layers.requires_grad_(False)
        with sharded.paused(gather=True):
            pass  # its end registers the hooks of trained parameters
        model.layers.requires_grad_(True)
    else:
        change(model)
    if covers == "enable":
        sharded.hooks.enable()
    elif covers == "pause":
        with sharded.paused(gather=True):
            pass
    loss(model, microbatch(0, 0, 0)).backward()
    sharded.gradients.finish()
    expected = plain_gradient(change)
    assert "head.weight" in expected or "embedding.weight" in expected
    for name, parameter in model.named_parameters():
        if name in expected:
            assert torch.equal(sharded.flat.grad_buffers[parameter], expected[name]), name
            assert parameter.grad is None


@pytest.mark.parametrize("gather", [False, True])
def test_the_guard_covers_a_replaced_module(gather: bool) -> None:
    def work(rank: int, room: Room) -> None:
        model, sharded, optimizer = simulated(rank, room)
        with sharded.paused(gather=False):
            pass
        old = model.head
        model.head = nn.Linear(8, 13, bias=False)
        model.head.weight = old.weight
        one_step(model, sharded, optimizer, 0)
        ids = microbatch(0, 0, 0)
        with sharded.paused(gather=gather), torch.no_grad():
            if gather:
                model(ids)
                return
            for read in (lambda: model.head(torch.ones(8)), lambda: model(ids)):
                with pytest.raises(StaleWeights):
                    read()

    run_ranks(3, work)


def test_a_replaced_module_gathers_before_it_reads() -> None:
    def work(rank: int, room: Room) -> Tensor:
        model, sharded, optimizer = simulated(rank, room)
        one_step(model, sharded, optimizer, 0)
        old = model.layers[1][0]
        model.layers[1][0] = nn.Linear(8, 8)
        model.layers[1][0].weight, model.layers[1][0].bias = old.weight, old.bias
        with torch.no_grad():
            output = model(microbatch(0, 0, 0))
        sharded.gather()
        with torch.no_grad():
            assert torch.equal(output, model(microbatch(0, 0, 0)))
        return output

    first, *others = run_ranks(3, work)
    assert all(torch.equal(first, other) for other in others)
