"""What differs between the configuration of a checkpoint and that of a run which resumes from it.

Owns which keys a run keeps from its first step to its last. They decide what is learned, so a curve on both sides of
such a change shows two experiments. All other keys may change. Compares; `begin.py` tells people and records it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollgraph.config import Config, to_dict
from rollgraph.run.checkpoints import Saved, find_complete
from rollgraph.sharding import CheckpointError
from rollgraph.sharding.manifest import read_states

FIXED = (  # with everything inside
    "seed",  # the order of prompts and the noise of samples
    "model.path",  # a resumed run has the weights of its checkpoint, whatever the path says
    "model.tiny",
    "model.dtype",
    "adapter",  # the parameters of the checkpoint, and what they are multiplied by
    "tokenizer",  # ids in the checkpoint mean other text
    "data.train",  # the checkpoint says how many prompts of which order were used
    "data.shuffle",
    "data.chat",
    "rollout.environment",  # the task
    "reward.functions",
    "algorithm.name",
    "algorithm.options",
    "algorithm.kl_coef",
)
ORDER = ("seed", "data.train", "data.shuffle")  # what a position in the data depends on
DEMONSTRATION_ORDER = ("seed", "warm_start.data")  # and in the demonstrations of a warm start
FIXED_ALONE = ("warm_start",)  # whether there is one: it decides what the reference policy is
FIXED_CONTENT = ("data.train", "tokenizer.path")  # fixed even where the path is the same
IGNORED = ("output", "resume", "allow_changes")
_LONGEST = 80  # characters of a value that are shown


class ChangedConfig(ValueError):
    """A run was resumed with a configuration that would make another run of it."""

    def __init__(self, checkpoint: Path, changes: Sequence[Change]) -> None:
        self.checkpoint = checkpoint
        self.changes = list(changes)
        self.keys = list(dict.fromkeys(_fixed_key(change) for change in changes))
        told = f"allow_changes={','.join(self.keys)}"
        super().__init__(
            f"{checkpoint} was saved with another configuration: {'; '.join(map(str, changes))}. A resumed run keeps "
            f"these: choose another output or, if you want the change, add {told}"
        )


@dataclass(frozen=True)
class Change:
    """A key with another value or, if both are equal, with another content behind its path."""

    key: str
    old: Any
    new: Any

    @property
    def is_fixed(self) -> bool:
        """Whether a run keeps this value unless it is told otherwise."""
        if self.old == self.new:
            return self.key in FIXED_CONTENT
        return self.key in FIXED_ALONE or covers(FIXED, self.key)

    def __str__(self) -> str:
        if self.old == self.new:
            return f"{self.key}: what is in {_shown(self.new)} has changed"
        return f"{self.key}: {_shown(self.old)} → {_shown(self.new)}"


def check_changes(saved: Saved, config: Config, fingerprints: Mapping[str, str]) -> list[Change]:
    """What has changed since a checkpoint was saved. Raises ChangedConfig for what is fixed and was not allowed."""
    state = _read_state(saved)
    if state is None or "config" not in state:
        return []
    changes = find_changes(state["config"], to_dict(config), state.get("fingerprints", {}), fingerprints)
    refused = [change for change in changes if change.is_fixed and not covers(config.allow_changes, change.key)]
    if refused:
        raise ChangedConfig(saved.path, refused)
    return changes


def find_changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    old_fingerprints: Mapping[str, str],
    new_fingerprints: Mapping[str, str],
) -> list[Change]:
    """Compare two configurations; paths with the same content behind them are the same."""
    both = old_fingerprints.keys() & new_fingerprints.keys()
    same = {key for key in both if old_fingerprints[key] == new_fingerprints[key]}
    found = [change for change in _differences(old, new) if change.key not in same and change.key not in IGNORED]
    differing = {change.key for change in found}
    for key in new_fingerprints:
        if key in both - same - differing:
            value = _look_up(new, key)
            found.append(Change(key, value, value))
    return found


def covers(keys: Sequence[str], key: str) -> bool:
    """Whether a key is one of these, or inside one: `algorithm` covers `algorithm.options.kl_coef`."""
    return any(key == outer or key.startswith((f"{outer}.", f"{outer}[")) for outer in keys)


def allows_other_data(config: Config, order: Sequence[str] = ORDER) -> bool:
    """Whether a position in the data may have become meaningless."""
    return any(covers(config.allow_changes, key) for key in order)


def _differences(old: Any, new: Any, key: str = "") -> Iterator[Change]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys((*new, *old)):
            inner = f"{key}.{name}" if key else name
            yield from _differences(old.get(name), new.get(name), inner)
    elif _holds_sections(old) and _holds_sections(new):
        for index in range(max(len(old), len(new))):
            before = old[index] if index < len(old) else None
            after = new[index] if index < len(new) else None
            yield from _differences(before, after, f"{key}[{index}]")
    elif old != new:
        yield Change(key, old, new)


def _holds_sections(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


def _look_up(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.replace("[", ".").replace("]", "").split("."):
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


def _fixed_key(change: Change) -> str:
    """The shortest way to allow a change."""
    return next((outer for outer in FIXED if covers([outer], change.key)), change.key)


def _shown(value: Any) -> str:
    """A value in a message. Text is shown whole, because the end of a path is what tells it from another."""
    if isinstance(value, str):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _read_state(saved: Saved) -> dict[str, Any] | None:
    """What rank 0 saved in this checkpoint or, if that is damaged, in the newest one before it."""
    older = [one for one in find_complete(saved.path.parent) if one.step < saved.step]
    for one in (saved, *reversed(older)):
        try:
            state: dict[str, Any] = read_states(one.path)[0]
            return state
        except (CheckpointError, IndexError):
            continue  # which one is whole is known once they are verified
    return None
