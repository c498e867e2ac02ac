"""Changes of a run's configuration since the checkpoint that it resumes from, including contents of files.

Owns the list of keys that are fixed from the first step of a run to the last. They decide what is learned: after a
change of one, a curve would show two experiments. All other keys may change. This only compares; `run/begin.py` reports
and records changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rollgraph.checkpoint.format import CheckpointError, read_states
from rollgraph.checkpoint.keep import SavedCheckpoint, find_checkpoints
from rollgraph.config import Config, to_dict, with_new_names
from rollgraph.model import weight_files
from rollgraph.model.arithmetic import ARITHMETIC
from rollgraph.model.weights.adapter_files import ADAPTER_WEIGHTS
from rollgraph.rl.data.prompts import PromptData
from rollgraph.tokenizer import TokenizerFiles

# -- fingerprints of files -------------------------------------------------------------------------
# A fingerprint depends on the content of a file and not on its path. Fingerprints find people's mistakes, not damage:
# we read only some blocks of large weight files.

BLOCKS = 16  # blocks to read of a weight file
BLOCK_BYTES = 1 << 16


def fingerprint_inputs(config: Config, data: PromptData) -> dict[str, str]:
    """The fingerprint of each key whose value is the path of a model, a tokenizer, training data or code."""
    state = data.state()
    fingerprints = {"data.train": f"{state['content']} of {state['rows']} rows"}
    tokenizer = Path(config.tokenizer_path)
    if tokenizer.is_dir():
        fingerprints["tokenizer.path"] = _fingerprint_tokenizer(tokenizer)
    elif config.tokenizer_path == "bytes":
        fingerprints["tokenizer.path"] = "bytes"
    if config.model.path is not None and Path(config.model.path).is_dir():
        fingerprints["model.path"] = fingerprint_weights(Path(config.model.path))
    if config.adapter is not None and config.adapter.path is not None and Path(config.adapter.path).is_dir():
        fingerprints["adapter.path"] = _digest((Path(config.adapter.path) / ADAPTER_WEIGHTS).read_bytes())
    for key, path in _code_keys(config):
        file, _, name = path.rpartition(":")
        if file.endswith(".py") and Path(file).is_file():
            fingerprints[key] = f"{_digest(Path(file).read_bytes())}:{name}"
    return fingerprints


def _code_keys(config: Config) -> Iterator[tuple[str, str]]:
    """The keys that may name a function in a file, with their values. A built-in name has no file."""
    yield "algorithm.name", config.algorithm.name
    if config.rollout.environment is not None:
        yield "rollout.environment.name", config.rollout.environment.name
    for index, function in enumerate(config.reward.functions):
        yield f"reward.functions[{index}].name", function.name


def _fingerprint_tokenizer(folder: Path) -> str:
    files = TokenizerFiles.read(folder)
    return _digest(json.dumps([files.tokenizer_json, files.config, files.model_ids], sort_keys=True).encode())


def fingerprint_weights(folder: Path) -> str:
    """Fingerprint the names and sizes of a model's weight files, and some evenly spaced blocks of each."""
    parts = []
    for path in weight_files(folder):
        size = path.stat().st_size
        parts.append(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            parts += _blocks(file, size)
    return _digest(b"".join(parts))


def _blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    last = max(0, size - BLOCK_BYTES)
    for index in range(BLOCKS):
        file.seek(last * index // (BLOCKS - 1))
        yield file.read(BLOCK_BYTES)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


# -- changes ---------------------------------------------------------------------------------------

FIXED = (  # keys, or sections with all their keys
    "seed",  # the order of prompts and the noise of samples
    "model.path",  # a resumed run has the weights of its checkpoint, whatever the path is
    "model.tiny",
    "model.dtype",
    "adapter",  # the parameters of the checkpoint, and their scale
    "tokenizer",  # it gives token ids their meaning
    "data.train",  # the checkpoint has a position in the order of prompts
    "data.shuffle",
    "data.chat",
    "rollout.environment",  # the task
    "reward.functions",
    "algorithm.name",
    "algorithm.options",
    "algorithm.kl_coef",
    "arithmetic",  # not a key: the version of the arithmetic on this kind of device
)
ORDER = ("seed", "data.train", "data.shuffle")  # keys on which a position in the data depends
DEMONSTRATION_ORDER = ("seed", "warm_start.data")  # the same for the demonstrations of a warm start
FIXED_ALONE = ("warm_start",)  # without its keys: whether there is one decides what the reference policy is
FIXED_CONTENT = ("data.train", "tokenizer.path")  # the content is fixed, too, even if the path is the same
IGNORED = ("output", "resume", "allow_changes")
_MAX_SHOWN = 80  # characters of a value in messages


class ChangedConfig(ValueError):
    """A run was resumed with a configuration that changes a fixed key."""

    def __init__(self, checkpoint: Path, changes: Sequence[Change]) -> None:
        self.checkpoint = checkpoint
        self.changes = list(changes)
        self.keys = list(dict.fromkeys(_fixed_key(change) for change in changes))
        override = f"allow_changes={','.join(self.keys)}"
        super().__init__(
            f"{checkpoint} was saved with another configuration: {'; '.join(map(str, changes))}. A resumed run keeps "
            f"these: choose another output or, if you want the change, add {override}"
        )


@dataclass(frozen=True)
class Change:
    """A key with a new value or, if `old` equals `new`, a path whose content has changed."""

    key: str
    old: Any
    new: Any

    @property
    def is_fixed(self) -> bool:
        """Whether this change needs `allow_changes`."""
        if self.old == self.new:
            return self.key in FIXED_CONTENT
        return self.key in FIXED_ALONE or covers(FIXED, self.key)

    def __str__(self) -> str:
        if self.old == self.new:
            return f"{self.key}: the content of {_format_value(self.new)} has changed"
        return f"{self.key}: {_format_value(self.old)} → {_format_value(self.new)}"


def check_changes(saved: SavedCheckpoint, config: Config, fingerprints: Mapping[str, str], device: str) -> list[Change]:
    """The changes since a checkpoint was saved. Raises ChangedConfig for fixed keys without `allow_changes`."""
    state = read_newest_state(saved)
    if state is None or "config" not in state:
        return []
    old = {**with_new_names(state["config"]), "arithmetic": arithmetic_on(device, state.get("arithmetic", {}))}
    new = {**to_dict(config), "arithmetic": arithmetic_on(device, ARITHMETIC)}
    changes = find_changes(old, new, state.get("fingerprints", {}), fingerprints)
    refused = [change for change in changes if change.is_fixed and not covers(config.allow_changes, change.key)]
    if refused:
        raise ChangedConfig(saved.path, refused)
    return changes


def arithmetic_on(device: str, versions: Mapping[str, int]) -> dict[str, int]:
    """The version for this kind of device only: a run that moves to another kind gets other bits anyway."""
    kind = device.partition(":")[0]
    return {kind: versions.get(kind, 1)}  # the first checkpoints did not have it


def find_changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    old_fingerprints: Mapping[str, str],
    new_fingerprints: Mapping[str, str],
) -> list[Change]:
    """Compare two configurations. Paths with the same content count as the same."""
    common_keys = old_fingerprints.keys() & new_fingerprints.keys()
    same = {key for key in common_keys if old_fingerprints[key] == new_fingerprints[key]}
    changes = [change for change in _differences(old, new) if change.key not in same and change.key not in IGNORED]
    changed_keys = {change.key for change in changes}
    for key in new_fingerprints:
        if key in common_keys - same - changed_keys:
            value = _look_up(new, key)
            changes.append(Change(key, value, value))
    return changes


def covers(keys: Sequence[str], key: str) -> bool:
    """Whether a key is one of these or inside one of these: `algorithm` covers `algorithm.options.kl_coef`."""
    return any(key == outer or key.startswith((f"{outer}.", f"{outer}[")) for outer in keys)


def allows_other_data(config: Config, order: Sequence[str] = ORDER) -> bool:
    """Whether the order of the data may change, so that a saved position has no meaning."""
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
    """The key to pass to `allow_changes` for a change."""
    return next((outer for outer in FIXED if covers([outer], change.key)), change.key)


def _format_value(value: Any) -> str:
    """A value for a message. Text is not shortened, because paths often differ at the end."""
    if isinstance(value, str):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def read_newest_state(saved: SavedCheckpoint) -> dict[str, Any] | None:
    """The state of rank 0 in this checkpoint or, if that is damaged, in the newest one before it."""
    older = [checkpoint for checkpoint in find_checkpoints(saved.path.parent) if checkpoint.step < saved.step]
    for checkpoint in (saved, *reversed(older)):
        try:
            state: dict[str, Any] = read_states(checkpoint.path)[0]
            return state
        except (CheckpointError, IndexError):
            continue  # they are verified later
    return None
