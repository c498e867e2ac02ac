"""Buffer slots: every small set of live ranges, then random and large ones."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgraph.graph.errors import OrderError
from rollgraph.graph.schedule import assign_slots, check_slots, parse_order
from tests.graph.schedule_reference import (
    Range,
    assert_sound_and_optimal,
    fewest_colours,
    interleaved,
    overlap,
    run_in_slots,
)


def test_ranges_that_touch_overlap() -> None:
    assert assign_slots([(0, 3), (3, 5)], "aa") == [0, 1]
    assert assign_slots([(0, 3), (4, 5)], "aa") == [0, 0]
    assert assign_slots([(2, 2), (2, 2)], "aa") == [0, 1]


def test_ranges_with_different_keys_never_share_a_slot() -> None:
    assert assign_slots([(0, 1), (2, 3), (4, 5), (6, 7)], ["a", "b", "a", "b"]) == [0, 1, 0, 1]


def test_no_ranges_need_no_slots() -> None:
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
def test_random_plans_are_sound_and_use_the_fewest_slots(
    items: list[tuple[Range, str]],
) -> None:
    ranges, keys = [r for r, _ in items], [k for _, k in items]
    slots = assert_sound_and_optimal(ranges, keys)
    assert slots == assign_slots(ranges, keys), "deterministic"
    names = {"a": ("z", 1), "b": None, "c": frozenset("q")}
    assert slots == assign_slots(ranges, [names[k] for k in keys]), "only equality of keys matters"


@settings(deadline=None, max_examples=200)
@given(st.lists(spans, max_size=7))
def test_random_plans_are_as_small_as_those_of_brute_force(ranges: list[Range]) -> None:
    assert len(set(assign_slots(ranges, [0] * len(ranges)))) == fewest_colours(ranges)


@settings(deadline=None, max_examples=200)
@given(st.lists(spans, min_size=2, max_size=20), st.data())
def test_one_wrong_slot_is_refused(ranges: list[Range], data: st.DataObject) -> None:
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
def test_check_slots_names_the_problem(ranges: list[Range], keys: str, slots: list[int], message: str) -> None:
    with pytest.raises(OrderError) as caught:
        check_slots(ranges, keys, slots)
    assert str(caught.value) == message


def test_assign_slots_refuses_invalid_ranges_and_keys() -> None:
    with pytest.raises(OrderError, match="2 ranges, but 1 keys"):
        assign_slots([(0, 1), (2, 3)], ["a"])
    with pytest.raises(OrderError, match="range 1 ends before it starts"):
        assign_slots([(0, 1), (3, 2)], ["a", "a"])


def test_a_large_plan_is_sound_and_as_small_as_possible() -> None:
    """4096 entries: rank 0 of 8 stages, 64 microbatches, 4 chunks of 16 layers."""
    schedule = parse_order(interleaved(8, 0, 64, 4), 64)
    slots = assign_slots(schedule.live_ranges(), [0] * schedule.entries)
    check_slots(schedule.live_ranges(), [0] * schedule.entries, slots)
    run_in_slots(schedule, slots)
    in_flight = (8 - 1) * 2 + (4 - 1) * 8 + 1
    assert len(set(slots)) == 16 * in_flight
