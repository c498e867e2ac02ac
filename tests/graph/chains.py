"""Chains of graphed blocks that share a pool, with eager twins."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from rollgraph.graph import GraphPool, make_graphed_callables


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def chain(count: int, backend: str, pool: GraphPool | None = None) -> tuple[list[nn.Module], list[nn.Module]]:
    """Graphed blocks that share a pool, and their eager twins."""
    blocks = [block() for _ in range(count)]
    twins = copy.deepcopy(blocks)
    samples = tuple((torch.randn(3, 4, requires_grad=True),) for _ in blocks)
    make_graphed_callables(tuple(blocks), samples, pool=pool, backend=backend)
    return blocks, twins


def leaf() -> Tensor:
    return torch.randn(3, 4, requires_grad=True)


def equal_gradients(blocks: list[nn.Module], twins: list[nn.Module]) -> bool:
    def parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
        return [p for module in modules for p in module.parameters()]

    pairs = [(p.grad, q.grad) for p, q in zip(parameters(blocks), parameters(twins), strict=True)]
    return all((g is None and h is None) or (g is not None and h is not None and torch.equal(g, h)) for g, h in pairs)
