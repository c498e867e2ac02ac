"""Weights in Hugging Face's layout: a folder with config.json and safetensors, one file or several with an index.

Owns where each of their tensors lies in the decoder's parameters, which are fused. Loading writes into the memory
the parameters have, one tensor at a time, and only once every file has been found to fit. Pickles are never read.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollgraph.files import FileError, MissingFile, read_object, regular_file, sync, write_new
from rollgraph.model.architecture import Architecture, ArchitectureError
from rollgraph.model.decoder import Decoder

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_SHARDS = "model-?????-of-?????.safetensors"
_INCOMPLETE = ".incomplete"  # what the name of a file ends with until all of them are written
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PICKLES = (
    ", only %s: a pickle can run any code and is never loaded. If you trust it, convert it: "
    "transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(another)"
)


class ModelFileError(ValueError):
    """Files that are not whole, or not this model's. Nothing was loaded."""


class Stored(NamedTuple):
    """What the header of a file says of a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def load_model(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    checkpointing: bool = False,
) -> Decoder:
    """The model of a folder, in the dtype it is stored in or cast to another. Nothing but its weights is allocated."""
    source = Path(folder)
    architecture, stored = read_architecture(source), _read_headers(source)
    dtypes = {dtype} if dtype else {stored[name].dtype for name in tensor_places(architecture) if name in stored}
    if len(dtypes) > 1:
        raise ModelFileError(
            f"{source} is stored in {_listed(sorted(map(_spelled, dtypes)))}: pass the dtype to load in"
        )
    with torch.device("meta"):
        model = Decoder(architecture, checkpointing=checkpointing).to(dtype=next(iter(dtypes), None))
    _check(source, stored, _views(model), cast=True)
    model.to_empty(device=device)
    model.frequencies.copy_(architecture.frequencies()[0])
    _fill(model, stored)
    return model


def load_weights(model: Decoder, folder: str | os.PathLike[str], *, cast: bool = False) -> None:
    """Copy the weights of a folder into the parameters, whose addresses stay. After an error they are unchanged.

    `cast` allows weights of another dtype than the parameters'.
    """
    source = Path(folder)
    theirs, ours = read_architecture(source), model.architecture
    if theirs != ours:
        names = [f.name for f in fields(ours) if f.compare and getattr(theirs, f.name) != getattr(ours, f.name)]
        different = [f"{name} is {getattr(theirs, name)} there and {getattr(ours, name)} here" for name in names]
        raise ModelFileError(f"{source} is of another architecture: {_listed(different)}")
    stored = _read_headers(source)
    _check(source, stored, _views(model), cast)
    _fill(model, stored)


def save_model(model: Decoder, folder: str | os.PathLike[str], *, shard_bytes: int = 5 * 1024**3) -> None:
    """Write a folder that Hugging Face's libraries can load; weights that it had are replaced.

    Files get their names when all of them are written, and the one without which nothing loads gets it last: a
    folder whose save was interrupted has the old weights, none or the new ones, never some of both.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for left in target.glob(f"model*{_INCOMPLETE}"):  # by a save that was interrupted
        left.unlink()
    shards = _planned(_views(model), shard_bytes)
    count = len(shards)
    names = [WEIGHTS] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    config = {k: v for k, v in model.architecture.to_config().items() if k != "torch_dtype"}  # dtype's old name
    written = target / (CONFIG + _INCOMPLETE)
    _write_json(written, {**config, "dtype": _spelled(model.embed.weight.dtype)})
    for name, tensors in zip(names, shards, strict=True):
        write_new(target / (name + _INCOMPLETE))  # so that nothing is written through a link of this name
        try:
            save_file(tensors, target / (name + _INCOMPLETE), {"format": "pt"})
        except SafetensorError as error:  # a full disk, for one
            raise ModelFileError(f"{target} was not written: {error}") from error
        shutil.copymode(written, target / (name + _INCOMPLETE))  # safetensors lets the owner alone read it
    if count > 1:
        size = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
        places = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        _write_json(target / (INDEX + _INCOMPLETE), {"metadata": {"total_size": size}, "weight_map": places})
        names.append(INDEX)
    for name in (CONFIG, *names):
        sync(target / (name + _INCOMPLETE))
    for old in (target / INDEX, target / WEIGHTS, *target.glob(_SHARDS)):
        old.unlink(missing_ok=True)
    for name in (CONFIG, *names):
        os.replace(target / (name + _INCOMPLETE), target / name)
    sync(target)


