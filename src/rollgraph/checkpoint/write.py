"""Writing a sharded checkpoint, atomically: each rank writes one file, and rank 0 the manifest.

Writing needs no collective, so a thread can do it during training (`checkpoint/keep.py` does). The ranks tell each
other how a save ended through the liveness check, not through the disk, which may be what failed.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from rollgraph.checkpoint.format import (
    FORMAT,
    MANIFEST,
    STATE,
    TENSOR_PARALLEL_FORMAT,
    UNSHARDED,
    CheckpointError,
    FileRecord,
    checkpoint_key,
    manifest_checksum,
    record_file,
)
from rollgraph.files import reporting_full_disk, sync
from rollgraph.parallel.data.bucket_plan import ParameterSpec, specs_of
from rollgraph.parallel.data.sharded_model import ShardedModel
from rollgraph.parallel.optim.adamw import ShardedAdamW
from rollgraph.parallel.optim.state import OptimizerState, ShardState, allocate_on_host
from rollgraph.parallel.ranks.failures import RankLost
from rollgraph.parallel.ranks.liveness import Liveness

# -- snapshots in host memory ----------------------------------------------------------------------
# State on the device is copied to the host. State that is already in host memory is lent to the writer, and the next
# update waits until it is written: a copy would double the host memory.

ShardLayout = list[dict[str, tuple[int, torch.dtype]]]  # per shard: field -> number of entries and dtype


@dataclass(frozen=True)
class ShardSnapshot:
    """The part of a checkpoint that one rank writes. Whoever takes a snapshot has to write it or call `release`."""

    rank: int
    ranks: int
    shard: dict[str, Tensor]  # "master/<parameter>", "exp_avg/<parameter>", ...: this rank's parts
    parts: list[tuple[str, int, int]]  # parameter, first element in the flattened parameter, number of elements
    unsharded: dict[str, Tensor]  # on rank 0: frozen parameters and buffers
    header: dict[str, Any]  # fields of the manifest
    copies: Sequence[ShardState] = ()  # the memory of `shard`, if it is a copy
    written: Event | None = None  # to be set when `shard` is written, if it is lent
    tensor_parallel_shards: Mapping[str, Any] = field(default_factory=dict)  # of the parameters in `parts`

    def release(self) -> None:
        """Call this when `shard` is no longer read."""
        if self.written is not None:
            self.written.set()


def take_snapshot(model: ShardedModel, optimizer: ShardedAdamW, memory: ShardSnapshot | None = None) -> ShardSnapshot:
    """Copy the contents of a checkpoint, into the `memory` of an earlier snapshot if there is one."""
    model.raise_if_swapped()
    state = optimizer.state
    unsharded = memory.unsharded if memory else {}
    if state.offload == "host":
        return snapshot_of(model, optimizer, state.shards, unsharded=unsharded, written=state.lend())
    copies = memory.copies if memory else allocate_copies(shard_layout(state.shards), model.world.device)
    copy_state_shards(state, copies)
    return snapshot_of(model, optimizer, copies, unsharded=unsharded, copies=copies)


def snapshot_of(
    model: ShardedModel,
    optimizer: ShardedAdamW,
    shards: Sequence[ShardState],
    *,
    unsharded: Mapping[str, Tensor] = MappingProxyType({}),
    copies: Sequence[ShardState] = (),
    written: Event | None = None,
) -> ShardSnapshot:
    """The contents of a checkpoint whose `shards` are in host memory, or are being copied there in the current stream.

    `unsharded` is memory to reuse for frozen parameters and buffers.
    """
    device = model.world.device
    shard = {}
    parts = []
    tensor_parallel_shards = {}
    for state in optimizer.split_by_parameter(shards):
        name = state.parameter.name
        key = checkpoint_key(name)
        if model.tensor is not None:
            if not model.tensor.saves(name):
                continue
            if not model.tensor.shards[name].is_full:
                tensor_parallel_shards[key] = model.tensor.shards[name].to_json()
        for kind, tensor in state.fields.items():
            shard[f"{kind}/{key}"] = tensor
        parts.append((key, state.start, state.elements))
    unsharded_copy = _copy_to_host(_unsharded_of(model) if model.rank == 0 else {}, unsharded)
    if torch.device(device).type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    header = {
        "format": FORMAT if model.tensor is None else TENSOR_PARALLEL_FORMAT,
        "steps": optimizer.steps,
        "skipped": int(optimizer.skipped),
        "updates": int(optimizer.updates),
        "optimizer_state": optimizer.state.format,
        "parameters": describe_full_parameters(model),
    }
    if model.tensor is not None:
        header["tensor_parallel"] = model.tensor.size
    return ShardSnapshot(
        model.rank, model.ranks, shard, parts, unsharded_copy, header, copies, written, tensor_parallel_shards
    )


def _unsharded_of(model: ShardedModel) -> dict[str, Tensor]:
    tensors = unsharded_tensors(model.model)
    if tensors and model.tensor is not None:
        raise CheckpointError(
            f"{next(iter(tensors))} is not trained, and with tensor parallelism only a shard of it would be saved"
        )
    return tensors


def shard_layout(shards: Sequence[ShardState]) -> ShardLayout:
    return [{name: (tensor.numel(), tensor.dtype) for name, tensor in shard.items()} for shard in shards]


def allocate_copies(layout: ShardLayout, device: str) -> list[ShardState]:
    """Host memory for shards with this layout."""
    tensors = iter(allocate_on_host([size for shard in layout for size in shard.values()], device))
    return [{name: next(tensors) for name in shard} for shard in layout]


def copy_state_shards(state: OptimizerState, copies: Sequence[ShardState]) -> None:
    """Start copies of the whole state."""
    for shard, copy in zip(state.shards, copies, strict=True):
        for name, tensor in shard.items():
            copy[name].copy_(tensor, non_blocking=True)


def unsharded_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and persistent buffers, by their keys in checkpoints."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            tensors[checkpoint_key(name)] = parameter.detach()
    persistent = _persistent_buffers(model)
    for name, buffer in model.named_buffers():
        if name in persistent:
            tensors[checkpoint_key(name)] = buffer.detach()
    return tensors


def _persistent_buffers(model: nn.Module) -> set[str]:
    names = set()
    for prefix, module in model.named_modules():
        for name in module._buffers:
            if name not in module._non_persistent_buffers_set:
                names.add(f"{prefix}.{name}".removeprefix("."))
    return names


def describe_full_parameters(model: ShardedModel) -> dict[str, str]:
    """A description of each parameter for the manifest, with the shapes of full parameters."""
    full_shapes = {}
    if model.tensor is not None:
        full_shapes = {name: shard.full_shape for name, shard in model.tensor.shards.items()}
    return describe_parameters(model.model, full_shapes)


def describe_parameters(model: nn.Module, shapes: Mapping[str, Sequence[int]] = MappingProxyType({})) -> dict[str, str]:
    """A description of each parameter by its key in checkpoints, e.g. "float32 8x8 frozen".

    `shapes` overrides the model's shapes, by the names of parameters.
    """
    specs = list(specs_of(model))
    described = {checkpoint_key(spec.name): _describe(spec, shapes.get(spec.name, spec.shape)) for spec in specs}
    if len(described) < len(specs):
        raise CheckpointError("two parameters of the model have the same key in a checkpoint; rename one of them")
    return described


def _describe(spec: ParameterSpec, shape: Sequence[int]) -> str:
    text = describe_tensor(spec.dtype, shape)
    return text if spec.trainable else f"{text} frozen"


def describe_tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """A dtype and a shape, e.g. "float32 8x8"."""
    name = str(dtype).removeprefix("torch.")
    size = "x".join(map(str, shape)) or "scalar"
    return f"{name} {size}"


def _copy_to_host(tensors: Mapping[str, Tensor], memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Start copies by name. A copy reuses the tensor of the same name in `memory`, if it fits.

    Copies from a GPU go to pinned memory, so that they do not wait for each other: synchronize before you read them.
    """
    copies = {}
    for name, tensor in tensors.items():
        copy = memory.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = copy.copy_(tensor.detach(), non_blocking=True)
    return copies


