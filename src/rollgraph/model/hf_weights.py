"""Reading weights in Hugging Face's layout: a folder with config.json and safetensors, in one file or in several.

Loading writes into the memory that the parameters already have, and only after every file was found to fit. Pickles are
never read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.autograd.graph import increment_version

from rollgraph.files import FileError, MissingFile, read_object, regular_file
from rollgraph.model.architecture import Architecture
from rollgraph.model.config_fields import ArchitectureError
from rollgraph.model.decoder import Decoder
from rollgraph.model.division import Share, empty_decoder, tensor_shares, whole_shapes
from rollgraph.model.hf_names import tensor_places
from rollgraph.model.shapes_only import shapes_only
from rollgraph.model.tensor_group import TensorGroup
from rollgraph.model.weight_stream import FileVersion, OnBytes, Transfer, stream

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PICKLES = "a pickle can run any code and is never loaded. If you trust it, convert it"
_CONVERT = f"{PICKLES}: transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(another)"


class ModelFileError(ValueError):
    """Files that are incomplete, that belong to another model, or that change while they are read."""


class Stored(NamedTuple):
    """What the header of a file says about a tensor."""

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
    group: TensorGroup | None = None,
) -> Decoder:
    """Load the model of a folder, in the dtype it is stored in or in `dtype`.

    Allocates nothing but the weights and a few buffers, whatever the size of the model. `on_bytes` is called again and
    again with how many bytes are loaded and how many there are. With a `group`, only this rank's pieces are read.
    """
    found = find_weights(folder, dtype)
    model = empty_decoder(found.architecture, found.dtype, device, checkpointing=checkpointing, group=group)
    _fill(model, found.tensors, on_bytes)
    return model


@dataclass(frozen=True)
class FoundWeights:
    """The weights of a folder, which were found to be complete and are not read yet."""

    architecture: Architecture
    dtype: torch.dtype | None  # that they are to have in memory
    tensors: dict[str, Stored]

    def read(self, parts: Mapping[str, tuple[int, Tensor]], on_bytes: OnBytes | None = None) -> None:
        """Read parts of parameters: of each name, flattened, from an element on as many as its memory has."""
        shapes = whole_shapes(self.architecture)
        transfers = []
        for name, (parameter, rows) in tensor_places(self.architecture).items():
            if parameter not in parts:
                continue
            found = self.tensors[name]
            start, memory = parts[parameter]
            row = math.prod(shapes[parameter][1:])
            first = (rows.start or 0) * row  # of this tensor in its parameter, in elements
            low = max(start, first)
            high = min(start + len(memory), first + math.prod(found.shape))
            if low < high:
                offset = found.offset + (low - first) * found.dtype.itemsize
                transfers.append(Transfer(found.file, offset, found.dtype, memory[low - start : high - start]))
        _stream(transfers, on_bytes)


def find_weights(folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> FoundWeights:
    """Find the weights of a folder, and check that they are those of its model, before anything is allocated."""
    source = Path(folder)
    architecture = read_architecture(source)
    stored = _read_headers(source)
    if dtype is None:
        dtype = _stored_dtype(source, architecture, stored)
    _check(source, stored, whole_views(architecture, dtype), cast=True)
    return FoundWeights(architecture, dtype, stored)


def load_weights(model: Decoder, folder: str | os.PathLike[str], *, cast: bool = False) -> None:
    """Copy the weights of a folder into the parameters, whose addresses stay the same.

    Weights that do not fit leave the parameters unchanged. If a file changes while it is read, the parameters become
    NaN, so that nobody uses a mixture of two models. `cast` allows weights of another dtype than the parameters'.
    """
    source = Path(folder)
    theirs = read_architecture(source)
    ours = model.whole
    if theirs != ours:
        raise ModelFileError(f"{source} has another architecture: {_difference(theirs, ours)}")
    stored = _read_headers(source)
    _check(source, stored, whole_views(ours, model.embed.weight.dtype), cast)
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


def whole_views(architecture: Architecture, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The shapes and the dtype of the tensors of a model that is not divided, without memory."""
    with shapes_only():
        return parameter_views(Decoder(architecture).to(dtype=dtype))