def tensor_places(architecture: Architecture) -> dict[str, tuple[str, slice]]:
    """Where each of Hugging Face's tensors lies: the decoder's parameter, and the rows of it."""
    a, every = architecture, slice(None)
    q, kv, mlp = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.mlp
    norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    if a.qk_norm:
        norms |= {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
    projections = (
        ("self_attn.q_proj", "attention.qkv", slice(q), a.qkv_bias),
        ("self_attn.k_proj", "attention.qkv", slice(q, q + kv), a.qkv_bias),
        ("self_attn.v_proj", "attention.qkv", slice(q + kv, q + 2 * kv), a.qkv_bias),
        ("self_attn.o_proj", "attention.out", every, a.output_bias),
        ("mlp.gate_proj", "mlp.gate_up", slice(mlp), a.mlp_bias),
        ("mlp.up_proj", "mlp.gate_up", slice(mlp, 2 * mlp), a.mlp_bias),
        ("mlp.down_proj", "mlp.down", every, a.mlp_bias),
    )
    places = {"model.embed_tokens.weight": ("embed.weight", every)}
    for i in range(a.layers):
        for theirs, ours in norms.items():
            places[f"model.layers.{i}.{theirs}.weight"] = f"layers.{i}.{ours}", every
        for theirs, ours, rows, biased in projections:
            for kind in ("weight", "bias") if biased else ("weight",):
                places[f"model.layers.{i}.{theirs}.{kind}"] = f"layers.{i}.{ours}.{kind}", rows
    places["model.norm.weight"] = "norm", every
    return places if a.tied else {**places, "lm_head.weight": ("head.weight", every)}


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The files that hold the weights of a folder, with the index that names them where there is one."""
    source = Path(folder)
    files = _weight_files(source)
    return files if files == [source / WEIGHTS] else [source / INDEX, *files]


def _views(model: Decoder) -> dict[str, Tensor]:
    """The parameters as Hugging Face's tensors, in the same memory."""
    places = tensor_places(model.architecture)
    return {name: model.get_parameter(parameter).detach()[rows] for name, (parameter, rows) in places.items()}


def _fill(model: Decoder, stored: dict[str, Stored]) -> None:
    views = _views(model)
    for path in sorted({found.file for found in stored.values()}):
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name in file.offset_keys():
                if name in views:
                    views[name].copy_(file.get_tensor(name))


def _check(source: Path, stored: dict[str, Stored], views: dict[str, Tensor], cast: bool) -> None:
    """That the files hold these tensors, each of the right shape and dtype, and no others."""
    shapes = {name: tuple(view.shape) for name, view in views.items()}
    shapes.setdefault("lm_head.weight", shapes["model.embed_tokens.weight"])  # a tied head may be stored as well
    problems = {
        "missing": [name for name in views if name not in stored],
        "unexpected": [n for n in stored if n not in shapes and not n.endswith(".rotary_emb.inv_freq")],
        "of another shape": [
            f"{name} {list(found.shape)} instead of {list(shapes[name])}"
            for name, found in stored.items()
            if name in shapes and found.shape != shapes[name]
        ],
        "of another dtype, which cast=True converts": [
            f"{name} {_spelled(found.dtype)} instead of {_spelled(views[name].dtype)}"
            for name, found in stored.items()
            if not cast and name in views and found.dtype != views[name].dtype
        ],
    }
    if any(problems.values()):
        found = "; ".join(f"{kind}: {_listed(names)}" for kind, names in problems.items() if names)
        raise ModelFileError(f"{source} does not fit the model; {found}")


def read_architecture(source: Path) -> Architecture:
    """Of a folder's config.json."""
    if not source.is_dir():
        raise ModelFileError(f"{source} is not a folder")
    config = _read_json(source / CONFIG)
    try:
        return Architecture.from_config(config)
    except ArchitectureError as error:
        raise ArchitectureError(f"{source}: {error}") from None


def read_dtype(source: Path) -> str | None:
    """What a folder's config.json says of the dtype of its weights; None if it says nothing."""
    config = _read_json(source / CONFIG)
    found = config.get("dtype") or config.get("torch_dtype")  # its old name
    known = [_spelled(dtype) for dtype in _DTYPES.values()]
    if found and found not in known:
        raise ModelFileError(f"{source / CONFIG}: dtype={found!r:.80}, not one of {', '.join(known)}")
    return found or None


def _read_headers(source: Path) -> dict[str, Stored]:
    """Every tensor of a folder, by its name."""
    stored: dict[str, Stored] = {}
    for path in _weight_files(source):
        try:
            with safe_open(regular_file(path), framework="pt") as file:
                headers = {name: file.get_slice(name) for name in file.offset_keys()}
                found = {name: (tuple(header.get_shape()), header.get_dtype()) for name, header in headers.items()}
        except (SafetensorError, OSError, OverflowError, FileError) as error:
            raise ModelFileError(f"{path} is not a whole safetensors file: {error}") from error
        for name, (shape, dtype) in found.items():
            if name in stored:
                raise ModelFileError(f"{source} has {name} twice, in {stored[name].file.name} and in {path.name}")
            if dtype not in _DTYPES:
                raise ModelFileError(f"{path}: {name} is stored as {dtype}, not as one of {', '.join(_DTYPES)}")
            stored[name] = Stored(path, shape, _DTYPES[dtype])
    return stored


def _weight_files(source: Path) -> list[Path]:
    whole, index = source / WEIGHTS, source / INDEX
    if whole.exists() and index.exists():
        raise ModelFileError(f"{source} has both {WEIGHTS} and {INDEX}: remove the one that is not meant")
    if whole.exists():
        return [whole]
    if not index.exists():
        pickles = sorted(path.name for path in source.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        raise ModelFileError(
            f"{source} has neither {WEIGHTS} nor {INDEX}{_PICKLES % _listed(pickles) if pickles else ''}"
        )
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ModelFileError(f"{index} has no weight_map")
    wrong = [f"{name}={file!r:.80}" for name, file in places.items() if not isinstance(file, str)]
    if wrong:
        raise ModelFileError(f"{index}: files in weight_map that are no strings: {_listed(wrong)}")
    files = sorted(set(places.values()))
    outside = [f"{name!r:.80}" for name in files if not _is_plain_name(name)]
    if outside:
        raise ModelFileError(f"{index}: weight_map may only name files that lie beside it, not {_listed(outside)}")
    absent = [name for name in files if not (source / name).exists()]
    if absent:
        raise ModelFileError(f"{source} is not whole; missing: {_listed(absent)}")
    return [source / name for name in files]


def _is_plain_name(name: str) -> bool:
    """Of a file in the same folder. That may be a link, as in a cache of downloads."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


def _planned(tensors: dict[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    """Tensors in files of at most so many bytes; one that is larger has a file of its own."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    return shards


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except MissingFile:
        raise ModelFileError(f"{path.parent} has no {path.name}") from None
    except FileError as error:
        raise ModelFileError(f"{path} {error.what}" + (f": {error.why}" if error.why else "")) from None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_new(path, json.dumps(content, indent=2) + "\n")


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: list[str]) -> str:
    """The first few, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
