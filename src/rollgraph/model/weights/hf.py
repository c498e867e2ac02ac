"""Weights in Hugging Face's layout: a folder with config.json and safetensors, read and written.

Loading checks all files first, and then writes into the existing memory of the parameters. Pickles are never read.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.autograd.graph import increment_version

from rollgraph.files import (
    FileError,
    MissingFile,
    check_regular_file,
    read_json_object,
    reporting_full_disk,
    sync,
    write_new,
)
from rollgraph.model.architecture import Architecture, hf_tensor_map
from rollgraph.model.decoder import Decoder
from rollgraph.model.field_kinds import ArchitectureError
from rollgraph.model.meta import empty_decoder, shapes_only
from rollgraph.model.tensor_parallel import TensorParallelGroup
from rollgraph.model.tensor_shards import HFTensorShard, full_shapes, hf_tensor_shards
from rollgraph.model.weights.peft_config import ADAPTER_CONFIG
from rollgraph.model.weights.stream import FileVersion, OnBytes, Transfer, stream

# -- loading a folder ------------------------------------------------------------------------------

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PICKLES = "a pickle can run any code and is never loaded. If you trust it, convert it"
_CONVERT = f"{PICKLES}: transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(another)"


class ModelFileError(ValueError):
    """Files that are incomplete, belong to another model, or change while they are read."""


class TensorHeader(NamedTuple):
    """A tensor as the header of its file describes it."""

    file: FileVersion
    offset: int  # of its first byte in the file
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def load_model(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    checkpointing: int = 0,
    on_bytes: OnBytes | None = None,
    group: TensorParallelGroup | None = None,
) -> Decoder:
    """Load the model of a folder, in the dtype it is stored in or in `dtype`.

    Allocates nothing but the weights and a few buffers, whatever the size of the model. `on_bytes` is called repeatedly
    with the number of bytes loaded so far and in all. With a `group`, only this rank's shards are read.
    """
    weights = find_model_weights(folder, dtype)
    model = empty_decoder(weights.architecture, weights.dtype, device, checkpointing=checkpointing, group=group)
    _fill(model, weights.tensors, on_bytes)
    return model


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a folder, checked but not read yet."""

    architecture: Architecture
    dtype: torch.dtype | None  # in memory
    tensors: dict[str, TensorHeader]

    def read(self, parts: Mapping[str, tuple[int, Tensor]], on_bytes: OnBytes | None = None) -> None:
        """Read parts of parameters: `parts` maps a name to the first element, in the flat parameter, and the memory."""
        shapes = full_shapes(self.architecture)
        transfers = []
        for name, (parameter, rows) in hf_tensor_map(self.architecture).items():
            if parameter not in parts:
                continue
            header = self.tensors[name]
            start, memory = parts[parameter]
            row = math.prod(shapes[parameter][1:])
            first = (rows.start or 0) * row  # of this tensor in its parameter, in elements
            low = max(start, first)
            high = min(start + len(memory), first + math.prod(header.shape))
            if low < high:
                offset = header.offset + (low - first) * header.dtype.itemsize
                transfers.append(Transfer(header.file, offset, header.dtype, memory[low - start : high - start]))
        _stream(transfers, on_bytes)


