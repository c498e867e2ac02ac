"""Loading a sharded checkpoint with any number of ranks, into the existing memory of model and optimizer."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rollgraph.checkpoint.format import (
    UNSHARDED,
    CheckpointError,
    Manifest,
    check_files,
    checkpoint_key,
    manifest_files,
    read_manifest,
    read_states,
)
from rollgraph.checkpoint.write import describe_full_parameters, describe_parameters, describe_tensor, unsharded_tensors
from rollgraph.parallel.data.bucket_plan import BLOCK, CHUNK, MASTER, StateField, StateFormat, specs_of, state_fields
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ParameterState, ShardedAdamW
from rollgraph.parallel.optim.codecs import NEAREST, MomentCodec
from rollgraph.parallel.optim.state import OptimizerState, ShardState
from rollgraph.parallel.tensor.pieces import TensorParallelShard

# -- parameters in the files -----------------------------------------------------------------------
# A file holds ranges of consecutive elements of a tensor parallel shard. If this rank's tensor parallel shard was not
# saved as such, we look up elements by their indices in the full parameter.


class SavedRange(NamedTuple):
    """Consecutive elements of a tensor parallel shard of a parameter, in one file."""

    file: Path
    shard: TensorParallelShard
    start: int  # in the flattened shard
    elements: int


def find_saved_ranges(source: Path, manifest: Manifest, key: str, full_shape: Sequence[int]) -> list[SavedRange]:
    """All ranges of a parameter of this shape. Raises if some of its elements are in no file."""
    full_shape = tuple(full_shape) or (1,)
    ranges = []
    for record in manifest["shards"]:
        shard = TensorParallelShard.full(full_shape)
        if key in record.get("pieces", {}):
            shard = TensorParallelShard.from_json(record["pieces"][key])
        for part, start, count in record["parts"]:
            if part == key:
                ranges.append(SavedRange(source / record["file"], shard, start, count))
    _check_complete(source, key, full_shape, ranges)
    return ranges


def _check_complete(source: Path, key: str, full_shape: Sequence[int], ranges: Sequence[SavedRange]) -> None:
    saved_elements: dict[TensorParallelShard, int] = {}
    for saved_range in ranges:
        saved_elements[saved_range.shard] = saved_elements.get(saved_range.shard, 0) + saved_range.elements
    missing = 0 if saved_elements else math.prod(full_shape)
    for shard, count in saved_elements.items():
        missing += math.prod(shard.shape) - count
    partial = [shard for shard in saved_elements if not shard.is_full]
    if partial:  # then no rank has saved the full parameter
        axis = partial[0].axis
        along: set[int] = set()
        for shard in partial:
            for start, stop in shard.ranges:
                along.update(range(start, stop))
        missing += (full_shape[axis] - len(along)) * (math.prod(full_shape) // full_shape[axis])
    if missing:
        raise CheckpointError(f"{source}: {missing} elements of {key} are in no file")


def flat_indices(shard: TensorParallelShard, start: int, stop: int) -> Tensor:
    """The indices, in the flattened full parameter, of the elements from start to stop of a flattened shard."""
    indices = torch.arange(start, stop)
    if shard.is_full:
        return indices
    inner = math.prod(shard.full_shape[shard.axis + 1 :])
    along = torch.cat([torch.arange(low, high) for low, high in shard.ranges])
    block = len(along) * inner
    outer, remainder = indices // block, indices % block
    return (outer * shard.full_shape[shard.axis] + along[remainder // inner]) * inner + remainder % inner


# -- optimizer state -------------------------------------------------------------------------------
# Blocks of int8 state start at the same elements of a parameter for any number of ranks, so state in the same format is
# copied bit by bit. State in another format is converted through fp32 and rounded to nearest. With another tensor
# parallel layout, state in less than fp32 is converted, too. Everything is loaded chunk by chunk into the optimizer's
# memory.


@dataclass(frozen=True)
class SavedPart:
    """Elements of a parameter's state that one file holds."""

    target: ParameterState
    file: Path
    start: int  # the first element to load, in the flattened parameter
    end: int
    saved_start: int  # the first element in the file, in the flattened parameter


@dataclass(frozen=True)
class ReshardedPart:
    """A parameter's state that was saved with another tensor parallel layout."""

    target: ParameterState
    shard: TensorParallelShard  # of this rank
    ranges: list[SavedRange]


