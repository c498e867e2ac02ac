"""Sharded checkpoints: a safetensors file for each rank and a JSON manifest with checksums; never a pickle.

A checkpoint is of parameters, not of shards: each file says which part of which parameter it holds, so
that any number of ranks can load what any other number saved. Taking a snapshot is apart from writing it,
and writing needs no collective, so that a thread can do it beside training (`checkpoint.py` does).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollgraph.distributed.liveness import Liveness, RankLost
from rollgraph.files import FileError, MissingFile, read_json, sync
from rollgraph.sharding.flat_buffer import ParameterSpec, specs_of
from rollgraph.sharding.optimizer import Piece, ShardedAdamW
from rollgraph.sharding.sharded_model import ShardedModel

FORMAT = 1
MANIFEST = "manifest.json"
_REST = "rest.safetensors"  # frozen parameters and buffers, whole
_STATE = "state.json"  # what each rank saved beside tensors
_POLL = 0.02  # seconds between two looks for what another rank writes
_PATIENCE = 4.0  # seconds, after a time-out, for the liveness check to find who is lost
_WRITTEN = ""  # what rank 0 says of a save that is on the disk

Manifest = dict[str, Any]
Sealed = dict[str, Any]  # {"file": name, "bytes": size, "sha256": checksum}


class CheckpointError(RuntimeError):
    """A checkpoint that is not whole, not this model's, not what was written, or that could not be written."""


@dataclass(frozen=True)
class ShardSnapshot:
    """What one rank writes, in host memory of its own: training may go on."""

    rank: int
    ranks: int
    shard: dict[str, Tensor]  # "master/<parameter>", "exp_avg/<parameter>", ...: the parts that this rank owns
    parts: list[tuple[str, int, int]]  # parameter, where the part starts in it, how many elements
    rest: dict[str, Tensor]  # on rank 0: frozen parameters and buffers
    header: dict[str, Any]  # of the manifest


# -- saving ----------------------------------------------------------------------------------------


def save(folder: str | os.PathLike[str], model: ShardedModel, optimizer: ShardedAdamW) -> None:
    """Write a checkpoint into a folder that all ranks see. It appears whole, or not at all."""
    target = Path(folder)
    if target.exists():
        raise CheckpointError(f"{target} exists already")
    token = model.collectives.agree(uuid.uuid4().hex[:8])[0]
    temporary = target.with_name(f"{target.name}.{token}.incomplete")
    write(
        take_snapshot(model, optimizer),
        temporary,
        target,
        timeout=model.collectives.timeout,
        liveness=model.collectives.liveness,
    )


def take_snapshot(model: ShardedModel, optimizer: ShardedAdamW, memory: ShardSnapshot | None = None) -> ShardSnapshot:
    """Copy what a checkpoint holds; into the memory of an earlier snapshot, if that is given."""
    model.refuse_lent()
    world = model.world
    shard = {f"{field}/{piece.parameter.name}": t for piece in optimizer.pieces for field, t in _fields(piece)}
    copied = _to_host(shard, memory.shard if memory else {})
    rest = _to_host(_rest(model) if world.rank == 0 else {}, memory.rest if memory else {})
    if torch.device(world.device).type == "cuda":
        torch.cuda.current_stream(world.device).synchronize()
    parts = [(piece.parameter.name, piece.start, piece.master.numel()) for piece in optimizer.pieces]
    header = {
        "format": FORMAT,
        "steps": optimizer.steps,
        "skipped": int(optimizer.skipped),
        "parameters": {s.name: _described(s) for s in specs_of(model.model)},
    }
    return ShardSnapshot(world.rank, world.size, copied, parts, rest, header)


