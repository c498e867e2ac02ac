"""Hooks that gather fully sharded parameters before a graph and free them after it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollgraph.graph import GraphHooks, StaleGraph, capture
from rollgraph.graph import make_graphed_callables as graph
from tests.graph.hook_logs import ALL, sample


class Sharded:
    """The parameters of one module: a permanent shard, and full values only between the hooks."""

    def __init__(self, module: nn.Module, repoint: bool) -> None:
        self.parameters = list(module.parameters())
        self.shards = [p.detach().clone() for p in self.parameters]
        self.full = [p.data for p in self.parameters]
        self.repoint = repoint
        self.gathers = 0
        self.reshard()

    def unshard(self, *_: Any) -> None:
        self.gathers += 1
        for parameter, full, shard in zip(self.parameters, self.full, self.shards, strict=True):
            full.copy_(shard)
            if self.repoint:
                parameter.data = full

    def reshard(self, *_: Any) -> None:
        for parameter, full, shard in zip(self.parameters, self.full, self.shards, strict=True):
            full.fill_(float("nan"))
            if self.repoint:
                parameter.data = shard

    def hooks(self, when: Any = ALL) -> GraphHooks:
        return GraphHooks([self.unshard], [self.reshard], [self.unshard], [self.reshard], when=when)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            shard.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


@pytest.mark.parametrize("repoint", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_hooks_gather_and_free_parameters_around_modules(
    backend: str, device: torch.device, repoint: bool, count: int
) -> None:
    torch.manual_seed(2)
    blocks = [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(count)]
    twins = copy.deepcopy(blocks)
    optimizer = torch.optim.SGD([p for t in twins for p in t.parameters()], 0.1)
    sharded = [Sharded(block, repoint) for block in blocks]
    samples = tuple((sample(),) for _ in blocks)
    graph(tuple(blocks), samples, backend=backend, hooks=[s.hooks() for s in sharded])
    assert all(torch.isnan(f).all() for s in sharded for f in s.full), "the last hooks of the capture freed them"
    for step in range(4):
        x, y = ((sample() * (step + 1)).detach().requires_grad_() for _ in range(2))
        before = [s.gathers for s in sharded]
        a, b = x, y
        for block, twin in zip(blocks, twins, strict=True):
            a, b = block(a), twin(b)
        assert torch.equal(a, b)
        a.square().sum().backward()
        b.square().sum().backward()
        assert torch.equal(x.grad, y.grad)
        assert [s.gathers - n for s, n in zip(sharded, before, strict=True)] == [2] * count
        for block, twin in zip(blocks, twins, strict=True):
            for p, q in zip(block.parameters(), twin.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)
                assert repoint or torch.isnan(p).all(), "parameters are sharded outside the hooks"
        for s in sharded:
            s.step()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("repoint", [False, True])
def test_a_replay_without_the_hooks_reads_poison_or_is_refused(
    backend: str, device: torch.device, repoint: bool
) -> None:
    """The test above can fail: without hooks, parameters stay sharded."""
    block = nn.Linear(4, 4)
    sharded = Sharded(block, repoint)
    graph(block, (sample(),), backend=backend, hooks=sharded.hooks(("warmup", "capture")))
    if repoint:
        with pytest.raises(StaleGraph, match="weight"):
            block(sample())
    else:
        assert torch.isnan(block(sample())).all()


def test_hooks_gather_and_free_parameters_around_a_captured_step(backend: str, device: torch.device) -> None:
    block = nn.Linear(4, 4)
    twin = copy.deepcopy(block)
    sharded = Sharded(block, repoint=False)
    hooks = GraphHooks([sharded.unshard], [sharded.reshard], when=ALL)

    def step(x: Tensor, m: nn.Module = block) -> Tensor:
        loss = m(x).square().sum()
        loss.backward()
        return loss.detach()

    graphed = capture(step, (sample().detach(),), backend=backend, hooks=hooks)
    for i in range(3):
        x = sample().detach() + i
        assert torch.equal(graphed(x), step(x, twin))
        assert torch.equal(block.weight.grad, twin.weight.grad)
        assert torch.isnan(block.weight).all()


def test_each_kind_of_hook_can_have_its_own_moments() -> None:
    calls: list[str] = []
    hooks = GraphHooks(
        pre_forward=[lambda *_: calls.append("before")],
        post_backward=[lambda *_: calls.append("after")],
        when={"pre_forward": ("warmup", "capture", "replay"), "post_backward": ("replay",)},
    )
    layer = nn.Linear(2, 2)
    graph(layer, (torch.randn(1, 2, requires_grad=True),), 1, hooks=hooks)
    assert calls == ["before", "before"]  # warm-up, capture
    layer(torch.randn(1, 2)).sum().backward()
    assert calls == ["before"] * 3 + ["after"]
    for wrong in ({"forward": ("replay",)}, {"pre_forward": "replay"}, {"pre_forward": ("never",)}):
        with pytest.raises(ValueError, match="when="):
            GraphHooks(when=wrong)
