"""Decides what the inference engine does next: which sequences prefill, which decode, in which row, in which blocks.

Owns the queue, the rows and, through `BlockManager`, the paged cache. It only decides: it touches no tensor and knows
nothing of models, sampling or text. Only the engine drives it, one step ahead of the results:

    while scheduler.has_work:
        step = scheduler.schedule()
        launch(step)  # at once, because a step refers to sequences in their present state
        scheduler.update(previous_step, tokens_of(previous_step))

Requests are served first come, first served: every sequence that has a row arrived before every sequence that waits.
When the cache is full, the latest sequence is preempted: it keeps its tokens and returns to the front of the queue. The
oldest is never preempted, and `add` makes sure that it fits into the cache alone. So the oldest always makes progress,
and every sequence becomes the oldest in turn.

The device runs steps in launch order. A block can therefore be reused as soon as its owner is done with it here, even
if a step in flight still writes to it: the new owner's writes come later.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from rollgraph.inference.blocks import BlockManager

# What a row does in a step. Any number from 0 on is a block: the row appends it to its table and then decodes.
IDLE = -2
GO = -1

NO_ROW = -1


class SequenceError(ValueError):
    """A sequence that could never run. `reason` is the message without the sequence's id."""

    def __init__(self, sequence_id: int, reason: str) -> None:
        self.sequence_id = sequence_id
        self.reason = reason
        super().__init__(f"sequence {sequence_id}: {reason}")


class RequestState(enum.Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"  # has a row that is still idle; between steps, only the latest sequence can be here
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request. The caller sets the first three fields; the scheduler maintains the others."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    generated: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    in_flight: int = 0  # tokens sampled by launched steps whose results `update` has not seen yet
    blocks: list[int] = field(default_factory=list)
    row: int = NO_ROW
    computed: int = 0  # positions whose keys and values are in the cache once all launched steps have run
    max_computed: int = 0  # limit of `computed`, set by `add`; 0 before
    finish_reason: str | None = None

    @property
    def length(self) -> int:
        """The number of known tokens."""
        return len(self.prompt) + len(self.generated)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The known tokens."""
        return (*self.prompt, *self.generated)


@dataclass(frozen=True)
class Chunk:
    """Positions `start` to `start + len(tokens) - 1` of a sequence to prefill, through the table `sequence.blocks`."""

    sequence: Sequence
    start: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class EngineStep:
    """One launch. The device prefills all chunks as one batch, then copies blocks, starts and moves rows, and decodes.

    No block is both source and target of a copy, no row is both source and target of a move, and no row that starts is
    moved. So each list can be executed at once, and starts and moves in either order.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source block, target block)
    starts: list[Sequence] = field(default_factory=list)  # sequences whose rows begin with their last known token
    moves: list[tuple[int, int]] = field(default_factory=list)  # (source row, target row)
    rows: list[Sequence | None] = field(default_factory=list)  # whose token each row samples; None where IDLE
    orders: list[int] = field(default_factory=list)  # for each row: IDLE, GO, or the block to append
    preempted: list[Sequence] = field(default_factory=list)  # since the previous step

    @property
    def bucket(self) -> int:
        """How many rows the decode covers; 0 if nothing decodes."""
        return len(self.rows)


