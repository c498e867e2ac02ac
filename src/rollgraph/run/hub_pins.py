"""The commits of the Hugging Face Hub that a run uses, from its first start to its last resume.

A branch of the hub moves; a run must not. So a run replaces each id in its configuration by one that names a commit,
before anything else reads it, and records the commit in its folder. A checkpoint holds this configuration, so it finds
the model wherever it is read. Also owns which rank downloads: the first one of each machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollgraph.config import Config
from rollgraph.distributed.world import World
from rollgraph.files import MissingFile, read_object, write_atomically
from rollgraph.run.hub_cache import HELD_OUT, TRAIN, Note, fetch_model, fetch_split, say_nothing
from rollgraph.run.hub_ids import HubError, HubId, Kind, find_id, is_commit
from rollgraph.run.key_errors import about
from rollgraph.run.shared_work import work_on_some

PINS = "hub.json"  # in the folder of a run: the commit of each repository and revision that its configuration names


@dataclass(frozen=True)
class _Source:
    """A key whose value may be an id."""

    section: str
    name: str
    kind: Kind
    splits: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"


_SOURCES = (
    _Source("model", "path", "model"),
    _Source("adapter", "path", "model"),
    _Source("tokenizer", "path", "model"),
    _Source("data", "train", "dataset", TRAIN),
    _Source("data", "validation", "dataset", HELD_OUT),
    _Source("warm_start", "data", "dataset", TRAIN),
    _Source("algorithm", "teacher", "model"),
)


def pin_sources(config: Config, world: World, *, note: Note = say_nothing, writes: bool = False) -> Config:
    """The configuration with a commit in each id, after downloading everything but the weights of the model.

    Rank 0 decides for all ranks. Without `writes`, nothing in the output folder changes.
    """

    def decide() -> str:
        return json.dumps(_pin(config, note, writes))

    pinned = json.loads(work_on_some(world, world.rank == 0, decide)[0])
    if not pinned:
        return config
    config = _with_values(config, pinned)

    def fetch() -> str:
        _pin(config, note, writes=False)  # what it names now are commits, so nothing is decided
        return ""

    work_on_some(world, world.local_rank == 0 and world.rank != 0, fetch)
    return config


def fetch_weights(text: str | None, world: World, note: Note = say_nothing) -> None:
    """Download the weights of a model, once on each machine. A path has them already."""
    found = find_id(text or "", "model")
    if found is not None:
        work_on_some(world, world.local_rank == 0, lambda: str(fetch_model(found, weights=True, note=note)))


def share_model_folder(text: str, world: World, note: Note = say_nothing) -> str:
    """The folder of a model with its weights, for a path or an id. All ranks get the commit that rank 0 found."""
    found = find_id(text, "model")
    if found is None:
        return text
    commit = work_on_some(world, world.rank == 0, lambda: fetch_model(found, note=note).name)[0]
    pinned = replace(found, revision=commit)
    fetch_weights(str(pinned), world, note)
    return str(fetch_model(pinned))


def _pin(config: Config, note: Note, writes: bool) -> dict[str, str]:
    """The id with a commit for each key that has an id."""
    place = Path(config.output) / PINS
    before = _read_pins(place)
    commits = dict(before)
    pinned = {}
    for source in _SOURCES:
        text = _value_of(config, source)
        with about(source.key):
            found = find_id(text, source.kind) if isinstance(text, str) else None
            if found is None:
                continue
            known = commits.get(found.at_revision, found.revision)
            exact = _fetch(source, replace(found, revision=known), note)
        pinned[source.key] = str(exact)
        if not found.is_pinned:
            commits[found.at_revision] = exact.revision
            recorded = f", recorded in {place}" if found.at_revision in before else ""
            note(f"{source.key}: {text} is commit {exact.revision}{recorded}")
    if writes and commits != before:
        write_atomically(place, json.dumps(commits, indent=2) + "\n")
    return pinned


def _fetch(source: _Source, wanted: HubId, note: Note) -> HubId:
    """Download what a key needs, weights aside. The id that comes back names a commit and, for a dataset, a split."""
    if source.kind == "model":
        return replace(wanted, revision=fetch_model(wanted, note=note).name)
    fetched = fetch_split(wanted, source.splits, note)
    return replace(wanted, revision=fetched.folder.name, split=fetched.split.name)


def _read_pins(place: Path) -> dict[str, str]:
    try:
        found = read_object(place)
    except MissingFile:
        return {}
    for name, commit in found.items():
        if not isinstance(commit, str) or not is_commit(commit):
            raise HubError(f"{name}: expected a commit, got {commit!r:.80}", place=str(place))
    return found


def _value_of(config: Config, source: _Source) -> Any:
    return getattr(getattr(config, source.section), source.name, None)


def _with_values(config: Config, values: Mapping[str, str]) -> Config:
    for key, value in values.items():
        section, _, name = key.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config
