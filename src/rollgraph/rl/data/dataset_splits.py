"""Finds the files of a split in a dataset's repository: from its README.md, or else from the names of files.

The rules are the hub's: https://huggingface.co/docs/hub/datasets-data-files-configuration. One is stricter: files in
several folders are not one split unless the README.md says so. Pure functions of the file names and the README.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from rollgraph.errors import InvalidInput, suggest
from rollgraph.rl.data.rows import READERS

CARD = "README.md"
CONVERTED = "refs/convert/parquet"  # the branch with the hub's own conversion of a dataset
_SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_NO_SPLIT = ""
_SHARD = re.compile(r"(?P<split>.+)-\d+-of-(?P<count>\d+)")
_NOT_DATA = {"", ".md", ".py", ".gitattributes", ".gitignore", ".txt", ".png", ".jpg", ".svg", ".pdf"}

Splits = dict[str, list[str]]  # the files of each split


class SplitError(InvalidInput):
    """A repository without the split, or with a split in a format that we do not read."""


@dataclass(frozen=True)
class ChosenSplit:
    """A split and the names of its files, e.g. ChosenSplit("train", ("data/train-00000-of-00001.parquet",))."""

    name: str
    files: tuple[str, ...]


def choose_split(files: Sequence[str], card: str, config: str | None, split_names: Sequence[str]) -> ChosenSplit:
    """Choose the first of `split_names` that a repository has. `card` is the text of its README.md."""
    described = _described_configs(card)
    if described:
        splits = _splits_by_card(sorted(files), described[_choose_config(described, config)])
    else:
        splits = _splits_by_name(_files_of_folder(sorted(files), config))
    if not splits:
        raise _unreadable(files)
    chosen = next((name for name in split_names if name in splits), None)
    if chosen is None:
        example = f"org/name:{next(iter(splits))}"
        raise SplitError(
            f"has no split {' or '.join(split_names)}; it has {', '.join(splits)}: name one, as in {example}"
        )
    names = splits[chosen]
    if any(PurePosixPath(name).suffix not in READERS for name in names):
        raise _unreadable(names)
    if not described and config is None:
        _refuse_several_folders(chosen, names)
    _refuse_missing_shards(names)
    return ChosenSplit(chosen, tuple(names))


# -- README.md -------------------------------------------------------------------------------------


def _splits_by_card(files: Sequence[str], entry: Mapping[str, Any]) -> Splits:
    """The splits of one config of the README.md."""
    folder = str(entry.get("data_dir") or "").strip("./")
    prefix = f"{folder}/" if folder else ""
    inside = [file for file in files if file.startswith(prefix)]
    patterns = _patterns_of(entry.get("data_files"))
    if not patterns:
        return _splits_by_name(inside)
    matched = {
        split: _matching(inside, [prefix + pattern for pattern in split_patterns])
        for split, split_patterns in patterns.items()
    }
    return {split: names for split, names in matched.items() if names}


def _described_configs(card: str) -> dict[str, Mapping[str, Any]]:
    """The configs in the YAML header of a README.md, by name."""
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
            hint = suggest(config, described)
            raise SplitError(f"has no config {config!r}; it has {', '.join(described)}{hint}")
        return config
    default_configs = [name for name, entry in described.items() if entry.get("default") is True]
    if default_configs:
        return default_configs[0]
    if len(described) == 1:
        return next(iter(described))
    if "default" in described:
        return "default"
    raise SplitError(f"has the configs {', '.join(described)}: name one, as in org/name:{next(iter(described))}/train")


def _patterns_of(data_files: Any) -> dict[str, list[str]]:
    """The patterns of each split, from the field `data_files` of a README.md.

    The field is a pattern, a list of patterns, or a list of entries with a `split` and a `path`. Patterns without a
    split are for training.
    """
    entries = data_files if isinstance(data_files, list) else [data_files]
    patterns: dict[str, list[str]] = {}
    for entry in filter(None, entries):
        split, path_or_paths = "train", entry
        if isinstance(entry, dict):
            split, path_or_paths = str(entry.get("split", "train")), entry.get("path")
        paths = path_or_paths if isinstance(path_or_paths, list) else [path_or_paths]
        patterns.setdefault(split, []).extend(str(path).removeprefix("./") for path in paths)
    return patterns


def _matching(files: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The files that match any pattern; `*` matches within a folder, `**` across folders."""
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
        listed = f"it has {', '.join(folders)}" if folders else "it has no folders"
        raise SplitError(f"has no folder {config!r}; {listed}{suggest(config, folders)}")
    return inside


def _splits_by_name(files: Sequence[str]) -> Splits:
    splits: Splits = {}
    for file in files:
        if PurePosixPath(file).suffix in READERS:
            splits.setdefault(_split_of(file), []).append(file)
    if set(splits) == {_NO_SPLIT}:  # no name contains a split, so all files are for training
        return {"train": splits[_NO_SPLIT]}
    splits.pop(_NO_SPLIT, None)
    return splits


def _split_of(file: str) -> str:
    """The split named in a file's name or, if there is none, in the name of the nearest folder that has one."""
    path = PurePosixPath(file)
    shard = _SHARD.match(path.stem)
    if shard and shard["split"].isidentifier():  # tools write such names, so they are exact: train_sft
        return shard["split"]
    for name in (path.stem, *reversed(path.parts[:-1])):
        if found := _standard_split(name):
            return found
    return _NO_SPLIT


def _standard_split(name: str) -> str | None:
    words = set(re.split(r"[^a-z]+", name.lower()))
    return next((split for split, names in _SPLIT_WORDS.items() if words & names), None)


# -- errors ----------------------------------------------------------------------------------------


def _unreadable(files: Iterable[str]) -> SplitError:
    data_files = [file for file in files if PurePosixPath(file).suffix not in _NOT_DATA]
    listed = ", ".join(data_files[:3]) or "no data files"
    if len(data_files) > 3:
        listed += f" and {len(data_files) - 3} more"
    formats = ", ".join(READERS)
    return SplitError(
        f"only {formats} files are read, and it has {listed}; the hub's own conversion may help: "
        f"org/name@{CONVERTED}:config/split"
    )


def _refuse_several_folders(split: str, files: Sequence[str]) -> None:
    """Raise if files are in several folders, which may be languages or versions: nothing says they belong together."""
    folders = sorted({file.rpartition("/")[0].partition("/")[0] for file in files})
    if len(folders) > 1:
        named = [folder for folder in folders if folder]
        raise SplitError(
            f"has files of {split} in several folders ({', '.join(named)}): name one, as in org/name:{named[0]}/{split}"
        )


def _refuse_missing_shards(files: Sequence[str]) -> None:
    """Raise if shards are missing: the rest of an interrupted download is not the whole split."""
    counts: dict[tuple[str, int], int] = {}
    for file in files:
        path = PurePosixPath(file)
        if shard := _SHARD.match(path.stem):
            group = (f"{path.parent}/{shard['split']}", int(shard["count"]))
            counts[group] = counts.get(group, 0) + 1
    for (name, count), present in counts.items():
        if present < count:
            raise SplitError(f"only {present} of {count} files of {name} are there: download it again")
