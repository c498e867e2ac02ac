"""Where a parameter is in the files of a checkpoint, whatever number of ranks divided its layer when it was saved.

A file holds runs of consecutive elements of a piece. If a rank has another piece than any that was saved, elements are
looked up by their place in the whole parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rollgraph.distributed.pieces import ParameterPiece
from rollgraph.sharding.manifest import CheckpointError, Manifest


class SavedRun(NamedTuple):
    """Elements of a piece of a parameter that one file holds."""

    file: Path
    piece: ParameterPiece
    start: int  # in the flattened piece
    elements: int


def find_runs(source: Path, manifest: Manifest, name: str, whole: Sequence[int]) -> list[SavedRun]:
    """All runs of a parameter of this shape. Raises if some of its elements are in no file."""
    whole = tuple(whole) or (1,)
    runs = []
    for record in manifest["shards"]:
        piece = ParameterPiece.of_all(whole)
        if name in record.get("pieces", {}):
            piece = ParameterPiece.from_json(record["pieces"][name])
        for part, start, count in record["parts"]:
            if part == name:
                runs.append(SavedRun(source / record["file"], piece, start, count))
    _check_complete(source, name, whole, runs)
    return runs


def _check_complete(source: Path, name: str, whole: Sequence[int], runs: Sequence[SavedRun]) -> None:
    held: dict[ParameterPiece, int] = {}
    for run in runs:
        held[run.piece] = held.get(run.piece, 0) + run.elements
    missing = 0 if held else math.prod(whole)
    for piece, count in held.items():
        missing += math.prod(piece.shape) - count
    divided = [piece for piece in held if not piece.is_whole]
    if divided:  # then no rank has saved the whole parameter
        axis = divided[0].axis
        along: set[int] = set()
        for piece in divided:
            for start, stop in piece.ranges:
                along.update(range(start, stop))
        missing += (whole[axis] - len(along)) * (math.prod(whole) // whole[axis])
    if missing:
        raise CheckpointError(f"{source}: {missing} elements of {name} are in no file")


def places_in_whole(piece: ParameterPiece, start: int, stop: int) -> Tensor:
    """Where elements of a flattened piece are in the flattened parameter."""
    places = torch.arange(start, stop)
    if piece.is_whole:
        return places
    inner = math.prod(piece.whole[piece.axis + 1 :])
    along = torch.cat([torch.arange(low, high) for low, high in piece.ranges])
    block = len(along) * inner
    outer, rest = places // block, places % block
    return (outer * piece.whole[piece.axis] + along[rest // inner]) * inner + rest % inner
