"""Every small order, legal or not; every small set of live ranges; then random and well-known large ones."""

from __future__ import annotations

import ast
import doctest
import re
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgraph.graph import schedule as module
from rollgraph.graph.errors import GraphError, OrderError
from rollgraph.graph.schedule import Schedule, SchedulePass, assign_slots, check_slots, parse_order, sequential

Range = tuple[int, int]
TE_ORDER = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]  # what Transformer Engine tests its own with


# --- What the tests hold the code against: slow, obvious, and sharing nothing with it ----------------------


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
            if not any(overlap(ranges[index], other) for other in group):
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
        mine = [i for i, other in enumerate(keys) if other == key]
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


# --- Orders, exhaustively -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "microbatches", "count"),
    # Catalan(m)^c * (2mc)! / (2m)!^c: the enumeration itself is right.
    [
        (1, 1, 1),
        (1, 2, 2),
        (1, 3, 5),
        (1, 4, 14),
        (1, 5, 42),
        (2, 1, 6),
        (2, 2, 280),
        (3, 1, 90),
        (4, 1, 2520),
    ],
)
def test_every_legal_order_of_a_size(chunks: int, microbatches: int, count: int) -> None:
    orders = set(legal_orders(chunks, microbatches))
    assert len(orders) == count
    for order in orders:
        check_schedule(order, [1] * chunks)
        if count < 1000:
            check_schedule(order, [2] * chunks)
            check_schedule(order, [1 + c % 3 for c in range(chunks)])


def test_every_legal_order_of_two_chunks_and_three_microbatches() -> None:
    """Too many to check everything: only steps and plan, with one layer per chunk."""
    count = 0
    for order in legal_orders(2, 3):
        count += 1
        schedule = parse_order(order, 2)
        ranges = schedule.live_ranges()
        slots = assign_slots(ranges, [0, 0, 0, 1, 1, 1])
        run_in_slots(schedule, slots)
        assert len(set(slots)) == peak(ranges[:3]) + peak(ranges[3:])
    assert count == 5 * 5 * 924


@pytest.mark.parametrize(
    ("alphabet", "lengths"),
    [
        ((1, -1), range(11)),
        ((1, 2, -1, -2), range(9)),
        ((1, 2, 3, -1, -2, -3), range(7)),
        (range(-2, 3), range(7)),
    ],
)
def test_accepts_exactly_the_legal_orders(alphabet: Sequence[int], lengths: range) -> None:
    chunks = max(alphabet)
    for length in lengths:
        legal = legal_of_length(length, chunks)
        accepted = set()
        for order in product(alphabet, repeat=length):
            try:
                parse_order(order, 6)  # divides among 1, 2 or 3 chunks
            except OrderError as error:
                assert_points_into(order, error)
            else:
                accepted.add(order)
        assert accepted == legal


def assert_points_into(order: Sequence[int], error: OrderError) -> None:
    """An error about an order quotes a position and what is there (an empty order has none)."""
    if not order:
        assert "empty" in str(error)
        return
    found = re.match(r"order\[(\d+)\] = (-?\d+): ", str(error))
    assert found, error
    assert order[int(found[1])] == int(found[2])


def test_a_backward_too_early_is_reported_where_it_is() -> None:
    """The prefix before the position can still become legal, the prefix with it cannot."""
    for order in product((1, -1), repeat=7):
        with pytest.raises(OrderError) as caught:  # an odd length is never legal
            parse_order(order, 1)
        early = [i for i in range(7) if sum(order[: i + 1]) < 0]
        if early:
            assert str(caught.value).startswith(f"order[{early[0]}] = -1: backward of chunk 1 before its forward")
        else:
            assert "never followed by its backward" in str(caught.value)


@pytest.mark.parametrize("length", range(7))
def test_forward_only_accepts_exactly_equal_counts(length: int) -> None:
    for order in product((1, 2, -1, -2), repeat=length):
        counts = [order.count(1), order.count(2)]
        legal = length > 0 and sum(counts) == length and (counts[1] == 0 or counts[0] == counts[1])
        try:
            schedule = parse_order(order, 2, forward_only=True)
        except OrderError as error:
            assert not legal
            assert_points_into(order, error)
        else:
            assert legal
            assert list(schedule.steps) == walk(order, schedule.layers_per_chunk)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_random_large_orders(data: st.DataObject) -> None:
    chunks = data.draw(st.integers(1, 4))
    microbatches = data.draw(st.integers(1, 6))
    layers = data.draw(st.lists(st.integers(1, 3), min_size=chunks, max_size=chunks))
    left = {sign * c: microbatches for c in range(1, chunks + 1) for sign in (1, -1)}
    order: list[int] = []
    while any(left.values()):
        ready = [v for v, n in left.items() if n and (v > 0 or left[-v] < n)]
        order.append(data.draw(st.sampled_from(ready)))
        left[order[-1]] -= 1
    check_schedule(order, layers)


