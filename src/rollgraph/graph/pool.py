"""The pool: owns graph memory and knows every graph in it.

Graphs of one arena share memory: what one frees, a later capture reuses. A graph that ran its
forward and waits for its backward is an open interval. While it is open, exactly the graphs captured
between its forward and its backward may replay: only their captures saw its memory as taken. The
rule depends on the order of captures alone, so a laptop and a GPU refuse the same programs.
"""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import ref

import torch

from rollgraph.graph.errors import CaptureError, MemoryInUse
from rollgraph.graph.report import GraphRecord, Report
from rollgraph.graph.static_outputs import StaticOutputs

PoolHandle = tuple[int, int]  # what torch.cuda.graph_pool_handle() returns
FOREVER = sys.maxsize  # later than any capture
_thread, _graph_task = threading.get_ident, torch._C._current_graph_task_id


class CapturedGraph(Protocol):
    """What a pool knows of a captured thing."""

    record: GraphRecord
    enabled: bool
    target: Any  # the module or function it was captured from
    static_bytes: int  # owned outside of the arena's segments

    def reset(self) -> None: ...


class Arena:
    """Memory shared by the captures made in it, with their order and their open intervals."""

    def __init__(self, handle: PoolHandle | None = None) -> None:
        self.handle = handle
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.scratch: dict[Any, torch.Tensor] = {}  # live only inside one backward, so shared by all
        self.captures = 0
        self._recordings = 0
        # forward -> graph, backward, bounds before it was opened, the autograd node that can still run it
        self._open: dict[int, tuple[str, int, int, int, ref[Any]]] = {}
        self.low, self.high = -1, FOREVER  # captures strictly between may replay
        self.lock = threading.RLock()  # held by whoever replays: memory is shared, so only one at a time can
        self.lenders: list[StaticOutputs] = []  # the outputs of its recordings
        self.borrower = 0  # the thread that they are lent to

    def cuda_handle(self) -> PoolHandle:
        if self.handle is None:
            self.handle = torch.cuda.graph_pool_handle()
        return self.handle

    def retain(self) -> None:
        """A recording uses the arena's CUDA pool."""
        self._recordings += 1

    def release(self) -> None:
        """One of them is gone. CUDA frees a pool with its last graph, and its handle is then dead."""
        self._recordings -= 1
        if self._recordings == 0:
            self.handle = None

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """One capture stream for each device: blocks are reused only within a stream."""
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        return self.streams[device]

    def next_capture(self) -> int:
        """The place of a new recording in the order of captures."""
        self.captures += 1
        return self.captures

    # -- threads ---------------------------------------------------------------------------------

    def claim(self, graph: str) -> None:
        """Make the calling thread the one that outputs are lent to; refuse while another one holds an output.

        That thread may be reading it at this very moment. A backward in a thread of autograd's own belongs to the
        thread that waits for it.
        """
        if self.borrower == _thread() or _graph_task() != -1:
            return
        if any(lender.held() for lender in self.lenders):
            gc.collect()  # it may wait in a reference cycle
            if any(lender.held() for lender in self.lenders):
                raise MemoryInUse(
                    f"graph {graph!r} is used by two threads, and an output that the other one got from its pool is "
                    "still held there: a replay would overwrite it. Keep a clone and drop the output before another "
                    "thread's turn, or capture a graph in a pool of its own for each thread"
                )
        self.borrower = _thread()

    # -- open intervals --------------------------------------------------------------------------

    def admit(self, capture: int, graph: str) -> None:
        """Refuse a replay that would overwrite what an open interval still needs."""
        if self.low < capture < self.high:
            return
        while self._open and next(reversed(self._open.values()))[4]() is None:  # opened last and abandoned
            _, (_, _, self.low, self.high, _) = self._open.popitem()
        if self.low < capture < self.high:
            return
        gc.collect()  # a node that nobody can reach any more may wait in a reference cycle
        self._close_abandoned()
        if self.low < capture < self.high:
            return
        waiting = next(name for forward, (name, back, *_) in self._open.items() if not forward < capture < back)
        if waiting == graph:
            raise MemoryInUse(
                f"graph {graph!r} was called again before the backward of its last call: a second forward would "
                "overwrite its activations. Run the backward first, or capture a schedule with `order`"
            )
        raise MemoryInUse(
            f"graph {graph!r} shares memory with {waiting!r}, which waits for its backward. Run that backward first, "
            "replay in capture order, or capture the two in different pools"
        )

    def open(self, graph: str, forward: int, backward: int, node: Any) -> None:
        """Start the interval of an autograd node; it was admitted, so no other one of this graph is open."""
        self._open[forward] = (graph, backward, self.low, self.high, ref(node))
        if forward > self.low:
            self.low = forward
        if backward < self.high:
            self.high = backward

    def is_open(self, forward: int, node: Any) -> bool:
        interval = self._open.get(forward)
        return interval is not None and interval[4]() is node

    def close(self, forward: int) -> None:
        last, interval = self._open.popitem()
        if last == forward:  # the usual order: what was opened last is closed first
            _, _, self.low, self.high, _ = interval
            return
        self._open[last] = interval
        del self._open[forward]
        remaining = list(self._open.items())
        self._open.clear()
        self.low, self.high = -1, FOREVER
        for start, (graph, end, _, _, node) in remaining:
            self._open[start] = (graph, end, self.low, self.high, node)
            self.low, self.high = max(self.low, start), min(self.high, end)

    def _close_abandoned(self) -> None:
        """Close the intervals whose backward nobody can call any more."""
        for forward in [f for f, (*_, node) in reversed(self._open.items()) if node() is None]:
            self.close(forward)

    def waits_for(self, forward: int) -> bool:
        """Somebody can still call the backward of that forward."""
        self._close_abandoned()
        return forward in self._open

    def open_intervals(self) -> list[str]:
        self._close_abandoned()
        return [graph for graph, *_ in self._open.values()]


