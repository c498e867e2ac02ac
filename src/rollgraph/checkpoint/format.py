"""The format of a sharded checkpoint: safetensors files and a JSON manifest with checksums; never a pickle.

Owns the manifest and the checks of files. A checkpoint is organised by parameter, not by rank: the manifest says which
parts of which parameters each file holds, so any number of ranks can load what any other number saved. With tensor
parallelism, the manifest also has the tensor parallel shard ("piece") that each part belongs to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollgraph.errors import MachineError
from rollgraph.files import FileError, MissingFile, read_json

FORMAT = 2
TENSOR_PARALLEL_FORMAT = 3  # the same, with tensor parallel shards
MANIFEST = "manifest.json"
UNSHARDED = "rest.safetensors"  # frozen parameters and buffers
STATE = "state.json"  # the state of each rank apart from tensors
# Parameters are saved under the names that parts of the decoder had in the first checkpoints.
_KEYS = {
    "embed_tokens": "embed",
    "input_layernorm": "attention_norm",
    "self_attn": "attention",
    "qkv_proj": "qkv",
    "o_proj": "out",
    "post_attention_layernorm": "mlp_norm",
    "gate_up_proj": "gate_up",
    "down_proj": "down",
    "lm_head": "head",
}
_REQUIRED = ("shards", "rest", "parameters", "steps", "skipped", "updates", "optimizer_state")

Manifest = dict[str, Any]
FileRecord = dict[str, Any]  # {"file": name, "bytes": size, "sha256": checksum}


class CheckpointError(MachineError, RuntimeError):
    """A checkpoint is incomplete, corrupt, of another model, or could not be written."""


def checkpoint_key(name: str) -> str:
    """The key of a parameter or buffer in checkpoints.

    >>> checkpoint_key("layers.0.self_attn.qkv_proj.weight")
    'layers.0.attention.qkv.weight'
    """
    return ".".join(_KEYS.get(part, part) for part in name.split("."))


def read_manifest(source: Path) -> Manifest:
    """Read the manifest, and check that all files exist with the right size. `verify` reads their contents."""
    path = source / MANIFEST
    try:
        manifest: Any = read_json(path)
    except MissingFile:
        raise CheckpointError(f"{source} is no checkpoint: it has no {MANIFEST}") from None
    except FileError as error:
        why = f": {error.reason}" if error.reason else ""
        raise CheckpointError(f"{path} {error.problem}{why}") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version not in (FORMAT, TENSOR_PARALLEL_FORMAT):
        raise CheckpointError(f"{source} has format {version}, expected {FORMAT} or {TENSOR_PARALLEL_FORMAT}")
    if manifest.get("sha256") != manifest_checksum(manifest):
        raise CheckpointError(f"{path} is not what was written: its checksum differs")
    missing = [name for name in _REQUIRED if name not in manifest]
    if missing:
        raise CheckpointError(f"{path} is not a checkpoint's manifest: it has no {', '.join(missing)}")
    _check_sizes(source, manifest_files(manifest))
    checked: Manifest = manifest
    return checked


def _check_sizes(source: Path, records: list[FileRecord]) -> None:
    sizes = {record["file"]: _size_of(source / record["file"]) for record in records}
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        raise CheckpointError(f"{source} is incomplete: {', '.join(missing)} missing")
    for record in records:
        path, size = source / record["file"], sizes[record["file"]]
        if size != record["bytes"]:
            raise CheckpointError(f"{path} is not what was written: {size} bytes instead of {record['bytes']}")


def _size_of(path: Path) -> int | None:
    """The size in bytes; None if there is no file: another thread may delete the checkpoint meanwhile."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def verify(source: Path) -> None:
    """Raise unless every byte of a checkpoint is as it was written."""
    check_files(source, manifest_files(read_manifest(source)))


def read_states(source: Path) -> list[Any]:
    """The state that each rank saved, in the order of ranks; empty if there is none."""
    manifest = read_manifest(source)
    if "state" not in manifest:
        return []
    check_files(source, [manifest["state"]])
    states: list[Any] = read_json(source / STATE)
    return states


def manifest_files(manifest: Manifest) -> list[FileRecord]:
    """The record of each file in the manifest."""
    files = [*manifest["shards"], manifest["rest"]]
    if "state" in manifest:
        files.append(manifest["state"])
    return files


def manifest_checksum(manifest: Mapping[str, Any]) -> str:
    """The checksum of a manifest's content, whatever its formatting."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# -- files -----------------------------------------------------------------------------------------


def record_file(path: Path) -> FileRecord:
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": _digest(path)}


def record_files(source: Path, paths: list[Path]) -> list[FileRecord]:
    """Records of files, for `check_files` to compare them with later."""
    records = []
    for path, digest in zip(paths, _digests(source, paths), strict=True):
        name = path.relative_to(source).as_posix()
        records.append({"file": name, "bytes": path.stat().st_size, "sha256": digest})
    return records


def check_files(source: Path, records: list[FileRecord]) -> None:
    """Raise unless every byte of these files is as it was written."""
    paths = [source / record["file"] for record in records]
    for path, record, digest in zip(paths, records, _digests(source, paths), strict=True):
        if digest != record["sha256"]:
            raise CheckpointError(f"{path} is not what was written: its checksum differs")


def _digests(source: Path, paths: list[Path]) -> list[str]:
    try:
        with ThreadPoolExecutor() as pool:  # hashing releases the GIL
            return list(pool.map(_digest, paths))
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
