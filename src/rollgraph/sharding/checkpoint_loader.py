"""Loading a sharded checkpoint with any number of ranks, into the memory that the model and the optimizer have."""

from __future__ import annotations

import json
import os
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
from rollgraph.sharding.optimizer import Piece, ShardedAdamW
from rollgraph.sharding.shard_snapshot import describe_parameters, describe_tensor, fields_of, unsharded_tensors
from rollgraph.sharding.sharded_model import ShardedModel

_ABSENT = "absent"


def load(folder: str | os.PathLike[str], model: ShardedModel, optimizer: ShardedAdamW) -> list[Any]:
    """Load parameters and optimizer state from a checkpoint; return the state that each rank saved.

    If any rank finds anything wrong, all ranks raise, and nothing has changed.
    """
    model.before_update()
    source = Path(folder)
    world = model.world
    contents: _Contents | None = None
    checksum = problem = ""
    try:
        manifest = read_manifest(source)
        checksum = manifest["sha256"]
        _check_parameters(manifest, model)
        check_files(source, list_files(manifest)[world.rank :: world.size])
        contents = _read(source, manifest, model, optimizer)
    except (CheckpointError, OSError, SafetensorError) as error:
        problem = str(error) or type(error).__name__
    _check_all_ranks(source, model, checksum, problem)
    assert contents is not None
    with torch.no_grad():
        for tensor, value in contents.tensors:
            tensor.copy_(value)
        optimizer.skipped.fill_(contents.skipped)
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
    missing = {spec.name: parameters[spec.name].numel() for spec in specs_of(model) if spec.trainable}
    with torch.no_grad():
        with safe_open(source / UNSHARDED, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 not a dict
                unsharded[name].copy_(file.get_tensor(name))
        for record in manifest["shards"]:
            with safe_open(source / record["file"], framework="pt") as file:
                for name, start, count in record["parts"]:
                    parameters[name].view(-1)[start : start + count].copy_(file.get_tensor(f"master/{name}"))
                    missing[name] -= count
    for name, count in missing.items():
        if count:
            raise CheckpointError(f"{source}: {count} elements of {name} are in no file")


def _check_all_ranks(source: Path, model: ShardedModel, checksum: str, problem: str) -> None:
    """Raise if any rank has a problem, or if the ranks see different checkpoints."""
    mine = json.dumps({"checksum": checksum, "problem": problem})
    found = [json.loads(text) for text in model.collectives.all_gather_text(mine)]
    for verdict in found:
        if verdict["problem"]:
            raise CheckpointError(verdict["problem"])
    if len({verdict["checksum"] for verdict in found}) > 1:
        raise CheckpointError(f"{source} is not the same checkpoint on all ranks")


@dataclass(frozen=True)
class _Contents:
    """Everything that a load will put in place."""

    tensors: list[tuple[Tensor, Tensor]]  # destination, value
    steps: int
    skipped: int
    states: list[Any]


def _read(source: Path, manifest: Manifest, model: ShardedModel, optimizer: ShardedAdamW) -> _Contents:
    tensors = []
    for piece in optimizer.pieces:
        values = _assemble(source, manifest, piece)
        for name, tensor in fields_of(piece):
            tensors.append((tensor, values[name]))
    here = unsharded_tensors(model.model)
    with safe_open(source / UNSHARDED, framework="pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
    _check_same(
        {name: describe_tensor(tensor.dtype, tensor.shape) for name, tensor in saved.items()},
        {name: describe_tensor(tensor.dtype, tensor.shape) for name, tensor in here.items()},
    )
    for name, tensor in here.items():
        tensors.append((tensor, saved[name]))
    return _Contents(tensors, manifest["steps"], manifest["skipped"], read_states(source))


def _assemble(source: Path, manifest: Manifest, piece: Piece) -> dict[str, Tensor]:
    """The values of a piece, from all files that hold a part of it."""
    size = piece.master.numel()
    values = {name: torch.empty_like(tensor, device="cpu") for name, tensor in fields_of(piece)}
    missing = size
    for record in manifest["shards"]:
        for name, start, count in record["parts"]:
            low = max(start, piece.start)
            high = min(start + count, piece.start + size)
            if name != piece.parameter.name or low >= high:
                continue
            missing -= high - low
            with safe_open(source / record["file"], framework="pt") as file, torch.no_grad():
                for field, value in values.items():
                    if value.dim():
                        saved = file.get_slice(f"{field}/{name}")
                        value[low - piece.start : high - piece.start] = saved[low - start : high - start]
                    else:
                        value.copy_(file.get_tensor(f"{field}/{name}"))
    if missing:
        raise CheckpointError(f"{source}: {missing} elements of {piece.parameter.name} are in no file")
    return values


def _check_parameters(manifest: Manifest, model: ShardedModel) -> None:
    _check_same(manifest["parameters"], describe_parameters(model.model))


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
