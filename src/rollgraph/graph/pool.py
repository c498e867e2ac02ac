"""The pool: owns graph memory and knows every graph in it.

Graphs of one arena share memory: a later capture reuses what an earlier one freed. A graph that ran its
forward and waits for its backward is an open interval. While it is open, exactly the graphs captured
between its forward and its backward may replay, because only their captures saw its memory as in use. The
rule depends on the order of captures alone, so a laptop and a GPU refuse the same programs.
"""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol
from weakref import finalize, ref

import torch

from rollgraph.graph.errors import CaptureError, MemoryInUse
from rollgraph.graph.pool_memory import PoolHandle, allocating_from, keep_pool, let_pool_go, with_index
from rollgraph.graph.report import GraphRecord, Report
from rollgraph.graph.static_outputs import StaticOutputs

FOREVER = sys.maxsize  # later than any capture
_thread = threading.get_ident
_graph_task = torch._C._current_graph_task_id


class CapturedGraph(Protocol):
    """What a pool knows of a captured function or callable."""

    record: GraphRecord
    enabled: bool
    target: Any  # the module or function it was captured from
    static_bytes: int  # memory that it owns outside the arena

    def reset(self) -> None: ...


class Arena:
    """Memory shared by the captures made in it, their order, and their open intervals."""

    def __init__(self, handle: PoolHandle | None = None) -> None:
        self.handle = handle
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.scratch: dict[Any, torch.Tensor] = {}  # used only during one backward, so all graphs share it
        self.captures = 0
        self._recordings = 0
        # forward -> (graph, backward, low and high before it was opened, the autograd node that can still run it)
        self._open: dict[int, tuple[str, int, int, int, ref[Any]]] = {}
        self.low = -1  # captures strictly between low and high may replay
        self.high = FOREVER
        self.lock = threading.RLock()  # held during a replay: the memory is shared, so replays take turns
        self.static_outputs: list[StaticOutputs] = []  # of its recordings
        self.owning_thread = 0  # the thread that may use them
        self.allocations: list[torch.Tensor] = []  # see GraphPool.allocate
        self.unsaved: dict[int, torch.UntypedStorage] = {}  # by key; see GraphPool.leave_unsaved
        self._kept: dict[torch.device, finalize[Any, Any]] = {}  # where the CUDA pool lives without a recording

    def cuda_handle(self) -> PoolHandle:
        if self.handle is None:
            self.handle = torch.cuda.graph_pool_handle()
        return self.handle

    def retain(self) -> None:
        """Count a recording that uses the arena's CUDA pool."""
        self._recordings += 1

    def release(self) -> None:
        """Count a recording that is gone. CUDA frees a pool with its last graph, and the handle is then invalid."""
        self._recordings -= 1
        if self._recordings == 0:
            self.handle = None

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The one capture stream of a device: memory blocks are reused only within a stream."""
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        return self.streams[device]

    @contextmanager
    def on_stream(self, device: torch.device) -> Iterator[None]:
        """Work inside runs on the capture stream, after what was launched before and before what is launched after."""
        stream = self.stream(device)
        caller = torch.cuda.current_stream(device)
        stream.wait_stream(caller)
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                yield
        finally:
            caller.wait_stream(stream)  # after a failure too: a rollback has to wait for what still runs there

    def allocating(self, device: torch.device) -> AbstractContextManager[None]:
        """Allocations come from the arena's memory inside. Call this on its stream."""
        if device not in self._kept:
            handle = self.cuda_handle()
            keep_pool(device.index, handle)
            self.retain()
            self._kept[device] = finalize(self, let_pool_go, device.index, handle)
            self._kept[device].atexit = False
        return allocating_from(device.index, self.cuda_handle())

    def free(self) -> None:
        """Give back the memory that belongs to no recording."""
        self.allocations.clear()
        self.unsaved.clear()
        for let_go in self._kept.values():
            let_go()
            self.release()
        self._kept.clear()

    def next_capture(self) -> int:
        """The number of a new recording in the order of captures."""
        self.captures += 1
        return self.captures

    # -- threads ---------------------------------------------------------------------------------

    def enter_thread(self, graph: str) -> None:
        """Make the calling thread the owning one; raise MemoryInUse while another thread still refers to an output.

        That thread may be reading the output right now. A backward that runs in one of autograd's own threads belongs
        to the thread that waits for it.
        """
        if self.owning_thread == _thread() or _graph_task() != -1:
            return
        if self._outputs_referenced():
            gc.collect()  # an output may be part of a reference cycle that is no longer in use
            if self._outputs_referenced():
                raise MemoryInUse(
                    f"graph {graph!r} is used by two threads, and the other thread still refers to an output from its "
                    "pool: a replay would overwrite it. Clone the output and drop it before another thread's turn, or "
                    "capture a graph in a pool of its own for each thread"
                )
        self.owning_thread = _thread()

    def _outputs_referenced(self) -> bool:
        return any(outputs.referenced() for outputs in self.static_outputs)

    # -- open intervals --------------------------------------------------------------------------

    def admit(self, capture: int, graph: str) -> None:
        """Raise MemoryInUse for a replay that would overwrite what an open interval still needs."""
        if self.low < capture < self.high:
            return
        while self._open and next(reversed(self._open.values()))[4]() is None:  # opened last, then abandoned
            _, (_, _, self.low, self.high, _) = self._open.popitem()
        if self.low < capture < self.high:
            return
        gc.collect()  # an unreachable node may be part of a reference cycle
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
        """Open the interval of an autograd node. Its forward was admitted, so the graph has no other open."""
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
        if last == forward:  # the usual order: the interval opened last is closed first
            _, _, self.low, self.high, _ = interval
            return
        self._open[last] = interval
        del self._open[forward]
        remaining = list(self._open.items())
        self._open.clear()
        self.low, self.high = -1, FOREVER
        for start, (graph, end, _, _, node) in remaining:
            self._open[start] = (graph, end, self.low, self.high, node)
            self.low = max(self.low, start)
            self.high = min(self.high, end)

    def _close_abandoned(self) -> None:
        """Close the intervals whose backward can no longer be called."""
        for forward in [f for f, (*_, node) in reversed(self._open.items()) if node() is None]:
            self.close(forward)

    def waits_for(self, forward: int) -> bool:
        """Whether the backward of that forward is pending and can still be called."""
        self._close_abandoned()
        return forward in self._open

    def open_intervals(self) -> list[str]:
        self._close_abandoned()
        return [graph for graph, *_ in self._open.values()]