# --- Orders that people run ---------------------------------------------------------------------------------


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


def test_the_transformer_engine_example() -> None:
    schedule = check_schedule(TE_ORDER, [1, 1])
    assert schedule.microbatches == 3
    runs = [("F" if s.kind == "forward" else "B", s.chunk, s.microbatch) for s in schedule.steps]
    assert runs == [
        ("F", 0, 0), ("F", 1, 0), ("F", 0, 1), ("F", 1, 1), ("B", 1, 0), ("B", 0, 0),
        ("F", 0, 2), ("F", 1, 2), ("B", 1, 1), ("B", 0, 1), ("B", 1, 2), ("B", 0, 2),
    ]  # fmt: skip
    assert [s.position for s in schedule.steps] == list(range(12))
    ranges = schedule.live_ranges()
    assert ranges == [(0, 5), (2, 9), (6, 11), (1, 4), (3, 8), (7, 10)]
    assert assign_slots(ranges, layer_keys(schedule)) == [0, 2, 0, 1, 3, 1]
    assert assign_slots(ranges, [None] * 6) == [0, 2, 1, 1, 3, 0]  # 4 slots either way: 4 are live at once


def test_layers_run_forward_in_order_and_backward_in_reverse() -> None:
    schedule = check_schedule([1, 2, -2, -1], [2, 3])
    assert [(s.chunk, s.layer, s.position) for s in schedule.steps] == [
        (0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1), (1, 2, 1),
        (1, 2, 2), (1, 1, 2), (1, 0, 2), (0, 1, 3), (0, 0, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_one_f_one_b(stages: int, microbatches: int) -> None:
    for rank in range(stages):
        schedule = check_schedule(one_f_one_b(stages, rank, microbatches), [2])
        slots = assign_slots(schedule.live_ranges(), layer_keys(schedule))
        in_flight = min(stages - rank, microbatches)
        assert len(set(slots)) == 2 * in_flight  # however many microbatches there are


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(2, 4, 2), (2, 8, 3), (4, 8, 2), (4, 4, 3)])
def test_interleaved_one_f_one_b(stages: int, microbatches: int, chunks: int) -> None:
    for rank in range(stages):
        schedule = check_schedule(interleaved(stages, rank, microbatches, chunks), [1] * chunks)
        slots = assign_slots(schedule.live_ranges(), [0] * schedule.entries)
        warmup = (stages - rank - 1) * 2 + (chunks - 1) * stages
        assert len(set(slots)) == min(warmup + 1, microbatches * chunks)


def test_all_forwards_first_shares_nothing() -> None:
    schedule = check_schedule([1] * 5 + [-1] * 5, [2])
    assert len(set(assign_slots(schedule.live_ranges(), [0] * 10))) == 10


def test_gradient_accumulation_shares_everything_between_microbatches() -> None:
    schedule = check_schedule([1, -1] * 5, [2])
    assert assign_slots(schedule.live_ranges(), layer_keys(schedule)) == [0, 1] * 5


@pytest.mark.parametrize("count", [1, 2, 5])
def test_sequential(count: int) -> None:
    schedule = sequential(count)
    assert schedule.layers_per_chunk == (count,)
    assert (schedule.microbatches, schedule.entries, schedule.callables) == (1, count, count)
    runs = [(s.kind, s.layer) for s in schedule.steps]
    assert runs[:count] == [("forward", i) for i in range(count)]
    assert runs[count:] == [("backward", i) for i in reversed(range(count))]
    assert schedule.live_ranges() == [(i, 2 * count - 1 - i) for i in range(count)]
    assert [schedule.entry(0, 0, i) for i in range(count)] == list(range(count))


def test_forward_only_entries_stay_live() -> None:
    """The order does not say when an output has been read, so no buffer may be reused."""
    schedule = parse_order([1, 2, 1, 2], 2, forward_only=True)
    assert [s.kind for s in schedule.steps] == ["forward"] * 4
    assert schedule.live_ranges() == [(0, 3), (2, 3), (1, 3), (3, 3)]
    assert sorted(assign_slots(schedule.live_ranges(), [0] * 4)) == [0, 1, 2, 3]
    assert sequential(3, forward_only=True).live_ranges() == [(0, 2), (1, 2), (2, 2)]


