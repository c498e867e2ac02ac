"""The sizes that graphs are captured for."""

from __future__ import annotations

import pytest

from rollgraph.inference.sizes import prefill_buckets, row_buckets


@pytest.mark.parametrize(
    ("rows", "buckets"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))]
)
def test_row_buckets_are_powers_of_two_and_the_largest(rows: int, buckets: tuple[int, ...]) -> None:
    assert row_buckets(rows) == buckets


@pytest.mark.parametrize(
    ("tokens", "buckets"), [(16, (16,)), (64, (64,)), (512, (64, 256, 512)), (8192, (64, 256, 1024, 4096, 8192))]
)
def test_prefill_buckets_quadruple_up_to_the_largest(tokens: int, buckets: tuple[int, ...]) -> None:
    assert prefill_buckets(tokens) == buckets
