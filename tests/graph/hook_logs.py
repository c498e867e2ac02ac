"""Hooks that log their calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph import GraphHooks

ALL = ("warmup", "capture", "replay")
KINDS = ("pre_forward", "post_forward", "pre_backward", "post_backward")


class Log:
    """Hooks that log their calls as `name:kind`, with the shapes of their arguments."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.arguments: list[tuple[str, Any]] = []

    def hooks(self, name: str, when: Any = ALL) -> GraphHooks:
        def make(kind: str) -> Any:
            def hook(*arguments: Any) -> None:
                self.calls.append(f"{name}:{kind}")
                self.arguments.append((kind, structure(arguments)))

            return hook

        return GraphHooks(**{kind: [make(kind)] for kind in KINDS}, when=when)

    def take(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def structure(tree: Any) -> Any:
    """A description of the arguments, which must be the same in all three moments."""
    if isinstance(tree, Tensor):
        return ("tensor", tuple(tree.shape), tree.dtype, tree.requires_grad)
    if isinstance(tree, (tuple, list)):
        return (type(tree).__name__, *map(structure, tree))
    if isinstance(tree, dict):
        return {key: structure(value) for key, value in tree.items()}
    return id(tree) if callable(tree) else tree


def passes(name: str) -> list[str]:
    return [f"{name}:{kind}" for kind in KINDS]


def layers(n: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(n)]


def sample() -> Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