# --- Entries and callables ----------------------------------------------------------------------------------


def test_entries_are_chunk_major_then_microbatch_then_layer() -> None:
    schedule = parse_order([1, 2, 3, -3, -2, -1] * 2, 6, [2, 1, 3])
    triples = [(c, m, n) for c, layers in enumerate((2, 1, 3)) for m in range(2) for n in range(layers)]
    assert [schedule.entry(*triple) for triple in triples] == list(range(12))
    assert schedule.entries == 12
    assert [schedule.callable_index(c, n) for c, m, n in triples if m == 0] == list(range(6))
    assert schedule.entry(chunk=2, microbatch=1, layer=0) == 2 * 3 + 1 * 3
    for step in schedule.steps:
        assert schedule.entry(step) == schedule.entry(step.chunk, step.microbatch, step.layer)


@pytest.mark.parametrize(
    ("triple", "message"),
    [
        ((2, 0, 0), "chunk 2 is not in 0..1"),
        ((-1, 0, 0), "chunk -1 is not in 0..1"),
        ((0, 1, 0), "microbatch 1 is not in 0..0"),
        ((0, -1, 0), "microbatch -1 is not in 0..0"),
        ((0, 0, 2), "layer 2 is not in 0..1"),
        ((0, 0, -1), "layer -1 is not in 0..1"),
    ],
)
def test_entry_never_wraps_around(triple: tuple[int, int, int], message: str) -> None:
    with pytest.raises(IndexError, match=re.escape(message)):
        parse_order([1, 2, -2, -1], 4).entry(*triple)


def test_entry_of_a_bare_chunk_is_an_error() -> None:
    with pytest.raises(IndexError, match="microbatch -1"):
        sequential(2).entry(0)  # type: ignore[call-overload]


def test_callable_index_never_wraps_around() -> None:
    schedule = parse_order([1, 2, -2, -1], 4)
    for chunk, layer in [(2, 0), (-1, 0), (0, 2), (0, -1)]:
        with pytest.raises(IndexError):
            schedule.callable_index(chunk, layer)


def test_schedules_are_values() -> None:
    assert parse_order(TE_ORDER, 4) == parse_order(tuple(TE_ORDER), 4, 2) == parse_order(TE_ORDER, 4, (2, 2))
    assert hash(sequential(3)) == hash(sequential(3))
    with pytest.raises(AttributeError):
        sequential(3).microbatches = 2  # type: ignore[misc]


# --- Errors -------------------------------------------------------------------------------------------------

