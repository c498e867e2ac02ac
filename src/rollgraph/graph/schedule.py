"""Schedules: the order of forwards and backwards in a pipeline, and the buffers that they can share.

Owns the meaning of an order and the live-range planner. It only decides: it touches no tensor and knows nothing of
capture, pools or modules, so all small orders can be tested exhaustively.

An order lists `+c` (the forward of the next microbatch of chunk c, counted from 1) and `-c` (the backward of the
oldest pending microbatch of chunk c). A chunk has one or more layers: its forward runs them in order, its backward in
reverse.

    >>> schedule = parse_order([1, 1, -1, 1, -1, -1], callables=2)  # 1F1B: one chunk of 2 layers
    >>> schedule.microbatches, schedule.entries  # 3 microbatches of 2 layers
    (3, 6)
    >>> ranges = schedule.live_ranges()  # by entry: steps between its forward and its backward
    >>> ranges
    [(0, 5), (1, 4), (2, 9), (3, 8), (6, 11), (7, 10)]
    >>> slots = assign_slots(ranges, keys=["layer 0", "layer 1"] * 3)
    >>> slots  # the third microbatch moves into the buffers of the first
    [0, 1, 2, 3, 0, 1]

Each chunk is checked by itself, because a rank sees only its part of the pipeline. The pipeline must make sure that
chunk 2 gets the results of chunk 1, from this rank or from another.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, overload

from rollgraph.graph.errors import OrderError


@dataclass(frozen=True)
class SchedulePass:
    """One layer's forward or backward for one microbatch. All indexes count from 0."""

    kind: Literal["forward", "backward"]
    chunk: int
    microbatch: int
    layer: int  # within the chunk
    position: int  # in the order the step came from


@dataclass(frozen=True)
class Schedule:
    """A legal order, expanded layer by layer. Made by `parse_order` or `sequential`.

    An *entry* is one (chunk, microbatch, layer), captured as one graph. A *callable* is one (chunk, layer): the user's
    module or function, shared by all of its microbatches.
    """

    steps: tuple[SchedulePass, ...]  # in execution order
    layers_per_chunk: tuple[int, ...]
    microbatches: int

    @property
    def callables(self) -> int:
        return sum(self.layers_per_chunk)

    @property
    def entries(self) -> int:
        return self.microbatches * self.callables

    @overload
    def entry(self, step: SchedulePass, /) -> int: ...
    @overload
    def entry(self, chunk: int, microbatch: int, layer: int) -> int: ...
    def entry(self, chunk: SchedulePass | int, microbatch: int = -1, layer: int = -1) -> int:
        """Index in the flat list with one item per entry: by chunk, then microbatch, then layer.

        This is the layout of Transformer Engine's `_order`, so lists can be passed to either.
        """
        if isinstance(chunk, SchedulePass):
            return self.entry(chunk.chunk, chunk.microbatch, chunk.layer)
        first = self.callable_index(chunk, 0)
        _check_index("microbatch", microbatch, self.microbatches)
        _check_index("layer", layer, self.layers_per_chunk[chunk])
        return self.microbatches * first + microbatch * self.layers_per_chunk[chunk] + layer

    def callable_index(self, chunk: int, layer: int) -> int:
        """Index in the list of distinct layers, which are those of chunk 0, then of chunk 1, ..."""
        _check_index("chunk", chunk, len(self.layers_per_chunk))
        _check_index("layer", layer, self.layers_per_chunk[chunk])
        return sum(self.layers_per_chunk[:chunk]) + layer

    def live_ranges(self) -> list[tuple[int, int]]:
        """For each entry, the first and last step that need its buffers: its forward and its backward.

        An entry without a backward is live until the last step, because no step says when its output was read.
        """
        starts = [0] * self.entries
        ends = [len(self.steps) - 1] * self.entries
        for index, step in enumerate(self.steps):
            bounds = starts if step.kind == "forward" else ends
            bounds[self.entry(step)] = index
        return list(zip(starts, ends, strict=True))


