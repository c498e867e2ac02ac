"""Pipeline orders: every small one, legal or not, then random and well-known large ones."""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgraph.graph import schedule as module
from rollgraph.graph.errors import OrderError
from rollgraph.graph.schedule import assign_slots, parse_order, sequential
from tests.graph.schedule_reference import (
    TE_ORDER,
    check_schedule,
    interleaved,
    layer_keys,
    legal_of_length,
    legal_orders,
    one_f_one_b,
    peak,
    run_in_slots,
    walk,
)

# -- Orders, exhaustively ----------


@pytest.mark.parametrize(
    ("chunks", "microbatches", "count"),
    # Catalan(m)^c * (2mc)! / (2m)!^c orders: checks the enumeration itself.
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
def test_every_legal_order_of_a_size_has_a_sound_and_optimal_plan(chunks: int, microbatches: int, count: int) -> None:
    orders = set(legal_orders(chunks, microbatches))
    assert len(orders) == count
    for order in orders:
        check_schedule(order, [1] * chunks)
        if count < 1000:
            check_schedule(order, [2] * chunks)
            check_schedule(order, [1 + c % 3 for c in range(chunks)])


@pytest.mark.slow
def test_every_order_of_two_chunks_and_three_microbatches_is_planned() -> None:
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
    """An error about an order quotes a position and the entry there (an empty order has none)."""
    if not order:
        assert "empty" in str(error)
        return
    match = re.match(r"order\[(\d+)\] = (-?\d+): ", str(error))
    assert match, error
    assert order[int(match[1])] == int(match[2])


def test_a_backward_that_is_too_early_is_reported_at_its_position() -> None:
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
def test_random_large_orders_have_a_sound_and_optimal_plan(data: st.DataObject) -> None:
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


# -- Well-known orders ----------


def test_the_transformer_engine_example_is_parsed_and_planned() -> None:
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
def test_one_f_one_b_needs_slots_for_the_microbatches_in_flight(stages: int, microbatches: int) -> None:
    for rank in range(stages):
        schedule = check_schedule(one_f_one_b(stages, rank, microbatches), [2])
        slots = assign_slots(schedule.live_ranges(), layer_keys(schedule))
        in_flight = min(stages - rank, microbatches)
        assert len(set(slots)) == 2 * in_flight  # however many microbatches there are


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(2, 4, 2), (2, 8, 3), (4, 8, 2), (4, 4, 3)])
def test_interleaved_one_f_one_b_needs_slots_for_its_warm_up(stages: int, microbatches: int, chunks: int) -> None:
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
def test_sequential_runs_backwards_in_reverse_order(count: int) -> None:
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


# -- Entries and callables ----------


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


# -- The file itself ----------


def test_the_doctests_of_the_module_pass() -> None:
    result = doctest.testmod(module)
    assert result.attempted >= 5
    assert result.failed == 0


def test_the_module_is_pure_python() -> None:
    """Besides the standard library, it imports only the error that it raises."""
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imported |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    standard = {"__future__", "heapq", "collections", "collections.abc", "dataclasses", "itertools", "typing"}
    assert imported - standard == {"rollgraph.graph.errors"}
