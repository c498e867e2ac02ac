"""The pool: owns the memory of graphs, knows every graph in it, and reports captures, replays and eager runs.

Graphs of one arena share memory: a later capture reuses what an earlier one freed. A forward that waits for its
backward is an open interval. While it is open, only graphs captured between that forward and that backward may replay:
only they saw its activations as memory in use. The rule needs nothing but the order of captures, so a laptop and a GPU
refuse the same programs.

    capture index   1      2      3      4      5
                    F0     F1     B1     B0     G
    F0 waits for B0: only 2 and 3 may replay (admits_after = 1, admits_before = 4); G would overwrite its activations
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import finalize, ref

import torch

from rollgraph.graph.errors import CaptureError, MemoryInUse
from rollgraph.graph.outputs import StaticOutputs

# -- the report ------------------------------------------------------------------------------------
# Each graph updates its record; a report is a snapshot of all records of a pool.


@dataclass
class GraphRecord:
    """The counters of one graph. A forward and its backward are one graph here."""

    name: str
    backend: str
    surface: str = ""
    operations: int = 0  # dispatched ATen operations, forward and backward
    bytes_owned: int = 0
    captures: int = 0
    replays: int = 0  # forward replays
    backward_replays: int = 0
    eager_runs: Counter[str] = field(default_factory=Counter)  # reason -> count
    dropped: int = 0  # captures released to make room for newer ones
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """The records of a pool: a table when printed, JSON for tools."""

    graphs: tuple[GraphRecord, ...]
    pool_bytes: int
    notes: tuple[str, ...] = ()  # about all graphs

    @property
    def captures(self) -> int:
        return sum(graph.captures for graph in self.graphs)

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)

    @property
    def eager_runs(self) -> int:
        return sum(graph.eager_runs.total() for graph in self.graphs)

    def summary(self) -> str:
        recaptured = sum(graph.captures > 1 for graph in self.graphs)
        captured = sum(graph.captures > 0 for graph in self.graphs)
        return (
            f"graphs: {captured} captured, {recaptured} captured again, "
            f"{self.replays} replays, {self.eager_runs} eager runs"
        )

    def to_json(self) -> str:
        graphs = [vars(graph) for graph in self.graphs]
        report = {"summary": self.summary(), "pool_bytes": self.pool_bytes, "notes": self.notes, "graphs": graphs}
        return json.dumps(report, indent=2)

    def __str__(self) -> str:
        header = ("graph", "backend", "ops", "owned", "captures", "replays", "eager", "surface")
        lines = _table(header, list(map(_report_row, self.graphs)))
        for graph in self.graphs:
            lines += [f"  {graph.name}: {n} eager: {why}" for why, n in sorted(graph.eager_runs.items())]
            if graph.dropped:
                lines.append(
                    f"  {graph.name}: {graph.dropped} captures dropped for newer ones (on_mismatch='recapture')"
                )
            lines += [f"  {graph.name}: note: {note}" for note in graph.notes]
        lines += [f"  note: {note}" for note in self.notes]
        lines.append(
            f"{len(self.graphs)} graphs, {self.captures} captures, {self.replays} replays, "
            f"{self.eager_runs} eager runs, {_bytes(self.pool_bytes)} of pool memory"
        )
        return "\n".join(lines)


def _report_row(graph: GraphRecord) -> tuple[str, ...]:
    replays = str(graph.replays)
    if graph.backward_replays:
        replays += f"+{graph.backward_replays}"
    surface = graph.surface
    if len(surface) > 60:
        surface = surface[:57] + "..."
    return (
        graph.name,
        graph.backend,
        str(graph.operations),
        _bytes(graph.bytes_owned),
        str(graph.captures),
        replays,
        str(graph.eager_runs.total()),
        surface,
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    columns = zip(header, *rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    numeric = {2, 3, 4, 5, 6}

    def line(cells: Sequence[str]) -> str:
        padded = []
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            padded.append(cell.rjust(width) if column in numeric else cell.ljust(width))
        return "  ".join(padded).rstrip()

    return [line(header), "  ".join("-" * width for width in widths), *map(line, rows)]


def _bytes(count: float) -> str:
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} GiB"


# -- memory from the pool outside a capture --------------------------------------------------------
# Owns the calls to the CUDA allocator, and how long a pool lives without a graph. Knows nothing of arenas or graphs.

PoolHandle = tuple[int, int]  # from torch.cuda.graph_pool_handle()


def with_device_index(device: torch.device) -> torch.device:
    """Add the index of the current device to a plain `cuda`."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def allocating_from(device: int, handle: PoolHandle) -> Iterator[None]:
    """Allocate from the pool for the current stream, in any thread: a backward runs in threads of autograd."""
    torch.cuda.empty_cache()  # inside, the allocator does not do this even when memory runs out
    torch._C._cuda_beginAllocateCurrentStreamToPool(device, handle)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, handle)
        torch._C._cuda_releasePool(device, handle)  # beginning counted as one use of the pool