class GraphPool:
    """Owns the graphs captured in it and their memory. Each worker has one.

    `handle` is a raw pool of `torch.cuda.graph_pool_handle()`, to share memory with other captures.
    """

    def __init__(self, handle: PoolHandle | None = None) -> None:
        self.arena = Arena(handle)
        self.graphs: list[CapturedGraph] = []
        self._names: dict[str, int] = {}
        self.notes: list[str] = []  # for the report

    @classmethod
    def of(cls, pool: GraphPool | PoolHandle | None) -> GraphPool:
        if isinstance(pool, GraphPool):
            return pool
        if pool is None or (isinstance(pool, tuple) and len(pool) == 2):
            return cls(pool)
        raise CaptureError(f"pool={pool!r}: expected a GraphPool, a torch.cuda.graph_pool_handle() or None")

    def unique_name(self, name: str) -> str:
        """`name`, or `name#2`, `name#3`, ... if the pool already has graphs of that name."""
        self._names[name] = count = self._names.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"

    def add(self, graph: CapturedGraph) -> None:
        self.graphs.append(graph)

    # -- memory ----------------------------------------------------------------------------------

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Take memory on a GPU in one piece before anything is captured: captures use it, and so does `allocate` later.

        Without it, the pool grows in the pieces that captures ask for, into which no larger tensor fits.
        """
        device = with_index(device)
        if device.type == "cuda" and nbytes:
            with self.arena.on_stream(device), self.arena.allocating(device):
                torch.empty(nbytes, dtype=torch.uint8, device=device)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros in memory that graphs captured so far use during their replays, for graphs that are captured later.

        Each replay of an earlier graph may overwrite the tensor, so its contents hold only while nothing but later
        graphs replays. It lives as long as the pool, and captures neither save nor restore it. On a GPU this is what
        earlier captures have left free, or new memory of the pool; on a CPU it is ordinary memory.
        """
        device = with_index(device)
        if device.type == "cuda":
            with self.arena.on_stream(device), self.arena.allocating(device):
                tensor = torch.zeros(shape, dtype=dtype, device=device)
        else:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.arena.allocations.append(tensor)
        self.leave_unsaved(tensor)
        return tensor

    def leave_unsaved(self, tensor: torch.Tensor) -> None:
        """Let captures change the memory of a tensor, all of its storage.

        Warm-up writes for real. What it overwrites is saved and restored, which takes as much memory again. Say this of
        a large tensor whose contents mean nothing while graphs are captured.
        """
        storage = tensor.untyped_storage()
        self.arena.unsaved[storage._cdata] = storage

    # -- on and off ------------------------------------------------------------------------------

    def disable(self, model: torch.nn.Module | None = None) -> None:
        """Run the original code instead of every graph (of `model`), counted as eager, until enabled again."""
        for graph in self._of(model):
            graph.enabled = False

    def enable(self, model: torch.nn.Module | None = None) -> None:
        for graph in self._of(model):
            graph.enabled = True

    @contextmanager
    def disabled(self, model: torch.nn.Module | None = None) -> Iterator[None]:
        """Graphs are off inside. Afterwards each is as before, even if its module has left the tree meanwhile."""
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
        """Release every graph and restore every original callable."""
        for graph in list(self.graphs):
            graph.reset()
        self.graphs.clear()
        self.arena.free()
        self.arena = Arena()  # without the open intervals of the old graphs

    def report(self) -> Report:
        records = tuple(copy.deepcopy(graph.record) for graph in self.graphs)
        return Report(records, self.memory_bytes(), tuple(self.notes))

    def memory_bytes(self) -> int:
        """Memory that the pool reserved on the GPU, plus what its graphs own outside it."""
        outside = sum(graph.static_bytes for graph in self.graphs)
        return outside + sum(size for _, size in pool_segments(self.arena))


def pool_segments(arena: Arena) -> list[tuple[int, int]]:
    """(address, bytes) of each segment that CUDA reserved for the arena."""
    if arena.handle is None or not arena.streams:
        return []
    segments = torch.cuda.memory_snapshot()
    return [(s["address"], s["total_size"]) for s in segments if tuple(s["segment_pool_id"]) == arena.handle]
