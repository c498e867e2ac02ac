"""A slow, obvious reference for schedules, which shares no code with the planner."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations, product

from rollgraph.graph.schedule import Schedule, SchedulePass, assign_slots, check_slots, parse_order

Range = tuple[int, int]
TE_ORDER = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]  # from Transformer Engine's own tests


# -- reference ----------


def balanced_words(pairs: int) -> Iterator[tuple[int, ...]]:
    """Every way to run `pairs` forwards (+1) and their backwards (-1) in one chunk."""
    for ups in combinations(range(2 * pairs), pairs):
        word = tuple(1 if i in ups else -1 for i in range(2 * pairs))
        if all(sum(word[: i + 1]) >= 0 for i in range(len(word))):
            yield word


def interleavings(words: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Every merge of the words that keeps the order inside each."""
    if not any(words):
        yield ()
    for i, word in enumerate(words):
        if word:
            for rest in interleavings([*words[:i], word[1:], *words[i + 1 :]]):
                yield (word[0], *rest)


def legal_orders(chunks: int, microbatches: int) -> Iterator[tuple[int, ...]]:
    for words in product(balanced_words(microbatches), repeat=chunks):
        yield from interleavings([tuple(s * (c + 1) for s in word) for c, word in enumerate(words)])


def legal_of_length(length: int, chunks: int) -> set[tuple[int, ...]]:
    """All legal orders of that length over at most that many chunks."""
    shapes = [(c, length // (2 * c)) for c in range(1, chunks + 1) if length and length % (2 * c) == 0]
    return {order for c, m in shapes for order in legal_orders(c, m)}


def walk(order: Sequence[int], layers: Sequence[int]) -> list[SchedulePass]:
    """The steps of a legal order, by running it with one queue of pending microbatches per chunk."""
    pending: list[deque[int]] = [deque() for _ in layers]
    started = [0] * len(layers)
    steps: list[SchedulePass] = []
    for position, value in enumerate(order):
        c = abs(value) - 1
        if value > 0:
            pending[c].append(started[c])
            steps += [SchedulePass("forward", c, started[c], layer, position) for layer in range(layers[c])]
            started[c] += 1
        else:
            mb = pending[c].popleft()
            steps += [SchedulePass("backward", c, mb, layer, position) for layer in range(layers[c] - 1, -1, -1)]
    return steps


def overlap(a: Range, b: Range) -> bool:
    return bool(set(range(a[0], a[1] + 1)) & set(range(b[0], b[1] + 1)))


def peak(ranges: Sequence[Range]) -> int:
    """The largest number of ranges live at one point."""
    points = {point for r in ranges for point in r}
    return max((sum(start <= p <= end for start, end in ranges) for p in points), default=0)


def fewest_colours(ranges: Sequence[Range]) -> int:
    """The smallest number of slots in any sound plan, by trying every plan."""

    def fits(index: int, groups: list[list[Range]], limit: int) -> bool:
        if index == len(ranges):
            return True
        for group in groups:
            if not any(overlap(ranges[index], member) for member in group):
                group.append(ranges[index])
                if fits(index + 1, groups, limit):
                    return True
                group.pop()
        return len(groups) < limit and fits(index + 1, [*groups, [ranges[index]]], limit)

    return next(n for n in range(len(ranges) + 1) if fits(0, [], n))


def assert_sound_and_optimal(ranges: Sequence[Range], keys: Sequence[Hashable]) -> list[int]:
    slots = assign_slots(ranges, keys)
    check_slots(ranges, keys, slots)
    for a, b in combinations(range(len(ranges)), 2):
        if slots[a] == slots[b]:
            assert keys[a] == keys[b]
            assert not overlap(ranges[a], ranges[b])
    for key in set(keys):
        mine = [i for i, candidate in enumerate(keys) if candidate == key]
        assert len({slots[i] for i in mine}) == peak([ranges[i] for i in mine])
    assert set(slots) == set(range(len(set(slots)))), "slots are numbered from 0 without gaps"
    return slots


def layer_keys(schedule: Schedule) -> list[int]:
    """Key of each entry when only microbatches of the same layer may share."""
    keys = [-1] * schedule.entries
    for step in schedule.steps:
        keys[schedule.entry(step)] = schedule.callable_index(step.chunk, step.layer)
    return keys


def run_in_slots(schedule: Schedule, slots: Sequence[int]) -> None:
    """Simulate the schedule: a forward writes its entry to its slot, and the backward must find it there."""
    memory: dict[int, int] = {}
    for step in schedule.steps:
        entry = schedule.entry(step)
        if step.kind == "forward":
            memory[slots[entry]] = entry
        else:
            assert memory[slots[entry]] == entry


def check_schedule(order: Sequence[int], layers: Sequence[int]) -> Schedule:
    """Everything that must hold for a legal order."""
    schedule = parse_order(order, sum(layers), layers)
    assert list(schedule.steps) == walk(order, layers)
    assert schedule.layers_per_chunk == tuple(layers)
    assert schedule.microbatches == list(order).count(1)

    ranges = schedule.live_ranges()
    assert len(ranges) == schedule.entries == schedule.microbatches * sum(layers)
    for index, step in enumerate(schedule.steps):
        assert ranges[schedule.entry(step)][0 if step.kind == "forward" else 1] == index
    for keys in (layer_keys(schedule), [0] * schedule.entries):
        run_in_slots(schedule, assert_sound_and_optimal(ranges, keys))
    return schedule


def one_f_one_b(stages: int, rank: int, microbatches: int) -> list[int]:
    """PipeDream-flush: warm up, then a forward and a backward in turn, then drain."""
    warmup = min(stages - rank - 1, microbatches)
    steady = microbatches - warmup
    return [1] * warmup + [1, -1] * steady + [-1] * warmup


def interleaved(stages: int, rank: int, microbatches: int, chunks: int) -> list[int]:
    """Megatron's interleaved 1F1B: chunks take turns in groups of `stages` microbatches."""
    total = microbatches * chunks
    turn = [(i // stages) % chunks for i in range(total)]
    forwards = [c + 1 for c in turn]
    backwards = [c - chunks for c in turn]
    warmup = min((stages - rank - 1) * 2 + (chunks - 1) * stages, total)
    order = forwards[:warmup]
    for i in range(total - warmup):
        order += [forwards[warmup + i], backwards[i]]
    return order + backwards[total - warmup :]