def retain_pool(device: int, handle: PoolHandle) -> None:
    """Keep a pool alive without a graph, until `release_pool`. The current stream must be capturable."""
    torch._C._cuda_beginAllocateCurrentStreamToPool(device, handle)
    torch._C._cuda_endAllocateToPool(device, handle)


def release_pool(device: int, handle: PoolHandle) -> None:
    torch._C._cuda_releasePool(device, handle)


# -- the pool --------------------------------------------------------------------------------------

FOREVER = sys.maxsize  # later than any capture
_thread = threading.get_ident
_graph_task = torch._C._current_graph_task_id


def becomes_free(is_used: Callable[[], Any], timeout_s: float) -> bool:
    """Return whether memory becomes free within some seconds.

    An autograd graph may be part of a reference cycle. Threads of autograd and Gloo drop their last tensors a little
    after their work is done.
    """
    if not is_used():
        return True
    gc.collect()
    deadline = time.monotonic() + timeout_s
    while is_used():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


class CapturedGraph(Protocol):
    """A captured function or callable, as its pool sees it."""

    record: GraphRecord
    enabled: bool
    target: Any  # the module or function it was captured from
    static_bytes: int  # memory it owns outside the arena

    def reset(self) -> None: ...


class Arena:
    """Memory shared by the captures made in it, their order, and their open intervals."""

    def __init__(self, handle: PoolHandle | None = None) -> None:
        self.handle = handle
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.scratch: dict[Any, torch.Tensor] = {}  # in use only during one backward, so all graphs share it
        self.captures = 0
        self._recordings = 0
        # Open intervals: forward -> (graph, backward, admits_after and admits_before until then, the autograd node).
        # An interval is abandoned when its node is gone: no backward can run any more.
        self._open: dict[int, tuple[str, int, int, int, ref[Any]]] = {}
        self.admits_after = -1  # captures strictly between these two indices may replay
        self.admits_before = FOREVER
        self.lock = threading.RLock()  # held during a replay: the memory is shared, so replays take turns
        self.static_outputs: list[StaticOutputs] = []  # of the arena's recordings
        self.owning_thread = 0  # the thread that may use these outputs
        self.allocations: list[torch.Tensor] = []  # see GraphPool.allocate
        self.unsaved: dict[int, torch.UntypedStorage] = {}  # by key; see GraphPool.leave_unsaved
        # Devices on which the CUDA pool lives even without a recording.
        self._retained_pools: dict[torch.device, finalize[Any, Any]] = {}

    def cuda_handle(self) -> PoolHandle:
        if self.handle is None:
            self.handle = torch.cuda.graph_pool_handle()
        return self.handle

    def retain(self) -> None:
        """Count a recording that uses the arena's CUDA pool."""
        self._recordings += 1

    def release(self) -> None:
        """Count a released recording. CUDA frees a pool with its last graph; the handle is then invalid."""
        self._recordings -= 1
        if self._recordings == 0:
            self.handle = None

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The capture stream of a device. There is one, because the allocator reuses blocks only within a stream."""
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        return self.streams[device]

    @contextmanager
    def on_stream(self, device: torch.device) -> Iterator[None]:
        """Run on the capture stream: after everything launched before the block, before everything launched after."""
        stream = self.stream(device)
        caller = torch.cuda.current_stream(device)
        stream.wait_stream(caller)
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                yield
        finally:
            caller.wait_stream(stream)  # after a failure too: a rollback must wait for work that still runs there

    def allocating(self, device: torch.device) -> AbstractContextManager[None]:
        """Allocate from the arena's memory inside. Call this on the arena's stream."""
        if device not in self._retained_pools:
            handle = self.cuda_handle()
            retain_pool(device.index, handle)
            self.retain()
            self._retained_pools[device] = finalize(self, release_pool, device.index, handle)
            self._retained_pools[device].atexit = False
        return allocating_from(device.index, self.cuda_handle())

    def free(self) -> None:
        """Free the memory that belongs to no recording."""
        self.allocations.clear()
        self.unsaved.clear()
        for release in self._retained_pools.values():
            release()
            self.release()
        self._retained_pools.clear()

    def next_capture_index(self) -> int:
        """Return the place of a new recording in the order of captures."""
        self.captures += 1
        return self.captures

    # -- threads ---------------------------------------------------------------------------------

    def enter_thread(self, graph: str) -> None:
        """Make the calling thread the owner; raise MemoryInUse while another thread still refers to an output.

        That thread may be reading the output right now. A backward that runs in one of autograd's own threads belongs
        to the thread that waits for it.
        """
        if self.owning_thread == _thread() or _graph_task() != -1:
            return
        if self._outputs_referenced():
            gc.collect()  # an output may belong to an unreachable reference cycle
            if self._outputs_referenced():
                raise MemoryInUse(
                    f"graph {graph!r} is used by two threads, and the other thread still refers to an output from its "
                    "pool: a replay would overwrite it. Clone the output and drop it before another thread's turn, or "
                    "give each thread its own graph in its own pool"
                )
        self.owning_thread = _thread()

    def _outputs_referenced(self) -> bool:
        return any(outputs.is_referenced() for outputs in self.static_outputs)

    # -- open intervals --------------------------------------------------------------------------

    def admit(self, capture: int, graph: str) -> None:
        """Raise MemoryInUse for a replay that would overwrite memory of an open interval."""
        if self.admits_after < capture < self.admits_before:
            return
        while self._open and next(reversed(self._open.values()))[4]() is None:  # opened last, then abandoned
            _, (_, _, self.admits_after, self.admits_before, _) = self._open.popitem()
        if self.admits_after < capture < self.admits_before:
            return

        def is_refused() -> bool:
            self._close_abandoned()
            return not self.admits_after < capture < self.admits_before

        if becomes_free(is_refused, timeout_s=0.05 if torch.cuda.is_initialized() else 0):
            return
        waiting = next(name for forward, (name, backward, *_) in self._open.items() if not forward < capture < backward)
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
        """Open the interval of an autograd node. Its forward was admitted, so this graph has no other open interval."""
        self._open[forward] = (graph, backward, self.admits_after, self.admits_before, ref(node))
        if forward > self.admits_after:
            self.admits_after = forward
        if backward < self.admits_before:
            self.admits_before = backward

    def is_open(self, forward: int, node: Any) -> bool:
        interval = self._open.get(forward)
        return interval is not None and interval[4]() is node

    def close(self, forward: int) -> None:
        last, interval = self._open.popitem()
        if last == forward:  # the usual order: last opened, first closed
            _, _, self.admits_after, self.admits_before, _ = interval
            return
        self._open[last] = interval
        del self._open[forward]
        remaining = list(self._open.items())
        self._open.clear()
        self.admits_after, self.admits_before = -1, FOREVER
        for start, (graph, end, _, _, node) in remaining:
            self._open[start] = (graph, end, self.admits_after, self.admits_before, node)
            self.admits_after = max(self.admits_after, start)
            self.admits_before = min(self.admits_before, end)

    def _close_abandoned(self) -> None:
        """Close the intervals whose backward can no longer run."""
        for forward in [f for f, (*_, node) in reversed(self._open.items()) if node() is None]:
            self.close(forward)

    def is_backward_pending(self, forward: int) -> bool:
        """Return whether the backward of this forward is pending and can still run."""
        self._close_abandoned()
        return forward in self._open

    def open_intervals(self) -> list[str]:
        self._close_abandoned()
        return [graph for graph, *_ in self._open.values()]


class GraphPool:
    """Owns its graphs and their memory. Each worker has one pool.

    `handle` is a raw pool of `torch.cuda.graph_pool_handle()`, to share memory with other captures.
    """

    def __init__(self, handle: PoolHandle | None = None) -> None:
        self.arena = Arena(handle)
        self.graphs: list[CapturedGraph] = []
        self.uncaptured: list[CapturedGraph] = []  # until their first call
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
        if graph in self.uncaptured:
            self.uncaptured.remove(graph)
        self.graphs.append(graph)

    # -- memory ----------------------------------------------------------------------------------

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Reserve memory on a GPU in one piece, before any capture. Captures and `allocate` use it later.

        We allocate one tensor from the pool and drop it at once. PyTorch's caching allocator then keeps its segment in
        the pool as free memory, because it never returns the segments of a live pool to CUDA. Later allocations are cut
        from that segment. Without it the pool grows piece by piece as captures need memory, and a larger tensor fits
        into none of the pieces.
        """
        device = with_device_index(device)
        if device.type == "cuda" and nbytes:
            with self.arena.on_stream(device), self.arena.allocating(device):
                torch.empty(nbytes, dtype=torch.uint8, device=device)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros for graphs that are captured later, in memory that earlier graphs overwrite in their replays.

        The contents hold only as long as no earlier graph replays. The tensor lives as long as the pool, and captures
        neither save nor restore it. On a GPU it lies in pool memory that earlier captures left free, or in new memory
        of the pool; on a CPU it is ordinary memory.
        """
        device = with_device_index(device)
        if device.type == "cuda":
            with self.arena.on_stream(device), self.arena.allocating(device):
                tensor = torch.zeros(shape, dtype=dtype, device=device)
        else:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.arena.allocations.append(tensor)
        self.leave_unsaved(tensor)
        return tensor

    def leave_unsaved(self, tensor: torch.Tensor) -> None:
        """Let captures change this tensor without restoring it: all of its storage.

        Warm-up really writes. Each storage it writes is saved first and restored afterwards, which takes the same
        memory a second time. Use this for a large tensor whose contents mean nothing while graphs are captured.
        """
        storage = tensor.untyped_storage()
        self.arena.unsaved[storage._cdata] = storage

    # -- on and off ------------------------------------------------------------------------------

    def disable(self, model: torch.nn.Module | None = None) -> None:
        """Run the original code in place of every graph (of `model`) until `enable`. Such calls count as eager."""
        for graph in self._graphs_of(model):
            graph.enabled = False

    def enable(self, model: torch.nn.Module | None = None) -> None:
        for graph in self._graphs_of(model):
            graph.enabled = True

    @contextmanager
    def disabled(self, model: torch.nn.Module | None = None) -> Iterator[None]:
        """Disable graphs inside, then restore each one, even if its module has left the tree meanwhile."""
        enabled_before = [(graph, graph.enabled) for graph in self._graphs_of(model)]
        try:
            self.disable(model)
            yield
        finally:
            for graph, enabled in enabled_before:
                graph.enabled = enabled

    def _graphs_of(self, model: torch.nn.Module | None) -> Sequence[CapturedGraph]:
        graphs = [*self.graphs, *self.uncaptured]
        if model is None:
            return graphs
        members = set(model.modules())
        return [g for g in graphs if isinstance(g.target, torch.nn.Module) and g.target in members]

    # -- end of life and report ------------------------------------------------------------------

    def reset(self) -> None:
        """Release every graph and restore every original callable."""
        for graph in self._graphs_of(None):
            graph.reset()
        self.graphs.clear()
        self.uncaptured.clear()
        self.arena.free()
        self.arena = Arena()  # without the open intervals of the old graphs

    def report(self) -> Report:
        records = tuple(copy.deepcopy(graph.record) for graph in self.graphs)
        return Report(records, self.memory_bytes(), tuple(self.notes))

    def memory_bytes(self) -> int:
        """Memory that the pool reserved on the GPU, plus memory that its graphs own outside it."""
        outside = sum(graph.static_bytes for graph in self.graphs)
        return outside + sum(size for _, size in pool_segments(self.arena))


def pool_segments(arena: Arena) -> list[tuple[int, int]]:
    """(address, bytes) of each segment that CUDA reserved for the arena."""
    if arena.handle is None or not arena.streams:
        return []
    segments = torch.cuda.memory_snapshot()
    return [(s["address"], s["total_size"]) for s in segments if tuple(s["segment_pool_id"]) == arena.handle]
