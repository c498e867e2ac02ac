"""Writing weights in Hugging Face's layout, so that an interrupted save never leaves a mixture of old and new files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rollgraph.files import sync, write_new
from rollgraph.model.decoder import Decoder
from rollgraph.model.division import tensor_shares
from rollgraph.model.hf_weights import CONFIG, INDEX, WEIGHTS, ModelFileError, parameter_views, spell, whole_views
from rollgraph.model.peft_config import ADAPTER_CONFIG

_SHARDS = "model-?????-of-?????.safetensors"
INCOMPLETE = ".incomplete"  # suffix of every file until all of them are written


def save_model(
    model: Decoder, folder: str | os.PathLike[str], *, shard_bytes: int = 5 * 1024**3, merge: bool = False
) -> None:
    """Write a folder that Hugging Face's libraries can load, replacing the weights that it has.

    Of a model with adapters these are the weights of its base or, with `merge`, those with the adapters added. Of a
    divided model all ranks of the group call this, and the first of them writes.

    Files get their final names only when all of them are written, and the file without which nothing loads gets its
    name last. So a folder whose save was interrupted holds the old weights, none, or the new ones, never a mixture.
    """
    tensors = gather_whole(model, _merged(model) if merge else iter(parameter_views(model).items()))
    if model.group is not None and model.group.rank > 0:
        for _ in tensors:  # for the rank that writes them
            pass
        return
    target = Path(folder)
    if (target / ADAPTER_CONFIG).exists():
        raise ModelFileError(f"{target} holds an adapter, which tools would load in place of a model beside it")
    target.mkdir(parents=True, exist_ok=True)
    for leftover in target.glob(f"model*{INCOMPLETE}"):  # of a save that was interrupted
        leftover.unlink()
    dtype = model.embed.weight.dtype
    shards = _split_into_shards(whole_views(model.whole, dtype), shard_bytes)
    names = _shard_names(len(shards))
    config = model.whole.to_config()
    config.pop("torch_dtype", None)  # the old name of dtype
    config["dtype"] = spell(dtype)
    config_path = target / (CONFIG + INCOMPLETE)
    _write_json(config_path, config)
    for name, shard in zip(names, shards, strict=True):
        write_tensors(target / (name + INCOMPLETE), dict(islice(tensors, len(shard))), like=config_path)
    if len(shards) > 1:
        _write_json(target / (INDEX + INCOMPLETE), _make_index(names, shards))
        names.append(INDEX)
    for name in (CONFIG, *names):
        sync(target / (name + INCOMPLETE))
    for old in (target / INDEX, target / WEIGHTS, *target.glob(_SHARDS)):
        old.unlink(missing_ok=True)
    for name in (CONFIG, *names):
        os.replace(target / (name + INCOMPLETE), target / name)
    sync(target)


def gather_whole(model: Decoder, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model, one at a time. Those of a divided one are gathered from the ranks of its group."""
    group = model.group
    if group is None:
        yield from tensors
        return
    shares = [tensor_shares(model.whole, rank, group.size) for rank in range(group.size)]
    for name, own_part in tensors:
        if name not in shares[0]:
            yield name, own_part
            continue
        parts = group.gather(own_part)
        counted = [part for part, own in zip(parts, shares, strict=True) if own[name].counted]
        yield name, torch.cat(counted, shares[0][name].axis).cpu()


def _merged(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The weights with the adapters added, in host memory: a GPU may have no room for those of a file."""
    if model.adapters is None:
        raise ModelFileError("the model has no adapters to merge")
    for name, tensor in model.adapters.merged_weights():
        yield name, tensor if model.group is not None else tensor.cpu()


def _split_into_shards(tensors: dict[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    """Distribute tensors over files of at most `shard_bytes`. A larger tensor gets a file of its own."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _shard_names(number: int) -> list[str]:
    if number == 1:
        return [WEIGHTS]
    return [f"model-{i:05}-of-{number:05}.safetensors" for i in range(1, number + 1)]


def write_tensors(path: Path, tensors: dict[str, Tensor], like: Path) -> None:
    """Write a safetensors file with the permissions of another file."""
    write_new(path)  # so that nothing is written through a link of this name
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:  # a full disk, for example
        raise ModelFileError(f"{path.parent} was not written: {error}") from error
    shutil.copymode(like, path)  # safetensors makes files that only their owner can read


def _make_index(names: list[str], shards: list[dict[str, Tensor]]) -> dict[str, Any]:
    size = 0
    places = {}
    for name, tensors in zip(names, shards, strict=True):
        for tensor_name, tensor in tensors.items():
            places[tensor_name] = name
            size += tensor.nbytes
    return {"metadata": {"total_size": size}, "weight_map": places}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_new(path, json.dumps(content, indent=2) + "\n")