# -- writing ---------------------------------------------------------------------------------------

_POLL = 0.02  # seconds between two checks for the files of other ranks
_LOSS_SECONDS = 4.0  # after a time-out, for the liveness check to name the lost rank
_WRITTEN = ""  # announced by rank 0 when a checkpoint is complete; any other text is an error


def save(folder: str | os.PathLike[str], model: ShardedModel, optimizer: ShardedAdamW) -> None:
    """Write a checkpoint atomically into a folder that all ranks can see."""
    target = Path(folder)
    if target.exists():
        raise CheckpointError(f"{target} exists already")
    token = model.exchange_text(uuid.uuid4().hex[:8])[0]
    write(
        take_snapshot(model, optimizer),
        target.with_name(f"{target.name}.{token}.incomplete"),
        target,
        timeout=model.collectives.timeout,
        liveness=model.collectives.liveness,
    )


def write(
    snapshot: ShardSnapshot,
    temporary: Path,
    target: Path,
    *,
    state: Any = None,
    manifest_fields: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
    liveness: Liveness | None = None,
    before_commit: Callable[[], None] | None = None,
) -> None:
    """Write this rank's part. Returns when the checkpoint of all ranks is at `target`, or raises on all of them.

    All ranks pass the same `temporary` folder, which must be new. Each rank writes its shard there, and a note about
    it. Rank 0 waits for all notes, writes the unsharded tensors and the manifest, and renames the folder. If a rank
    cannot write, it tells the others through `liveness`, which is required with several ranks, and the folder is
    deleted. No wait takes longer than `timeout` seconds. `before_commit` is called just before the folder is renamed,
    and may raise. `manifest_fields` has more fields for the manifest; `state` is JSON and may differ between ranks.
    """
    outcome = _SaveOutcome(liveness, temporary.name, timeout)
    try:
        outcome.check()
        temporary.mkdir(parents=True, exist_ok=True)
        _write_shard(snapshot, temporary, state)
        snapshot.release()
        if snapshot.rank == 0:
            _complete(snapshot, temporary, manifest_fields or {}, outcome)
            if before_commit is not None:
                before_commit()
            os.replace(temporary, target)
            sync(target.parent)
            outcome.announce(_WRITTEN)
        else:
            outcome.wait_for_rank_0()
    except BaseException as error:
        message = f"{target} was not written: {error}"
        if _is_disk_error(error) and liveness is not None:
            message = f"{target} was not written: rank{snapshot.rank}: {error}"
        # Announce the failure before deleting the folder, so that a late rank does not create it again.
        failure = outcome.announced() or outcome.announce(message)
        with suppress(OSError):  # the first error matters more
            if snapshot.rank == 0:
                discard(temporary, temporary.with_suffix(".deleted"))
            elif failure != message:
                shutil.rmtree(temporary)  # rank 0 may have deleted it before this rank created it
        if liveness is not None and liveness.loss is not None:
            raise RankLost(failure, liveness.loss) from error
        if _is_disk_error(error) or isinstance(error, CheckpointError):
            raise CheckpointError(failure) from error
        raise
    finally:
        snapshot.release()