def parse_order(
    order: Sequence[int],
    callables: int,
    layers_per_chunk: int | Sequence[int] | None = None,
    forward_only: bool = False,
) -> Schedule:
    """Check `order` and expand it for `callables` layers, which `layers_per_chunk` assigns to chunks.

    A single number gives every chunk that many layers; None divides the layers evenly. An illegal order raises
    `OrderError`, which names the position.
    """
    order = tuple(order)
    _check_elements(order)
    _check_pairing(order, forward_only)
    _check_chunks(order)
    layers = _layers_of_chunks(max(order), callables, layers_per_chunk)
    return Schedule(tuple(_expand(order, layers)), layers, order.count(1))


def sequential(callables: int, forward_only: bool = False) -> Schedule:
    """The default order: one microbatch, forward through every callable, then backward in reverse."""
    return parse_order([1] if forward_only else [1, -1], callables, forward_only=forward_only)


def _check_elements(order: Sequence[int]) -> None:
    """Every element must be `+chunk` or `-chunk`."""
    if not order:
        raise OrderError("order is empty: it needs at least one forward")
    for position, value in enumerate(order):
        at = f"order[{position}] = {value!r}"
        if isinstance(value, float):
            raise OrderError(
                f"{at}: not an int; weight-gradient half-steps (such as -1.5) are not supported, "
                "-chunk is the whole backward"
            )
        if isinstance(value, bool) or not isinstance(value, int):
            raise OrderError(f"{at}: not an int but {type(value).__name__}")
        if value == 0:
            raise OrderError(f"{at}: chunks are numbered from 1, so that the sign can mean the direction")


def _check_pairing(order: Sequence[int], forward_only: bool) -> None:
    """Every backward must follow its forward, and every forward must have a backward."""
    forwards: defaultdict[int, list[int]] = defaultdict(list)  # chunk -> positions
    backwards: Counter[int] = Counter()
    for position, value in enumerate(order):
        chunk = abs(value)
        if value > 0:
            forwards[chunk].append(position)
            continue
        at = f"order[{position}] = {value}: backward of chunk {chunk}"
        if forward_only:
            raise OrderError(f"{at} in a forward-only order")
        if backwards[chunk] == len(forwards[chunk]):
            so_far = f"{len(forwards[chunk])} forward, {backwards[chunk]} backward so far"
            raise OrderError(f"{at} before its forward ({so_far})")
        backwards[chunk] += 1
    if forward_only:
        return
    for chunk, positions in sorted(forwards.items()):
        pending = positions[backwards[chunk] :]
        if pending:
            raise OrderError(
                f"order[{pending[0]}] = {chunk}: forward of chunk {chunk} never followed by its backward "
                f"({len(positions)} forward, {backwards[chunk]} backward in all, {len(pending)} pending)"
            )


def _check_chunks(order: Sequence[int]) -> None:
    """Chunks must be 1..max without gaps, and all must run the same microbatches."""
    counts = Counter(value for value in order if value > 0)
    last = max(order)
    missing = next((chunk for chunk in range(1, last) if chunk not in counts), None)
    if missing is not None:
        raise OrderError(f"order[{order.index(last)}] = {last}: but chunk {missing} never runs")
    fewest = min(counts, key=lambda chunk: counts[chunk])
    runs: Counter[int] = Counter()
    for position, chunk in enumerate(order):
        runs[chunk] += 1
        if chunk > 0 and runs[chunk] > counts[fewest]:
            raise OrderError(
                f"order[{position}] = {chunk}: chunk {chunk} runs {counts[chunk]} microbatches, "
                f"but chunk {fewest} only {counts[fewest]}"
            )