def find_parts(
    source: Path, manifest: Manifest, target: ParameterState, shard: TensorParallelShard | None = None
) -> list[SavedPart] | list[ReshardedPart]:
    """Find the saved state of a parameter, in all files that hold a part of it.

    `shard` is this rank's tensor parallel shard of the parameter, if there is tensor parallelism.
    """
    shard = shard or TensorParallelShard.full(target.parameter.shape)
    ranges = find_saved_ranges(source, manifest, checkpoint_key(target.parameter.name), shard.full_shape)
    same = [saved_range for saved_range in ranges if saved_range.shard.holds_same(shard)]
    if not same:
        return [ReshardedPart(target, shard, ranges)]
    parts = []
    for saved_range in same:
        low = max(saved_range.start, target.start)
        high = min(saved_range.start + saved_range.elements, target.start + target.elements)
        if low < high:
            parts.append(SavedPart(target, saved_range.file, low, high, saved_range.start))
    return parts


def load_resharded(part: ReshardedPart, saved: StateFormat, state: OptimizerState) -> None:
    """Load state from another tensor parallel layout. Takes host memory for the state of the full parameter."""
    target = part.target
    key = checkpoint_key(target.parameter.name)
    full = {field.name: torch.empty(math.prod(part.shard.full_shape)) for field in state_fields("fp32")}
    for saved_range in part.ranges:
        with safe_open(saved_range.file, framework="pt") as file:
            fields = [(field, file.get_slice(f"{field.name}/{key}")) for field in state_fields(saved)]
            for low in range(0, saved_range.elements, CHUNK):
                high = min(low + CHUNK, saved_range.elements)
                values = {field.name: _entries_of(entries, field, low, high) for field, entries in fields}
                if saved != "fp32":
                    values = _convert(values, high - low, saved, "fp32")
                indices = flat_indices(saved_range.shard, saved_range.start + low, saved_range.start + high)
                for name, tensor in values.items():
                    full[name].index_copy_(0, indices, tensor)
    for low in range(0, target.elements, CHUNK):
        high = min(low + CHUNK, target.elements)
        indices = flat_indices(part.shard, target.start + low, target.start + high)
        values = {name: tensor.index_select(0, indices) for name, tensor in full.items()}
        if state.format != "fp32":
            values = _convert(values, high - low, "fp32", state.format)
        for name, tensor in state.part(target.fields, low, high).items():
            tensor.copy_(values[name])


