"""BlockManager: reference counts, and content that matches for exactly as long as a table holds it."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgraph.inference import blocks
from rollgraph.inference.blocks import BlockManager


def test_every_block_except_the_first_is_allocated_once() -> None:
    manager = BlockManager(blocks=5, block_size=4)
    assert manager.free == manager.capacity == 4
    assert sorted(manager.allocate(3) + manager.allocate(1)) == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="cannot allocate 1 blocks: only 0 are free"):
        manager.allocate(1)


def test_a_request_that_is_too_large_takes_nothing() -> None:
    manager = BlockManager(blocks=4, block_size=1)
    with pytest.raises(RuntimeError, match="cannot allocate 4 blocks: only 3 are free"):
        manager.allocate(4)
    assert manager.free == 3


def test_a_block_is_free_when_its_last_table_releases_it() -> None:
    manager = BlockManager(blocks=3, block_size=4)
    table = manager.allocate(2)
    manager.share(table[:1])
    manager.release(table)
    assert (manager.free, manager.count(table[0]), manager.count(table[1])) == (1, 1, 0)
    manager.release(table[:1])
    assert manager.free == 2


def test_a_free_block_can_neither_be_released_nor_shared() -> None:
    manager = BlockManager(blocks=3, block_size=4)
    table = manager.allocate(1)
    manager.release(table)
    with pytest.raises(RuntimeError, match="already free"):
        manager.release(table)
    with pytest.raises(RuntimeError, match="cannot share block"):
        manager.share(table)
    with pytest.raises(RuntimeError, match="cannot share block 0: it is free"):
        manager.share([0])


@pytest.mark.parametrize(("number", "size"), [(1, 4), (0, 4), (8, 0)])
def test_a_cache_needs_blocks_with_room_for_tokens(number: int, size: int) -> None:
    with pytest.raises(ValueError, match="blocks of"):
        BlockManager(number, size)


def test_equal_tokens_after_a_different_prefix_do_not_match() -> None:
    manager = BlockManager(blocks=8, block_size=2)
    first = manager.allocate(2)
    manager.register(first, (1, 1, 7, 7))
    assert manager.match((1, 1, 7, 7)) == (first, None)
    assert manager.match((2, 2, 7, 7)) == ([], None)
    assert manager.match((7, 7)) == ([], None)
    second = manager.allocate(2)
    manager.register(second, (2, 2, 7, 7))
    assert manager.match((2, 2, 7, 7)) == (second, None)


def test_a_tail_matches_completely_or_not_at_all() -> None:
    manager = BlockManager(blocks=8, block_size=4)
    table = manager.allocate(2)
    manager.register(table, (1, 2, 3, 4, 5, 6))
    assert manager.match((1, 2, 3, 4, 5, 6)) == (table[:1], table[1])
    assert manager.match((1, 2, 3, 4, 5)) == (table[:1], None)
    assert manager.match((1, 2, 3, 4, 5, 6, 7)) == (table[:1], None)
    assert manager.match((1, 2, 3, 4)) == (table[:1], None)
    assert manager.match((5, 6)) == ([], None)


def test_a_copy_of_a_tail_replaces_a_released_original() -> None:
    manager = BlockManager(blocks=8, block_size=4)
    original, copy = manager.allocate(1), manager.allocate(1)
    manager.register(original, (1, 2))
    manager.register(copy, (1, 2))
    assert manager.match((1, 2)) == ([], original[0])  # the older one, because the copy may not be filled yet
    manager.release(original)
    assert manager.match((1, 2)) == ([], copy[0])
    manager.release(copy)
    assert manager.match((1, 2)) == ([], None)


def test_a_block_filled_in_two_chunks_matches_its_latest_content() -> None:
    manager = BlockManager(blocks=8, block_size=2)
    table = manager.allocate(2)
    manager.register(table, (1, 2, 3))
    assert manager.match((1, 2, 3)) == (table[:1], table[1])
    manager.register(table, (1, 2, 3, 4), start=3)
    assert manager.match((1, 2, 3, 4)) == (table, None)
    assert manager.match((1, 2, 3)) == (table[:1], None)
    manager.release(table)
    assert manager.match((1, 2, 3)) == manager.match((1, 2, 3, 4)) == ([], None)


def test_a_prefix_can_be_long() -> None:
    """Keys that contained the keys of their parents would exhaust the stack here."""
    manager = BlockManager(blocks=100_001, block_size=1)
    prefix = tuple(range(100_000))
    table = manager.allocate(len(prefix))
    manager.register(table, prefix)
    assert manager.match(prefix) == (table, None)


def test_the_example_in_the_module_docstring() -> None:
    result = doctest.testmod(blocks)
    assert result.attempted > 0
    assert result.failed == 0


@given(
    size=st.integers(1, 3),
    calls=st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=7).map(tuple), st.booleans()), max_size=25),
)
def test_match_finds_the_longest_prefix_among_live_tables(size: int, calls: list[tuple[tuple[int, ...], bool]]) -> None:
    """Compare with a search through all tables, while tables are added and the oldest are released."""
    manager = BlockManager(blocks=200, block_size=size)
    held: list[tuple[tuple[int, ...], list[int]]] = []
    for prefix, leaves in calls:
        shared, tail = manager.match(prefix)
        full = len(prefix) // size * size
        lengths = [n for n in range(full // size, 0, -1) if any(p[: n * size] == prefix[: n * size] for p, _ in held)]
        assert len(shared) == max(lengths, default=0)
        assert (tail is not None) == (full < len(prefix) and any(p == prefix for p, _ in held))
        for index, block in enumerate(shared):
            assert any(p[: (index + 1) * size] == prefix[: (index + 1) * size] and t[index] == block for p, t in held)
        if tail is not None:
            assert any(p == prefix and t[-1] == tail for p, t in held)
        manager.share(shared)
        table = shared + manager.allocate(manager.needed(len(prefix)) - len(shared))
        manager.register(table, prefix, start=len(shared) * size)
        held.append((prefix, table))
        if leaves:
            manager.release(held.pop(0)[1])
        live = {block for _, t in held for block in t}
        assert manager.free == manager.capacity - len(live)
        assert all(manager.count(block) == sum(block in t for _, t in held) for block in live)
