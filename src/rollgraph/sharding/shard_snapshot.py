"""What one rank contributes to a checkpoint, in host memory, so that training can go on while it is written.

State on the device is copied. State that lies in host memory anyway is lent to the writer, and the next update waits
until it is written: a copy would take as much host memory again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.sharding.bucket_plan import ParameterSpec, specs_of
from rollgraph.sharding.manifest import DIVIDED_FORMAT, FORMAT, CheckpointError
from rollgraph.sharding.optimizer import ShardedAdamW
from rollgraph.sharding.optimizer_state import OptimizerState, ShardState
from rollgraph.sharding.pinned_memory import allocate_on_host
from rollgraph.sharding.sharded_model import ShardedModel

ShardLayout = list[dict[str, tuple[int, torch.dtype]]]  # the entries and the type of each field of each shard


@dataclass(frozen=True)
class ShardSnapshot:
    """What one rank writes. Whoever takes a snapshot writes it, or calls `release`."""

    rank: int
    ranks: int
    shard: dict[str, Tensor]  # "master/<parameter>", "exp_avg/<parameter>", ...: the parts that this rank owns
    parts: list[tuple[str, int, int]]  # parameter, where the part starts in it, how many elements
    rest: dict[str, Tensor]  # on rank 0: frozen parameters and buffers
    header: dict[str, Any]  # fields of the manifest
    copies: Sequence[ShardState] = ()  # the memory of `shard`, if it was copied
    written: Event | None = None  # to be set when `shard` is written, if it was not
    pieces: Mapping[str, Any] = field(default_factory=dict)  # what these are parts of, where ranks divide layers

    def release(self) -> None:
        """Nobody will read `shard` any more."""
        if self.written is not None:
            self.written.set()


def take_snapshot(model: ShardedModel, optimizer: ShardedAdamW, memory: ShardSnapshot | None = None) -> ShardSnapshot:
    """Copy the contents of a checkpoint, into the memory of an earlier snapshot if one is given."""
    model.raise_if_swapped()
    state = optimizer.state
    rest = memory.rest if memory else {}
    if state.offload == "host":
        return snapshot_of(model, optimizer, state.shards, rest=rest, written=state.lend())
    copies = memory.copies if memory else allocate_copies(layout_of(state.shards), model.world.device)
    copy_shards(state, copies)
    return snapshot_of(model, optimizer, copies, rest=rest, copies=copies)


def snapshot_of(
    model: ShardedModel,
    optimizer: ShardedAdamW,
    shards: Sequence[ShardState],
    *,
    rest: Mapping[str, Tensor] = MappingProxyType({}),
    copies: Sequence[ShardState] = (),
    written: Event | None = None,
) -> ShardSnapshot:
    """The contents of a checkpoint whose shards are in host memory, or are being copied there in the current stream.

    `rest` is memory for frozen parameters and buffers.
    """
    device = model.world.device
    shard = {}
    parts = []
    pieces = {}
    for piece in optimizer.pieces_of(shards):
        name = piece.parameter.name
        if model.tensor is not None:
            if not model.tensor.saves(name):
                continue
            if not model.tensor.pieces[name].is_whole:
                pieces[name] = model.tensor.pieces[name].to_json()
        for kind, tensor in piece.fields.items():
            shard[f"{kind}/{name}"] = tensor
        parts.append((name, piece.start, piece.elements))
    rest_copy = _copy_to_host(_rest_of(model) if model.rank == 0 else {}, rest)
    if torch.device(device).type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    header = {
        "format": FORMAT if model.tensor is None else DIVIDED_FORMAT,
        "steps": optimizer.steps,
        "skipped": int(optimizer.skipped),
        "updates": int(optimizer.updates),
        "optimizer_state": optimizer.state.format,
        "parameters": describe_whole(model),
    }
    if model.tensor is not None:
        header["tensor_parallel"] = model.tensor.size
    return ShardSnapshot(model.rank, model.ranks, shard, parts, rest_copy, header, copies, written, pieces)


def _rest_of(model: ShardedModel) -> dict[str, Tensor]:
    tensors = unsharded_tensors(model.model)
    if tensors and model.tensor is not None:
        raise CheckpointError(f"{next(iter(tensors))} is not trained, and ranks divide layers: it would not be whole")
    return tensors


def layout_of(shards: Sequence[ShardState]) -> ShardLayout:
    return [{name: (tensor.numel(), tensor.dtype) for name, tensor in shard.items()} for shard in shards]


def allocate_copies(layout: ShardLayout, device: str) -> list[ShardState]:
    """Host memory for shards of these sizes."""
    tensors = iter(allocate_on_host([size for shard in layout for size in shard.values()], device))
    return [{name: next(tensors) for name in shard} for shard in layout]


def copy_shards(state: OptimizerState, copies: Sequence[ShardState]) -> None:
    """Start copies of the whole state."""
    for shard, copy in zip(state.shards, copies, strict=True):
        for name, tensor in shard.items():
            copy[name].copy_(tensor, non_blocking=True)


def unsharded_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and persistent buffers, by name."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            tensors[name] = parameter.detach()
    persistent = _persistent_buffers(model)
    for name, buffer in model.named_buffers():
        if name in persistent:
            tensors[name] = buffer.detach()
    return tensors


def _persistent_buffers(model: nn.Module) -> set[str]:
    names = set()
    for prefix, module in model.named_modules():
        for name in module._buffers:
            if name not in module._non_persistent_buffers_set:
                names.add(f"{prefix}.{name}".removeprefix("."))
    return names


def describe_whole(model: ShardedModel) -> dict[str, str]:
    """Each parameter as text, for the manifest: as it is when no rank divides it."""
    whole = {}
    if model.tensor is not None:
        whole = {name: piece.whole for name, piece in model.tensor.pieces.items()}
    return describe_parameters(model.model, whole)


def describe_parameters(model: nn.Module, shapes: Mapping[str, Sequence[int]] = MappingProxyType({})) -> dict[str, str]:
    """Each parameter as text, e.g. "float32 8x8 frozen". `shapes` has those that are not the model's, by name."""
    return {spec.name: _describe(spec, shapes.get(spec.name, spec.shape)) for spec in specs_of(model)}


def _describe(spec: ParameterSpec, shape: Sequence[int]) -> str:
    text = describe_tensor(spec.dtype, shape)
    return text if spec.trainable else f"{text} frozen"


def describe_tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """A dtype and a shape as text, e.g. "float32 8x8"."""
    name = str(dtype).removeprefix("torch.")
    size = "x".join(map(str, shape)) or "scalar"
    return f"{name} {size}"


def _copy_to_host(tensors: Mapping[str, Tensor], memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Start copies; from a GPU they go to pinned memory, so that they do not wait for one another."""
    copies = {}
    for name, tensor in tensors.items():
        copy = memory.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = copy.copy_(tensor.detach(), non_blocking=True)
    return copies
