"""Which files of a dataset's repository hold a split: as its README.md says, or else by their names.

Owns these rules, which are those of the hub: https://huggingface.co/docs/hub/datasets-data-files-configuration. One is
stricter: files of several folders are not one split unless the README.md says so. Pure: knows names and a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from rollgraph.errors import InvalidInput, suggest
from rollgraph.rl.rows import READERS

CARD = "README.md"
CONVERTED = "refs/convert/parquet"  # where the hub keeps its own conversion of a dataset
_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_UNNAMED = ""
_SHARD = re.compile(r"(?P<split>.+)-\d+-of-(?P<count>\d+)")
_NOT_DATA = {"", ".md", ".py", ".gitattributes", ".gitignore", ".txt", ".png", ".jpg", ".svg", ".pdf"}

Splits = dict[str, list[str]]  # the files of each split


class SplitError(InvalidInput):
    """A repository that does not have the split, or has it in a format that is not read."""


@dataclass(frozen=True)
class ChosenSplit:
    """A split and the names of its files, e.g. ChosenSplit("train", ("data/train-00000-of-00001.parquet",))."""

    name: str
    files: tuple[str, ...]


def choose_split(files: Sequence[str], card: str, config: str | None, wanted: Sequence[str]) -> ChosenSplit:
    """The first split of `wanted` that a repository has. `card` is the text of its README.md."""
    described = _described_configs(card)
    if described:
        splits = _splits_by_card(sorted(files), described[_choose_config(described, config)])
    else:
        splits = _splits_by_name(_files_of_folder(sorted(files), config))
    if not splits:
        raise _unreadable(files)
    found = next((name for name in wanted if name in splits), None)
    if found is None:
        example = f"org/name:{next(iter(splits))}"
        raise SplitError(f"has no split {' or '.join(wanted)}; it has {', '.join(splits)}: name one, as in {example}")
    names = splits[found]
    if any(PurePosixPath(name).suffix not in READERS for name in names):
        raise _unreadable(names)
    if not described and config is None:
        _refuse_several_folders(found, names)
    _refuse_missing_shards(names)
    return ChosenSplit(found, tuple(names))


# -- README.md -------------------------------------------------------------------------------------


def _splits_by_card(files: Sequence[str], entry: Mapping[str, Any]) -> Splits:
    """The splits of one config."""
    folder = str(entry.get("data_dir") or "").strip("./")
    prefix = f"{folder}/" if folder else ""
    inside = [file for file in files if file.startswith(prefix)]
    patterns = _patterns_of(entry.get("data_files"))
    if not patterns:
        return _splits_by_name(inside)
    matched = {split: _matching(inside, [prefix + each for each in given]) for split, given in patterns.items()}
    return {split: names for split, names in matched.items() if names}


def _described_configs(card: str) -> dict[str, Mapping[str, Any]]:
    """The configs of the YAML at the top of a README.md, by name."""
    if not card.startswith("---"):
        return {}
    try:
        header = yaml.safe_load(card.split("\n---", 1)[0].removeprefix("---"))
    except yaml.YAMLError as error:
        raise SplitError(f"the YAML at the top of its {CARD} cannot be read: {error}") from None
    entries = header.get("configs") if isinstance(header, dict) else None
    if not isinstance(entries, list):
        return {}
    return {str(entry.get("config_name", "default")): entry for entry in entries if isinstance(entry, dict)}


def _choose_config(described: Mapping[str, Mapping[str, Any]], config: str | None) -> str:
    if config is not None:
        if config not in described:
            near = suggest(config, described)
            raise SplitError(f"has no config {config!r}; it has {', '.join(described)}{near}")
        return config
    marked = [name for name, entry in described.items() if entry.get("default") is True]
    if marked:
        return marked[0]
    if len(described) == 1:
        return next(iter(described))
    if "default" in described:
        return "default"
    raise SplitError(f"has the configs {', '.join(described)}: name one, as in org/name:{next(iter(described))}/train")


def _patterns_of(data_files: Any) -> dict[str, list[str]]:
    """The patterns of each split. What names no split is for training."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    patterns: dict[str, list[str]] = {}
    for entry in filter(None, entries):
        split, given = "train", entry
        if isinstance(entry, dict):
            split, given = str(entry.get("split", "train")), entry.get("path")
        paths = given if isinstance(given, list) else [given]
        patterns.setdefault(split, []).extend(str(path).removeprefix("./") for path in paths)
    return patterns


