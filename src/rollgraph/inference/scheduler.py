"""What the inference engine does next: who prefills, who decodes, in which row, with which blocks.

Owns the queue, the rows and, through `BlockManager`, the paged cache. Decides only: it touches no tensor and knows
nothing of models, sampling or text. Only the engine drives it, one step ahead of the results:

    while scheduler.has_work:
        step = scheduler.schedule()
        launch(step)  # at once, because a step refers to sequences as they are now
        scheduler.update(step_before, tokens_of(step_before))

Requests are served in the order they came: whoever has a row came before everyone who waits. When the cache is full,
the latest sequence gives way and goes back to the front of the queue with the tokens it has. The oldest never gives
way, and alone it fits (`add` sees to that), so it always gets on, and so does everyone in turn.

The device runs steps in the order of launch. So a block can have a new owner as soon as the old one is done with it
here, even if a step in flight still writes there: what the new owner writes comes later.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from rollgraph.inference.blocks import BlockManager

IDLE, GO = -2, -1  # what a row is told to do in a step; a block number means: go, and append this block to your table
NO_ROW = -1


class RequestState(enum.Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"  # has a row, which is idle; between steps only the latest sequence can be here
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One request. The caller gives the first three fields, the scheduler keeps the others."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    generated: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    in_flight: int = 0  # tokens that launched steps sample for it, still to come by `update`
    blocks: list[int] = field(default_factory=list)
    row: int = NO_ROW
    computed: int = 0  # positions whose keys and values are in the cache once the launched steps have run
    end: int = 0  # what `computed` comes to at most: the last token is sampled but never fed
    finish_reason: str | None = None

    @property
    def length(self) -> int:
        """How many tokens are known."""
        return len(self.prompt) + len(self.generated)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that are known."""
        return (*self.prompt, *self.generated)


