"""Adapter folders in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Owns the map from PEFT's tensors to the adapters of a model. Loading checks everything first, and then writes into the
existing memory of the adapters. Pickles are never read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rollgraph.files import FileError, MissingFile, read_json_object, sync, write_new
from rollgraph.model.architecture import Architecture
from rollgraph.model.decoder import Decoder
from rollgraph.model.lora import Adapters
from rollgraph.model.tensor_shards import HFTensorShard, hf_tensor_shards
from rollgraph.model.weights.hf import (
    CONFIG,
    INCOMPLETE,
    PICKLES,
    ModelFileError,
    first_names,
    has_weights,
    read_header,
    write_tensors,
)
from rollgraph.model.weights.peft_config import (
    ADAPTER_CONFIG,
    AdapterFileError,
    StoredAdapter,
    format_adapter_config,
    parse_adapter_config,
    projection_shapes,
)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."  # of PEFT's wrappers around the model
_FACTORS = ("lora_A.weight", "lora_B.weight")  # [rank, inputs] and [outputs, rank]


def read_base(folder: str | os.PathLike[str]) -> tuple[str, str | None]:
    """The base model of an adapter, as a path or hub id, and its revision on the hub if the file has one."""
    config_path = Path(folder) / ADAPTER_CONFIG
    config = _read_config(Path(folder))
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base:
        raise AdapterFileError(
            f"base_model_name_or_path={base!r:.80}: does not say which model to load", location=str(config_path)
        )
    return base, revision if isinstance(revision, str) and revision else None


def read_adapter(folder: str | os.PathLike[str], architecture: Architecture) -> StoredAdapter:
    """Read an adapter's settings, and check that it fits this architecture. Reads no tensor data, only headers."""
    source = Path(folder)
    config = parse_adapter_config(_read_config(source), architecture, str(source / ADAPTER_CONFIG))
    _check_tensors(source, config, architecture)
    return config


def load_adapter(model: Decoder, folder: str | os.PathLike[str]) -> None:
    """Copy an adapter from a folder into the model's adapter, in place: its tensors keep their addresses.

    The dropout may differ. After an error the adapter is unchanged.
    """
    adapters = _adapters_of(model)
    stored = read_adapter(folder, model.full_architecture)
    for name in ("rank", "alpha", "targets", "rslora"):
        theirs, ours = getattr(stored.spec, name), getattr(adapters.spec, name)
        if (sorted(theirs) != sorted(ours)) if name == "targets" else (theirs != ours):
            raise AdapterFileError(f"{name} is {theirs} there and {ours} in the model", location=str(folder))
    copies: list[tuple[Tensor, Tensor]] = []  # all are read before the first is written
    with safe_open(Path(folder) / ADAPTER_WEIGHTS, framework="pt") as file:
        for name, tensor in _tensors_of(adapters).items():
            source = file.get_tensor(name)
            shard = _shard_of(model, name)
            if shard is not None:
                source = source.narrow(shard.axis, shard.start, shard.stop - shard.start)
            if source.shape != tensor.shape:
                raise AdapterFileError(f"{name} changed while the adapter was loaded", location=str(folder))
            copies.append((tensor, source.to(tensor.dtype, copy=True)))  # a copy: `source` is a view of the mapped file
    with torch.no_grad():
        for tensor, source in copies:
            tensor.copy_(source)
    adapters.refresh()  # the matmuls read copies of A