def _is_disk_error(error: BaseException) -> bool:
    return isinstance(error, (OSError, SafetensorError))


def discard(folder: Path, renamed: Path) -> None:
    """Rename a folder, then delete it, so that no half-deleted folder ever has its name."""
    os.replace(folder, renamed)
    sync(renamed.parent)
    shutil.rmtree(renamed)


@dataclass(frozen=True)
class _SaveOutcome:
    """The outcome of one save, shared by all ranks through the liveness check."""

    liveness: Liveness | None
    key: str
    timeout: float

    def announced(self) -> str | None:
        """The outcome, if a rank has announced it."""
        return None if self.liveness is None else self.liveness.announced(self.key)

    def announce(self, outcome: str) -> str:
        """Returns the valid outcome: the first one announced. This rank's may only be a consequence of it."""
        return outcome if self.liveness is None else self.liveness.announce(self.key, outcome)

    def check(self) -> None:
        """Raise if the save has failed on another rank, or if a rank is lost."""
        if self.liveness is not None:
            self._raise_failure()
            self.liveness.check()

    def _raise_failure(self) -> None:
        failure = self.announced()
        if failure:
            raise CheckpointError(failure)

    def wait_while(self, pending: Callable[[], str]) -> None:
        """Wait until `pending`, which names what is missing, returns an empty text."""
        deadline = time.monotonic() + self.timeout
        while True:
            missing = pending()
            if not missing:
                return
            self.check()
            if time.monotonic() > deadline:
                self._find_lost_rank()
                raise CheckpointError(f"nothing from {missing} within {self.timeout:g} s")
            time.sleep(_POLL)

    def _find_lost_rank(self) -> None:
        """Give the liveness check time to name a stopped rank, which it detects at about the same time.

        Rank 0 waits half as long as the others, so that they do not take rank 0 for the lost rank.
        """
        if self.liveness is not None:
            seconds = _LOSS_SECONDS if self.liveness.rank == 0 else 2 * _LOSS_SECONDS
            self.liveness.wait_for_loss(seconds)
            self.check()

    def wait_for_rank_0(self) -> None:
        self.wait_while(lambda: "rank0" if self.announced() is None else "")
        self._raise_failure()


