"""Capture once, replay safely, on CUDA and on a CPU."""

from rollgraph.graph.callables import GraphedCallable, make_graphed_callables
from rollgraph.graph.capture import GraphedFunction, capture
from rollgraph.graph.errors import (
    CaptureError,
    GraphError,
    HookError,
    HostReadError,
    MemoryInUse,
    OrderError,
    ReplayMismatch,
    StaleGraph,
)
from rollgraph.graph.hooks import GraphHooks
from rollgraph.graph.pool import GraphPool
from rollgraph.graph.report import Report

__all__ = [
    "CaptureError",
    "GraphError",
    "GraphHooks",
    "GraphPool",
    "GraphedCallable",
    "GraphedFunction",
    "HookError",
    "HostReadError",
    "MemoryInUse",
    "OrderError",
    "ReplayMismatch",
    "Report",
    "StaleGraph",
    "capture",
    "make_graphed_callables",
]
