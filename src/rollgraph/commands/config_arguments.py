"""Command-line arguments of every command that reads a configuration: its file, and key=value among the options."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_origin

from rollgraph.config import Key, list_keys
from rollgraph.config.field_types import unwrap


def add_words(parser: argparse.ArgumentParser, example: str, nargs: str | None = None) -> None:
    parser.add_argument("config", nargs=nargs, help="YAML file of a run; see docs/config.md")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # without a default, argparse calls it required
        metavar="key=value",
        help=f"override a key, anywhere on the line, e.g. {example}",
    )


def sort_words(options: argparse.Namespace, rest: list[str]) -> list[str]:
    """Move each key=value that argparse could not place, because it came after an option, to `options.overrides`.

    Returns what is still unknown. The configuration file is the first word that is not key=value, or that is the name
    of an existing file.
    """
    if not hasattr(options, "overrides"):
        return rest
    unknown = [word for word in rest if word.startswith("-")]
    words = []
    for word in (options.config, *options.overrides, *rest):
        if word is not None and word not in unknown:
            words.append(word)
    if words:
        position = _find_file(words)
        options.config = words[position]
        options.overrides = words[:position] + words[position + 1 :]
    return unknown


def _find_file(words: list[str]) -> int:
    for position, word in enumerate(words):
        if "=" not in word or Path(word).is_file():
            return position
    return 0


def find_dashed_keys(options: argparse.Namespace, rest: Sequence[str], arguments: Sequence[str]) -> str:
    """What to write instead of `--steps 4`, if configuration keys were given as options; empty if none were.

    `rest` are the arguments that argparse could not place, and `arguments` all of them.
    """
    if not hasattr(options, "overrides"):
        return ""
    # A word with a blank is no option to argparse, whatever it begins with.
    unplaced = {word for word in (options.config, *options.overrides, *rest) if word and word.startswith("--")}
    given = []
    instead = []
    for position, word in enumerate(arguments):
        name, equals, value = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if word not in unplaced or not _is_key(key):
            continue
        following = arguments[position + 1 : position + 2]
        if not equals and following and not following[0].startswith("--"):
            value = following[0]
            word = f"{word} {value}"
        given.append(word)
        instead.append(shlex.quote(f"{key}={value}") if value else f"{key}=VALUE")
    if not given:
        return ""
    return f"{' '.join(given)}: configuration keys have no dashes; write {' '.join(instead)}"


def _is_key(name: str) -> bool:
    """Whether a configuration has this key; a mapping, such as algorithm.options, has any."""
    return any(name == key.name or (_is_mapping(key) and name.startswith(f"{key.name}.")) for key in list_keys())


def _is_mapping(key: Key) -> bool:
    kind, _ = unwrap(key.kind)
    return get_origin(kind) is Mapping