EARLY = "order[{}] = -{}: backward of chunk {} before its forward ({} forward, {} backward so far)"
HALF = "not an int; weight-gradient half-steps (such as -1.5) are not supported, -chunk is the whole backward"
ZERO = "chunks are numbered from 1, so that the sign can mean the direction"


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([], "order is empty: it needs at least one forward"),
        ([1, -1.5, -1], f"order[1] = -1.5: {HALF}"),
        ([1.0, -1], f"order[0] = 1.0: {HALF}"),
        ([1, float("nan")], f"order[1] = nan: {HALF}"),
        ([True, -1], "order[0] = True: not an int but bool"),
        ([1, "-1"], "order[1] = '-1': not an int but str"),
        ([1, None], "order[1] = None: not an int but NoneType"),
        ([1, -1, 0], f"order[2] = 0: {ZERO}"),
        ([-1], EARLY.format(0, 1, 1, 0, 0)),
        ([-1, 1], EARLY.format(0, 1, 1, 0, 0)),
        ([1, 2, -2, -2], EARLY.format(3, 2, 2, 1, 1)),
        ([1, 1, -1, -1, -1, 1], EARLY.format(4, 1, 1, 2, 2)),
        ([1, -2], EARLY.format(1, 2, 2, 0, 0)),
        (
            [1, 2, 1, -2, -1],
            "order[2] = 1: forward of chunk 1 never followed by its backward (2 forward, 1 backward in all, 1 pending)",
        ),
        (
            [1, 2, 2, -1, 2, -2],
            "order[2] = 2: forward of chunk 2 never followed by its backward (3 forward, 1 backward in all, 2 pending)",
        ),
        ([1, 3, -3, -1], "order[1] = 3: but chunk 2 never runs"),
        ([2, -2], "order[0] = 2: but chunk 1 never runs"),
        ([1, -1, 10**12, -(10**12)], f"order[2] = {10**12}: but chunk 2 never runs"),
        ([1, 2, -2, 1, -1, -1], "order[3] = 1: chunk 1 runs 2 microbatches, but chunk 2 only 1"),
        ([2, 2, 1, 2, -1, -2, -2, -2], "order[1] = 2: chunk 2 runs 3 microbatches, but chunk 1 only 1"),
    ],
)
def test_errors_name_the_position(order: list[Any], message: str) -> None:
    with pytest.raises(OrderError) as caught:
        parse_order(order, 12)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([1, 1, -1], "order[2] = -1: backward of chunk 1 in a forward-only order"),
        ([-2], "order[0] = -2: backward of chunk 2 in a forward-only order"),
        ([1, 2, 1], "order[2] = 1: chunk 1 runs 2 microbatches, but chunk 2 only 1"),
        ([3, 1], "order[0] = 3: but chunk 2 never runs"),
    ],
)
def test_forward_only_errors(order: list[int], message: str) -> None:
    with pytest.raises(OrderError) as caught:
        parse_order(order, 12, forward_only=True)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("callables", "layers", "message"),
    [
        (5, None, "5 callables do not divide evenly among 2 chunks: pass layers_per_chunk"),
        (1, None, "1 callables do not divide evenly among 2 chunks: pass layers_per_chunk"),
        (0, None, "callables = 0: there must be at least one"),
        (-2, None, "callables = -2: there must be at least one"),
        (4, [4], "layers_per_chunk has 1 items, but the order has 2 chunks"),
        (4, [2, 1, 1], "layers_per_chunk has 3 items, but the order has 2 chunks"),
        (4, [4, 0], "layers_per_chunk[1] = 0: must be a positive int"),
        (4, [5, -1], "layers_per_chunk[1] = -1: must be a positive int"),
        (4, 0, "layers_per_chunk[0] = 0: must be a positive int"),
        (2, True, "layers_per_chunk[0] = True: must be a positive int"),
        (4, [2.0, 2], "layers_per_chunk[0] = 2.0: must be a positive int"),
        (4, [2, 3], "layers_per_chunk = (2, 3) adds up to 5, not to 4 callables"),
        (4, 3, "layers_per_chunk = (3, 3) adds up to 6, not to 4 callables"),
    ],
)
def test_layer_errors(callables: int, layers: Any, message: str) -> None:
    with pytest.raises(OrderError) as caught:
        parse_order([1, 2, -2, -1], callables, layers)
    assert str(caught.value) == message


def test_order_errors_are_graph_errors_and_value_errors() -> None:
    with pytest.raises(GraphError):
        sequential(0)
    with pytest.raises(ValueError, match="empty"):
        parse_order([], 1)


# --- Slots --------------------------------------------------------------------------------------------------


def test_ranges_that_touch_overlap() -> None:
    assert assign_slots([(0, 3), (3, 5)], "aa") == [0, 1]
    assert assign_slots([(0, 3), (4, 5)], "aa") == [0, 0]
    assert assign_slots([(2, 2), (2, 2)], "aa") == [0, 1]


def test_keys_never_share() -> None:
    assert assign_slots([(0, 1), (2, 3), (4, 5), (6, 7)], ["a", "b", "a", "b"]) == [0, 1, 0, 1]


def test_no_ranges_no_slots() -> None:
    assert assign_slots([], []) == []
    check_slots([], [], [])


def test_every_small_set_of_ranges_has_an_optimal_plan() -> None:
    """All multisets of up to 4 ranges over four points, in every order: no sound plan has fewer slots."""
    universe = [(start, end) for start in range(4) for end in range(start, 4)]
    best: dict[tuple[Range, ...], int] = {}
    for size in range(5):
        for ranges in product(universe, repeat=size):
            slots = assign_slots(ranges, [None] * size)
            check_slots(ranges, [None] * size, slots)
            canonical = tuple(sorted(ranges))
            if canonical not in best:
                best[canonical] = fewest_colours(canonical)
            assert len(set(slots)) == best[canonical]


def test_check_slots_rejects_exactly_the_unsound_plans() -> None:
    """Every plan for every three ranges over four points, and every way to give them two keys."""
    universe = [(start, end) for start in range(4) for end in range(start, 4)]
    plans = list(product(range(3), repeat=3))
    for ranges in product(universe, repeat=3):
        for keys in ("aaa", "aab", "aba"):
            for plan in plans:
                sound = all(
                    plan[a] != plan[b] or (keys[a] == keys[b] and not overlap(ranges[a], ranges[b]))
                    for a, b in combinations(range(3), 2)
                )
                try:
                    check_slots(ranges, keys, plan)
                except OrderError:
                    assert not sound
                else:
                    assert sound


