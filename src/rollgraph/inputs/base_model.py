"""The base model of a LoRA run: which folder holds it, and whether it is still the one the run began with.

A checkpoint of a LoRA run holds adapters only, so loading it also needs the base: the folder of `model.path`, or a
folder inside the run if the base is random. Also resolves the adapter settings, which `adapter.path` may determine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollgraph.checkpoint.changes import covers, fingerprint_weights
from rollgraph.checkpoint.format import FileRecord, check_files, record_files
from rollgraph.checkpoint.start import CannotResume
from rollgraph.config import AdapterConfig, Config, ConfigError, ConfigProblem
from rollgraph.config.fields import name_key_in_errors
from rollgraph.inputs.inputs import make_tokenizer, resolve_architecture
from rollgraph.model import Decoder, load_weights, save_model, weight_files
from rollgraph.model.lora import AdapterSpec
from rollgraph.model.weights.adapter_files import read_adapter
from rollgraph.model.weights.hf import CONFIG
from rollgraph.policy import PolicyWorker
from rollgraph.rl.data.hub import find_hub_id, model_folder
from rollgraph.tokenizer import Tokenizer

BASE_FOLDER = "base"  # in the run folder: a base with random weights
BASE_RECORDS = "base"  # in the state of a checkpoint: checksums of the files in that folder
_STORED_KEYS = ("rank", "alpha", "targets", "rslora")  # settings that the files of an adapter determine


# -- the adapters ----------------------------------------------------------------------------------


def resolve_adapter(config: Config) -> Config:
    """The configuration with rank, alpha, targets and scaling taken from `adapter.path`, if it is set."""
    adapter = config.adapter
    if adapter is None or adapter.path is None:
        return config
    architecture, _ = resolve_architecture(config, make_tokenizer(config))
    with name_key_in_errors("adapter.path"):
        stored = read_adapter(model_folder(adapter.path), architecture).spec
    spec = {name: getattr(stored, name) for name in _STORED_KEYS}
    problems = []
    for name, value in spec.items():
        configured = getattr(adapter, name)
        if not any(_is_equal(configured, allowed) for allowed in (value, getattr(AdapterConfig(), name))):
            detail = (
                f"is {_format_value(configured)}, but the adapter in {adapter.path} has {_format_value(value)}; "
                "leave this key out"
            )
            problems.append(ConfigProblem(detail, f"adapter.{name}"))
    if problems:
        raise ConfigError(problems)
    return replace(config, adapter=replace(adapter, **spec))


def _is_equal(left: Any, right: Any) -> bool:
    """Targets are compared in any order."""
    return set(left) == set(right) if isinstance(left, tuple) else bool(left == right)


def _format_value(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def adapter_spec(settings: AdapterConfig) -> AdapterSpec:
    """The adapters of a resolved configuration."""
    return AdapterSpec(settings.rank, settings.alpha, settings.targets, settings.dropout, settings.rslora)


def base_is_reference(config: Config) -> bool:
    """Whether the reference policy is the model with adapters disabled: fresh adapters do not change the output."""
    return config.adapter is not None and config.adapter.path is None and config.warm_start is None


# -- the base --------------------------------------------------------------------------------------


def describe_base(config: Config) -> tuple[str, str | None]:
    """The base of a run for adapter_config.json: a folder, or a hub id with its revision."""
    if config.model.path is None:
        return str((Path(config.output) / BASE_FOLDER).absolute()), None
    hub_id = find_hub_id(config.model.path, "model")
    if hub_id is None:
        return str(Path(config.model.path).absolute()), None
    return hub_id.repo, hub_id.revision


def save_base(config: Config, model: Decoder, tokenizer: Tokenizer) -> list[FileRecord]:
    """Write the base of a fresh run to its folder if the base is random; returns checksums of its files."""
    if config.adapter is None or config.model.path is not None:
        return []
    folder = Path(config.output) / BASE_FOLDER
    save_model(model, folder)
    if model.group is not None and model.group.rank > 0:
        return []  # the first rank of the group writes
    tokenizer.save(folder)
    return record_files(folder, [folder / CONFIG, *weight_files(folder)])


def find_base(config: Config, source: Path, state: Mapping[str, Any]) -> Path:
    """The folder with the base of a checkpoint. `state` is what rank 0 saved in it.

    Raises if the folder no longer holds the base that the run began with.
    """
    if config.model.path is None:
        candidates = (source.parent.parent / BASE_FOLDER, Path(state["config"]["output"]) / BASE_FOLDER)
        folder = next((candidate for candidate in candidates if candidate.is_dir()), None)
        if folder is None:
            raise CannotResume(f"{source} needs the base model of its run, but there is no folder {candidates[0]}")
        check_files(folder, state[BASE_RECORDS])
        return folder
    folder = model_folder(config.model.path)
    recorded = state.get("fingerprints", {}).get("model.path", "")
    may_change = covers(config.allow_changes, "model.path")
    if recorded and not may_change and Path(config.model.path).is_dir() and fingerprint_weights(folder) != recorded:
        raise CannotResume(f"{folder} has changed: it is not the base model that {source} was trained on")
    return folder


def restore_base(config: Config, policy: PolicyWorker, source: Path, state: Mapping[str, Any]) -> list[FileRecord]:
    """Load the base of a checkpoint into the policy, before its adapters; returns the checksums of `save_base`."""
    if config.adapter is None:
        return []
    folder = find_base(config, source, state)
    if config.model.path is not None:  # then the model was loaded from there
        return []
    with policy.sharded.writing_full_model():
        load_weights(policy.full_model, folder)
    records: list[FileRecord] = state[BASE_RECORDS]
    return records
