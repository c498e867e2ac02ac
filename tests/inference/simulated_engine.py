"""A simulated device for the scheduler, where every token depends on everything read through the block tables.

If a block is wrongly shared, freed too early, overwritten or not copied, the device samples a token other than the
oracle, which sees only the prompt.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from rollgraph.inference.scheduler import GO, IDLE, NO_ROW, EngineStep, RequestState, Scheduler, Sequence

GARBAGE = -7


def sample(seen: list[tuple[int, int]], seed: int) -> int:
    """The 'model': the next token from the cached tokens and their 'keys and values'. It differs by request."""
    return hash((tuple(seen), seed)) % 1_000_003


def attended(tokens: list[int]) -> int:
    """The 'keys and values' of the last of these tokens in a deeper layer: they depend on all tokens before it."""
    return hash(tuple(tokens))


def oracle(prompt: tuple[int, ...], seed: int, count: int) -> list[int]:
    """The tokens that a request generates, computed without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sample([(token, attended(tokens[: i + 1])) for i, token in enumerate(tokens)], seed))
    return tokens[len(prompt) :]


@dataclass
class Row:
    token: int
    position: int
    table: list[int]
    seed: int


class Device:
    """Executes steps as the engine does. It knows only the contents of each step."""

    def __init__(self, blocks: int, block_size: int, rows: int) -> None:
        self.size = block_size
        self.tokens = [[GARBAGE] * block_size for _ in range(blocks)]  # the first layer's cache
        self.deeper = [[GARBAGE] * block_size for _ in range(blocks)]  # the second layer's
        self.rows: list[Row | None] = [None] * rows

    def run(self, step: EngineStep) -> list[int]:
        self.prefill(step)
        assert not {source for source, _ in step.copies} & {target for _, target in step.copies}
        for source, target in step.copies:
            self.tokens[target] = list(self.tokens[source])
            self.deeper[target] = list(self.deeper[source])
        sources, targets = {source for source, _ in step.moves}, {target for _, target in step.moves}
        assert not sources & targets
        assert not {sequence.row for sequence in step.starts} & (sources | targets)
        for sequence in step.starts:
            row = Row(sequence.tokens[-1], sequence.length - 1, list(sequence.blocks), sequence.id)
            self.rows[sequence.row] = row
        for source, target in step.moves:
            self.rows[source], self.rows[target] = None, self.rows[source]
        return self.decode(step)

    def prefill(self, step: EngineStep) -> None:
        """All chunks as one batch: layer by layer, every write before any read."""
        written: Counter[tuple[int, int]] = Counter()
        for chunk in step.chunks:
            for position, token in enumerate(chunk.tokens, chunk.start):
                block, slot = self.locate(chunk.sequence.blocks, position)
                self.tokens[block][slot] = token
                written[block, slot] += 1
        for chunk in step.chunks:
            for position in range(chunk.start, chunk.start + len(chunk.tokens)):
                block, slot = self.locate(chunk.sequence.blocks, position)
                self.deeper[block][slot] = attended(self.read(self.tokens, chunk.sequence.blocks, position + 1))
        assert all(count == 1 and block > 0 for (block, _), count in written.items())

    def decode(self, step: EngineStep) -> list[int]:
        assert len(step.orders) == len(step.rows) == step.bucket
        sampled = []
        for row, order in zip(self.rows, step.orders, strict=False):
            if order == IDLE:
                self.tokens[0][0] = self.deeper[0][0] = GARBAGE
                sampled.append(GARBAGE)
                continue
            assert row is not None, "an order for a row that never started"
            if order != GO:
                row.table.append(order)
            block, slot = self.locate(row.table, row.position)
            self.tokens[block][slot] = row.token
            self.deeper[block][slot] = attended(self.read(self.tokens, row.table, row.position + 1))
            row.position += 1
            tokens, deeper = (self.read(cache, row.table, row.position) for cache in (self.tokens, self.deeper))
            row.token = sample(list(zip(tokens, deeper, strict=True)), row.seed)
            sampled.append(row.token)
        return sampled

    def locate(self, table: list[int], position: int) -> tuple[int, int]:
        return table[position // self.size], position % self.size

    def read(self, cache: list[list[int]], table: list[int], count: int) -> list[int]:
        return [cache[block][slot] for block, slot in (self.locate(table, i) for i in range(count))]


class SimulatedEngine:
    """A small version of the host loop: a scheduler, a device, and the steps whose tokens it has not read yet."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.scheduler = Scheduler(**options)
        self.device = Device(options["blocks"], options["block_size"], options["max_rows"])
        self.launched: deque[tuple[EngineStep, list[int]]] = deque()
        self.sequences: list[Sequence] = []
        self.stopping: set[int] = set()  # requests that stop at a token that is a multiple of 5
        self.steps: list[EngineStep] = []
        self.preempted: set[Sequence] = set()  # not reported by a step yet
        self._expected: dict[int, list[int]] = {}

    def add(self, prompt: tuple[int, ...], max_tokens: int) -> Sequence:
        sequence = Sequence(len(self.sequences), prompt, max_tokens)
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def launch(self) -> EngineStep | None:
        had_row = [sequence for sequence in self.sequences if sequence.row != NO_ROW]
        step = self.scheduler.schedule()
        has_row = [sequence for sequence in self.sequences if sequence.row != NO_ROW]
        self.preempted |= {sequence for sequence in had_row if sequence not in has_row}
        newcomers = [sequence for sequence in has_row if sequence not in had_row]
        if newcomers:  # the last one leaves a free block for each other sequence that will need one more
            blocks = self.scheduler.blocks
            others = (sequence for sequence in has_row if sequence is not newcomers[-1])
            assert blocks.free >= sum(
                len(sequence.blocks) < blocks.needed(sequence.max_computed) for sequence in others
            )
        if step is None:
            assert self.launched or not self.scheduler.has_work, "stuck: nothing to launch and nothing to wait for"
            return None
        assert self.preempted <= set(step.preempted)
        self.preempted.clear()
        self.check(step)
        self.launched.append((step, self.device.run(step)))
        self.steps.append(step)
        return step

    def land(self) -> None:
        """Read the tokens of the oldest step in flight."""
        step, tokens = self.launched.popleft()
        for sequence, token in self.scheduler.update(step, tokens):
            assert sequence.generated[-1] == token
            if sequence.id in self.stopping and token % 5 == 0:
                self.scheduler.finish(sequence, "stop")

    def turn(self) -> EngineStep | None:
        """Like the real engine: launch a step, then read the one before. With nothing to launch, read the rest."""
        step = self.launch()
        while len(self.launched) > (step is not None):
            self.land()
        return step

    def drain(self) -> None:
        """Run to the end. The oldest sequence makes progress in each step, which bounds the number of steps."""
        limit = 5 + sum(2 * s.max_computed + 5 for s in self.sequences)
        while self.scheduler.has_work:
            self.turn()
            limit -= 1
            assert limit > 0
        while self.launched:
            self.land()

    def check(self, step: EngineStep) -> None:
        """Check the invariants of a step."""
        options = self.options
        assert sum(len(chunk.tokens) for chunk in step.chunks) <= options["prefill_tokens"]
        assert len(step.chunks) <= options["prefill_sequences"]
        assert all(chunk.tokens for chunk in step.chunks)
        decoding = [row for row, sequence in enumerate(step.rows) if sequence is not None]
        assert step.bucket in (0, *options["buckets"])
        assert (step.bucket == 0) == (not decoding)
        assert decoding or step.chunks
        if decoding:  # the smallest bucket, and all rows are compacted into it
            assert min(b for b in options["buckets"] if b > decoding[-1]) == step.bucket
            holders = [sequence for sequence in self.sequences if sequence.row != NO_ROW]
            assert max(s.row for s in holders) < min(b for b in options["buckets"] if b >= len(holders))
        for row, (sequence, order) in enumerate(zip(step.rows, step.orders, strict=True)):
            assert (sequence is None) == (order == IDLE)
            if sequence is not None:
                assert (sequence.row, sequence.state) == (row, RequestState.RUNNING)
                assert len(sequence.generated) + sequence.in_flight <= sequence.max_tokens
                assert sequence.length + sequence.in_flight <= options["max_length"]
                assert order == GO or order == sequence.blocks[-1] > 0
        # Decodes and copies write only to blocks with one owner. (The device checks that chunks do not collide.)
        size = options["block_size"]
        written = [s.blocks[(s.computed - 1) // size] for s in step.rows if s is not None]
        written += [target for _, target in step.copies]
        assert all(self.scheduler.blocks.count(block) == 1 for block in written)

    def check_state(self) -> None:
        """Check the invariants between any two calls."""
        blocks, size = self.scheduler.blocks, self.options["block_size"]
        alive = [sequence for sequence in self.sequences if sequence.state is not RequestState.FINISHED]
        waiting = [sequence for sequence in alive if sequence.state is RequestState.WAITING]
        holding = [sequence for sequence in alive if sequence.state is not RequestState.WAITING]
        assert (self.scheduler.waiting, self.scheduler.running) == (len(waiting), len(holding))
        assert self.scheduler.has_work == bool(alive)
        assert not any(s.blocks or s.computed for s in self.sequences if s not in holding)
        assert all((sequence.row == NO_ROW) == (sequence not in holding) for sequence in self.sequences)
        assert len({sequence.row for sequence in holding}) == len(holding) <= self.options["max_rows"]
        # First come, first served. Only the latest sequence that has a row can be partly prefilled.
        assert not waiting or not holding or max(s.id for s in holding) < min(s.id for s in waiting)
        assert all(s.state is RequestState.RUNNING or s is max(holding, key=lambda s: s.id) for s in holding)
        # Each block is free, or held by as many tables as its count says. The first block is never held.
        owners: dict[int, list[Sequence]] = {}
        for sequence in holding:
            assert 0 not in sequence.blocks
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            assert sequence.computed <= len(sequence.blocks) * size
            for block in sequence.blocks:
                owners.setdefault(block, []).append(sequence)
        held = [
            block for table in self.scheduler._retained for block in table
        ]  # of finished sequences, while others wait
        assert waiting or not held
        assert [blocks.count(b) for b in range(self.options["blocks"])] == [
            len(owners.get(b, [])) + held.count(b) for b in range(self.options["blocks"])
        ]
        assert blocks.free + len(owners.keys() | set(held)) == self.options["blocks"] - 1
        # Sequences that share a block agree on all tokens up to its end, and no longer write to it.
        for block, sharing in owners.items():
            stop = (sharing[0].blocks.index(block) + 1) * size
            assert len(sharing) == 1 or len({sequence.tokens[:stop] for sequence in sharing}) == 1
            assert len(sharing) == 1 or all(s.blocks.index(block) + 1 == stop // size for s in sharing)
            assert len(sharing) == 1 or all(sequence.computed >= stop for sequence in sharing)
        for sequence in self.sequences:
            assert sequence.generated == self.expected(sequence)[: len(sequence.generated)]
            assert sequence.in_flight == sum(sequence in step.rows for step, _ in self.launched)
            if sequence.state is RequestState.RUNNING:
                assert sequence.computed == sequence.length - 1 + sequence.in_flight

    def check_end(self) -> None:
        """Check that all blocks are free, and that every sequence finished as it should."""
        self.check_state()
        assert self.scheduler.blocks.free == self.options["blocks"] - 1
        for sequence in self.sequences:
            assert sequence.state is RequestState.FINISHED
            assert sequence.in_flight == 0
            expected = self.expected(sequence)
            if sequence.finish_reason == "length":
                assert sequence.generated == expected
            if sequence.finish_reason == "stop":
                assert [token % 5 == 0 for token in sequence.generated].index(True) == len(sequence.generated) - 1

    def expected(self, sequence: Sequence) -> list[int]:
        if sequence.id not in self._expected:
            limit = min(sequence.max_tokens, self.options["max_length"] - len(sequence.prompt))
            self._expected[sequence.id] = oracle(sequence.prompt, sequence.id, limit)
        return self._expected[sequence.id]


OPTIONS: dict[str, Any] = {
    "blocks": 65,
    "block_size": 4,
    "max_rows": 16,
    "buckets": (1, 2, 4, 8, 16),
    "prefill_tokens": 64,
    "prefill_sequences": 8,
    "max_length": 64,
}


def engine_with(**changes: Any) -> SimulatedEngine:
    return SimulatedEngine(**{**OPTIONS, **changes})


def count_prefilled(engine: SimulatedEngine) -> int:
    return sum(len(chunk.tokens) for step in engine.steps for chunk in step.chunks)


def finish_all(engine: SimulatedEngine) -> None:
    engine.drain()
    engine.check_end()