@dataclass(frozen=True)
class Chunk:
    """Positions `start` to `start + len(tokens) - 1` to prefill; `sequence.blocks` is the table."""

    sequence: Sequence
    start: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class EngineStep:
    """One launch. The device runs the chunks as one batch, then the copies, the starts and moves, and the decode.

    No block is source of one copy and target of another, no row source of one move and target of another, and no row
    that starts is moved from or to. So each list can be done at once, and starts and moves in either order.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source block, target block)
    starts: list[Sequence] = field(default_factory=list)  # rows that begin, with the last token, at `length - 1`
    moves: list[tuple[int, int]] = field(default_factory=list)  # (from row, to row)
    rows: list[Sequence | None] = field(default_factory=list)  # whose token is sampled there; None where IDLE
    orders: list[int] = field(default_factory=list)  # for each row IDLE, GO, or the block to append
    preempted: list[Sequence] = field(default_factory=list)  # since the step before

    @property
    def bucket(self) -> int:
        """How many rows the decode covers; 0 if there is nothing to decode."""
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
        prefill_tokens: int,  # in the chunks of one step, at most
        prefill_sequences: int,  # chunks of one step, at most
        max_length: int,  # of a prompt with what is generated
    ) -> None:
        if not buckets or buckets != tuple(sorted({*buckets})) or buckets[0] < 1 or buckets[-1] != max_rows:
            raise ValueError(f"buckets = {buckets}: must ascend from at least 1 to max_rows = {max_rows}")
        if prefill_tokens < 1 or prefill_sequences < 1:
            raise ValueError(f"prefill_tokens = {prefill_tokens}, prefill_sequences = {prefill_sequences}: at least 1")
        self.blocks = BlockManager(blocks, block_size)
        self._buckets, self._max_length = buckets, max_length
        self._prefill_tokens, self._prefill_sequences = prefill_tokens, prefill_sequences
        self._waiting: deque[Sequence] = deque()
        self._admitted: dict[Sequence, None] = {}  # who has a row, the latest last
        self._free_rows = list(range(max_rows))  # a heap: the lowest first
        self._left: list[list[int]] = []  # tables of who finished, held for those who wait and may share their prompt
        self._next = EngineStep()  # what `schedule` fills; if it has nothing to launch, this keeps who was preempted

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._admitted)

    @property
    def running(self) -> int:
        """How many sequences have a row."""
        return len(self._admitted)

    @property
    def waiting(self) -> int:
        """How many sequences wait for one."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a request. One that could never run is refused, and nothing has changed."""
        name, length = f"sequence {sequence.id}", len(sequence.prompt)
        if sequence.end:
            raise ValueError(f"{name} has been added before")
        if not length:
            raise ValueError(f"{name}: the prompt is empty")
        if sequence.max_tokens < 1:
            raise ValueError(f"{name}: max_tokens = {sequence.max_tokens}, must be at least 1")
        if length >= self._max_length:
            raise ValueError(f"{name}: a prompt of {length} tokens leaves no room in max_length = {self._max_length}")
        end = min(length + sequence.max_tokens, self._max_length) - 1
        needed = self.blocks.needed(end)
        if needed > self.blocks.capacity:
            raise ValueError(
                f"{name}: {length} tokens of prompt and {end + 1 - length} to generate take {needed} blocks, "
                f"the cache has {self.blocks.capacity}"
            )
        sequence.end = end
        self._waiting.append(sequence)

    def schedule(self) -> EngineStep | None:
        """The next step, counted as launched. None: nothing to do before an `add`, or the `update` of a step."""
        step = self._next
        decoding, appends = self._continue()
        self._prefill(step)
        self._release_left()
        decoding += step.starts  # their blocks cover the first decode
        if not decoding and not step.chunks:
            return None
        if decoding:
            self._compact(step.moves)
            bucket = self._bucket(1 + max(sequence.row for sequence in decoding))
            rows, orders = step.rows, step.orders
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
        self._next = EngineStep()
        return step

    def update(self, step: EngineStep, tokens: list[int]) -> list[tuple[Sequence, int]]:
        """Take in the tokens of a step, one for each row, in the order of launch. Gives what was appended to whom."""
        if len(tokens) != step.bucket:
            raise ValueError(f"{len(tokens)} tokens for a step of {step.bucket} rows")
        appended: list[tuple[Sequence, int]] = []
        finished = RequestState.FINISHED
        for sequence, token in zip(step.rows, tokens, strict=True):
            if sequence is None:
                continue
            sequence.in_flight -= 1
            if sequence.state is finished:
                continue  # it ended while this was computed
            sequence.generated.append(token)
            appended.append((sequence, token))
            if sequence.length > sequence.end:
                self.finish(sequence, "length")
        return appended

    def finish(self, sequence: Sequence, reason: str) -> None:
        """A sequence ends here, whatever it is doing. The first reason stays."""
        if sequence.state is RequestState.FINISHED:
            return
        if sequence.state is RequestState.WAITING:
            self._waiting.remove(sequence)
        else:
            self._left.append(self._leave(sequence))
        if not self._waiting:
            self._release_left()
        sequence.state = RequestState.FINISHED
        sequence.finish_reason = reason

    def _continue(self) -> tuple[list[Sequence], list[Sequence]]:
        """Who runs and goes on, and which of them get a block for it. Where none is free, the latest gives way."""
        decoding: list[Sequence] = []
        appends: list[Sequence] = []
        running, size = RequestState.RUNNING, self.blocks.block_size
        for sequence in list(self._admitted):  # the oldest first: whoever gives way has not had its turn
            if sequence.state is not running or sequence.computed == sequence.end:
                continue
            if sequence.computed == len(sequence.blocks) * size:
                if not self.blocks.free:
                    self._release_left()
                while not self.blocks.free:
                    self._preempt(next(reversed(self._admitted)))
                if sequence.row == NO_ROW:
                    break  # it was the latest itself
                sequence.blocks += self.blocks.allocate(1)
                appends.append(sequence)
            decoding.append(sequence)
        return decoding, appends

    def _prefill(self, step: EngineStep) -> None:
        """Go on with the sequence that is partly prefilled, then let others in while there is room."""
        latest = next(reversed(self._admitted), None)
        sequence = latest if latest and latest.state is RequestState.PREFILLING else None
        budget = self._prefill_tokens
        while sequence or (sequence := self._admit(budget, step.copies)):
            prefix, start = sequence.tokens[:-1], sequence.computed  # the last token is the first to be decoded
            stop = min(len(prefix), start + budget)
            if stop > start:
                step.chunks.append(Chunk(sequence, start, prefix[start:stop]))
                self.blocks.register(sequence.blocks, prefix[:stop], start)
                sequence.computed = stop
                budget = budget - (stop - start) if len(step.chunks) < self._prefill_sequences else 0
            if stop < len(prefix):
                return  # it goes on in the next step, before anyone else is let in
            step.starts.append(sequence)
            sequence = None

    def _admit(self, budget: int, copies: list[tuple[int, int]]) -> Sequence | None:
        """Give the first in the queue a row, and blocks for the tokens it has; None if it has to wait.

        Each sequence that runs is left a free block, or the newcomer would soon give way again. One that gave way
        waits for its tokens in flight, and nobody overtakes it.
        """
        if not self._waiting or not self._free_rows or self._waiting[0].in_flight:
            return None
        sequence = self._waiting[0]
        prefix = sequence.tokens[:-1]
        shared, tail = self.blocks.match(prefix)
        fresh = self.blocks.needed(sequence.length) - len(shared)
        computed = len(shared) * self.blocks.block_size
        if max(fresh, 1) > self.blocks.free - len(self._admitted):
            if not self._left or copies:  # nobody may write this step to what it copies from
                return None
            self._release_left()
            return self._admit(budget, copies)
        if not (budget or tail or computed == len(prefix)):
            return None
        self._admitted[self._waiting.popleft()] = None
        sequence.state = RequestState.PREFILLING
        sequence.row = heapq.heappop(self._free_rows)
        self.blocks.share(shared)
        sequence.blocks = shared + self.blocks.allocate(fresh)
        sequence.computed = computed
        if tail:
            copies.append((tail, sequence.blocks[len(shared)]))
            self.blocks.register(sequence.blocks, prefix, computed)
            sequence.computed = len(prefix)
        return sequence

    def _compact(self, moves: list[tuple[int, int]]) -> None:
        """Bring all rows into the smallest bucket that holds as many."""
        bucket = self._bucket(len(self._admitted))
        for sequence in self._admitted:
            if sequence.row >= bucket:
                row = heapq.heappushpop(self._free_rows, sequence.row)
                if sequence.state is RequestState.RUNNING:  # else the device has not heard of its row yet
                    moves.append((sequence.row, row))
                sequence.row = row

    def _bucket(self, rows: int) -> int:
        return self._buckets[bisect_left(self._buckets, rows)]

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue. Frees a block at least: the one that it writes to is nobody else's."""
        self.blocks.release(self._leave(sequence))
        sequence.state = RequestState.WAITING
        self._waiting.appendleft(sequence)
        self._next.preempted.append(sequence)

    def _leave(self, sequence: Sequence) -> list[int]:
        """Give back the row; gives the blocks, which are to be released."""
        del self._admitted[sequence]
        heapq.heappush(self._free_rows, sequence.row)
        blocks = sequence.blocks
        sequence.row, sequence.blocks, sequence.computed = NO_ROW, [], 0
        return blocks

    def _release_left(self) -> None:
        for blocks in self._left:
            self.blocks.release(blocks)
        self._left.clear()