spans = st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda s: (s[0], s[0] + s[1]))


@settings(deadline=None, max_examples=400)
@given(st.lists(st.tuples(spans, st.sampled_from("abc")), max_size=40))
def test_random_plans_are_sound_and_use_as_many_slots_as_are_live_at_once(
    items: list[tuple[Range, str]],
) -> None:
    ranges, keys = [r for r, _ in items], [k for _, k in items]
    slots = assert_sound_and_optimal(ranges, keys)
    assert slots == assign_slots(ranges, keys), "deterministic"
    names = {"a": ("z", 1), "b": None, "c": frozenset("q")}
    assert slots == assign_slots(ranges, [names[k] for k in keys]), "only equality of keys matters"


@settings(deadline=None, max_examples=200)
@given(st.lists(spans, max_size=7))
def test_random_plans_are_as_small_as_brute_force_finds(ranges: list[Range]) -> None:
    assert len(set(assign_slots(ranges, [0] * len(ranges)))) == fewest_colours(ranges)


@settings(deadline=None, max_examples=200)
@given(st.lists(spans, min_size=2, max_size=20), st.data())
def test_one_wrong_slot_is_found(ranges: list[Range], data: st.DataObject) -> None:
    clashes = [(a, b) for a, b in combinations(range(len(ranges)), 2) if overlap(ranges[a], ranges[b])]
    if clashes:
        a, b = data.draw(st.sampled_from(clashes))
        slots = assign_slots(ranges, [0] * len(ranges))
        slots[a] = slots[b]
        with pytest.raises(OrderError, match="both live at step"):
            check_slots(ranges, [0] * len(ranges), slots)


SHARED = "slot {} is shared by range {} {} and range {} {}, {}"


@pytest.mark.parametrize(
    ("ranges", "keys", "slots", "message"),
    [
        (
            [(0, 5), (7, 9), (5, 6)],
            "aaa",
            [3, 3, 3],
            SHARED.format(3, 0, (0, 5), 2, (5, 6), "both live at step 5"),
        ),
        (
            [(0, 1), (2, 3)],
            "ab",
            [0, 0],
            SHARED.format(0, 0, (0, 1), 1, (2, 3), "whose keys differ: 'a' and 'b'"),
        ),
        ([(0, 1), (2, 3)], "aa", [0], "2 ranges, but 1 slots"),
        ([(0, 1), (2, 3)], "a", [0, 0], "2 ranges, but 1 keys"),
        ([(0, 1), (3, 2)], "aa", [0, 0], "range 1 ends before it starts: (3, 2)"),
    ],
)
def test_check_slots_says_what_is_wrong(ranges: list[Range], keys: str, slots: list[int], message: str) -> None:
    with pytest.raises(OrderError) as caught:
        check_slots(ranges, keys, slots)
    assert str(caught.value) == message


def test_assign_slots_refuses_what_it_cannot_plan() -> None:
    with pytest.raises(OrderError, match="2 ranges, but 1 keys"):
        assign_slots([(0, 1), (2, 3)], ["a"])
    with pytest.raises(OrderError, match="range 1 ends before it starts"):
        assign_slots([(0, 1), (3, 2)], ["a", "a"])


def test_a_large_plan() -> None:
    """4096 entries: rank 0 of 8 stages, 64 microbatches, 4 chunks of 16 layers."""
    schedule = parse_order(interleaved(8, 0, 64, 4), 64)
    slots = assign_slots(schedule.live_ranges(), [0] * schedule.entries)
    check_slots(schedule.live_ranges(), [0] * schedule.entries, slots)
    run_in_slots(schedule, slots)
    in_flight = (8 - 1) * 2 + (4 - 1) * 8 + 1
    assert len(set(slots)) == 16 * in_flight


# --- The file itself ----------------------------------------------------------------------------------------


def test_the_example_in_the_header_is_true() -> None:
    result = doctest.testmod(module)
    assert result.attempted >= 5
    assert result.failed == 0


def test_decides_without_tensors() -> None:
    """The file is pure Python: besides the standard library it imports only the error that it raises."""
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imported |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    standard = {"__future__", "heapq", "collections", "collections.abc", "dataclasses", "itertools", "typing"}
    assert imported - standard == {"rollgraph.graph.errors"}
