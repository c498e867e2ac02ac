"""The callable that replaces a module's forward. Owns how a graph is called with Transformer Engine's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from rollgraph.graph import GraphedCallable

FIRST_MICROBATCH = "is_first_microbatch"  # tells FP8 modules to requantise their weights; plain modules ignore it


class GraphedForward:
    """Stands in for a module's forward, or for one microbatch of it, and is called as Transformer Engine's is.

    A graph captured in eval mode has no backward and replays in any grad mode. `is_first_microbatch` is dropped if
    the graph was captured without it.
    """

    def __init__(self, graph: GraphedCallable, module: nn.Module, keywords: Sequence[str]) -> None:
        self.graph = graph
        self._module = module
        self._training = module.training
        self._drops = FIRST_MICROBATCH not in keywords

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._module.training is not self._training:
            return self.graph(*args, **kwargs)  # runs the original forward, and counts the call as eager
        if self._drops and isinstance(kwargs.get(FIRST_MICROBATCH), bool):
            del kwargs[FIRST_MICROBATCH]
        if self._training or not self.graph.replays:
            return self.graph(*args, **kwargs)
        with torch.no_grad():
            return self.graph(*args, **kwargs)

    def install(self) -> None:
        """Replace the graph as the module's forward, and give the module a `reset`."""
        self._module.forward = self
        self._module.reset = partial(_reset, self)  # type: ignore[assignment]

    def reset(self) -> None:
        """Free the graph and, if it is installed, restore the module's own forward."""
        if self._module.__dict__.get("forward") is self:
            self._module.forward = self.graph
            self._module.__dict__.pop("reset", None)
        self.graph.reset()

    def __reduce__(self) -> Any:
        return self.graph.__reduce__()  # a copy or pickle of the module gets its own, ungraphed forward


def _reset(forward: Any) -> None:
    """A module's `reset`. A copy of the module has no graph, so there is nothing to free."""
    if isinstance(forward, GraphedForward):
        forward.reset()
