"""Transformer Engine's `make_graphed_callables` for plain PyTorch modules, on rollgraph's graphs.

Imports nothing of Transformer Engine, which need not be installed.
"""

from rollgraph.compat.transformer_engine.callables import make_graphed_callables
from rollgraph.compat.transformer_engine.graphed_forward import GraphedForward

__all__ = ["GraphedForward", "make_graphed_callables"]
