"""Pieces of a parameter: where their elements are in the whole one, and whether files hold all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.distributed.pieces import ParameterPiece
from rollgraph.sharding import CheckpointError
from rollgraph.sharding.saved_layout import find_runs, places_in_whole

PIECES = {
    "rows": ParameterPiece((6, 4), 0, ((1, 3), (5, 6)), (True, True)),
    "columns": ParameterPiece((3, 8), 1, ((4, 6), (0, 1)), (True, True)),
    "in the middle": ParameterPiece((2, 6, 3), 1, ((2, 4),), (True,)),
    "elements": ParameterPiece((9,), 0, ((3, 8),), (True,)),
    "all": ParameterPiece.of_all((3, 5)),
}


def cut(whole: Tensor, piece: ParameterPiece) -> Tensor:
    return torch.cat([whole.narrow(piece.axis, low, high - low) for low, high in piece.ranges], piece.axis)


@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
def test_elements_of_a_piece_are_found_in_the_whole(piece: ParameterPiece) -> None:
    numbers = torch.arange(torch.Size(piece.whole).numel()).view(piece.whole)
    expected = cut(numbers, piece)
    assert tuple(expected.shape) == piece.shape
    for start in range(expected.numel()):
        for stop in range(start + 1, expected.numel() + 1):
            assert torch.equal(places_in_whole(piece, start, stop), expected.flatten()[start:stop])
    again = ParameterPiece.from_json(json.loads(json.dumps(piece.to_json())))
    assert again.holds_same(piece)


def test_spans_that_a_rank_counts() -> None:
    shared = ParameterPiece((8, 3), 0, ((0, 2), (4, 5), (6, 7)), (True, False, True))
    assert shared.counted_spans() == [(0, 6), (9, 12)]
    assert ParameterPiece.of_all((2, 3), counted=False).counted_spans() == []
    assert ParameterPiece.of_all(()).counted_spans() == [(0, 1)]
    with pytest.raises(ValueError, match="first axis alone"):
        ParameterPiece((3, 8), 1, ((0, 1), (2, 3)), (True, False)).counted_spans()


def manifest_of(*shards: tuple[ParameterPiece | None, int, int]) -> dict[str, Any]:
    """A manifest in which each file holds one run of a parameter `w`, given with its piece, start and length."""
    records = []
    for number, (piece, start, count) in enumerate(shards):
        record: dict[str, Any] = {"file": f"rank{number}.safetensors", "parts": [["w", start, count]]}
        if piece is not None:
            record["pieces"] = {"w": piece.to_json()}
        records.append(record)
    return {"shards": records}


UPPER = ParameterPiece((4, 2), 0, ((0, 2),), (True,))
LOWER = ParameterPiece((4, 2), 0, ((2, 4),), (True,))


def test_runs_of_a_parameter_are_found() -> None:
    runs = find_runs(Path("saved"), manifest_of((UPPER, 0, 3), (UPPER, 3, 1), (LOWER, 0, 4)), "w", (4, 2))
    assert [(run.file.name, run.start, run.elements) for run in runs] == [
        ("rank0.safetensors", 0, 3),
        ("rank1.safetensors", 3, 1),
        ("rank2.safetensors", 0, 4),
    ]
    assert [run.piece.holds_same(UPPER) for run in runs] == [True, True, False]
    (scalar,) = find_runs(Path("saved"), manifest_of((None, 0, 1)), "w", ())
    assert scalar.piece.is_whole


@pytest.mark.parametrize(
    ("shards", "missing"),
    [
        ([(None, 0, 5)], 3),
        ([(UPPER, 0, 4), (LOWER, 0, 3)], 1),
        ([(LOWER, 0, 4)], 4),
        ([], 8),
    ],
)
def test_elements_that_no_file_holds_are_an_error(shards: list[Any], missing: int) -> None:
    with pytest.raises(CheckpointError, match=f"saved: {missing} elements of w are in no file"):
        find_runs(Path("saved"), manifest_of(*shards), "w", (4, 2))
