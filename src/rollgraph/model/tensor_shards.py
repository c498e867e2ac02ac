"""Tensor parallelism of a model: which shard of each parameter a rank has.

As in Megatron, q, k, v, gate and up are column parallel, so that a rank has whole heads, and o and down are row
parallel. Norms, the embedding and the output head are replicated. If there are more ranks than key/value heads, several
ranks have the same ones. Knows no process groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rollgraph.model.architecture import Architecture, hf_tensor_map
from rollgraph.model.decoder import Decoder
from rollgraph.model.layers import Linear
from rollgraph.model.meta import empty_decoder, shapes_only
from rollgraph.model.tensor_parallel import TensorParallelGroup
from rollgraph.parallel.tensor.pieces import TensorParallelShard


class HFTensorShard(NamedTuple):
    """A rank's shard of one of Hugging Face's tensors, e.g. HFTensorShard(axis=0, start=512, stop=1024)."""

    axis: int
    start: int
    stop: int
    counted: bool = True  # False: another rank has the same shard, and sums over ranks count that one


def hf_tensor_shards(architecture: Architecture, rank: int, size: int) -> dict[str, HFTensorShard]:
    """This rank's shard of each of Hugging Face's tensors that is sharded. The others are replicated."""
    if problem := architecture.why_indivisible(size):
        raise ValueError(problem)
    kv_replicas = max(1, size // architecture.kv_heads)
    kv_heads = max(1, architecture.kv_heads // size)

    def slice_of(length: int, index: int, count: int) -> tuple[int, int]:
        return length * index // count, length * (index + 1) // count

    heads = slice_of(architecture.heads * architecture.head_dim, rank, size)
    keys = slice_of(
        architecture.kv_heads * architecture.head_dim, rank // kv_replicas, architecture.kv_heads // kv_heads
    )
    width = slice_of(architecture.mlp, rank, size)
    column_parallel = {
        "q_proj": HFTensorShard(0, *heads),
        "k_proj": HFTensorShard(0, *keys, counted=rank % kv_replicas == 0),
        "v_proj": HFTensorShard(0, *keys, counted=rank % kv_replicas == 0),
        "gate_proj": HFTensorShard(0, *width),
        "up_proj": HFTensorShard(0, *width),
    }
    row_parallel = {"o_proj": HFTensorShard(1, *heads), "down_proj": HFTensorShard(1, *width)}
    shards = {}
    for name in hf_tensor_map(architecture):
        projection, kind = name.split(".")[-2:]
        if projection in column_parallel:
            shards[name] = column_parallel[projection]
        elif projection in row_parallel and kind == "weight":
            shards[name] = row_parallel[projection]
    return shards


def parameter_shards(architecture: Architecture, rank: int, size: int) -> dict[str, TensorParallelShard]:
    """A rank's shard of each parameter of the decoder. Of replicated parameters, rank 0 has the one that counts."""
    hf_shards = hf_tensor_shards(architecture, rank, size)
    shapes = full_shapes(architecture)
    fused: dict[str, list[tuple[int, HFTensorShard]]] = {}  # by parameter, each with its first row in the parameter
    for name, (parameter, rows) in hf_tensor_map(architecture).items():
        if name in hf_shards:
            fused.setdefault(parameter, []).append((rows.start or 0, hf_shards[name]))
    shards = {}
    for parameter, shape in shapes.items():
        shards[parameter] = TensorParallelShard.full(shape, counted=rank == 0)
        if parameter in fused:
            ranges = tuple((first + shard.start, first + shard.stop) for first, shard in fused[parameter])
            counted = tuple(shard.counted for _, shard in fused[parameter])
            shards[parameter] = TensorParallelShard(shape, fused[parameter][0][1].axis, ranges, counted)
    return shards


def model_shards(model: Decoder) -> dict[str, TensorParallelShard]:
    """This rank's shard of each parameter of a tensor parallel model."""
    assert model.group is not None
    shards = parameter_shards(model.full_architecture, model.group.rank, model.group.size)
    if model.adapters is None:
        return shards
    return _adapter_shards(model, model.group)


def _adapter_shards(model: Decoder, group: TensorParallelGroup) -> dict[str, TensorParallelShard]:
    """In a column parallel layer A is replicated and B sharded, in a row parallel one the reverse; see `Linear`."""
    shards = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear) or layer.adapter is None:
            continue
        a, b = tuple(layer.lora_a.shape), tuple(layer.lora_b.shape)
        if layer.row_parallel_group is not None:
            inputs = a[1]
            span = (group.rank * inputs, (group.rank + 1) * inputs)
            shards[f"{name}.lora_a"] = TensorParallelShard((a[0], inputs * group.size), 1, (span,), (True,))
            shards[f"{name}.lora_b"] = TensorParallelShard.full(b, counted=group.rank == 0)
            continue
        shards[f"{name}.lora_a"] = TensorParallelShard.full(a, counted=group.rank == 0)
        spans = []
        for projection in layer.adapter.projections:
            width = projection.b_columns.stop - projection.b_columns.start
            first = projection.b_columns.start * group.size + group.rank * width
            spans.append((first, first + width))
        counted = (True,) * len(spans)
        shards[f"{name}.lora_b"] = TensorParallelShard((b[0], b[1] * group.size), 1, tuple(spans), counted)
    return shards


def full_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of the unsharded model."""
    with shapes_only():
        model = Decoder(architecture)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def slice_shard(full: Tensor, shard: TensorParallelShard) -> Tensor:
    """The shard of a full parameter, as a copy."""
    return torch.cat([full.narrow(shard.axis, start, stop - start) for start, stop in shard.ranges], shard.axis)


@torch.no_grad()
def shard_model(model: Decoder, group: TensorParallelGroup) -> Decoder:
    """A rank's shard of an unsharded model, in new memory."""
    weight = model.embed_tokens.weight
    shard = empty_decoder(
        model.full_architecture, weight.dtype, weight.device, checkpointing=model.checkpointing, group=group
    )
    copy_shards(shard, dict(model.named_parameters()))
    return shard


@torch.no_grad()
def copy_shards(model: Decoder, full_parameters: Mapping[str, Tensor]) -> None:
    """Copy this rank's shards of full parameters, by name, into a tensor parallel model."""
    shards = model_shards(model)
    for name, parameter in model.named_parameters():
        parameter.copy_(slice_shard(full_parameters[name], shards[name]))
