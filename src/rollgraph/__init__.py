"""rollgraph post-trains language models with reinforcement learning, on captured graphs.

One process per GPU holds one set of weights that generates, scores and trains. Every phase replays captured graphs:
CUDA graphs on a GPU, a recorded tape on a CPU.

Importing any part of the package runs this file, so it imports nothing until a name is used. `Trainer` runs training
from Python; the parts live in packages such as `rollgraph.graph`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollgraph.trainer import Trainer

__all__ = ["Trainer", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from rollgraph.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
