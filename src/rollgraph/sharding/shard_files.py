"""Sharded checkpoints: a safetensors file for each rank and a JSON manifest with checksums; never a pickle.

A checkpoint is of parameters, not of shards: each file says which part of which parameter it holds, so
that any number of ranks can load what any other number saved.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollgraph.sharding.flat_buffer import ParameterSpec, specs_of
from rollgraph.sharding.optimizer import Piece, ShardedAdamW
from rollgraph.sharding.sharded_model import ShardedModel

FORMAT = 1
MANIFEST = "manifest.json"
_REST = "rest.safetensors"  # frozen parameters and buffers, whole


class CheckpointError(RuntimeError):
    """A checkpoint that is not whole, not this model's, or not what was written; nothing was loaded."""


def save(folder: str | os.PathLike[str], model: ShardedModel, optimizer: ShardedAdamW) -> None:
    """Write a checkpoint into a folder that all ranks see. It appears whole, or not at all."""
    target, rank = Path(folder), model.world.rank
    if target.exists():
        raise CheckpointError(f"{target} exists already")
    temporary = target.with_name(target.name + ".incomplete")
    temporary.mkdir(parents=True, exist_ok=True)
    name = f"rank{rank}.safetensors"
    _write(temporary / name, {f"{f}/{p.parameter.name}": t for p in optimizer.pieces for f, t in _fields(p)})
    parts = [[piece.parameter.name, piece.start, piece.master.numel()] for piece in optimizer.pieces]
    mine = {"file": name, "sha256": _digest(temporary / name), "parts": parts}
    said = [json.loads(text) for text in model.collectives.agree(json.dumps(mine))]
    if rank == 0:
        _write(temporary / _REST, _rest(model))
        manifest = {
            "format": FORMAT,
            "steps": optimizer.steps,
            "parameters": {s.name: _described(s) for s in specs_of(model.model)},
            "shards": said,
            "rest": {"file": _REST, "sha256": _digest(temporary / _REST)},
        }
        path = temporary / MANIFEST
        path.write_text(json.dumps(manifest, indent=1))
        _sync(path)
        os.replace(temporary, target)
        _sync(target.parent)
    model.collectives.agree("saved")


def load(folder: str | os.PathLike[str], model: ShardedModel, optimizer: ShardedAdamW) -> None:
    """Parameters and optimizer state from a checkpoint, into the memory they have."""
    source = Path(folder)
    manifest = _manifest(source)
    _check(manifest, model)
    for entry in (*manifest["shards"], manifest["rest"]):
        if _digest(source / entry["file"]) != entry["sha256"]:
            raise CheckpointError(f"{source / entry['file']} is not what was written: its checksum differs")
    found = [(piece, dict(_assembled(source, manifest, piece))) for piece in optimizer.pieces]
    with torch.no_grad():
        for piece, values in found:
            for name, tensor in _fields(piece):
                tensor.copy_(values[name])
        held = _rest(model)
        with safe_open(source / _REST, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 not a dict
                held[name].copy_(file.get_tensor(name))
    optimizer.steps = manifest["steps"]
    optimizer.write_shards()
    model.updated()
    model.gather()


def _fields(piece: Piece) -> Iterator[tuple[str, Tensor]]:
    yield "master", piece.master
    yield from piece.state.items()


def _rest(model: ShardedModel) -> dict[str, Tensor]:
    held = {name: p for name, p in model.model.named_parameters() if not p.requires_grad}
    kept = _persistent(model.model)
    return {n: t.detach() for n, t in (*held.items(), *model.model.named_buffers()) if n in held or n in kept}


def _persistent(model: torch.nn.Module) -> set[str]:
    """The names of the buffers that belong to a checkpoint."""
    return {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


def _assembled(source: Path, manifest: dict[str, Any], piece: Piece) -> Iterator[tuple[str, Tensor]]:
    """The values of a piece, from whichever files hold a part of it."""
    values = {name: torch.empty_like(tensor, device="cpu") for name, tensor in _fields(piece)}
    missing = piece.master.numel()
    for entry in manifest["shards"]:
        for name, start, count in entry["parts"]:
            low, high = max(start, piece.start), min(start + count, piece.start + piece.master.numel())
            if name != piece.parameter.name or low >= high:
                continue
            missing -= high - low
            with safe_open(source / entry["file"], framework="pt") as file:
                for kind, value in values.items():
                    saved = file.get_slice(f"{kind}/{name}")
                    if value.dim():
                        value[low - piece.start : high - piece.start] = saved[low - start : high - start]
                    else:
                        value.copy_(file.get_tensor(f"{kind}/{name}"))
    if missing:
        raise CheckpointError(f"{source}: {missing} elements of {piece.parameter.name} are in no file")
    yield from values.items()


def _manifest(source: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((source / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{source} is no checkpoint: it has no {MANIFEST}") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{source / MANIFEST} is not JSON: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{source} has format {manifest.get('format')}, expected {FORMAT}")
    files = [entry["file"] for entry in (*manifest["shards"], manifest["rest"])]
    absent = [name for name in files if not (source / name).exists()]
    if absent:
        raise CheckpointError(f"{source} is not whole: {', '.join(absent)} missing")
    return manifest


def _check(manifest: dict[str, Any], model: ShardedModel) -> None:
    saved, mine = manifest["parameters"], {s.name: _described(s) for s in specs_of(model.model)}
    different = sorted(name for name in saved.keys() | mine.keys() if saved.get(name) != mine.get(name))
    if different:
        name = different[0]
        more = f", and {len(different) - 1} more" if len(different) > 1 else ""
        raise CheckpointError(
            f"the checkpoint is of another model: {name} is {saved.get(name, 'absent')} there and "
            f"{mine.get(name, 'absent')} here{more}"
        )


def _described(spec: ParameterSpec) -> str:
    shape = "x".join(map(str, spec.shape)) or "scalar"
    return f"{str(spec.dtype).removeprefix('torch.')} {shape}" + " frozen" * (not spec.trainable)


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, path)
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