def find_model_weights(folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> ModelWeights:
    """Read the headers of a folder's weights, and check that they fit its config.json. Allocates no weights."""
    source = Path(folder)
    architecture = read_architecture(source)
    stored = _read_headers(source)
    if dtype is None:
        dtype = _stored_dtype(source, architecture, stored)
    _check_tensors(source, stored, full_meta_tensors(architecture, dtype), cast=True)
    return ModelWeights(architecture, dtype, stored)


def load_weights(model: Decoder, folder: str | os.PathLike[str], *, cast: bool = False) -> None:
    """Copy the weights in a folder into the parameters, in place: addresses do not change.

    Weights that do not fit leave the parameters unchanged. If a file changes while it is read, the parameters become
    NaN, so that a mixture of two models is never used. With `cast`, weights of another dtype are converted.
    """
    source = Path(folder)
    theirs = read_architecture(source)
    ours = model.full_architecture
    if theirs != ours:
        raise ModelFileError(f"{source} has another architecture: {_difference(theirs, ours)}")
    stored = _read_headers(source)
    _check_tensors(source, stored, full_meta_tensors(ours, model.embed_tokens.weight.dtype), cast)
    try:
        _fill(model, stored)
    except BaseException:
        for view in parameter_views(model).values():
            view.fill_(math.nan)
        raise


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The files that hold the weights of a folder, and the index that names them if there is one."""
    source = Path(folder)
    files = _weight_files(source)
    if files == [source / WEIGHTS]:
        return files
    return [source / INDEX, *files]


def has_weights(folder: Path) -> bool:
    """Whether a folder holds the weights of a model, complete or not."""
    return (folder / WEIGHTS).exists() or (folder / INDEX).exists()


# -- tensors ---------------------------------------------------------------------------------------


def full_meta_tensors(architecture: Architecture, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors of the unsharded model by Hugging Face's names, on the meta device."""
    with shapes_only():
        return parameter_views(Decoder(architecture).to(dtype=dtype))


def parameter_views(model: Decoder) -> dict[str, Tensor]:
    """Views of the weights by Hugging Face's names, without adapters. Under tensor parallelism, this rank's shards."""
    views = {}
    for name, (parameter, rows) in hf_tensor_map(model.architecture).items():
        views[name] = attrgetter(parameter)(model).detach()[rows]
    return views


def _fill(model: Decoder, stored: dict[str, TensorHeader], on_bytes: OnBytes | None = None) -> None:
    views = parameter_views(model)
    shards: dict[str, HFTensorShard] = {}
    if model.group is not None:
        shards = hf_tensor_shards(model.full_architecture, model.group.rank, model.group.size)
    _stream([_transfer(stored[name], view, shards.get(name)) for name, view in views.items()], on_bytes)
    increment_version(list(views.values()))  # autograd does not see these writes


def _stream(transfers: list[Transfer], on_bytes: OnBytes | None) -> None:
    """Read tensors in the order in which they are stored."""
    transfers.sort(key=lambda transfer: (transfer.file.path, transfer.offset))
    try:
        stream(transfers, on_bytes)
    except FileError as error:
        raise ModelFileError(f"{error.location} {error.detail}") from None


def _transfer(header: TensorHeader, view: Tensor, shard: HFTensorShard | None) -> Transfer:
    if shard is None:
        return Transfer(header.file, header.offset, header.dtype, view)
    row = math.prod(header.shape[1:]) * header.dtype.itemsize
    if shard.axis == 0:
        return Transfer(header.file, header.offset + shard.start * row, header.dtype, view)
    return Transfer(header.file, header.offset + shard.start * header.dtype.itemsize, header.dtype, view, stride=row)


def _stored_dtype(source: Path, architecture: Architecture, stored: dict[str, TensorHeader]) -> torch.dtype | None:
    """The one dtype of all stored tensors of the model; None if there are no tensors."""
    dtypes = {stored[name].dtype for name in hf_tensor_map(architecture) if name in stored}
    if len(dtypes) > 1:
        names = first_names(sorted(map(dtype_name, dtypes)))
        raise ModelFileError(f"{source} is stored in several dtypes ({names}): choose one with dtype=")
    return next(iter(dtypes), None)


def _check_tensors(source: Path, stored: dict[str, TensorHeader], views: dict[str, Tensor], cast: bool) -> None:
    """Check that the files hold exactly these tensors, each with the right shape and dtype."""
    shapes = {name: tuple(view.shape) for name, view in views.items()}
    shapes.setdefault("lm_head.weight", shapes["model.embed_tokens.weight"])  # files may store a tied head as well
    missing = [name for name in views if name not in stored]
    unexpected = []
    misshapen = []
    mistyped = []
    for name, header in stored.items():
        if name not in shapes:
            if not name.endswith(".rotary_emb.inv_freq"):  # old files store it, but we compute it
                unexpected.append(name)
            continue
        if header.shape != shapes[name]:
            misshapen.append(f"{name} {list(header.shape)} instead of {list(shapes[name])}")
        if not cast and name in views and header.dtype != views[name].dtype:
            mistyped.append(f"{name} {dtype_name(header.dtype)} instead of {dtype_name(views[name].dtype)}")
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "wrong shape": misshapen,
        "wrong dtype (cast=True converts it)": mistyped,
    }
    if any(problems.values()):
        summary = "; ".join(f"{kind}: {first_names(names)}" for kind, names in problems.items() if names)
        raise ModelFileError(f"{source} does not fit the model; {summary}")


