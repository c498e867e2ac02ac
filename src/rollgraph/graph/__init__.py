"""Capture once, replay safely, on CUDA and on a CPU."""

from rollgraph.graph.callables import GraphedCallable, make_graphed_callables
from rollgraph.graph.capture import GraphedFunction, capture
from rollgraph.graph.errors import (
    CaptureError,
    GeneratorError,
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
from rollgraph.graph.sanitizer import Finding, Findings, sanitize, sanitize_process_if_asked

__all__ = [
    "CaptureError",
    "Finding",
    "Findings",
    "GeneratorError",
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
    "sanitize",
]

sanitize_process_if_asked()
