"""The models that people look at after a run or before it: of a model or adapter folder, of a checkpoint, or of a run.

Owns how a folder is told from the others, and what a checkpoint needs besides its weights: the tokenizer and the
architecture are those of the run that saved it, whose configuration is in the checkpoint. Only reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from rollgraph.config import AdapterConfig, Config, ConfigError, parse_config
from rollgraph.files import check_path
from rollgraph.model import Decoder, load_model
from rollgraph.model.adapter_files import load_adapter, read_adapter, read_base
from rollgraph.model.adapters import attach
from rollgraph.model.division import empty_decoder
from rollgraph.model.hf_weights import CONFIG, has_weights
from rollgraph.model.peft_config import ADAPTER_CONFIG
from rollgraph.run.base_model import adapter_spec, find_base
from rollgraph.run.checkpoints import Saved, by_score, find_complete
from rollgraph.run.hub_cache import model_folder
from rollgraph.run.hub_ids import SCHEME, find_id
from rollgraph.run.inputs import make_tokenizer, read_architecture
from rollgraph.sharding import CheckpointError
from rollgraph.sharding.checkpoint_loader import load_parameters
from rollgraph.sharding.manifest import MANIFEST, read_manifest, read_states, verify
from rollgraph.tokenizer import Tokenizer, load_tokenizer

CHECKPOINTS = "checkpoints"
EXPECTED = (
    f"expected a model folder (with {CONFIG}), an adapter (with {ADAPTER_CONFIG}), a checkpoint (with {MANIFEST}) or "
    f"the folder of a run (with {CHECKPOINTS}/)"
)
Kind = Literal["model", "adapter", "checkpoint", "run"]
Which = Literal["latest", "best"]


class SourceError(ValueError):
    """A folder that holds no model which could be used, or a checkpoint that lacks something."""


@dataclass(frozen=True)
class ModelSource:
    """A folder that a person named, and what it is."""

    kind: Kind
    path: Path


def recognize(folder: str | Path, which: Which | None = None) -> ModelSource:
    """Tell what a folder is by the names in it. `which` is only checked: it makes sense for a run alone."""
    path = Path(check_path(folder))
    if not path.is_dir():
        raise SourceError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}; {EXPECTED}")
    kind: Kind
    if (path / ADAPTER_CONFIG).exists() and not has_weights(path):  # an adapter may have the config.json of its base
        kind = "adapter"
    elif (path / CONFIG).exists():
        kind = "model"
    elif (path / MANIFEST).exists():
        kind = "checkpoint"
    elif (path / CHECKPOINTS).is_dir():
        kind = "run"
    elif any(path.glob(f"step_*/{MANIFEST}")):
        raise SourceError(f"{path}: holds the checkpoints of a run; name one of them, or the run, {path.parent}")
    else:
        raise SourceError(f"{path}: {EXPECTED}")
    if which is not None and kind != "run":
        article = "an" if kind == "adapter" else "a"
        raise SourceError(f"--which {which} chooses a checkpoint of a run, but {path} is {article} {kind}")
    return ModelSource(kind, path)


# -- a checkpoint of a run -------------------------------------------------------------------------


def choose_checkpoint(run: Path, which: Which, problems: list[str]) -> Saved:
    """The latest or best checkpoint of which every byte is as it was written; those passed over go to `problems`."""

    def note(path: Path, error: CheckpointError) -> None:
        problems.append(f"{path} is skipped: {error}")

    found = find_complete(run / CHECKPOINTS, on_broken=note)
    for saved in by_score(found) if which == "best" else reversed(found):
        try:
            verify(saved.path)
        except CheckpointError as error:
            note(saved.path, error)
        else:
            return saved
    raise none_found(run, unscored=which == "best" and bool(found), broken=bool(problems))


def none_found(run: str | Path, *, unscored: bool, broken: bool) -> SourceError:
    """What to say about a run without a checkpoint that could be used."""
    scored = " with a score: use --which latest" if unscored else ""
    return SourceError(f"{run} has no {'whole ' if broken else ''}checkpoint{scored}")


def check_checkpoint(path: Path) -> Saved:
    """A checkpoint that a person named, wherever it is now; raises unless it is whole."""
    verify(path)
    manifest = read_manifest(path)
    return Saved(manifest.get("step", 0), path, manifest.get("score"))


def read_config(checkpoint: Path) -> Config:
    """The configuration of the run that saved a checkpoint; raises if the folder of the model it began with is gone.

    A model of the hub is named with its commit, so it is found from anywhere.
    """
    states = read_states(checkpoint)
    saved: Any = states[0] if states else None
    if not isinstance(saved, dict) or "config" not in saved:
        raise SourceError(f"{checkpoint} has no configuration: it was not saved by `rollgraph train`")
    try:
        config = parse_config(json.dumps(saved["config"]), name=f"{checkpoint}: configuration")
    except ConfigError as error:
        raise SourceError(f"{checkpoint} was saved by another version of rollgraph:\n{error}") from None
    named = {"model.path": config.model.path, "tokenizer.path": config.tokenizer.path}
    for key, folder in named.items():
        if folder is None or folder == "bytes" or folder.startswith(SCHEME):
            continue
        if not Path(folder).is_dir():
            raise SourceError(
                f"{checkpoint}: its run took {key} from {folder}, and there is no such folder (in {Path.cwd()}); "
                "a checkpoint needs it, so start this command in the folder where the run was started"
            )
    return config


# -- for generation --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredModel:
    """A tokenizer, and weights that have not been read yet."""

    path: Path  # a model folder, an adapter or a checkpoint
    tokenizer: Tokenizer
    config: Config | None = None  # of the run that saved the checkpoint; None: a model folder or an adapter
    step: int | None = None  # of the checkpoint
    base: Path | None = None  # of an adapter, or of a checkpoint of adapters: the folder of the model it belongs to

    def load(
        self, dtype: torch.dtype | None, device: str, on_bytes: Callable[[int, int], None] | None = None
    ) -> Decoder:
        """Load the weights, in the dtype they are stored in or in another one.

        `on_bytes` is told how many bytes of a model folder are loaded, and of how many.
        """
        if self.base is not None:
            return self._load_with_adapter(self.base, dtype, device, on_bytes)
        if self.config is None:
            return load_model(self.path, dtype=dtype, device=device, on_bytes=on_bytes)
        architecture, _ = read_architecture(self.config, self.tokenizer)
        model = empty_decoder(architecture, _stored_dtype(self.path), device)
        load_parameters(self.path, model)
        return model if dtype is None else model.to(dtype)

    def _load_with_adapter(
        self, base: Path, dtype: torch.dtype | None, device: str, on_bytes: Callable[[int, int], None] | None
    ) -> Decoder:
        """Adapters have the dtype of their base: it is chosen before they are attached."""
        if self.config is None:
            model = load_model(base, dtype=dtype, device=device, on_bytes=on_bytes)
            attach(model, read_adapter(self.path, model.architecture).spec, seed=0)
            load_adapter(model, self.path)
            return model
        assert self.config.adapter is not None
        model = load_model(base, dtype=dtype or _stored_dtype(self.path), device=device, on_bytes=on_bytes)
        attach(model, adapter_spec(self.config.adapter), seed=0)
        load_parameters(self.path, model, cast=True)
        assert model.adapters is not None
        model.adapters.refresh()
        return model


def open_model(folder: str, which: Which | None, problems: list[str]) -> StoredModel:
    """Find the model of a folder and load its tokenizer. Checkpoints that were passed over go to `problems`."""
    source = recognize(folder, which)
    if source.kind == "model":
        return StoredModel(source.path, load_tokenizer(folder))
    if source.kind == "adapter":
        base = model_folder(named_base(source.path), weights=True)
        return StoredModel(source.path, load_tokenizer(base), base=base)
    if source.kind == "run":
        saved = choose_checkpoint(source.path, which or "latest", problems)
    else:
        saved = check_checkpoint(source.path)
    config = read_config(saved.path)
    found = None if config.adapter is None else find_base(config, saved.path, read_states(saved.path)[0])
    return StoredModel(saved.path, make_tokenizer(config), config, saved.step, found)


def named_base(adapter: Path) -> str:
    """The model that an adapter folder names: a path, or an id on the hub with its revision."""
    base, revision = read_base(adapter)
    if find_id(base, "model") is None:
        if not Path(base).is_dir():
            where = f"there is no such folder (in {Path.cwd()})"
            raise SourceError(f"{adapter} is an adapter of {base}, and {where}; see base_model_name_or_path")
        return base
    return base if revision is None else f"{base}@{revision}"


def _stored_dtype(checkpoint: Path) -> torch.dtype:
    """The dtype of the model that was trained; its master weights have another one."""
    described: Iterable[str] = read_manifest(checkpoint)["parameters"].values()
    dtype: torch.dtype = getattr(torch, next(iter(described)).split()[0])
    return dtype


# -- for evaluation --------------------------------------------------------------------------------


def with_model(config: Config, source: ModelSource) -> Config:
    """The same configuration for the model of a source: its weights, its tokenizer, and where its checkpoints are."""
    if source.kind == "model":
        return replace(config, model=replace(config.model, path=str(source.path), tiny=None), adapter=None)
    if source.kind == "adapter":
        model = replace(config.model, path=named_base(source.path), tiny=None)
        return replace(config, model=model, adapter=AdapterConfig(path=str(source.path)))
    if source.kind == "checkpoint":
        saved = read_config(source.path)
    else:
        saved = _config_of_run(source.path)
        config = replace(config, output=str(source.path))
    adapter = saved.adapter and replace(saved.adapter, path=None)  # the checkpoint has what became of that one
    return replace(config, model=saved.model, adapter=adapter, tokenizer=saved.tokenizer)


def _config_of_run(run: Path) -> Config:
    """The configuration in the newest checkpoint that can be read; which one will be loaded is decided later."""
    broken = []
    for saved in reversed(find_complete(run / CHECKPOINTS, on_broken=lambda path, _: broken.append(path))):
        try:
            return read_config(saved.path)
        except CheckpointError:
            broken.append(saved.path)
    raise none_found(run, unscored=False, broken=bool(broken))