def _difference(theirs: Architecture, ours: Architecture) -> str:
    differences = []
    for field in fields(ours):
        their_value = getattr(theirs, field.name)
        our_value = getattr(ours, field.name)
        if field.compare and their_value != our_value:
            differences.append(f"{field.name} is {their_value} there and {our_value} here")
    return first_names(differences)


# -- its files -------------------------------------------------------------------------------------


def read_architecture(source: Path) -> Architecture:
    """The architecture that a folder's config.json describes."""
    if not source.is_dir():
        raise ModelFileError(f"{source} is not a folder")
    config = _read_json(source / CONFIG)
    try:
        return Architecture.from_config(config)
    except ArchitectureError as error:
        raise ArchitectureError(error.detail, location=str(source)) from None


def read_dtype(source: Path) -> str | None:
    """The dtype of the weights according to a folder's config.json; None if it does not say."""
    config = _read_json(source / CONFIG)
    name = config.get("dtype") or config.get("torch_dtype")  # its old name
    if not name:
        return None
    known = [dtype_name(dtype) for dtype in _DTYPES.values()]
    if name not in known:
        raise ModelFileError(f"{source / CONFIG}: dtype={name!r:.80}: must be one of {', '.join(known)}")
    return str(name)


def _read_headers(source: Path) -> dict[str, TensorHeader]:
    """The header of every tensor in a folder, by name."""
    stored: dict[str, TensorHeader] = {}
    for path in _weight_files(source):
        for name, header in read_header(path).items():
            if name in stored:
                raise ModelFileError(f"{source} has {name} twice, in {stored[name].file.path.name} and in {path.name}")
            stored[name] = header
    return stored


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The headers of a file's tensors, by name."""
    headers: dict[str, TensorHeader] = {}
    try:
        version = FileVersion.of(check_regular_file(path))
        with safe_open(path, framework="pt") as file:  # this checks that the tensors fill the file to its end
            for name in file.offset_keys():
                header = file.get_slice(name)
                dtype = header.get_dtype()
                if dtype not in _DTYPES:
                    raise ModelFileError(f"{path}: {name} is stored as {dtype}; expected one of {', '.join(_DTYPES)}")
                headers[name] = TensorHeader(version, 0, tuple(header.get_shape()), _DTYPES[dtype])
    except (SafetensorError, OSError, OverflowError, FileError) as error:
        raise ModelFileError(f"{path} is not a complete safetensors file: {error}") from error
    offset = version.size - sum(tensor.nbytes for tensor in headers.values())
    for name, tensor in headers.items():
        headers[name] = tensor._replace(offset=offset)
        offset += tensor.nbytes
    return headers


