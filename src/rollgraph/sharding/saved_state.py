"""The optimizer state in a checkpoint's files: finding the part that a rank needs, in any sharding, and loading it.

Blocks of int8 state start at the same elements of a parameter whatever the number of ranks, so state of the same format
is copied as it is. State of another format is converted through fp32, to the nearest numbers. Both go chunk by chunk,
into the memory that the optimizer has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rollgraph.sharding.manifest import CheckpointError, Manifest
from rollgraph.sharding.moment_codecs import NEAREST, MomentCodec
from rollgraph.sharding.optimizer import Piece
from rollgraph.sharding.optimizer_state import OptimizerState, ShardState
from rollgraph.sharding.state_memory import BLOCK, CHUNK, MASTER, StateField, StateFormat, state_fields


@dataclass(frozen=True)
class SavedPart:
    """Elements of a piece that one file holds."""

    piece: Piece
    file: Path
    start: int  # where the elements start in the parameter
    end: int
    saved_start: int  # where the part in the file starts in the parameter


def find_parts(source: Path, manifest: Manifest, piece: Piece) -> list[SavedPart]:
    """Where the state of a piece is, in all files that hold a part of it."""
    parts = []
    missing = piece.elements
    for record in manifest["shards"]:
        for name, start, count in record["parts"]:
            low = max(start, piece.start)
            high = min(start + count, piece.start + piece.elements)
            if name == piece.parameter.name and low < high:
                missing -= high - low
                parts.append(SavedPart(piece, source / record["file"], low, high, start))
    if missing:
        raise CheckpointError(f"{source}: {missing} elements of {piece.parameter.name} are in no file")
    return parts


def load_part(part: SavedPart, saved: StateFormat, state: OptimizerState) -> None:
    """Put a part in place. `saved` is the format of the file."""
    piece = part.piece
    with safe_open(part.file, framework="pt") as file:
        fields = [(field, file.get_slice(f"{field.name}/{piece.parameter.name}")) for field in state_fields(saved)]
        for low in range(part.start, part.end, CHUNK):
            high = min(low + CHUNK, part.end)
            values = {}
            for field, entries in fields:
                start = (low - part.saved_start) // field.elements_per_entry
                values[field.name] = entries[start : field.entries(high - part.saved_start)]
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
