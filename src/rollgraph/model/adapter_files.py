"""Adapter folders in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Owns the map from PEFT's tensors to the adapters of a model. Everything is checked before anything is written, into the
memory that the adapters already have. Pickles are never read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rollgraph.files import FileError, MissingFile, read_object, sync, write_new
from rollgraph.model.adapters import Adapters
from rollgraph.model.architecture import Architecture
from rollgraph.model.decoder import Decoder
from rollgraph.model.division import Share, tensor_shares
from rollgraph.model.hf_saving import INCOMPLETE, write_tensors
from rollgraph.model.hf_weights import CONFIG, PICKLES, ModelFileError, has_weights, listed, read_header
from rollgraph.model.peft_config import (
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
    """The model that an adapter belongs to, as a path or hub id, and its revision on the hub if the file says so."""
    place = Path(folder) / ADAPTER_CONFIG
    content = _read_content(Path(folder))
    base, revision = content.get("base_model_name_or_path"), content.get("revision")
    if not isinstance(base, str) or not base:
        raise AdapterFileError(
            f"base_model_name_or_path={base!r:.80}: does not say which model to load", place=str(place)
        )
    return base, revision if isinstance(revision, str) and revision else None


def read_adapter(folder: str | os.PathLike[str], architecture: Architecture) -> StoredAdapter:
    """Check that a folder holds an adapter of a model with this architecture. Of its tensors, only headers are read."""
    source = Path(folder)
    config = parse_adapter_config(_read_content(source), architecture, str(source / ADAPTER_CONFIG))
    _check_tensors(source, config, architecture)
    return config


def load_adapter(model: Decoder, folder: str | os.PathLike[str]) -> None:
    """Copy the adapter of a folder into those of the model, whose addresses stay the same.

    The folder's dropout does not matter. After an error the adapters are unchanged.
    """
    adapters = _adapters_of(model)
    config = read_adapter(folder, model.whole)
    for name in ("rank", "alpha", "targets", "rslora"):
        theirs, ours = getattr(config.spec, name), getattr(adapters.spec, name)
        if (sorted(theirs) != sorted(ours)) if name == "targets" else (theirs != ours):
            raise AdapterFileError(f"{name} is {theirs} there and {ours} in the model", place=str(folder))
    with safe_open(Path(folder) / ADAPTER_WEIGHTS, framework="pt") as file, torch.no_grad():
        for name, tensor in _tensors_of(adapters).items():
            stored = file.get_tensor(name)
            share = _share_of(model, name)
            if share is not None:
                stored = stored.narrow(share.axis, share.start, share.stop - share.start)
            tensor.copy_(stored)
    adapters.refresh()


def save_adapter(
    model: Decoder, folder: str | os.PathLike[str], *, base: str | None, revision: str | None = None
) -> None:
    """Write an adapter folder that PEFT can load, replacing the adapter that it has.

    `base` is the path or hub id of the base model. An interrupted save leaves the old adapter, none, or the new one. Of
    a divided model all ranks of the group call this, and the first of them writes.
    """
    adapters = _adapters_of(model)
    tensors = {}
    for name, tensor in _tensors_of(adapters).items():
        share = _share_of(model, name)
        if share is not None and model.group is not None:
            tensor = torch.cat(list(model.group.gather(tensor)), share.axis)
        tensors[name] = tensor.contiguous()
    if model.group is not None and model.group.rank > 0:
        return
    target = Path(folder)
    if has_weights(target):
        raise AdapterFileError(
            "holds the weights of a model, beside which tools would not find an adapter", place=str(target)
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


def _share_of(model: Decoder, name: str) -> Share | None:
    """The part of one of PEFT's tensors that this rank has; None if it has all of it."""
    if model.group is None:
        return None
    projection, factor = name.removeprefix(_PREFIX).split(".lora_")
    share = tensor_shares(model.whole, model.group.rank, model.group.size)[f"{projection}.weight"]
    divided = "B.weight" if share.axis == 0 else "A.weight"  # by outputs, or by inputs
    return share if factor == divided else None


def _tensors_of(adapters: Adapters) -> dict[str, Tensor]:
    """The adapters as PEFT's tensors, in the same memory."""
    tensors = {}
    for name, *factors in adapters.parts():
        for factor, tensor in zip(_FACTORS, factors, strict=True):
            tensors[f"{_PREFIX}{name}.{factor}"] = tensor.detach()
    return tensors


def _read_content(source: Path) -> dict[str, object]:
    if not source.is_dir():
        raise AdapterFileError("is not a folder" if source.exists() else "there is no such folder", place=str(source))
    try:
        return read_object(source / ADAPTER_CONFIG)
    except MissingFile:
        also = f"; it has {CONFIG}, so it may be a model" if (source / CONFIG).exists() else ""
        if (source / "model" / ADAPTER_CONFIG).exists():
            also = f"; did you mean {source / 'model'}?"
        raise AdapterFileError(f"has no {ADAPTER_CONFIG}{also}", place=str(source)) from None
    except FileError as error:
        raise AdapterFileError(error.detail, place=error.place) from None


def _check_tensors(source: Path, config: StoredAdapter, architecture: Architecture) -> None:
    """Check that the file holds exactly the tensors that the configuration describes."""
    if not (source / ADAPTER_WEIGHTS).exists():
        only = f", only {_PICKLE}: {PICKLES}" if (source / _PICKLE).exists() else ""
        raise AdapterFileError(f"has no {ADAPTER_WEIGHTS}{only}", place=str(source))
    try:
        stored = read_header(source / ADAPTER_WEIGHTS)
    except ModelFileError as error:
        raise AdapterFileError(str(error)) from None
    wanted: dict[str, tuple[int, ...]] = {}
    rank = config.spec.rank
    for name, (outputs, inputs) in projection_shapes(architecture).items():
        if name.rpartition(".")[2] in config.spec.targets:
            for factor, shape in zip(_FACTORS, ((rank, inputs), (outputs, rank)), strict=True):
                wanted[f"{_PREFIX}{name}.{factor}"] = shape
    misshapen = []
    for name in wanted.keys() & stored.keys():
        if stored[name].shape != wanted[name]:
            misshapen.append(f"{name} {list(stored[name].shape)} instead of {list(wanted[name])}")
    problems = {
        "missing": sorted(wanted.keys() - stored.keys()),
        "unexpected": sorted(stored.keys() - wanted.keys()),
        "wrong shape": sorted(misshapen),
    }
    if any(problems.values()):
        found = "; ".join(f"{kind}: {listed(names)}" for kind, names in problems.items() if names)
        of = f" (it is one of {config.base})" if config.base else ""
        raise AdapterFileError(f"the adapter does not fit the model{of}; {found}", place=str(source))