class GraphPool:
    """Owns the graphs captured in it and their memory; one for each worker.

    `handle` is a raw pool of `torch.cuda.graph_pool_handle()`, to share memory with other captures.
    """

    def __init__(self, handle: PoolHandle | None = None) -> None:
        self.arena = Arena(handle)
        self.graphs: list[CapturedGraph] = []
        self._names: dict[str, int] = {}

    @classmethod
    def of(cls, pool: GraphPool | PoolHandle | None) -> GraphPool:
        if isinstance(pool, GraphPool):
            return pool
        if pool is None or (isinstance(pool, tuple) and len(pool) == 2):
            return cls(pool)
        raise CaptureError(f"pool={pool!r}: expected a GraphPool, a torch.cuda.graph_pool_handle() or None")

    def unique_name(self, name: str) -> str:
        """`name`, or `name#2`, `name#3`, ... where graphs of that name are already here."""
        self._names[name] = count = self._names.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"

    def add(self, graph: CapturedGraph) -> None:
        self.graphs.append(graph)

    # -- on and off ------------------------------------------------------------------------------

    def disable(self, model: torch.nn.Module | None = None) -> None:
        """Run the original code instead of every graph (of `model`), counted, until enabled again."""
        for graph in self._of(model):
            graph.enabled = False

    def enable(self, model: torch.nn.Module | None = None) -> None:
        for graph in self._of(model):
            graph.enabled = True

    @contextmanager
    def disabled(self, model: torch.nn.Module | None = None) -> Iterator[None]:
        """Graphs off inside; afterwards each is as it was found, whatever left the tree meanwhile."""
        found = [(graph, graph.enabled) for graph in self._of(model)]
        try:
            self.disable(model)
            yield
        finally:
            for graph, enabled in found:
                graph.enabled = enabled

    def _of(self, model: torch.nn.Module | None) -> Sequence[CapturedGraph]:
        if model is None:
            return list(self.graphs)
        members = set(model.modules())
        return [g for g in self.graphs if isinstance(g.target, torch.nn.Module) and g.target in members]

    # -- end of life and report ------------------------------------------------------------------

    def reset(self) -> None:
        """Give back every graph and put every original callable back in place."""
        for graph in list(self.graphs):
            graph.reset()
        self.graphs.clear()
        self.arena = Arena()  # no interval of the old graphs is left open

    def report(self) -> Report:
        records = tuple(copy.deepcopy(graph.record) for graph in self.graphs)
        return Report(records, self.memory_bytes())

    def memory_bytes(self) -> int:
        """Reserved by the pool on the GPU, plus what its graphs own outside of it."""
        outside = sum(graph.static_bytes for graph in self.graphs)
        return outside + sum(size for _, size in pool_segments(self.arena))


def pool_segments(arena: Arena) -> list[tuple[int, int]]:
    """(address, bytes) of each segment that CUDA reserved for the arena."""
    if arena.handle is None or not arena.streams:
        return []
    segments = torch.cuda.memory_snapshot()
    return [(s["address"], s["total_size"]) for s in segments if tuple(s["segment_pool_id"]) == arena.handle]
