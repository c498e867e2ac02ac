"""The base model of a run that trains adapters: which folder holds it, and whether it is the one the run began with.

A checkpoint holds adapters only, so whoever loads one needs the base as well: the folder of `model.path`, or the run's
own folder if the base is random. Also decides what adapters a run has, for `adapter.path` may say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollgraph.config import AdapterConfig, Config, ConfigError, ConfigProblem
from rollgraph.model import Decoder, load_weights, save_model, weight_files
from rollgraph.model.adapter_files import read_adapter
from rollgraph.model.adapters import AdapterSpec
from rollgraph.model.hf_weights import CONFIG
from rollgraph.policy import PolicyWorker
from rollgraph.run.config_changes import covers
from rollgraph.run.fingerprints import fingerprint_weights
from rollgraph.run.hub_cache import model_folder
from rollgraph.run.hub_ids import find_id
from rollgraph.run.inputs import make_tokenizer, read_architecture
from rollgraph.run.key_errors import about
from rollgraph.run.resume import CannotResume
from rollgraph.sharding.manifest import FileRecord, check_files, record_files
from rollgraph.tokenizer import Tokenizer

BASE = "base"  # in the folder of a run: a base with random weights
RECORDED = "base"  # in the state of a checkpoint: checksums of the files in that folder
_STORED = ("rank", "alpha", "targets", "rslora")  # keys that an adapter folder decides


# -- the adapters ----------------------------------------------------------------------------------


def resolve_adapter(config: Config) -> Config:
    """The configuration with the rank, alpha, targets and scaling of `adapter.path`, if there is one."""
    given = config.adapter
    if given is None or given.path is None:
        return config
    architecture, _ = read_architecture(config, make_tokenizer(config))
    with about("adapter.path"):
        stored = read_adapter(model_folder(given.path), architecture).spec
    found = {name: getattr(stored, name) for name in _STORED}
    problems = []
    for name, value in found.items():
        ours = getattr(given, name)
        if not any(_same(ours, other) for other in (value, getattr(AdapterConfig(), name))):
            detail = f"is {_shown(ours)}, but the adapter in {given.path} has {_shown(value)}; leave this key out"
            problems.append(ConfigProblem(detail, f"adapter.{name}"))
    if problems:
        raise ConfigError(problems)
    return replace(config, adapter=replace(given, **found))


def _same(one: Any, other: Any) -> bool:
    """Targets may be in any order."""
    return set(one) == set(other) if isinstance(one, tuple) else bool(one == other)


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def adapter_spec(settings: AdapterConfig) -> AdapterSpec:
    """The adapters of a configuration that was resolved."""
    return AdapterSpec(settings.rank, settings.alpha, settings.targets, settings.dropout, settings.rslora)


def base_is_reference(config: Config) -> bool:
    """Whether the reference policy is the model with its adapters switched off: they change nothing at the start."""
    return config.adapter is not None and config.adapter.path is None and config.warm_start is None


# -- the base --------------------------------------------------------------------------------------


def describe_base(config: Config) -> tuple[str, str | None]:
    """What an adapter_config.json says about the base of a run: a folder or a hub id, and its revision on the hub."""
    if config.model.path is None:
        return str((Path(config.output) / BASE).absolute()), None
    found = find_id(config.model.path, "model")
    if found is None:
        return str(Path(config.model.path).absolute()), None
    return found.repo, found.revision


def keep_base(config: Config, model: Decoder, tokenizer: Tokenizer) -> list[FileRecord]:
    """Write the base of a run that begins, if it is random; gives the checksums of the files that hold it."""
    if config.adapter is None or config.model.path is not None:
        return []
    folder = Path(config.output) / BASE
    save_model(model, folder)
    if model.group is not None and model.group.rank > 0:
        return []  # the first rank of the group writes
    tokenizer.save(folder)
    return record_files(folder, [folder / CONFIG, *weight_files(folder)])


def find_base(config: Config, source: Path, state: Mapping[str, Any]) -> Path:
    """The folder with the base of a checkpoint, given with what rank 0 saved in it.

    Raises if that is not the base which its run began with.
    """
    if config.model.path is None:
        places = (source.parent.parent / BASE, Path(state["config"]["output"]) / BASE)
        folder = next((place for place in places if place.is_dir()), None)
        if folder is None:
            raise CannotResume(f"{source} needs the base model of its run, but there is no folder {places[0]}")
        check_files(folder, state[RECORDED])
        return folder
    folder = model_folder(config.model.path)
    before = state.get("fingerprints", {}).get("model.path", "")
    may_change = covers(config.allow_changes, "model.path")
    if before and not may_change and Path(config.model.path).is_dir() and fingerprint_weights(folder) != before:
        raise CannotResume(f"{folder} has changed: it is not the base model that {source} was trained on")
    return folder


def restore_base(config: Config, policy: PolicyWorker, source: Path, state: Mapping[str, Any]) -> list[FileRecord]:
    """Give the policy the base of a checkpoint, which is loaded next; gives what `keep_base` gave."""
    if config.adapter is None:
        return []
    folder = find_base(config, source, state)
    if config.model.path is not None:  # then the model was loaded from there
        return []
    with policy.sharded.writing_reader():
        load_weights(policy.reader, folder)
    records: list[FileRecord] = state[RECORDED]
    return records
