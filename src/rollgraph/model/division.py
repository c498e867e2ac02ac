"""How the ranks of a tensor group divide a model: which piece of each parameter, and of each of Hugging Face's tensors.

Queries, keys, values, gate and up are divided by their outputs, so that a rank has whole heads; the projections after
them by their inputs. Norms, the embedding and the head are on every rank. Ranks that outnumber key/value heads share
them. Knows no process groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rollgraph.distributed.pieces import ParameterPiece
from rollgraph.model.architecture import Architecture
from rollgraph.model.decoder import Decoder
from rollgraph.model.hf_names import tensor_places
from rollgraph.model.linear import Linear
from rollgraph.model.shapes_only import shapes_only
from rollgraph.model.tensor_group import TensorGroup


class Share(NamedTuple):
    """The part of one of Hugging Face's tensors that a rank holds."""

    axis: int
    start: int
    stop: int
    counted: bool = True  # False: another rank has the same part, and counts it


def tensor_shares(whole: Architecture, rank: int, size: int) -> dict[str, Share]:
    """The part of each of Hugging Face's tensors that is divided. The others are on every rank."""
    if problem := whole.why_indivisible(size):
        raise ValueError(problem)
    repeats = max(1, size // whole.kv_heads)
    kv_heads = max(1, whole.kv_heads // size)

    def slice_of(length: int, place: int, places: int) -> tuple[int, int]:
        return length * place // places, length * (place + 1) // places

    heads = slice_of(whole.heads * whole.head_dim, rank, size)
    keys = slice_of(whole.kv_heads * whole.head_dim, rank // repeats, whole.kv_heads // kv_heads)
    width = slice_of(whole.mlp, rank, size)
    by_outputs = {
        "q_proj": Share(0, *heads),
        "k_proj": Share(0, *keys, counted=rank % repeats == 0),
        "v_proj": Share(0, *keys, counted=rank % repeats == 0),
        "gate_proj": Share(0, *width),
        "up_proj": Share(0, *width),
    }
    by_inputs = {"o_proj": Share(1, *heads), "down_proj": Share(1, *width)}
    found = {}
    for name in tensor_places(whole):
        projection, kind = name.split(".")[-2:]
        if projection in by_outputs:
            found[name] = by_outputs[projection]
        elif projection in by_inputs and kind == "weight":
            found[name] = by_inputs[projection]
    return found


def parameter_pieces(whole: Architecture, rank: int, size: int) -> dict[str, ParameterPiece]:
    """The piece of each parameter of the decoder that a rank holds. What all ranks have, the first of them counts."""
    shares = tensor_shares(whole, rank, size)
    shapes = whole_shapes(whole)
    parts: dict[str, list[tuple[int, Share]]] = {}  # of fused parameters, with the row where each begins
    for name, (parameter, rows) in tensor_places(whole).items():
        if name in shares:
            parts.setdefault(parameter, []).append((rows.start or 0, shares[name]))
    pieces = {}
    for parameter, shape in shapes.items():
        pieces[parameter] = ParameterPiece.of_all(shape, counted=rank == 0)
        if parameter in parts:
            ranges = tuple((first + share.start, first + share.stop) for first, share in parts[parameter])
            counted = tuple(share.counted for _, share in parts[parameter])
            pieces[parameter] = ParameterPiece(shape, parts[parameter][0][1].axis, ranges, counted)
    return pieces


def model_pieces(model: Decoder) -> dict[str, ParameterPiece]:
    """The piece of each parameter of a divided model that this rank holds."""
    assert model.group is not None
    pieces = parameter_pieces(model.whole, model.group.rank, model.group.size)
    if model.adapters is None:
        return pieces
    return _adapter_pieces(model, model.group)


def _adapter_pieces(model: Decoder, group: TensorGroup) -> dict[str, ParameterPiece]:
    """A has all inputs of a layer or those of this rank, and B its outputs or all of them; see `Linear`."""
    found = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, Linear) or layer.adapter is None:
            continue
        a, b = tuple(layer.lora_a.shape), tuple(layer.lora_b.shape)
        if layer.sums_over is not None:
            inputs = a[1]
            span = (group.rank * inputs, (group.rank + 1) * inputs)
            found[f"{name}.lora_a"] = ParameterPiece((a[0], inputs * group.size), 1, (span,), (True,))
            found[f"{name}.lora_b"] = ParameterPiece.of_all(b, counted=group.rank == 0)
            continue
        found[f"{name}.lora_a"] = ParameterPiece.of_all(a, counted=group.rank == 0)
        spans = []
        for part in layer.adapter.parts:
            width = part.up.stop - part.up.start
            first = part.up.start * group.size + group.rank * width
            spans.append((first, first + width))
        counted = (True,) * len(spans)
        found[f"{name}.lora_b"] = ParameterPiece((b[0], b[1] * group.size), 1, tuple(spans), counted)
    return found


def whole_shapes(whole: Architecture) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of a model that is not divided."""
    with shapes_only():
        model = Decoder(whole)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def cut(tensor: Tensor, piece: ParameterPiece) -> Tensor:
    """The piece of a whole parameter."""
    return torch.cat([tensor.narrow(piece.axis, start, stop - start) for start, stop in piece.ranges], piece.axis)


def empty_decoder(
    architecture: Architecture,
    dtype: torch.dtype | None,
    device: str | torch.device,
    *,
    checkpointing: int = 0,
    group: TensorGroup | None = None,
) -> Decoder:
    """A model whose weights are not set. Allocates nothing but them."""
    with shapes_only():
        model = Decoder(architecture, checkpointing=checkpointing, group=group).to(dtype=dtype)
    model.to_empty(device=device)
    frequencies, _ = architecture.frequencies()
    model.frequencies.copy_(frequencies)
    return model


def hollow_decoder(
    architecture: Architecture, dtype: torch.dtype | None, device: str | torch.device, *, checkpointing: int = 0
) -> Decoder:
    """A model whose parameters have a device, but no memory yet: all elements of one are the same element.

    It is for whoever moves the parameters to other memory before they are written or read.
    """
    with shapes_only():
        model = Decoder(architecture, checkpointing=checkpointing).to(dtype=dtype)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            element = torch.zeros((), dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(element.expand(parameter.shape)))
    frequencies, _ = architecture.frequencies()
    model.frequencies = frequencies.to(device)
    return model


@torch.no_grad()
def divide_model(model: Decoder, group: TensorGroup) -> Decoder:
    """The piece of a whole model that one rank of a group holds, in memory of its own."""
    weight = model.embed.weight
    piece = empty_decoder(model.whole, weight.dtype, weight.device, checkpointing=model.checkpointing, group=group)
    copy_pieces(piece, dict(model.named_parameters()))
    return piece


@torch.no_grad()
def copy_pieces(model: Decoder, whole: Mapping[str, Tensor]) -> None:
    """Copy this rank's pieces of whole parameters, given by name, into a divided model."""
    pieces = model_pieces(model)
    for name, parameter in model.named_parameters():
        parameter.copy_(cut(whole[name], pieces[name]))
