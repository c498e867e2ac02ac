"""What one rank contributes to a checkpoint, copied to host memory so that training can go on while it is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.sharding.bucket_plan import ParameterSpec, specs_of
from rollgraph.sharding.manifest import FORMAT
from rollgraph.sharding.optimizer import Piece, ShardedAdamW
from rollgraph.sharding.sharded_model import ShardedModel


@dataclass(frozen=True)
class ShardSnapshot:
    """A copy of what one rank writes."""

    rank: int
    ranks: int
    shard: dict[str, Tensor]  # "master/<parameter>", "exp_avg/<parameter>", ...: the parts that this rank owns
    parts: list[tuple[str, int, int]]  # parameter, where the part starts in it, how many elements
    rest: dict[str, Tensor]  # on rank 0: frozen parameters and buffers
    header: dict[str, Any]  # fields of the manifest


def take_snapshot(model: ShardedModel, optimizer: ShardedAdamW, memory: ShardSnapshot | None = None) -> ShardSnapshot:
    """Copy the contents of a checkpoint, into the memory of an earlier snapshot if one is given."""
    model.raise_if_swapped()
    world = model.world
    shard = {}
    parts = []
    for piece in optimizer.pieces:
        for field, tensor in fields_of(piece):
            shard[f"{field}/{piece.parameter.name}"] = tensor
        parts.append((piece.parameter.name, piece.start, piece.master.numel()))
    rest = unsharded_tensors(model.model) if world.rank == 0 else {}
    shard_copy = _copy_to_host(shard, memory.shard if memory else {})
    rest_copy = _copy_to_host(rest, memory.rest if memory else {})
    if torch.device(world.device).type == "cuda":
        torch.cuda.current_stream(world.device).synchronize()
    header = {
        "format": FORMAT,
        "steps": optimizer.steps,
        "skipped": int(optimizer.skipped),
        "parameters": describe_parameters(model.model),
    }
    return ShardSnapshot(world.rank, world.size, shard_copy, parts, rest_copy, header)


def fields_of(piece: Piece) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a piece by name: the master weights and the optimizer state."""
    yield "master", piece.master
    yield from piece.state.items()


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


def describe_parameters(model: nn.Module) -> dict[str, str]:
    """Each parameter as text, e.g. "float32 8x8 frozen", for the manifest."""
    return {spec.name: _describe(spec) for spec in specs_of(model)}


def _describe(spec: ParameterSpec) -> str:
    text = describe_tensor(spec.dtype, spec.shape)
    return text if spec.trainable else f"{text} frozen"


def describe_tensor(dtype: torch.dtype, shape: torch.Size) -> str:
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