def _layers_of_chunks(chunks: int, callables: int, layers_per_chunk: int | Sequence[int] | None) -> tuple[int, ...]:
    """The number of layers per chunk. They must add up to the number of callables."""
    if callables < 1:
        raise OrderError(f"callables = {callables}: there must be at least one")
    if layers_per_chunk is None:
        if callables % chunks:
            raise OrderError(f"{callables} callables do not divide evenly among {chunks} chunks: pass layers_per_chunk")
        return (callables // chunks,) * chunks
    layers = (layers_per_chunk,) * chunks if isinstance(layers_per_chunk, int) else tuple(layers_per_chunk)
    if len(layers) != chunks:
        raise OrderError(f"layers_per_chunk has {len(layers)} items, but the order has {chunks} chunks")
    for chunk, count in enumerate(layers):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise OrderError(f"layers_per_chunk[{chunk}] = {count!r}: must be a positive int")
    if sum(layers) != callables:
        raise OrderError(f"layers_per_chunk = {layers} adds up to {sum(layers)}, not to {callables} callables")
    return layers


def _expand(order: Sequence[int], layers: Sequence[int]) -> Iterator[SchedulePass]:
    """The steps of a checked order. The n-th forward of a chunk and its n-th backward belong to microbatch n."""
    seen: Counter[int] = Counter()
    for position, value in enumerate(order):
        chunk = abs(value) - 1
        microbatch = seen[value]
        seen[value] += 1
        if value > 0:
            for layer in range(layers[chunk]):
                yield SchedulePass("forward", chunk, microbatch, layer, position)
        else:
            for layer in reversed(range(layers[chunk])):
                yield SchedulePass("backward", chunk, microbatch, layer, position)


def assign_slots(ranges: Sequence[tuple[int, int]], keys: Sequence[Hashable]) -> list[int]:
    """A slot for each range. Ranges share a slot only if their keys are equal and they never overlap.

    Both ends belong to a range: a range that ends at step t overlaps one that starts at t. We go through the ranges by
    start. Each takes the slot of its key that has been free longest, or a new slot if all are in use. So a new slot
    means that every slot of the key is in use at that step, and no plan needs fewer.
    """
    _check_ranges(ranges, keys)
    slots = [0] * len(ranges)
    slot_count = 0
    busy: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)  # key -> heap of (end, slot)
    for index in sorted(range(len(ranges)), key=lambda i: (ranges[i], i)):
        start, end = ranges[index]
        heap = busy[keys[index]]
        if heap and heap[0][0] < start:
            slot = heapq.heappop(heap)[1]
        else:
            slot = slot_count
            slot_count += 1
        heapq.heappush(heap, (end, slot))
        slots[index] = slot
    return slots


def check_slots(ranges: Sequence[tuple[int, int]], keys: Sequence[Hashable], slots: Sequence[int]) -> None:
    """Raise `OrderError` unless the plan is sound. Shares no code with the planner, so that it is a real check."""
    _check_ranges(ranges, keys)
    if len(slots) != len(ranges):
        raise OrderError(f"{len(ranges)} ranges, but {len(slots)} slots")
    tenants: defaultdict[int, list[int]] = defaultdict(list)
    for index, slot in enumerate(slots):
        tenants[slot].append(index)
    for slot, indexes in tenants.items():
        # Sorted by start, two ranges overlap only if two neighbours do.
        for a, b in pairwise(sorted(indexes, key=lambda i: (ranges[i], i))):
            shared = f"slot {slot} is shared by range {a} {ranges[a]} and range {b} {ranges[b]}"
            if keys[a] != keys[b]:
                raise OrderError(f"{shared}, whose keys differ: {keys[a]!r} and {keys[b]!r}")
            if ranges[b][0] <= ranges[a][1]:
                raise OrderError(f"{shared}, both live at step {ranges[b][0]}")


def _check_ranges(ranges: Sequence[tuple[int, int]], keys: Sequence[Hashable]) -> None:
    if len(ranges) != len(keys):
        raise OrderError(f"{len(ranges)} ranges, but {len(keys)} keys")
    for index, (start, end) in enumerate(ranges):
        if end < start:
            raise OrderError(f"range {index} ends before it starts: ({start}, {end})")


def _check_index(name: str, index: int, count: int) -> None:
    """Raise IndexError if the index is out of range. A negative one must not wrap around to other buffers."""
    if not 0 <= index < count:
        raise IndexError(f"{name} {index} is not in 0..{count - 1}")