def write(
    snapshot: ShardSnapshot,
    temporary: Path,
    target: Path,
    *,
    state: Any = None,
    about: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
    liveness: Liveness | None = None,
) -> None:
    """Write this rank's part; returns when the checkpoint of all ranks has its name, or raises on all of them.

    All ranks name the same `temporary`, which nobody used before. Each leaves a shard and a note of it there. Rank 0
    waits for all notes, writes the rest and renames the folder. Whoever cannot do its part tells the others, by the
    liveness check that several ranks need, and the folder goes. They wait for each other for `timeout` seconds at most.
    `about` are fields for the manifest, `state` is JSON, of each rank its own.
    """
    others = _Others(liveness, temporary.name, timeout)
    try:
        others.check()
        temporary.mkdir(parents=True, exist_ok=True)
        _hand_over(snapshot, temporary, state)
        if snapshot.rank == 0:
            _publish(snapshot, temporary, target, about or {}, others)
            others.tell(_WRITTEN)
        else:
            others.wait_for_rank_0()
    except BaseException as error:
        mine = f"rank{snapshot.rank}: {error}" if _is_of_the_disk(error) and liveness is not None else f"{error}"
        mine = f"{target} was not written: {mine}"
        failed = others.said() or others.tell(mine)  # before the folder goes: whoever is late must not make it again
        with suppress(OSError):  # the first error is the one to tell
            if snapshot.rank == 0:
                discard(temporary, temporary.with_suffix(".deleted"))
            elif failed != mine:
                shutil.rmtree(temporary)  # rank 0 may have thrown it away before this rank made it
        if liveness is not None and liveness.loss is not None:
            raise RankLost(failed) from error
        if _is_of_the_disk(error) or isinstance(error, CheckpointError):
            raise CheckpointError(failed) from error
        raise


def _is_of_the_disk(error: BaseException) -> bool:
    return isinstance(error, (OSError, SafetensorError))


@dataclass(frozen=True)
class _Others:
    """What ranks tell each other of one save: not by the disk, which may be what failed. Alone, nothing."""

    liveness: Liveness | None
    key: str
    timeout: float

    def said(self) -> str | None:
        """How the save ended, if somebody has said so."""
        return self.liveness.posted(self.key) if self.liveness is not None else None

    def tell(self, end: str) -> str:
        """Gives back what stands: somebody may have been faster, and this be what comes of it."""
        return end if self.liveness is None else self.liveness.post(self.key, end)

    def check(self) -> None:
        """Raise if it has failed elsewhere, or if a rank is lost."""
        if self.liveness is not None:
            if failed := self.said():
                raise CheckpointError(failed)
            self.liveness.check()

    def wait_while(self, unfinished: Callable[[], str]) -> None:
        """Until nothing is left that this names."""
        deadline = time.monotonic() + self.timeout
        while missing := unfinished():
            self.check()
            if time.monotonic() > deadline:
                self._ask_who_is_lost()
                raise CheckpointError(f"nothing from {missing} within {self.timeout:g} s")
            time.sleep(_POLL)

    def _ask_who_is_lost(self) -> None:
        """A rank that is stopped becomes known at this same moment. Rank 0 waits for it less long than others wait for
        rank 0, so that nobody takes rank 0 for the one that is lost."""
        if self.liveness is not None:
            self.liveness.explain(_PATIENCE if self.liveness.rank == 0 else 2 * _PATIENCE)
            self.check()

    def wait_for_rank_0(self) -> None:
        self.wait_while(lambda: "rank0" if self.said() is None else "")
        if failed := self.said():
            raise CheckpointError(failed)


def discard(folder: Path, away: Path) -> None:
    """Delete a folder: its name first, so that never a half of it has that name."""
    os.replace(folder, away)
    sync(away.parent)
    shutil.rmtree(away)


def _hand_over(snapshot: ShardSnapshot, temporary: Path, state: Any) -> None:
    path, note = temporary / f"rank{snapshot.rank}.safetensors", temporary / f"rank{snapshot.rank}.json"
    said = {"shard": {**_write_tensors(path, snapshot.shard), "parts": snapshot.parts}, "state": state}
    _write_json(note.with_suffix(".part"), said)
    os.replace(note.with_suffix(".part"), note)  # the note appears whole, and after the file that it is of


