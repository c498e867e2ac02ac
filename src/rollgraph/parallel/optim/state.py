"""Optimizer state: master weights and moments of shards, on the device or in host memory.

Owns the memory, and streams it to an update chunk by chunk. Chunks of state on the device are views. Chunks of state on
the host pass through buffers on the device, so that reading the next chunk and writing the previous one overlap with
the update of this one. Knows nothing about the arithmetic of an update.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from rollgraph.parallel.data.bucket_plan import (
    CHUNK,
    MASTER,
    STREAM_BUFFERS,
    Offload,
    StateFormat,
    chunk_elements,
    state_fields,
)

# -- pinned host memory ----------------------------------------------------------------------------
# PyTorch's allocator of pinned memory may round each request up to a power of two, which wastes tens of GiB for the
# state of a large model. Here all tensors are in one mapping, whose pages are locked at once.

_ALIGNMENT = 256  # bytes: every tensor starts at a multiple of it


class PinningError(RuntimeError):
    """The system refused to lock the host memory."""

    def __init__(self, nbytes: int, code: int) -> None:
        super().__init__(
            f"{nbytes / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {code}): "
            "is there enough memory, and does the container allow it?"
        )
        self.nbytes = nbytes
        self.code = code


def allocate_on_host(sizes: Sequence[tuple[int, torch.dtype]], device: torch.device | str) -> list[Tensor]:
    """Zero tensors in host memory with these `sizes` (entries and dtype); pinned if the device is a GPU."""
    if torch.device(device).type != "cuda":
        return [torch.zeros(entries, dtype=dtype) for entries, dtype in sizes]
    starts = []
    total = 0
    for entries, dtype in sizes:
        starts.append(total)
        total += -(-entries * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    whole = _map_and_pin(total)
    tensors = []
    for (entries, dtype), start in zip(sizes, starts, strict=True):
        tensors.append(whole[start : start + entries * dtype.itemsize].view(dtype))
    return tensors


def _map_and_pin(nbytes: int) -> Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    memory = _PinnedMapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel may support neither
        memory.madvise(mmap.MADV_DONTFORK)  # a fork would make the pages copy-on-write
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    memory.pin(whole.data_ptr(), nbytes)
    return whole


class _PinnedMapping(mmap.mmap):
    """A mapping whose pages are unlocked before it is unmapped."""

    address = 0  # of the pages that are locked

    def pin(self, address: int, nbytes: int) -> None:
        self._runtime = torch.cuda.cudart()
        code = int(self._runtime.cudaHostRegister(address, nbytes, 0))
        if code:
            raise PinningError(nbytes, code)
        self.address = address

    def __del__(self) -> None:
        if self.address:
            self._runtime.cudaHostUnregister(self.address)


# -- copies that overlap with computation ----------------------------------------------------------
# Reads and writes have a CUDA stream each, so both directions are busy at once. The host never waits. On a CPU every
# copy runs immediately, in the same order.

Copies = Iterable[tuple[Tensor, Tensor]]  # from, to


class CopyStreams:
    """Copies between the host and a ring of device buffers. A buffer is filled, used and written back, repeatedly.

    Between `wait_for_read` and `write` it belongs to the current stream.
    """

    def __init__(self, buffers: int, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._reads = torch.cuda.Stream(device)
            self._writes = torch.cuda.Stream(device)
            self._is_read = [torch.cuda.Event() for _ in range(buffers)]
            self._is_used = [torch.cuda.Event() for _ in range(buffers)]
            self._is_written = [torch.cuda.Event() for _ in range(buffers)]
            torch.cuda.current_stream(device).synchronize()  # the buffers were just allocated there

    def read(self, buffer: int, copies: Copies) -> None:
        """Start copies from the host, after the buffer's previous contents are written."""
        if not self._cuda:
            _copy(copies)
            return
        self._reads.wait_event(self._is_written[buffer])
        with torch.cuda.stream(self._reads):
            _copy(copies)
        self._is_read[buffer].record(self._reads)

    def wait_for_read(self, buffer: int) -> None:
        """Let the current stream wait for the copies into a buffer."""
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_event(self._is_read[buffer])

    def write(self, buffer: int, copies: Copies) -> None:
        """Start copies to the host, after all work queued on the current stream."""
        if not self._cuda:
            _copy(copies)
            return
        self._is_used[buffer].record(torch.cuda.current_stream(self._device))
        self._writes.wait_event(self._is_used[buffer])
        with torch.cuda.stream(self._writes):
            _copy(copies)
        self._is_written[buffer].record(self._writes)

    def synchronize(self) -> None:
        """Block the host until all copies have finished."""
        if self._cuda:
            self._writes.synchronize()
            self._reads.synchronize()


def _copy(copies: Copies) -> None:
    for source, target in copies:
        target.copy_(source, non_blocking=True)


# -- the state -------------------------------------------------------------------------------------

ShardState = dict[str, Tensor]  # the fields of a shard, or of a part of one, by name