def _write_shard(snapshot: ShardSnapshot, temporary: Path, state: Any) -> None:
    """Write the shard, then a note about it. The note appears atomically, by a rename."""
    record = _write_tensors(temporary / f"rank{snapshot.rank}.safetensors", snapshot.shard)
    note = temporary / f"rank{snapshot.rank}.json"
    unfinished = note.with_suffix(".part")
    shard = {**record, "parts": snapshot.parts}
    if snapshot.tensor_parallel_shards:
        shard["pieces"] = snapshot.tensor_parallel_shards
    _write_json(unfinished, {"shard": shard, "state": state})
    os.replace(unfinished, note)


def _complete(
    snapshot: ShardSnapshot, temporary: Path, manifest_fields: Mapping[str, Any], outcome: _SaveOutcome
) -> None:
    """On rank 0: wait for all shards, then write the unsharded tensors and the manifest."""
    paths = [temporary / f"rank{rank}.json" for rank in range(snapshot.ranks)]
    outcome.wait_while(lambda: ", ".join(path.stem for path in paths if not path.exists()))
    notes = [json.loads(path.read_text()) for path in paths]
    manifest = {**snapshot.header, **manifest_fields, "shards": [note["shard"] for note in notes]}
    manifest["rest"] = _write_tensors(temporary / UNSHARDED, snapshot.unsharded)
    states = [note["state"] for note in notes]
    if any(state is not None for state in states):
        manifest["state"] = _write_json(temporary / STATE, states)
    _write_json(temporary / MANIFEST, {**manifest, "sha256": manifest_checksum(manifest)})
    for path in paths:
        path.unlink()
    sync(temporary)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> FileRecord:
    with reporting_full_disk(path, sum(tensor.nbytes for tensor in tensors.values())):
        path.touch()
        mode = path.stat().st_mode
        save_file(tensors, path)
        path.chmod(mode)  # the usual mode of a new file; save_file makes it readable by the owner alone
        sync(path)
    return record_file(path)


def _write_json(path: Path, value: Any) -> FileRecord:
    text = json.dumps(value, indent=1)
    with reporting_full_disk(path, len(text)):
        path.write_text(text)
        sync(path)
    return record_file(path)
