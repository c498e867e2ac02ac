"""Pins each model and dataset of the Hugging Face Hub to a commit, from a run's first start to its last resume.

A branch on the hub moves; a run must not. So a run replaces each id in its configuration with one that names a commit,
before anything else reads it, and records the commit in its folder. A checkpoint has this configuration, so it finds
the model on any machine. This file also owns the rule that the first rank of each machine downloads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollgraph.config import Config
from rollgraph.config.fields import name_key_in_errors
from rollgraph.files import MissingFile, read_json_object, write_atomically
from rollgraph.parallel.data.together import run_on_some_ranks
from rollgraph.parallel.ranks.world import World
from rollgraph.rl.data.hub import (
    TRAIN_SPLITS,
    VALIDATION_SPLITS,
    HubError,
    HubId,
    Note,
    RepoKind,
    fetch_model,
    fetch_split,
    find_hub_id,
    ignore_note,
    is_commit,
)

PINS = "hub.json"  # in the folder of a run: the commit of each repository and revision that its configuration names


@dataclass(frozen=True)
class _HubKey:
    """A configuration key whose value may be an id, e.g. _HubKey("data", "train", "dataset", ("train",))."""

    section: str
    name: str
    kind: RepoKind
    splits: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"


_HUB_KEYS = (
    _HubKey("model", "path", "model"),
    _HubKey("adapter", "path", "model"),
    _HubKey("tokenizer", "path", "model"),
    _HubKey("data", "train", "dataset", TRAIN_SPLITS),
    _HubKey("data", "validation", "dataset", VALIDATION_SPLITS),
    _HubKey("warm_start", "data", "dataset", TRAIN_SPLITS),
    _HubKey("algorithm", "teacher", "model"),
)


def pin_sources(config: Config, world: World, *, note: Note = ignore_note, writes: bool = False) -> Config:
    """Replace each id in the configuration with a pinned one, and download all files but the model's weights.

    Rank 0 decides for all ranks. Without `writes`, nothing in the output folder changes.
    """

    def decide() -> str:
        return json.dumps(_pin(config, note, writes))

    pinned = json.loads(run_on_some_ranks(world, world.rank == 0, decide)[0])
    if not pinned:
        return config
    config = _with_values(config, pinned)

    def fetch() -> str:
        _pin(config, note, writes=False)  # all ids name commits now, so this only downloads
        return ""

    run_on_some_ranks(world, world.local_rank == 0 and world.rank != 0, fetch)
    return config


def fetch_weights(text: str | None, world: World, note: Note = ignore_note) -> None:
    """Download the weights of a model once on each machine; nothing to do for a path."""
    hub_id = find_hub_id(text or "", "model")
    if hub_id is not None:
        run_on_some_ranks(world, world.local_rank == 0, lambda: str(fetch_model(hub_id, weights=True, note=note)))


def share_model_folder(text: str, world: World, note: Note = ignore_note) -> str:
    """The folder of a model with its weights, from a path or an id. All ranks use the commit that rank 0 resolves."""
    hub_id = find_hub_id(text, "model")
    if hub_id is None:
        return text
    commit = run_on_some_ranks(world, world.rank == 0, lambda: fetch_model(hub_id, note=note).name)[0]
    pinned = replace(hub_id, revision=commit)
    fetch_weights(str(pinned), world, note)
    return str(fetch_model(pinned))


def _pin(config: Config, note: Note, writes: bool) -> dict[str, str]:
    """The pinned id of each configuration key that has an id."""
    pins_file = Path(config.output) / PINS
    recorded_commits = _read_pins(pins_file)
    commits = dict(recorded_commits)
    pinned = {}
    for hub_key in _HUB_KEYS:
        text = _value_of(config, hub_key)
        with name_key_in_errors(hub_key.key):
            hub_id = find_hub_id(text, hub_key.kind) if isinstance(text, str) else None
            if hub_id is None:
                continue
            revision = commits.get(hub_id.at_revision, hub_id.revision)
            pinned_id = _fetch(hub_key, replace(hub_id, revision=revision), note)
        pinned[hub_key.key] = str(pinned_id)
        if not hub_id.is_pinned:
            commits[hub_id.at_revision] = pinned_id.revision
            suffix = f", recorded in {pins_file}" if hub_id.at_revision in recorded_commits else ""
            note(f"{hub_key.key}: {text} is commit {pinned_id.revision}{suffix}")
    if writes and commits != recorded_commits:
        write_atomically(pins_file, json.dumps(commits, indent=2) + "\n")
    return pinned


def _fetch(hub_key: _HubKey, hub_id: HubId, note: Note) -> HubId:
    """Download the files of a key except weights; returns the id with a commit and, for a dataset, a split."""
    if hub_key.kind == "model":
        return replace(hub_id, revision=fetch_model(hub_id, note=note).name)
    fetched = fetch_split(hub_id, hub_key.splits, note)
    return replace(hub_id, revision=fetched.folder.name, split=fetched.split.name)


def _read_pins(pins_file: Path) -> dict[str, str]:
    try:
        commits = read_json_object(pins_file)
    except MissingFile:
        return {}
    for name, commit in commits.items():
        if not isinstance(commit, str) or not is_commit(commit):
            raise HubError(f"{name}: expected a commit, got {commit!r:.80}", location=str(pins_file))
    return commits


def _value_of(config: Config, hub_key: _HubKey) -> Any:
    return getattr(getattr(config, hub_key.section), hub_key.name, None)


def _with_values(config: Config, values: Mapping[str, str]) -> Config:
    for key, value in values.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config