@dataclass(frozen=True)
class StateChunk:
    """The part of a shard that one update operation covers."""

    shard: int  # the index of the shard
    start: int  # in the shard, in elements
    end: int
    first: int  # the index of its first element among the elements of all shards
    stored: ShardState  # the memory that holds its state between updates

    @property
    def elements(self) -> int:
        return self.end - self.start


class OptimizerState:
    """The state of all shards of a rank; `shards` has their numbers of elements. The memory never moves."""

    def __init__(self, shards: Sequence[int], state: StateFormat, offload: Offload, device: torch.device | str) -> None:
        self.format = state
        self.offload = offload
        self.fields = state_fields(state)
        self._device = torch.device(device)
        self._elements = list(shards)
        self._reader_done: threading.Event | None = None  # set once the reader of the lent state has finished
        self._copies: CopyStreams | None = None
        if offload == "host":
            self.shards = self._allocate_on_host()
        else:
            self.shards = [self._allocate(elements) for elements in self._elements]
        self.clear_moments()
        self.chunks = self._split_into_chunks()
        if offload == "host":
            largest = chunk_elements(self._elements)
            buffers = [self._allocate(largest) for _ in range(STREAM_BUFFERS)]
            self._streamed = []  # the device memory of each chunk during an update
            for number, chunk in enumerate(self.chunks):
                self._streamed.append(self.part(buffers[number % STREAM_BUFFERS], 0, chunk.elements))
            self._copies = CopyStreams(STREAM_BUFFERS, self._device)

    def _allocate(self, elements: int) -> ShardState:
        return {
            field.name: torch.zeros(field.entries(elements), dtype=field.dtype, device=self._device)
            for field in self.fields
        }

    def _allocate_on_host(self) -> list[ShardState]:
        sizes = [(field.entries(elements), field.dtype) for elements in self._elements for field in self.fields]
        tensors = iter(allocate_on_host(sizes, self._device))
        return [{field.name: next(tensors) for field in self.fields} for _ in self._elements]

    def _split_into_chunks(self) -> list[StateChunk]:
        """Divide shards into chunks. State that needs no copies is updated in whole shards: fewer operations."""
        in_place = self.format == "fp32" and self.offload == "none"
        chunks = []
        first = 0
        for shard, elements in enumerate(self._elements):
            step = elements if in_place else CHUNK
            for start in range(0, elements, step):
                end = min(start + step, elements)
                stored = self.part(self.shards[shard], start, end)
                chunks.append(StateChunk(shard, start, end, first + start, stored))
            first += elements
        return chunks

    def part(self, state: Mapping[str, Tensor], start: int, end: int) -> ShardState:
        """The fields of the elements from `start`, the start of a block, to `end`."""
        fields = {}
        for field in self.fields:
            fields[field.name] = state[field.name][start // field.elements_per_entry : field.entries(end)]
        return fields

    @torch.no_grad()
    def clear_moments(self) -> None:
        """Reset the moments to their initial values."""
        self.before_writing()
        for state in self.shards:
            for field in self.fields:
                if field is not MASTER:
                    state[field.name].fill_(field.initial)

    # -- chunk by chunk ----------------------------------------------------------------------------

    def stream(self) -> Iterator[tuple[StateChunk, ShardState]]:
        """Yield each chunk with its state on the device. Changes to the state are stored when the iteration continues.

        With state on the host, a chunk is read while the two before it are updated and written.
        """
        if self._copies is None:
            for chunk in self.chunks:
                yield chunk, chunk.stored
            return
        self.wait_for_reader()
        self._refuse_capture()
        ahead = STREAM_BUFFERS - 1
        for number in range(min(ahead, len(self.chunks))):
            self._read(self._copies, number)
        for number, chunk in enumerate(self.chunks):
            if number + ahead < len(self.chunks):
                self._read(self._copies, number + ahead)
            self._copies.wait_for_read(number % STREAM_BUFFERS)
            yield chunk, self._streamed[number]
            self._copies.write(number % STREAM_BUFFERS, _pairs(self._streamed[number], chunk.stored))

    def _read(self, copies: CopyStreams, number: int) -> None:
        copies.read(number % STREAM_BUFFERS, _pairs(self.chunks[number].stored, self._streamed[number]))

    def _refuse_capture(self) -> None:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "an update that streams its state from the host cannot be captured: it waits for copies and for the "
                "writer of a checkpoint; use offload='none', or capture everything but the update"
            )

    # -- other readers and writers -----------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until the state on the host includes the last update."""
        if self._copies is not None:
            self._copies.synchronize()

    def before_writing(self) -> None:
        """Call this before the state is changed outside of an update."""
        self.synchronize()
        self.wait_for_reader()

    def lend(self) -> threading.Event:
        """Lend the state to a reader, who sets the returned event when done. Until then, the state does not change."""
        self.synchronize()
        self._reader_done = threading.Event()
        return self._reader_done

    def wait_for_reader(self) -> None:
        """Wait until the reader of the lent state is done. Each update does so first."""
        if self._reader_done is not None:
            self._reader_done.wait()
            self._reader_done = None


def _pairs(sources: ShardState, targets: ShardState) -> list[tuple[Tensor, Tensor]]:
    return [(sources[name], targets[name]) for name in sources]
