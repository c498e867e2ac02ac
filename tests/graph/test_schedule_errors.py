"""An illegal order raises OrderError, which names the position."""

from __future__ import annotations

from typing import Any

import pytest

from rollgraph.graph.errors import GraphError, OrderError
from rollgraph.graph.schedule import parse_order, sequential

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
def test_errors_of_forward_only_orders_name_the_position(order: list[int], message: str) -> None:
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
def test_errors_of_layer_counts_name_the_value(callables: int, layers: Any, message: str) -> None:
    with pytest.raises(OrderError) as caught:
        parse_order([1, 2, -2, -1], callables, layers)
    assert str(caught.value) == message


def test_order_errors_are_graph_errors_and_value_errors() -> None:
    with pytest.raises(GraphError):
        sequential(0)
    with pytest.raises(ValueError, match="empty"):
        parse_order([], 1)