def _matching(files: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The files of any pattern, where `*` stays within a folder and `**` does not."""
    expressions = [_to_expression(pattern) for pattern in patterns]
    return [file for file in files if any(expression.fullmatch(file) for expression in expressions)]


def _to_expression(pattern: str) -> re.Pattern[str]:
    parts = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(parts.get(piece) or re.escape(piece) for piece in pieces))


# -- names -----------------------------------------------------------------------------------------


def _files_of_folder(files: Sequence[str], config: str | None) -> list[str]:
    """All files, or those of the folder that a config names."""
    if config is None:
        return list(files)
    inside = [file for file in files if file.startswith(f"{config}/")]
    if not inside:
        folders = sorted({file.partition("/")[0] for file in files if "/" in file})
        has = f"it has {', '.join(folders)}" if folders else "it has no folders"
        raise SplitError(f"has no folder {config!r}; {has}{suggest(config, folders)}")
    return inside


def _splits_by_name(files: Sequence[str]) -> Splits:
    splits: Splits = {}
    for file in files:
        if PurePosixPath(file).suffix in READERS:
            splits.setdefault(_split_of(file), []).append(file)
    if set(splits) == {_UNNAMED}:  # no name says what it is for, so all of it is for training
        return {"train": splits[_UNNAMED]}
    splits.pop(_UNNAMED, None)
    return splits


def _split_of(file: str) -> str:
    """The split that a file's name, or else the nearest folder's, stands for."""
    path = PurePosixPath(file)
    shard = _SHARD.match(path.stem)
    if shard and shard["split"].isidentifier():  # such names are written by tools and are exact: train_sft
        return shard["split"]
    for name in (path.stem, *reversed(path.parts[:-1])):
        if found := _standard(name):
            return found
    return _UNNAMED


def _standard(name: str) -> str | None:
    words = set(re.split(r"[^a-z]+", name.lower()))
    return next((split for split, names in _WORDS.items() if words & names), None)


# -- what cannot be used ---------------------------------------------------------------------------


def _unreadable(files: Iterable[str]) -> SplitError:
    data = [file for file in files if PurePosixPath(file).suffix not in _NOT_DATA]
    has = ", ".join(data[:3]) or "no data files"
    if len(data) > 3:
        has += f" and {len(data) - 3} more"
    formats = ", ".join(READERS)
    return SplitError(
        f"only {formats} files are read, and it has {has}; the hub's own conversion may help: "
        f"org/name@{CONVERTED}:config/split"
    )


def _refuse_several_folders(split: str, files: Sequence[str]) -> None:
    """Folders may be languages or versions, and nothing says that they belong together."""
    folders = sorted({file.rpartition("/")[0].partition("/")[0] for file in files})
    if len(folders) > 1:
        named = [folder for folder in folders if folder]
        raise SplitError(
            f"has files of {split} in several folders ({', '.join(named)}): name one, as in org/name:{named[0]}/{split}"
        )


def _refuse_missing_shards(files: Sequence[str]) -> None:
    """A part of a split, left by an interrupted download, must not be taken for the whole."""
    counts: dict[tuple[str, int], int] = {}
    for file in files:
        path = PurePosixPath(file)
        if shard := _SHARD.match(path.stem):
            group = (f"{path.parent}/{shard['split']}", int(shard["count"]))
            counts[group] = counts.get(group, 0) + 1
    for (name, count), present in counts.items():
        if present < count:
            raise SplitError(f"only {present} of {count} files of {name} are there: download it again")