def save_adapter(
    model: Decoder, folder: str | os.PathLike[str], *, base: str | None, revision: str | None = None
) -> None:
    """Write an adapter folder that PEFT can load, replacing the adapter in it.

    `base` is the path or hub id of the base model. After an interrupted save the folder holds the old adapter, the new
    one, or none. Under tensor parallelism all ranks of the group call this, and its rank 0 writes.
    """
    adapters = _adapters_of(model)
    tensors = {}
    for name, tensor in _tensors_of(adapters).items():
        shard = _shard_of(model, name)
        if shard is not None and model.group is not None:
            tensor = torch.cat(list(model.group.all_gather(tensor)), shard.axis)
        tensors[name] = tensor.contiguous()
    if model.group is not None and model.group.rank > 0:
        return
    target = Path(folder)
    if has_weights(target):
        raise AdapterFileError(
            "holds the weights of a model: tools would not find an adapter next to them", location=str(target)
        )
    target.mkdir(parents=True, exist_ok=True)
    content = format_adapter_config(StoredAdapter(adapters.spec, base, revision))
    unfinished = {name: target / (name + INCOMPLETE) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
    write_new(unfinished[ADAPTER_CONFIG], json.dumps(content, indent=2) + "\n")
    write_tensors(unfinished[ADAPTER_WEIGHTS], tensors, like=unfinished[ADAPTER_CONFIG])
    sync(unfinished[ADAPTER_WEIGHTS])
    (target / ADAPTER_WEIGHTS).unlink(missing_ok=True)
    for name, path in unfinished.items():
        os.replace(path, target / name)
    sync(target)


def _adapters_of(model: Decoder) -> Adapters:
    if model.adapters is None:
        raise AdapterFileError("the model has no adapters")
    return model.adapters


def _shard_of(model: Decoder, name: str) -> HFTensorShard | None:
    """This rank's shard of one of PEFT's tensors; None if the tensor is replicated."""
    if model.group is None:
        return None
    projection, factor = name.removeprefix(_PREFIX).split(".lora_")
    shard = hf_tensor_shards(model.full_architecture, model.group.rank, model.group.size)[f"{projection}.weight"]
    sharded_factor = "B.weight" if shard.axis == 0 else "A.weight"  # of column parallel layers, of row parallel ones
    return shard if factor == sharded_factor else None


def _tensors_of(adapters: Adapters) -> dict[str, Tensor]:
    """Views of the adapters by PEFT's names."""
    tensors = {}
    for name, *factors in adapters.projections():
        for factor, tensor in zip(_FACTORS, factors, strict=True):
            tensors[f"{_PREFIX}{name}.{factor}"] = tensor.detach()
    return tensors


def _read_config(source: Path) -> dict[str, object]:
    """The JSON of a folder's adapter_config.json. If there is none, the error says what the folder may be."""
    if not source.is_dir():
        raise AdapterFileError(
            "is not a folder" if source.exists() else "there is no such folder", location=str(source)
        )
    try:
        return read_json_object(source / ADAPTER_CONFIG)
    except MissingFile:
        hint = f"; it has {CONFIG}, so it may be a model" if (source / CONFIG).exists() else ""
        if (source / "model" / ADAPTER_CONFIG).exists():  # a run folder: the exported adapter is in model/
            hint = f"; did you mean {source / 'model'}?"
        raise AdapterFileError(f"has no {ADAPTER_CONFIG}{hint}", location=str(source)) from None
    except FileError as error:
        raise AdapterFileError(error.detail, location=error.location) from None


def _check_tensors(source: Path, config: StoredAdapter, architecture: Architecture) -> None:
    """Check that the file holds exactly the tensors that the configuration describes."""
    if not (source / ADAPTER_WEIGHTS).exists():
        only = f", only {_PICKLE}: {PICKLES}" if (source / _PICKLE).exists() else ""
        raise AdapterFileError(f"has no {ADAPTER_WEIGHTS}{only}", location=str(source))
    try:
        stored = read_header(source / ADAPTER_WEIGHTS)
    except ModelFileError as error:
        raise AdapterFileError(str(error)) from None
    expected: dict[str, tuple[int, ...]] = {}
    rank = config.spec.rank
    for name, (outputs, inputs) in projection_shapes(architecture).items():
        if name.rpartition(".")[2] in config.spec.targets:
            for factor, shape in zip(_FACTORS, ((rank, inputs), (outputs, rank)), strict=True):
                expected[f"{_PREFIX}{name}.{factor}"] = shape
    misshapen = []
    for name in expected.keys() & stored.keys():
        if stored[name].shape != expected[name]:
            misshapen.append(f"{name} {list(stored[name].shape)} instead of {list(expected[name])}")
    problems = {
        "missing": sorted(expected.keys() - stored.keys()),
        "unexpected": sorted(stored.keys() - expected.keys()),
        "wrong shape": sorted(misshapen),
    }
    if any(problems.values()):
        description = "; ".join(f"{kind}: {first_names(names)}" for kind, names in problems.items() if names)
        of = f" (it is one of {config.base})" if config.base else ""
        raise AdapterFileError(f"the adapter does not fit the model{of}; {description}", location=str(source))
