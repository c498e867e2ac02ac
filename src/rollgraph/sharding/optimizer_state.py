"""The state of the optimizer: fp32 master weights and two moments for the shard of each bucket that this rank owns.

Owns the memory, on the device or on the host, and how it reaches an update: chunk by chunk. Chunks of state on the
device are views of it. Chunks of state on the host pass through buffers on the device, so that reading the next chunk
and writing the last one overlap with the update of this one. Knows nothing about the arithmetic of an update.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollgraph.sharding.copy_streams import CopyStreams
from rollgraph.sharding.pinned_memory import allocate_on_host
from rollgraph.sharding.state_memory import (
    CHUNK,
    MASTER,
    STREAM_BUFFERS,
    Offload,
    StateFormat,
    chunk_elements,
    state_fields,
)

ShardState = dict[str, Tensor]  # the fields of one shard, or of a part of one, by name


@dataclass(frozen=True)
class StateChunk:
    """A part of one shard that is updated at a time."""

    shard: int  # which of the shards
    start: int  # in the shard, in elements
    end: int
    first: int  # the place of its first element among all shards
    kept: ShardState  # the memory that holds its state between updates

    @property
    def elements(self) -> int:
        return self.end - self.start


class OptimizerState:
    """The state of shards with these numbers of elements. Its memory never moves."""

    def __init__(self, shards: Sequence[int], state: StateFormat, offload: Offload, device: torch.device | str) -> None:
        self.format = state
        self.offload = offload
        self.fields = state_fields(state)
        self._device = torch.device(device)
        self._elements = list(shards)
        self._reader: threading.Event | None = None  # set once whoever reads the state has finished
        self._copies: CopyStreams | None = None
        if offload == "host":
            self.shards = self._allocate_on_host()
        else:
            self.shards = [self._allocate(elements) for elements in self._elements]
        self.clear_moments()
        self.chunks = self._divide()
        if offload == "host":
            largest = chunk_elements(self._elements)
            buffers = [self._allocate(largest) for _ in range(STREAM_BUFFERS)]
            self._streamed = []  # where each chunk is during an update
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

    def _divide(self) -> list[StateChunk]:
        """State that needs no copy of any kind is updated shard by shard: fewer and larger operations."""
        in_place = self.format == "fp32" and self.offload == "none"
        chunks = []
        first = 0
        for shard, elements in enumerate(self._elements):
            step = elements if in_place else CHUNK
            for start in range(0, elements, step):
                end = min(start + step, elements)
                kept = self.part(self.shards[shard], start, end)
                chunks.append(StateChunk(shard, start, end, first + start, kept))
            first += elements
        return chunks

    def part(self, state: Mapping[str, Tensor], start: int, end: int) -> ShardState:
        """The fields of the elements from `start`, which begins a block, to `end`."""
        found = {}
        for field in self.fields:
            found[field.name] = state[field.name][start // field.elements_per_entry : field.entries(end)]
        return found

    @torch.no_grad()
    def clear_moments(self) -> None:
        """Set the moments to what they are before the first update."""
        self.before_writing()
        for state in self.shards:
            for field in self.fields:
                if field is not MASTER:
                    state[field.name].fill_(field.initial)

    # -- chunk by chunk ----------------------------------------------------------------------------

    def stream(self) -> Iterator[tuple[StateChunk, ShardState]]:
        """Each chunk with its state on the device; what is written to that is kept when the next chunk is asked for.

        With state on the host, a chunk is read while the two before it are updated and written.
        """
        if self._copies is None:
            for chunk in self.chunks:
                yield chunk, chunk.kept
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
            self._copies.write(number % STREAM_BUFFERS, _pairs(self._streamed[number], chunk.kept))

    def _read(self, copies: CopyStreams, number: int) -> None:
        copies.read(number % STREAM_BUFFERS, _pairs(self.chunks[number].kept, self._streamed[number]))

    def _refuse_capture(self) -> None:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "an update that streams its state from the host cannot be captured: it waits for copies and for the "
                "writer of a checkpoint; use offload='none', or capture everything but the update"
            )

    # -- others who read and write it --------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until the state on the host is that of the last update."""
        if self._copies is not None:
            self._copies.synchronize()

    def before_writing(self) -> None:
        """Call this before the state is changed elsewhere than in an update."""
        self.synchronize()
        self.wait_for_reader()

    def lend(self) -> threading.Event:
        """Let somebody read the state until they set the event. Until then, it does not change."""
        self.synchronize()
        self._reader = threading.Event()
        return self._reader

    def wait_for_reader(self) -> None:
        """Wait until nobody reads the state that was lent. An update does so before it begins."""
        if self._reader is not None:
            self._reader.wait()
            self._reader = None


def _pairs(sources: ShardState, targets: ShardState) -> list[tuple[Tensor, Tensor]]:
    return [(sources[name], targets[name]) for name in sources]
