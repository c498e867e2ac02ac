"""Capture once, replay safely, on CUDA and on a CPU.

Reading order: `captured.py` is the path of every call. `function_recorder.py` records a whole function; `passes.py`,
`segment_recorder.py` and `segment.py` a callable behind one autograd node. They rest on `surface.py` (does the call
fit?), `state/binding.py` (does the program still mean the same memory?), `pool.py` (may that memory be overwritten?),
`state/transaction.py` (a capture leaves no trace), and on the backends, `cuda_backend.py` and `tape.py`.
"""

from rollgraph.graph.callables import GraphedCallable, make_graphed_callables
from rollgraph.graph.capture import GraphedFunction, capture, capture_lazily
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
from rollgraph.graph.pool import GraphPool, Report
from rollgraph.graph.sanitizer import Finding, Findings, sanitize, sanitize_process_if_enabled

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
    "capture_lazily",
    "make_graphed_callables",
    "sanitize",
]

sanitize_process_if_enabled()
