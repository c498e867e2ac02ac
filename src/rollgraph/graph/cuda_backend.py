"""The CUDA backend: a recording is a `torch.cuda.CUDAGraph`.

Owns the capture on a CUDA stream (generators, cuBLAS workspaces, memory pool) and the cleanup of a broken capture.
Knows nothing of functions, modules or autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rollgraph.graph.backend import PassFunction, Recording
from rollgraph.graph.host_reads import refuse_copy_to_host, refuse_host_read, refusing_host_reads
from rollgraph.graph.pool import Arena, pool_segments, with_device_index
from rollgraph.graph.state.transaction import no_gc
from rollgraph.graph.state.undo_log import OperationMode, storage_of, tensors_in
from rollgraph.graph.surface import StaticTensors

_increment_version = torch._C._increment_version


class CaptureMonitor(OperationMode):
    """Sees each operation of a CUDA capture. Refuses host reads before they break it; keeps tensors it reads alive."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.external: dict[int, Tensor] = {}  # tensors from outside that operations read
        self._kept_storages: set[int] = set()  # keys of their storages
        self.created: dict[int, StorageWeakRef] = {}  # weak, but a key is not reused while its reference exists

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_host_read(func, args, kwargs)
        refuse_copy_to_host(func, args, kwargs)
        self.operations += 1
        inputs = set()
        for tensor in tensors_in((args, kwargs)):
            storage = storage_of(tensor)
            if storage is None or storage._cdata in self.created:
                continue
            inputs.add(storage._cdata)
            # Keep a leaf itself, to notice `.data =`. For other tensors keep the memory but not the autograd graph.
            if tensor.is_leaf:
                self.external[id(tensor)] = tensor
                self._kept_storages.add(storage._cdata)
            elif storage._cdata not in self._kept_storages:
                self.external[-storage._cdata] = tensor.detach()
                self._kept_storages.add(storage._cdata)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if storage is not None and storage._cdata not in inputs:
                self.created.setdefault(storage._cdata, StorageWeakRef(storage))
        return result

    def forget(self) -> None:
        """Drop every reference. A thread of autograd may keep the monitor of a backward a little longer than we do."""
        self.external.clear()
        self.created.clear()


class CudaRecording:
    """A CUDA graph with its static inputs and outputs."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: StaticTensors,
        outputs: list[Tensor | None],
        monitor: CaptureMonitor,
        arena: Arena,
    ) -> None:
        self._arena = arena
        self.operations = monitor.operations
        self.external: Sequence[Tensor] = list(monitor.external.values())
        self.nbytes = 0
        self._graph = graph
        self._fill = inputs.fill
        self._launch = super(torch.cuda.CUDAGraph, graph).replay
        self.outputs = outputs
        self._released = False
        self._written = [o for o in outputs if o is not None and not o.is_inference()]

    def seal(self, versions: bool = True) -> None:
        if not versions:
            self._written = []

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        self._fill(inputs)
        self._launch()
        if self._written:  # so that autograd refuses a backward that saved an old output
            _increment_version(self._written)
        return self.outputs

    def release(self) -> None:
        if not self._released:
            self._graph.reset()
            self._arena.release()
        self._released = True
        self.outputs = []
        self._written = []
        self.external = ()


class CudaBackend:
    name = "cuda"
    records = True
    executes = False
    record_call = None

    def __init__(self, device: torch.device) -> None:
        self.device = with_device_index(device)

    @contextmanager
    def stream_context(self, arena: Arena, in_pool: bool = False) -> Iterator[None]:
        with arena.on_stream(self.device), arena.allocating(self.device) if in_pool else nullcontext():
            yield

    def record(
        self,
        run_pass: PassFunction,
        inputs: StaticTensors,
        arena: Arena,
        generators: Sequence[torch.Generator],
        shared_state: dict[Any, Any],
    ) -> Recording:
        graph = torch.cuda.CUDAGraph()
        monitor = CaptureMonitor()
        for generator in generators:
            if generator.device.type == "cuda":
                graph.register_generator_state(generator)
        with self.stream_context(arena), no_gc():
            torch.cuda.synchronize(self.device)
            torch._C._cuda_clearCublasWorkspaces()  # so that the graph allocates its workspace in its pool
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated(self.device)
            outputs = self._capture(graph, run_pass, inputs, arena, monitor)
            torch._C._cuda_clearCublasWorkspaces()
            recording = CudaRecording(graph, inputs, outputs, monitor, arena)
            recording.nbytes = torch.cuda.memory_allocated(self.device) - before
        recording.external = _outside_pool(recording.external, arena)
        monitor.forget()
        return recording

    def _capture(
        self,
        graph: torch.cuda.CUDAGraph,
        run_pass: PassFunction,
        inputs: StaticTensors,
        arena: Arena,
        monitor: CaptureMonitor,
    ) -> list[Tensor | None]:
        arena.retain()
        try:
            graph.capture_begin(pool=cast(Any, arena.cuda_handle()), capture_error_mode="thread_local")
            with refusing_host_reads(), monitor:
                outputs = run_pass(inputs.tensors)
            graph.capture_end()
        except BaseException:
            self._abandon(graph, arena)
            raise
        return outputs

    def _abandon(self, graph: torch.cuda.CUDAGraph, arena: Arena) -> None:
        """End a broken capture, and clean up state that PyTorch leaves behind when CUDA invalidates a capture."""
        try:
            graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.device.index, arena.cuda_handle())
            generator = torch.cuda.default_generators[self.device.index]
            generator.graphsafe_set_state(torch.Generator(self.device))  # the old state still counts as captured
            arena.handle = None
        graph.reset()
        arena.release()


def _outside_pool(tensors: Sequence[Tensor], arena: Arena) -> list[Tensor]:
    """The tensors outside the arena's pool. (The pool keeps its memory alive by itself.)"""
    segments = pool_segments(arena)
    outside = []
    for tensor in tensors:
        address = tensor.data_ptr()
        if not any(start <= address < start + size for start, size in segments):
            outside.append(tensor)
    return outside
