"""The optimizer state in a checkpoint's files: finding the part that a rank needs, in any sharding, and loading it.

Blocks of int8 state start at the same elements of a parameter whatever the number of ranks, so state of the same format
is copied as it is. State of another format is converted through fp32, to the nearest numbers, and so is state in less
than fp32 of ranks that divided layers in another way. All goes chunk by chunk, into the memory that the optimizer has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rollgraph.distributed.pieces import ParameterPiece
from rollgraph.sharding.manifest import Manifest
from rollgraph.sharding.moment_codecs import NEAREST, MomentCodec
from rollgraph.sharding.optimizer import Piece
from rollgraph.sharding.optimizer_state import OptimizerState, ShardState
from rollgraph.sharding.saved_layout import SavedRun, find_runs, places_in_whole
from rollgraph.sharding.state_memory import BLOCK, CHUNK, MASTER, StateField, StateFormat, state_fields


@dataclass(frozen=True)
class SavedPart:
    """Elements of a piece that one file holds."""

    piece: Piece
    file: Path
    start: int  # where the elements start in the parameter
    end: int
    saved_start: int  # where the part in the file starts in the parameter


@dataclass(frozen=True)
class RegroupedPart:
    """A piece whose elements are in pieces that were divided in another way."""

    piece: Piece
    own: ParameterPiece
    runs: list[SavedRun]


def find_parts(
    source: Path, manifest: Manifest, piece: Piece, own: ParameterPiece | None = None
) -> list[SavedPart] | list[RegroupedPart]:
    """Where the state of a piece is, in all files that hold a part of it.

    `own` says what this rank has of the parameter, where ranks divide layers among themselves.
    """
    own = own or ParameterPiece.of_all(piece.parameter.shape)
    runs = find_runs(source, manifest, piece.parameter.name, own.whole)
    same = [run for run in runs if run.piece.holds_same(own)]
    if not same:
        return [RegroupedPart(piece, own, runs)]
    parts = []
    for run in same:
        low = max(run.start, piece.start)
        high = min(run.start + run.elements, piece.start + piece.elements)
        if low < high:
            parts.append(SavedPart(piece, run.file, low, high, run.start))
    return parts


def load_regrouped(part: RegroupedPart, saved: StateFormat, state: OptimizerState) -> None:
    """Put the elements of a piece in place that come from others. Takes memory for the state of the whole parameter."""
    piece = part.piece
    whole = {field.name: torch.empty(math.prod(part.own.whole)) for field in state_fields("fp32")}
    for run in part.runs:
        with safe_open(run.file, framework="pt") as file:
            fields = [(field, file.get_slice(f"{field.name}/{piece.parameter.name}")) for field in state_fields(saved)]
            for low in range(0, run.elements, CHUNK):
                high = min(low + CHUNK, run.elements)
                values = {field.name: _entries_of(entries, field, low, high) for field, entries in fields}
                if saved != "fp32":
                    values = _convert(values, high - low, saved, "fp32")
                places = places_in_whole(run.piece, run.start + low, run.start + high)
                for name, tensor in values.items():
                    whole[name].index_copy_(0, places, tensor)
    for low in range(0, piece.elements, CHUNK):
        high = min(low + CHUNK, piece.elements)
        places = places_in_whole(part.own, piece.start + low, piece.start + high)
        values = {name: tensor.index_select(0, places) for name, tensor in whole.items()}
        if state.format != "fp32":
            values = _convert(values, high - low, "fp32", state.format)
        for name, tensor in state.part(piece.fields, low, high).items():
            tensor.copy_(values[name])


def _entries_of(entries: Any, field: StateField, low: int, high: int) -> Tensor:
    """The entries of a field for some elements of a run."""
    found: Tensor = entries[low // field.elements_per_entry : field.entries(high)]
    return found


def load_part(part: SavedPart, saved: StateFormat, state: OptimizerState) -> None:
    """Put a part in place. `saved` is the format of the file."""
    piece = part.piece
    with safe_open(part.file, framework="pt") as file:
        fields = [(field, file.get_slice(f"{field.name}/{piece.parameter.name}")) for field in state_fields(saved)]
        for low in range(part.start, part.end, CHUNK):
            high = min(low + CHUNK, part.end)
            values = {}
            for field, entries in fields:
                values[field.name] = _entries_of(entries, field, low - part.saved_start, high - part.saved_start)
            if saved != state.format:
                values = _convert(values, high - low, saved, state.format)
            for name, tensor in state.part(piece.fields, low - piece.start, high - piece.start).items():
                tensor.copy_(values[name])


def _convert(values: ShardState, elements: int, saved: StateFormat, wanted: StateFormat) -> ShardState:
    padded = -(-elements // BLOCK) * BLOCK
    whole = {field.name: _pad(values[field.name], field, padded) for field in state_fields(saved)}
    moments = torch.empty(padded), torch.empty(padded)
    MomentCodec(saved, "cpu").decode(whole, *moments)
    result = {f.name: torch.empty(f.entries(padded), dtype=f.dtype) for f in state_fields(wanted)}
    nearest = torch.full((padded,), NEAREST, dtype=torch.int32)
    MomentCodec(wanted, "cpu").encode(*moments, (nearest, nearest), result)
    result[MASTER.name] = whole[MASTER.name]
    return {field.name: result[field.name][: field.entries(elements)] for field in state_fields(wanted)}


def _pad(tensor: Tensor, field: StateField, elements: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, field.entries(elements) - tensor.numel()))
