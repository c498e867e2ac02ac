"""Loading a sharded checkpoint with any number of ranks, into the memory that the model and the optimizer have."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rollgraph.sharding.bucket_plan import specs_of
from rollgraph.sharding.manifest import (
    UNSHARDED,
    CheckpointError,
    Manifest,
    check_files,
    list_files,
    read_manifest,
    read_states,
)
from rollgraph.sharding.optimizer import ShardedAdamW
from rollgraph.sharding.saved_layout import SavedRun, find_runs, places_in_whole
from rollgraph.sharding.saved_state import RegroupedPart, SavedPart, find_parts, load_part, load_regrouped
from rollgraph.sharding.shard_snapshot import describe_parameters, describe_tensor, describe_whole, unsharded_tensors
from rollgraph.sharding.sharded_model import ShardedModel
from rollgraph.sharding.state_memory import CHUNK, StateFormat

_ABSENT = "absent"


def load(folder: str | os.PathLike[str], model: ShardedModel, optimizer: ShardedAdamW) -> list[Any]:
    """Load parameters and optimizer state from a checkpoint; return the state that each rank saved.

    If any rank finds anything wrong, all ranks raise, and nothing has changed.
    """
    model.before_update()
    source = Path(folder)
    contents: _Contents | None = None
    checksum = problem = ""
    try:
        manifest = read_manifest(source)
        checksum = manifest["sha256"]
        _check_parameters(manifest, model)
        check_files(source, list_files(manifest)[model.rank :: model.ranks])
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
            if isinstance(part, RegroupedPart):
                load_regrouped(part, contents.format, optimizer.state)
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
    """Load only the parameters and buffers, into a model that is not sharded. `verify` the checkpoint before.

    `cast` allows parameters of another dtype than the model's.
    """
    source = Path(folder)
    manifest = read_manifest(source)
    saved, here = manifest["parameters"], describe_parameters(model)
    if cast:
        saved, here = _without_dtypes(saved), _without_dtypes(here)
    _check_same(saved, here)
    unsharded = unsharded_tensors(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        with safe_open(source / UNSHARDED, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 not a dict
                unsharded[name].copy_(file.get_tensor(name))
        for spec in specs_of(model):
            if spec.trainable:
                _load_parameter(parameters[spec.name], find_runs(source, manifest, spec.name, spec.shape), spec.name)


def _load_parameter(parameter: Tensor, runs: Sequence[SavedRun], name: str) -> None:
    flat = parameter.view(-1)
    for run in runs:
        with safe_open(run.file, framework="pt") as file:
            values = file.get_tensor(f"master/{name}")
        if run.piece.is_whole:
            flat[run.start : run.start + run.elements].copy_(values)
            continue
        for low in range(0, run.elements, CHUNK):
            chunk = values[low : low + CHUNK].to(flat)
            places = places_in_whole(run.piece, run.start + low, run.start + low + len(chunk))
            flat.index_copy_(0, places.to(flat.device), chunk)


def _check_all_ranks(source: Path, model: ShardedModel, checksum: str, problem: str) -> None:
    """Raise if any rank has a problem, or if the ranks see different checkpoints."""
    mine = json.dumps({"checksum": checksum, "problem": problem})
    found = [json.loads(text) for text in model.exchange_text(mine)]
    for verdict in found:
        if verdict["problem"]:
            raise CheckpointError(verdict["problem"])
    if len({verdict["checksum"] for verdict in found}) > 1:
        raise CheckpointError(f"{source} is not the same checkpoint on all ranks")


@dataclass(frozen=True)
class _Contents:
    """Everything that a load will put in place."""

    tensors: list[tuple[Tensor, Tensor]]  # destination, value
    parts: list[
        SavedPart | RegroupedPart
    ]  # of the optimizer state, which may be too large to be read before it is put in place
    format: StateFormat
    steps: int
    skipped: int
    updates: int
    states: list[Any]


def _read(source: Path, manifest: Manifest, model: ShardedModel, optimizer: ShardedAdamW) -> _Contents:
    here = unsharded_tensors(model.model)
    parts: list[SavedPart | RegroupedPart] = []
    for piece in optimizer.pieces:
        own = None if model.tensor is None else model.tensor.pieces[piece.parameter.name]
        parts += find_parts(source, manifest, piece, own)
    with safe_open(source / UNSHARDED, framework="pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
    _check_same(
        {name: describe_tensor(tensor.dtype, tensor.shape) for name, tensor in saved.items()},
        {name: describe_tensor(tensor.dtype, tensor.shape) for name, tensor in here.items()},
    )
    return _Contents(
        [(tensor, saved[name]) for name, tensor in here.items()],
        parts,
        manifest["optimizer_state"],
        manifest["steps"],
        manifest["skipped"],
        manifest["updates"],
        read_states(source),
    )


def _check_parameters(manifest: Manifest, model: ShardedModel) -> None:
    _check_same(manifest["parameters"], describe_whole(model))


def _without_dtypes(described: dict[str, str]) -> dict[str, str]:
    return {name: text.partition(" ")[2] for name, text in described.items()}


def _check_same(saved: dict[str, str], here: dict[str, str]) -> None:
    """Raise if tensors of the checkpoint and of the model, described as text, differ."""
    different = sorted(name for name in saved.keys() | here.keys() if saved.get(name) != here.get(name))
    if different:
        name = different[0]
        more = f", and {len(different) - 1} more" if len(different) > 1 else ""
        raise CheckpointError(
            f"the checkpoint is of another model: {name} is {saved.get(name, _ABSENT)} in the checkpoint and "
            f"{here.get(name, _ABSENT)} in the model{more}"
        )