class Scheduler:
    """First come, first served, over `max_rows` rows and `blocks` blocks."""

    def __init__(
        self,
        *,
        blocks: int,
        block_size: int,
        max_rows: int,
        buckets: tuple[int, ...],  # how many rows a decode can cover: ascending, the last is max_rows
        prefill_tokens: int,  # the most tokens in all chunks of a step
        prefill_sequences: int,  # the most chunks in a step
        max_length: int,  # the most tokens of a prompt and its completion together
    ) -> None:
        if not buckets or buckets != tuple(sorted({*buckets})) or buckets[0] < 1 or buckets[-1] != max_rows:
            raise ValueError(f"buckets = {buckets}: must ascend from at least 1 to max_rows = {max_rows}")
        if prefill_tokens < 1 or prefill_sequences < 1:
            raise ValueError(
                f"prefill_tokens = {prefill_tokens}, prefill_sequences = {prefill_sequences}: both must be at least 1"
            )
        self.blocks = BlockManager(blocks, block_size)
        self._buckets = buckets
        self._max_length = max_length
        self._prefill_tokens = prefill_tokens
        self._prefill_sequences = prefill_sequences
        self._waiting: deque[Sequence] = deque()
        self._admitted: dict[Sequence, None] = {}  # sequences that have a row, the latest last
        self._growing: set[Sequence] = set()  # sequences that have a row and will need more blocks before they end
        self._free_rows = list(range(max_rows))  # a heap: the lowest row comes out first
        self._retained: list[list[int]] = []  # tables of finished sequences, kept while others that wait may share them
        self._next = EngineStep()  # filled by `schedule`; if there is nothing to launch, it keeps the preempted

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._admitted)

    @property
    def running(self) -> int:
        """How many sequences have a row."""
        return len(self._admitted)

    @property
    def waiting(self) -> int:
        """How many sequences wait for a row."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises SequenceError, and changes nothing, if it could never run."""
        if sequence.max_computed:
            raise ValueError(f"sequence {sequence.id} has been added before")
        length = len(sequence.prompt)
        if not length:
            raise SequenceError(sequence.id, "the prompt is empty")
        if sequence.max_tokens < 1:
            raise SequenceError(sequence.id, f"max_tokens = {sequence.max_tokens}: must be at least 1")
        if length >= self._max_length:
            raise SequenceError(
                sequence.id, f"a prompt of {length} tokens leaves no room in max_length = {self._max_length}"
            )
        max_total = min(length + sequence.max_tokens, self._max_length)
        max_computed = max_total - 1  # the last token is sampled but never fed to the model
        needed = self.blocks.needed(max_computed)
        if needed > self.blocks.capacity:
            raise SequenceError(
                sequence.id,
                f"a prompt of {length} tokens with {max_total - length} to generate needs {needed} blocks; "
                f"the cache has {self.blocks.capacity}",
            )
        sequence.max_computed = max_computed
        self._waiting.append(sequence)

    def schedule(self) -> EngineStep | None:
        """Return the next step and count it as launched.

        None means that there is nothing to launch before another `add`, or before the `update` of a step in flight.
        """
        step = self._next
        decoding, appends = self._continue_running()
        self._prefill(step)
        self._release_retained()
        decoding += step.starts  # their blocks already cover the first decode
        if not decoding and not step.chunks:
            return None
        if decoding:
            self._compact(step.moves)
            self._fill_rows(step, decoding, appends)
        self._next = EngineStep()
        return step

    def update(self, step: EngineStep, tokens: list[int]) -> list[tuple[Sequence, int]]:
        """Process the tokens of a step, one for each row, in launch order. Returns the (sequence, token) pairs that
        were appended."""
        if len(tokens) != step.bucket:
            raise ValueError(f"{len(tokens)} tokens for a step of {step.bucket} rows")
        appended: list[tuple[Sequence, int]] = []
        finished = RequestState.FINISHED
        for sequence, token in zip(step.rows, tokens, strict=True):
            if sequence is None:
                continue
            sequence.in_flight -= 1
            if sequence.state is finished:
                continue  # it ended while this token was computed
            sequence.generated.append(token)
            appended.append((sequence, token))
            if sequence.length > sequence.max_computed:
                self.finish(sequence, "length")
        return appended

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence, whatever its state. If it has already ended, its first reason stays."""
        if sequence.state is RequestState.FINISHED:
            return
        if sequence.state is RequestState.WAITING:
            self._waiting.remove(sequence)
        else:
            self._retained.append(self._leave_row(sequence))
        if not self._waiting:
            self._release_retained()
        sequence.state = RequestState.FINISHED
        sequence.finish_reason = reason

    def preempt_all(self) -> None:
        """Discard the cache: every sequence with a row goes back to its place in the queue."""
        while self._admitted:
            self._preempt(next(reversed(self._admitted)))
        self._release_retained()

    def _continue_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences that decode in this step, and those of them that get another block for it.

        If no block is free, the latest sequence is preempted.
        """
        decoding: list[Sequence] = []
        appends: list[Sequence] = []
        running = RequestState.RUNNING
        size = self.blocks.block_size
        for sequence in list(self._admitted):  # oldest first: preempted ones are not yet visited
            if sequence.state is not running or sequence.computed == sequence.max_computed:
                continue
            if sequence.computed == len(sequence.blocks) * size:
                if not self.blocks.free:
                    self._release_retained()
                while not self.blocks.free:
                    self._preempt(next(reversed(self._admitted)))
                if sequence.row == NO_ROW:
                    break  # this sequence was the latest, and was preempted
                sequence.blocks += self.blocks.allocate(1)
                appends.append(sequence)
                if len(sequence.blocks) == self.blocks.needed(sequence.max_computed):
                    self._growing.remove(sequence)
            decoding.append(sequence)
        return decoding, appends

    def _prefill(self, step: EngineStep) -> None:
        """Continue the sequence that is partly prefilled, then admit others while there is room."""
        budget = self._prefill_tokens
        sequence = next(reversed(self._admitted), None)
        if sequence is None or sequence.state is not RequestState.PREFILLING:
            sequence = self._admit(budget, step.copies)
        while sequence is not None:
            prefix = sequence.tokens[:-1]  # the last token is the first to be decoded
            start = sequence.computed
            stop = min(len(prefix), start + budget)
            if stop > start:
                step.chunks.append(Chunk(sequence, start, prefix[start:stop]))
                self.blocks.register(sequence.blocks, prefix[:stop], start)
                sequence.computed = stop
                budget -= stop - start
                if len(step.chunks) == self._prefill_sequences:
                    budget = 0
            if stop < len(prefix):
                return  # it continues in the next step, before any other is admitted
            step.starts.append(sequence)
            sequence = self._admit(budget, step.copies)

    def _admit(self, budget: int, copies: list[tuple[int, int]]) -> Sequence | None:
        """Give the first sequence in the queue a row, and blocks for its tokens; None if it has to wait.

        One free block remains for each sequence that will need another, or the newcomer would soon be preempted again.
        A preempted sequence waits for its tokens in flight, and none overtakes it.
        """
        if not self._waiting or not self._free_rows or self._waiting[0].in_flight:
            return None
        sequence = self._waiting[0]
        prefix = sequence.tokens[:-1]
        shared, tail = self.blocks.match(prefix)
        fresh = self.blocks.needed(sequence.length) - len(shared)
        computed = len(shared) * self.blocks.block_size
        if max(fresh, 1) > self.blocks.free - len(self._growing):
            if not self._retained or copies:  # this step must not overwrite a block that it copies from
                return None
            self._release_retained()
            return self._admit(budget, copies)
        if not (budget or tail or computed == len(prefix)):
            return None
        self._admitted[self._waiting.popleft()] = None
        sequence.state = RequestState.PREFILLING
        sequence.row = heapq.heappop(self._free_rows)
        self.blocks.share(shared)
        sequence.blocks = shared + self.blocks.allocate(fresh)
        if len(sequence.blocks) < self.blocks.needed(sequence.max_computed):
            self._growing.add(sequence)
        sequence.computed = computed
        if tail:
            copies.append((tail, sequence.blocks[len(shared)]))
            self.blocks.register(sequence.blocks, prefix, computed)
            sequence.computed = len(prefix)
        return sequence

    def _fill_rows(self, step: EngineStep, decoding: list[Sequence], appends: list[Sequence]) -> None:
        """Fill in what each row of the decode does, and count its token as in flight."""
        bucket = self._bucket_for(1 + max(sequence.row for sequence in decoding))
        rows = step.rows
        orders = step.orders
        rows += [None] * bucket
        orders += [IDLE] * bucket
        for sequence in decoding:
            sequence.in_flight += 1
            sequence.computed += 1
            rows[sequence.row] = sequence
            orders[sequence.row] = GO
        for sequence in appends:
            orders[sequence.row] = sequence.blocks[-1]
        for sequence in step.starts:
            sequence.state = RequestState.RUNNING

    def _compact(self, moves: list[tuple[int, int]]) -> None:
        """Move all rows into the smallest bucket that holds them."""
        bucket = self._bucket_for(len(self._admitted))
        for sequence in self._admitted:
            if sequence.row >= bucket:
                row = heapq.heappushpop(self._free_rows, sequence.row)
                if sequence.state is RequestState.RUNNING:  # otherwise the device does not know its row yet
                    moves.append((sequence.row, row))
                sequence.row = row

    def _bucket_for(self, rows: int) -> int:
        return self._buckets[bisect_left(self._buckets, rows)]

    def _preempt(self, sequence: Sequence) -> None:
        """Return a sequence to the front of the queue. This frees at least one block: the one it writes to is not
        shared."""
        self.blocks.release(self._leave_row(sequence))
        sequence.state = RequestState.WAITING
        self._waiting.appendleft(sequence)
        self._next.preempted.append(sequence)

    def _leave_row(self, sequence: Sequence) -> list[int]:
        """Free the row of a sequence. Returns its blocks, which the caller has to release."""
        del self._admitted[sequence]
        self._growing.discard(sequence)
        heapq.heappush(self._free_rows, sequence.row)
        blocks = sequence.blocks
        sequence.row = NO_ROW
        sequence.blocks = []
        sequence.computed = 0
        return blocks

    def _release_retained(self) -> None:
        for blocks in self._retained:
            self.blocks.release(blocks)
        self._retained.clear()