def _weight_files(source: Path) -> list[Path]:
    """The safetensors files of a folder: the only one, or those that the index names."""
    single_file = source / WEIGHTS
    index = source / INDEX
    if single_file.exists() and index.exists():
        raise ModelFileError(f"{source} has both {WEIGHTS} and {INDEX}: remove one of them")
    if single_file.exists():
        return [single_file]
    if not index.exists():
        pickles = sorted(path.name for path in source.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        only = f", only {first_names(pickles)}: {_CONVERT}" if pickles else ""
        raise ModelFileError(f"{source} has neither {WEIGHTS} nor {INDEX}{only}")
    return [source / name for name in _read_index(index)]


def _read_index(index: Path) -> list[str]:
    """The names of the files in an index, each of which must be a file in the same folder."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelFileError(f"{index} has no weight_map")
    not_strings = [f"{name}={file!r:.80}" for name, file in weight_map.items() if not isinstance(file, str)]
    if not_strings:
        raise ModelFileError(f"{index}: file names in weight_map must be strings: {first_names(not_strings)}")
    names = sorted(set(weight_map.values()))
    outside = [f"{name!r:.80}" for name in names if not _is_plain_name(name)]
    if outside:
        raise ModelFileError(f"{index}: weight_map may only name files in its own folder, not {first_names(outside)}")
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise ModelFileError(f"{index.parent} is not complete; missing: {first_names(missing)}")
    return names


def _is_plain_name(name: str) -> bool:
    """Whether a name stays in its folder. The file itself may be a link, as in a download cache."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except MissingFile:
        raise ModelFileError(f"{path.parent} has no {path.name}") from None
    except FileError as error:
        why = f": {error.reason}" if error.reason else ""
        raise ModelFileError(f"{path} {error.problem}{why}") from None


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in config.json."""
    return str(dtype).removeprefix("torch.")


def first_names(names: list[str]) -> str:
    """At most three names, then a count of the rest."""
    shown = ", ".join(names[:3])
    if len(names) > 3:
        shown += f" and {len(names) - 3} more"
    return shown


# -- writing ---------------------------------------------------------------------------------------

_SHARDS = "model-?????-of-?????.safetensors"
INCOMPLETE = ".incomplete"  # suffix of every file until all of them are written


def save_model(
    model: Decoder, folder: str | os.PathLike[str], *, shard_bytes: int = 5 * 1024**3, merge: bool = False
) -> None:
    """Write a folder that Hugging Face's libraries can load, replacing the weights in it.

    Of a model with adapters, we write the base or, with `merge`, the weights with the adapters merged. Under tensor
    parallelism all ranks of the group call this, and its rank 0 writes.

    Files get their final names only when all of them are written, and the file that loading starts from is renamed
    last. So after an interrupted save, the folder holds the old weights, none, or the new ones, never a mixture.
    """
    tensors = gather_full_tensors(model, _merged(model) if merge else iter(parameter_views(model).items()))
    if model.group is not None and model.group.rank > 0:
        for _ in tensors:  # take part in the gathers
            pass
        return
    target = Path(folder)
    if (target / ADAPTER_CONFIG).exists():
        raise ModelFileError(f"{target} holds an adapter: tools would load it instead of a model next to it")
    target.mkdir(parents=True, exist_ok=True)
    for leftover in target.glob(f"model*{INCOMPLETE}"):  # of a save that was interrupted
        leftover.unlink()
    dtype = model.embed_tokens.weight.dtype
    shards = _split_into_shards(full_meta_tensors(model.full_architecture, dtype), shard_bytes)
    names = _shard_names(len(shards))
    config = model.full_architecture.to_config()
    config.pop("torch_dtype", None)  # the old name of dtype
    config["dtype"] = dtype_name(dtype)
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


def gather_full_tensors(model: Decoder, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The full tensors of a model, one at a time, gathered from the tensor parallel ranks if there are any."""
    group = model.group
    if group is None:
        yield from tensors
        return
    shards = [hf_tensor_shards(model.full_architecture, rank, group.size) for rank in range(group.size)]
    for name, shard in tensors:
        if name not in shards[0]:
            yield name, shard
            continue
        parts = group.all_gather(shard)
        counted = [part for part, rank_shards in zip(parts, shards, strict=True) if rank_shards[name].counted]
        yield name, torch.cat(counted, shards[0][name].axis).cpu()


def _merged(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The weights with the adapters merged, in host memory: a GPU may not have room for a whole file's worth."""
    if model.adapters is None:
        raise ModelFileError("the model has no adapters to merge")
    for name, tensor in model.adapters.merged_weights():
        yield name, tensor if model.group is not None else tensor.cpu()


def _split_into_shards(tensors: dict[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    """Distribute tensors over files of at most `shard_bytes`. A larger tensor gets a separate file."""
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
    write_new(path)  # replaces a link of this name, instead of writing through it
    try:
        with reporting_full_disk(path, sum(tensor.nbytes for tensor in tensors.values())):
            save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:
        raise ModelFileError(f"{path.parent} was not written: {error}") from error
    shutil.copymode(like, path)  # safetensors makes files that only their owner can read


def _make_index(names: list[str], shards: list[dict[str, Tensor]]) -> dict[str, Any]:
    size = 0
    weight_map = {}
    for name, tensors in zip(names, shards, strict=True):
        for tensor_name, tensor in tensors.items():
            weight_map[tensor_name] = name
            size += tensor.nbytes
    return {"metadata": {"total_size": size}, "weight_map": weight_map}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_new(path, json.dumps(content, indent=2) + "\n")