def parameter_views(model: Decoder) -> dict[str, Tensor]:
    """The weights as Hugging Face's tensors, in the same memory. Adapters are not among them.

    Of a divided model, they are the parts that this rank holds.
    """
    views = {}
    for name, (parameter, rows) in tensor_places(model.architecture).items():
        views[name] = attrgetter(parameter)(model).detach()[rows]
    return views


def _fill(model: Decoder, stored: dict[str, Stored], on_bytes: OnBytes | None = None) -> None:
    views = parameter_views(model)
    shares: dict[str, Share] = {}
    if model.group is not None:
        shares = tensor_shares(model.whole, model.group.rank, model.group.size)
    _stream([_transfer(stored[name], view, shares.get(name)) for name, view in views.items()], on_bytes)
    increment_version(list(views.values()))  # they were written behind autograd's back


def _stream(transfers: list[Transfer], on_bytes: OnBytes | None) -> None:
    """Read tensors in the order in which they are stored."""
    transfers.sort(key=lambda transfer: (transfer.file.path, transfer.offset))
    try:
        stream(transfers, on_bytes)
    except FileError as error:
        raise ModelFileError(f"{error.place} {error.detail}") from None


def _transfer(found: Stored, view: Tensor, share: Share | None) -> Transfer:
    if share is None:
        return Transfer(found.file, found.offset, found.dtype, view)
    row = math.prod(found.shape[1:]) * found.dtype.itemsize
    if share.axis == 0:
        return Transfer(found.file, found.offset + share.start * row, found.dtype, view)
    return Transfer(found.file, found.offset + share.start * found.dtype.itemsize, found.dtype, view, stride=row)


def _stored_dtype(source: Path, architecture: Architecture, stored: dict[str, Stored]) -> torch.dtype | None:
    """The one dtype that all tensors of the model are stored in; None if there are no tensors."""
    dtypes = {stored[name].dtype for name in tensor_places(architecture) if name in stored}
    if len(dtypes) > 1:
        names = listed(sorted(map(spell, dtypes)))
        raise ModelFileError(f"{source} is stored in several dtypes ({names}): choose one with dtype=")
    return next(iter(dtypes), None)


def _check(source: Path, stored: dict[str, Stored], views: dict[str, Tensor], cast: bool) -> None:
    """Check that the files hold exactly these tensors, each with the right shape and dtype."""
    shapes = {name: tuple(view.shape) for name, view in views.items()}
    shapes.setdefault("lm_head.weight", shapes["model.embed_tokens.weight"])  # a tied head may be stored as well
    missing = [name for name in views if name not in stored]
    unexpected = []
    misshapen = []
    mistyped = []
    for name, found in stored.items():
        if name not in shapes:
            if not name.endswith(".rotary_emb.inv_freq"):  # old files have it, and it is computed anyway
                unexpected.append(name)
            continue
        if found.shape != shapes[name]:
            misshapen.append(f"{name} {list(found.shape)} instead of {list(shapes[name])}")
        if not cast and name in views and found.dtype != views[name].dtype:
            mistyped.append(f"{name} {spell(found.dtype)} instead of {spell(views[name].dtype)}")
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "wrong shape": misshapen,
        "wrong dtype (cast=True converts it)": mistyped,
    }
    if any(problems.values()):
        found_problems = "; ".join(f"{kind}: {listed(names)}" for kind, names in problems.items() if names)
        raise ModelFileError(f"{source} does not fit the model; {found_problems}")


def _difference(theirs: Architecture, ours: Architecture) -> str:
    different = []
    for field in fields(ours):
        their_value = getattr(theirs, field.name)
        our_value = getattr(ours, field.name)
        if field.compare and their_value != our_value:
            different.append(f"{field.name} is {their_value} there and {our_value} here")
    return listed(different)


# -- reading ---------------------------------------------------------------------------------------


def read_architecture(source: Path) -> Architecture:
    """The architecture that a folder's config.json describes."""
    if not source.is_dir():
        raise ModelFileError(f"{source} is not a folder")
    config = _read_json(source / CONFIG)
    try:
        return Architecture.from_config(config)
    except ArchitectureError as error:
        raise ArchitectureError(error.detail, place=str(source)) from None