def _entries_of(entries: Any, field: StateField, low: int, high: int) -> Tensor:
    """The entries of a field for the elements from low to high."""
    values: Tensor = entries[low // field.elements_per_entry : field.entries(high)]
    return values


def load_part(part: SavedPart, saved: StateFormat, state: OptimizerState) -> None:
    """Load a part. `saved` is the format of the file."""
    target = part.target
    key = checkpoint_key(target.parameter.name)
    with safe_open(part.file, framework="pt") as file:
        fields = [(field, file.get_slice(f"{field.name}/{key}")) for field in state_fields(saved)]
        for low in range(part.start, part.end, CHUNK):
            high = min(low + CHUNK, part.end)
            values = {}
            for field, entries in fields:
                values[field.name] = _entries_of(entries, field, low - part.saved_start, high - part.saved_start)
            if saved != state.format:
                values = _convert(values, high - low, saved, state.format)
            for name, tensor in state.part(target.fields, low - target.start, high - target.start).items():
                tensor.copy_(values[name])


def _convert(values: ShardState, elements: int, saved: StateFormat, target: StateFormat) -> ShardState:
    padded = -(-elements // BLOCK) * BLOCK
    padded_values = {field.name: _pad(values[field.name], field, padded) for field in state_fields(saved)}
    moments = torch.empty(padded), torch.empty(padded)
    MomentCodec(saved, "cpu").decode(padded_values, *moments)
    result = {f.name: torch.empty(f.entries(padded), dtype=f.dtype) for f in state_fields(target)}
    nearest = torch.full((padded,), NEAREST, dtype=torch.int32)
    MomentCodec(target, "cpu").encode(*moments, (nearest, nearest), result)
    result[MASTER.name] = padded_values[MASTER.name]
    return {field.name: result[field.name][: field.entries(elements)] for field in state_fields(target)}


def _pad(tensor: Tensor, field: StateField, elements: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, field.entries(elements) - tensor.numel()))


# -- loading ---------------------------------------------------------------------------------------

_ABSENT = "absent"


def load(folder: str | os.PathLike[str], model: ShardedModel, optimizer: ShardedAdamW) -> list[Any]:
    """Load parameters and optimizer state from a checkpoint. Returns the state that each rank saved.

    If any rank finds a problem, all ranks raise, and nothing has changed.
    """
    model.before_update()
    source = Path(folder)
    contents: _Contents | None = None
    checksum = problem = ""
    try:
        manifest = read_manifest(source)
        checksum = manifest["sha256"]
        _check_parameters(manifest, model)
        check_files(source, manifest_files(manifest)[model.rank :: model.ranks])
        contents = _read(source, manifest, model, optimizer)
    except (CheckpointError, OSError, SafetensorError) as error:
        problem = str(error) or type(error).__name__
    _check_all_ranks(source, model, checksum, problem)
    assert contents is not None
    with torch.no_grad():
        for tensor, value in contents.tensors:
            tensor.copy_(value)
        optimizer.state.before_writing()
        for part in contents.parts:
            if isinstance(part, ReshardedPart):
                load_resharded(part, contents.format, optimizer.state)
            else:
                load_part(part, contents.format, optimizer.state)
        optimizer.skipped.fill_(contents.skipped)
        optimizer.updates.fill_(contents.updates)
    optimizer.steps = contents.steps
    optimizer.write_shards()
    model.after_update()
    model.gather()
    return contents.states


def load_parameters(folder: str | os.PathLike[str], model: nn.Module, *, cast: bool = False) -> None:
    """Load only the parameters and buffers, into a model that is not sharded. Call `verify` before.

    `cast` allows parameters of another dtype than the model's.
    """
    source = Path(folder)
    manifest = read_manifest(source)
    saved, expected = manifest["parameters"], describe_parameters(model)
    if cast:
        saved, expected = _without_dtypes(saved), _without_dtypes(expected)
    _check_same(saved, expected)
    unsharded = unsharded_tensors(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        with safe_open(source / UNSHARDED, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 not a dict
                unsharded[key].copy_(file.get_tensor(key))
        for spec in specs_of(model):
            if spec.trainable:
                key = checkpoint_key(spec.name)
                _load_parameter(parameters[spec.name], find_saved_ranges(source, manifest, key, spec.shape), key)


def _load_parameter(parameter: Tensor, ranges: Sequence[SavedRange], key: str) -> None:
    flat = parameter.view(-1)
    for saved_range in ranges:
        with safe_open(saved_range.file, framework="pt") as file:
            values = file.get_tensor(f"master/{key}")
        if saved_range.shard.is_full:
            flat[saved_range.start : saved_range.start + saved_range.elements].copy_(values)
            continue
        for low in range(0, saved_range.elements, CHUNK):
            chunk = values[low : low + CHUNK].to(flat)
            indices = flat_indices(saved_range.shard, saved_range.start + low, saved_range.start + low + len(chunk))
            flat.index_copy_(0, indices.to(flat.device), chunk)


def _check_all_ranks(source: Path, model: ShardedModel, checksum: str, problem: str) -> None:
    """Raise if any rank has a problem, or if the ranks see different checkpoints."""
    own_report = json.dumps({"checksum": checksum, "problem": problem})
    reports = [json.loads(text) for text in model.exchange_text(own_report)]
    for report in reports:
        if report["problem"]:
            raise CheckpointError(report["problem"])
    if len({report["checksum"] for report in reports}) > 1:
        raise CheckpointError(f"{source} is not the same checkpoint on all ranks")


@dataclass(frozen=True)
class _Contents:
    """Everything that a load will copy into model and optimizer."""

    tensors: list[tuple[Tensor, Tensor]]  # destination, value
    parts: list[SavedPart | ReshardedPart]  # of the optimizer state; not read yet, because it may be too large
    format: StateFormat
    steps: int
    skipped: int
    updates: int
    states: list[Any]


def _read(source: Path, manifest: Manifest, model: ShardedModel, optimizer: ShardedAdamW) -> _Contents:
    unsharded = unsharded_tensors(model.model)
    parts: list[SavedPart | ReshardedPart] = []
    for target in optimizer.parameter_states:
        shard = None if model.tensor is None else model.tensor.shards[target.parameter.name]
        parts += find_parts(source, manifest, target, shard)
    with safe_open(source / UNSHARDED, framework="pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
    _check_same(
        {name: describe_tensor(tensor.dtype, tensor.shape) for name, tensor in saved.items()},
        {name: describe_tensor(tensor.dtype, tensor.shape) for name, tensor in unsharded.items()},
    )
    return _Contents(
        [(tensor, saved[name]) for name, tensor in unsharded.items()],
        parts,
        manifest["optimizer_state"],
        manifest["steps"],
        manifest["skipped"],
        manifest["updates"],
        read_states(source),
    )


def _check_parameters(manifest: Manifest, model: ShardedModel) -> None:
    _check_same(manifest["parameters"], describe_full_parameters(model))


def _without_dtypes(described: dict[str, str]) -> dict[str, str]:
    return {name: text.partition(" ")[2] for name, text in described.items()}


def _check_same(saved: dict[str, str], expected: dict[str, str]) -> None:
    """Raise if the descriptions of tensors in the checkpoint and in the model differ."""
    different = sorted(name for name in saved.keys() | expected.keys() if saved.get(name) != expected.get(name))
    if different:
        name = different[0]
        more = f", and {len(different) - 1} more" if len(different) > 1 else ""
        raise CheckpointError(
            f"the checkpoint is of another model: {name} is {saved.get(name, _ABSENT)} in the checkpoint and "
            f"{expected.get(name, _ABSENT)} in the model{more}"
        )