def _publish(snapshot: ShardSnapshot, temporary: Path, target: Path, about: Mapping[str, Any], others: _Others) -> None:
    notes = [temporary / f"rank{rank}.json" for rank in range(snapshot.ranks)]
    others.wait_while(lambda: ", ".join(note.stem for note in notes if not note.exists()))
    said = [json.loads(note.read_text()) for note in notes]
    manifest = {**snapshot.header, **about, "shards": [entry["shard"] for entry in said]}
    manifest["rest"] = _write_tensors(temporary / _REST, snapshot.rest)
    if any(entry["state"] is not None for entry in said):
        manifest["state"] = _write_json(temporary / _STATE, [entry["state"] for entry in said])
    _write_json(temporary / MANIFEST, {**manifest, "sha256": _seal(manifest)})
    for note in notes:
        note.unlink()
    sync(temporary)
    os.replace(temporary, target)
    sync(target.parent)


def _to_host(tensors: Mapping[str, Tensor], memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that are on their way: page-locked, so that those from a GPU do not wait for one another."""
    copies = {}
    for name, tensor in tensors.items():
        copy = memory.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = copy.copy_(tensor.detach(), non_blocking=True)
    return copies


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


# -- loading ---------------------------------------------------------------------------------------


def load(folder: str | os.PathLike[str], model: ShardedModel, optimizer: ShardedAdamW) -> list[Any]:
    """Parameters and optimizer state from a checkpoint, into the memory they have; gives the state of each rank.

    If any rank finds anything wrong, it is an error on all of them, and nothing has changed.
    """
    model.before_update()
    source, world = Path(folder), model.world
    found: _Found | None = None
    try:
        manifest = read_manifest(source)
        _check(manifest, model)
        check_files(source, _files(manifest)[world.rank :: world.size])
        found = _read(source, manifest, model, optimizer)
        verdict = f"sound {manifest['sha256']}"
    except (CheckpointError, OSError, SafetensorError) as error:
        verdict = f"{error}"
    said = model.collectives.agree(verdict)
    if wrong := [text for text in said if not text.startswith("sound ")]:
        raise CheckpointError(wrong[0])
    if found is None or len(set(said)) > 1:
        raise CheckpointError(f"{source} is not the same for all ranks")
    with torch.no_grad():
        for tensor, value in found.tensors:
            tensor.copy_(value)
        optimizer.skipped.fill_(found.skipped)
    optimizer.steps = found.steps
    optimizer.write_shards()
    model.updated()
    model.gather()
    return found.states


def read_manifest(source: Path) -> Manifest:
    """The manifest of a checkpoint that has all its files, in their sizes; what is in them is for `verify`."""
    path = source / MANIFEST
    try:
        manifest = read_json(path)
    except MissingFile:
        raise CheckpointError(f"{source} is no checkpoint: it has no {MANIFEST}") from None
    except FileError as error:
        why = f": {error.why}" if error.why else ""
        raise CheckpointError(f"{path} {error.what}{why}") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT:
        raise CheckpointError(f"{source} has format {version}, expected {FORMAT}")
    if manifest.get("sha256") != _seal(manifest):
        raise CheckpointError(f"{path} is not what was written: its checksum differs")
    if absent := [name for name in ("shards", "rest", "parameters", "steps", "skipped") if name not in manifest]:
        raise CheckpointError(f"{path} is not that of a checkpoint: it has no {', '.join(absent)}")
    sizes = {entry["file"]: _size(source / entry["file"]) for entry in _files(manifest)}
    if absent := [name for name, size in sizes.items() if size is None]:
        raise CheckpointError(f"{source} is not whole: {', '.join(absent)} missing")
    for entry in _files(manifest):
        if sizes[entry["file"]] != entry["bytes"]:
            raise CheckpointError(
                f"{source / entry['file']} is not what was written: "
                f"{sizes[entry['file']]} bytes instead of {entry['bytes']}"
            )
    return manifest


def verify(source: Path) -> None:
    """Raise unless every byte is what was written."""
    check_files(source, _files(read_manifest(source)))


def read_states(source: Path) -> list[Any]:
    """The state that each rank saved, in the order of ranks; none if there was none."""
    manifest = read_manifest(source)
    if "state" not in manifest:
        return []
    check_files(source, [manifest["state"]])
    states: list[Any] = read_json(source / _STATE)
    return states


@dataclass(frozen=True)
class _Found:
    """All that a load will put in place."""

    tensors: list[tuple[Tensor, Tensor]]  # where to, what
    steps: int
    skipped: int
    states: list[Any]


def _read(source: Path, manifest: Manifest, model: ShardedModel, optimizer: ShardedAdamW) -> _Found:
    tensors = []
    for piece in optimizer.pieces:
        values = dict(_assembled(source, manifest, piece))
        tensors += [(tensor, values[name]) for name, tensor in _fields(piece)]
    held = _rest(model)
    with safe_open(source / _REST, framework="pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
    for name in sorted(held.keys() | saved.keys()):
        here, there = (_shape(group[name]) if name in group else "absent" for group in (held, saved))
        if here != there:
            raise CheckpointError(f"the checkpoint is of another model: {name} is {there} there and {here} here")
        tensors.append((held[name], saved[name]))
    return _Found(tensors, manifest["steps"], manifest["skipped"], read_states(source))


def _assembled(source: Path, manifest: Manifest, piece: Piece) -> Iterator[tuple[str, Tensor]]:
    """The values of a piece, from whichever files hold a part of it."""
    values = {name: torch.empty_like(tensor, device="cpu") for name, tensor in _fields(piece)}
    missing = piece.master.numel()
    for entry in manifest["shards"]:
        for name, start, count in entry["parts"]:
            low, high = max(start, piece.start), min(start + count, piece.start + piece.master.numel())
            if name != piece.parameter.name or low >= high:
                continue
            missing -= high - low
            with safe_open(source / entry["file"], framework="pt") as file, torch.no_grad():
                for kind, value in values.items():
                    saved = file.get_slice(f"{kind}/{name}")
                    if value.dim():
                        value[low - piece.start : high - piece.start] = saved[low - start : high - start]
                    else:
                        value.copy_(file.get_tensor(f"{kind}/{name}"))
    if missing:
        raise CheckpointError(f"{source}: {missing} elements of {piece.parameter.name} are in no file")
    yield from values.items()


def _check(manifest: Manifest, model: ShardedModel) -> None:
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


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


# -- files -----------------------------------------------------------------------------------------


def _files(manifest: Manifest) -> list[Sealed]:
    """What the manifest says of each file."""
    return [*manifest["shards"], manifest["rest"], *([manifest["state"]] if "state" in manifest else [])]


def seal_files(source: Path, paths: list[Path]) -> list[Sealed]:
    """What `check_files` will compare them with."""
    digests = _digests(source, paths)
    return [
        {"file": path.relative_to(source).as_posix(), "bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    ]


def check_files(source: Path, entries: list[Sealed]) -> None:
    """Raise unless every byte is what was written."""
    paths = [source / entry["file"] for entry in entries]
    digests = _digests(source, paths)
    for path, entry, digest in zip(paths, entries, digests, strict=True):
        if digest != entry["sha256"]:
            raise CheckpointError(f"{path} is not what was written: its checksum differs")


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> Sealed:
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path)
    path.chmod(mode)  # as any file has it here; save_file leaves it to the owner alone
    return _sealed(path)


def _write_json(path: Path, value: Any) -> Sealed:
    path.write_text(json.dumps(value, indent=1))
    return _sealed(path)


def _sealed(path: Path) -> Sealed:
    sync(path)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": _digest(path)}


def _digests(source: Path, paths: list[Path]) -> list[str]:
    try:
        with ThreadPoolExecutor() as pool:  # hashing lets other threads run
            return list(pool.map(_digest, paths))
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(manifest: Mapping[str, Any]) -> str:
    """The checksum of a manifest, of what it says and not of how it is spelled."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None