def read_dtype(source: Path) -> str | None:
    """The dtype of the weights according to a folder's config.json; None if it does not say."""
    config = _read_json(source / CONFIG)
    found = config.get("dtype") or config.get("torch_dtype")  # its old name
    if not found:
        return None
    known = [spell(dtype) for dtype in _DTYPES.values()]
    if found not in known:
        raise ModelFileError(f"{source / CONFIG}: dtype={found!r:.80}: must be one of {', '.join(known)}")
    return str(found)


def _read_headers(source: Path) -> dict[str, Stored]:
    """The header of every tensor in a folder, by name."""
    stored: dict[str, Stored] = {}
    for path in _weight_files(source):
        for name, found in read_header(path).items():
            if name in stored:
                raise ModelFileError(f"{source} has {name} twice, in {stored[name].file.path.name} and in {path.name}")
            stored[name] = found
    return stored


def read_header(path: Path) -> dict[str, Stored]:
    """What the header of a file says about each of its tensors, by name."""
    found: dict[str, Stored] = {}
    try:
        version = FileVersion.of(regular_file(path))
        with safe_open(path, framework="pt") as file:  # checks that the tensors fill the file up to its end
            for name in file.offset_keys():
                header = file.get_slice(name)
                dtype = header.get_dtype()
                if dtype not in _DTYPES:
                    raise ModelFileError(f"{path}: {name} is stored as {dtype}; expected one of {', '.join(_DTYPES)}")
                found[name] = Stored(version, 0, tuple(header.get_shape()), _DTYPES[dtype])
    except (SafetensorError, OSError, OverflowError, FileError) as error:
        raise ModelFileError(f"{path} is not a complete safetensors file: {error}") from error
    offset = version.size - sum(tensor.nbytes for tensor in found.values())
    for name, tensor in found.items():
        found[name] = tensor._replace(offset=offset)
        offset += tensor.nbytes
    return found


def _weight_files(source: Path) -> list[Path]:
    """The safetensors files of a folder: the only one, or those that the index names."""
    whole = source / WEIGHTS
    index = source / INDEX
    if whole.exists() and index.exists():
        raise ModelFileError(f"{source} has both {WEIGHTS} and {INDEX}: remove the one that is not meant")
    if whole.exists():
        return [whole]
    if not index.exists():
        pickles = sorted(path.name for path in source.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        only = f", only {listed(pickles)}: {_CONVERT}" if pickles else ""
        raise ModelFileError(f"{source} has neither {WEIGHTS} nor {INDEX}{only}")
    return [source / name for name in _read_index(index)]


def _read_index(index: Path) -> list[str]:
    """The names of the files in an index, each of which must be a file in the same folder."""
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict):
        raise ModelFileError(f"{index} has no weight_map")
    wrong = [f"{name}={file!r:.80}" for name, file in places.items() if not isinstance(file, str)]
    if wrong:
        raise ModelFileError(f"{index}: file names in weight_map must be strings: {listed(wrong)}")
    names = sorted(set(places.values()))
    outside = [f"{name!r:.80}" for name in names if not _is_plain_name(name)]
    if outside:
        raise ModelFileError(f"{index}: weight_map may only name files in its own folder, not {listed(outside)}")
    absent = [name for name in names if not (index.parent / name).exists()]
    if absent:
        raise ModelFileError(f"{index.parent} is not complete; missing: {listed(absent)}")
    return names


def _is_plain_name(name: str) -> bool:
    """Whether a name stays in its folder. The file itself may be a link, as in a download cache."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except MissingFile:
        raise ModelFileError(f"{path.parent} has no {path.name}") from None
    except FileError as error:
        why = f": {error.why}" if error.why else ""
        raise ModelFileError(f"{path} {error.what}{why}") from None


def spell(dtype: torch.dtype) -> str:
    """The name of a dtype in config.json."""
    return str(dtype).removeprefix("torch.")


def listed(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    shown = ", ".join(names[:3])
    if len(names) > 3:
        shown += f" and {len(names) - 3} more"
    return shown
