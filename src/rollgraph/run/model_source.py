"""Opens the model behind a folder that a person names: a model, an adapter, a checkpoint or a run.

Owns how these folders are told apart, and what a checkpoint needs besides its weights: the tokenizer and architecture
of the run that saved it, from the configuration inside the checkpoint. Only reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from rollgraph.checkpoint.format import MANIFEST, CheckpointError, read_manifest, read_states, verify
from rollgraph.checkpoint.keep import SavedCheckpoint, by_score, find_checkpoints
from rollgraph.checkpoint.load import load_parameters
from rollgraph.config import AdapterConfig, Config, ConfigError, parse_config, with_new_names
from rollgraph.files import check_path
from rollgraph.inputs.base_model import adapter_spec, find_base
from rollgraph.inputs.inputs import make_tokenizer, resolve_architecture
from rollgraph.model import Decoder, load_model
from rollgraph.model.lora import attach
from rollgraph.model.meta import empty_decoder
from rollgraph.model.weights.adapter_files import load_adapter, read_adapter, read_base
from rollgraph.model.weights.hf import CONFIG, has_weights
from rollgraph.model.weights.peft_config import ADAPTER_CONFIG
from rollgraph.rl.data.hub import SCHEME, find_hub_id, model_folder
from rollgraph.tokenizer import Tokenizer, load_tokenizer

CHECKPOINTS = "checkpoints"
EXPECTED = (
    f"expected a model folder (with {CONFIG}), an adapter (with {ADAPTER_CONFIG}), a checkpoint (with {MANIFEST}) or "
    f"the folder of a run (with {CHECKPOINTS}/)"
)
Kind = Literal["model", "adapter", "checkpoint", "run"]
Which = Literal["latest", "best"]


class SourceError(ValueError):
    """A folder without a usable model, or an incomplete checkpoint."""


@dataclass(frozen=True)
class ModelSource:
    """A folder that a person named, and what kind it is."""

    kind: Kind
    path: Path


def identify_source(folder: str | Path, which: Which | None = None) -> ModelSource:
    """Tell the kind of a folder by the names in it. `which` is only checked: it makes sense only for a run."""
    path = Path(check_path(folder))
    if not path.is_dir():
        raise SourceError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}; {EXPECTED}")
    kind: Kind
    if (path / ADAPTER_CONFIG).exists() and not has_weights(path):  # it may hold the config.json of its base
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


def choose_checkpoint(run: Path, which: Which, problems: list[str]) -> SavedCheckpoint:
    """The latest or best checkpoint that is intact. Notes about damaged ones that were skipped go to `problems`."""

    def note(path: Path, error: CheckpointError) -> None:
        problems.append(f"{path} is skipped: {error}")

    checkpoints = find_checkpoints(run / CHECKPOINTS, on_broken=note)
    for saved in by_score(checkpoints) if which == "best" else reversed(checkpoints):
        try:
            verify(saved.path)
        except CheckpointError as error:
            note(saved.path, error)
        else:
            return saved
    raise no_checkpoint_error(run, unscored=which == "best" and bool(checkpoints), broken=bool(problems))


def no_checkpoint_error(run: str | Path, *, unscored: bool, broken: bool) -> SourceError:
    """The error for a run without a usable checkpoint."""
    scored = " with a score: use --which latest" if unscored else ""
    return SourceError(f"{run} has no {'whole ' if broken else ''}checkpoint{scored}")


def verify_checkpoint(path: Path) -> SavedCheckpoint:
    """A checkpoint that a person named, wherever it is now; raises unless it is intact."""
    verify(path)
    manifest = read_manifest(path)
    return SavedCheckpoint(manifest.get("step", 0), path, manifest.get("score"))


def read_checkpoint_config(checkpoint: Path) -> Config:
    """The configuration of the run that saved a checkpoint; raises if the folder of its initial model is gone.

    A hub model is pinned to a commit, so it can be found from anywhere.
    """
    states = read_states(checkpoint)
    saved: Any = states[0] if states else None
    if not isinstance(saved, dict) or "config" not in saved:
        raise SourceError(f"{checkpoint} has no configuration: it was not saved by `rollgraph train`")
    try:
        config = parse_config(json.dumps(with_new_names(saved["config"])), name=f"{checkpoint}: configuration")
    except ConfigError as error:
        raise SourceError(f"{checkpoint} was saved by another version of rollgraph:\n{error}") from None
    configured_paths = {"model.path": config.model.path, "tokenizer.path": config.tokenizer.path}
    for key, folder in configured_paths.items():
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
    """A tokenizer, and weights that are still on disk."""

    path: Path  # a model folder, an adapter or a checkpoint
    tokenizer: Tokenizer
    config: Config | None = None  # of the run that saved the checkpoint; None: a model folder or an adapter
    step: int | None = None  # of the checkpoint
    base: Path | None = None  # of an adapter or a LoRA checkpoint: the folder of its base model

    def load(
        self, dtype: torch.dtype | None, device: str, on_bytes: Callable[[int, int], None] | None = None
    ) -> Decoder:
        """Load the weights, in the stored dtype or in `dtype`.

        `on_bytes` gets (loaded, total) bytes while a model folder is loaded.
        """
        if self.base is not None:
            return self._load_with_adapter(self.base, dtype, device, on_bytes)
        if self.config is None:
            return load_model(self.path, dtype=dtype, device=device, on_bytes=on_bytes)
        architecture, _ = resolve_architecture(self.config, self.tokenizer)
        model = empty_decoder(architecture, _stored_dtype(self.path), device)
        load_parameters(self.path, model)
        return model if dtype is None else model.to(dtype)

    def _load_with_adapter(
        self, base: Path, dtype: torch.dtype | None, device: str, on_bytes: Callable[[int, int], None] | None
    ) -> Decoder:
        """Load the base in its final dtype, then attach the adapters: they get the dtype of their base."""
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
    """Find the model of a folder and load its tokenizer. Notes about skipped checkpoints go to `problems`."""
    source = identify_source(folder, which)
    if source.kind == "model":
        return StoredModel(source.path, load_tokenizer(folder))
    if source.kind == "adapter":
        base = model_folder(find_adapter_base(source.path), weights=True)
        return StoredModel(source.path, load_tokenizer(base), base=base)
    if source.kind == "run":
        saved = choose_checkpoint(source.path, which or "latest", problems)
    else:
        saved = verify_checkpoint(source.path)
    config = read_checkpoint_config(saved.path)
    base_folder = None if config.adapter is None else find_base(config, saved.path, read_states(saved.path)[0])
    return StoredModel(saved.path, make_tokenizer(config), config, saved.step, base_folder)


def find_adapter_base(adapter: Path) -> str:
    """The base model that an adapter folder names: a path, or a hub id with its revision."""
    base, revision = read_base(adapter)
    if find_hub_id(base, "model") is None:
        if not Path(base).is_dir():
            where = f"there is no such folder (in {Path.cwd()})"
            raise SourceError(f"{adapter} is an adapter of {base}, and {where}; see base_model_name_or_path")
        return base
    return base if revision is None else f"{base}@{revision}"


def _stored_dtype(checkpoint: Path) -> torch.dtype:
    """The dtype of the trained model, not of its master weights."""
    parameters: Iterable[str] = read_manifest(checkpoint)["parameters"].values()
    dtype: torch.dtype = getattr(torch, next(iter(parameters)).split()[0])
    return dtype


# -- for evaluation --------------------------------------------------------------------------------


def configure_model(config: Config, source: ModelSource) -> Config:
    """The same configuration with the model of a source: its weights, its tokenizer and its checkpoint folder."""
    if source.kind == "model":
        return replace(config, model=replace(config.model, path=str(source.path), tiny=None), adapter=None)
    if source.kind == "adapter":
        model = replace(config.model, path=find_adapter_base(source.path), tiny=None)
        return replace(config, model=model, adapter=AdapterConfig(path=str(source.path)))
    if source.kind == "checkpoint":
        saved = read_checkpoint_config(source.path)
    else:
        saved = _read_run_config(source.path)
        config = replace(config, output=str(source.path))
    adapter = saved.adapter and replace(saved.adapter, path=None)  # the checkpoint holds the trained adapter
    return replace(config, model=saved.model, adapter=adapter, tokenizer=saved.tokenizer)


def _read_run_config(run: Path) -> Config:
    """The configuration of the newest readable checkpoint. Which checkpoint is loaded is decided later."""
    broken = []
    for saved in reversed(find_checkpoints(run / CHECKPOINTS, on_broken=lambda path, _: broken.append(path))):
        try:
            return read_checkpoint_config(saved.path)
        except CheckpointError:
            broken.append(saved.path)
    raise no_checkpoint_error(run, unscored=False, broken=bool(broken))
