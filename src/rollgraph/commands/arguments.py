"""Arguments that several commands share: a configuration file with key=value overrides, and a device."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_origin

from rollgraph.config import Key, list_keys
from rollgraph.config.fields import split_annotated
from rollgraph.config.names import counterpart_of

# -- the configuration -----------------------------------------------------------------------------


def add_config_arguments(parser: argparse.ArgumentParser, example: str, nargs: str | None = None) -> None:
    parser.add_argument("config", nargs=nargs, help="YAML file of a run; see docs/config.md")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # without a default, argparse calls it required
        metavar="key=value",
        help=f"override a key, anywhere on the line, e.g. {example}",
    )


def collect_overrides(options: argparse.Namespace, unparsed: list[str]) -> list[str]:
    """Add each key=value that argparse did not parse, because it came after an option, to `options.overrides`.

    Returns the arguments that are still unknown. The configuration file is the first word that is not key=value, or
    that names an existing file.
    """
    if not hasattr(options, "overrides"):
        return unparsed
    unknown = [word for word in unparsed if word.startswith("-")]
    words = []
    for word in (options.config, *options.overrides, *unparsed):
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


def explain_dashed_keys(options: argparse.Namespace, unparsed: Sequence[str], arguments: Sequence[str]) -> str:
    """What to write instead of `--steps 4` or `--num_generations 4`: our keys, or another framework's, with dashes.

    Empty if there are none. `unparsed` are the arguments that argparse did not parse, and `arguments` are all of them.
    """
    if not hasattr(options, "overrides"):
        return ""
    # To argparse, a word with a blank is never an option, even if it begins with dashes.
    dashed = {word for word in (options.config, *options.overrides, *unparsed) if word and word.startswith("--")}
    dashed_keys = []
    replacements = []
    problems = []
    for position, word in enumerate(arguments):
        name, equals, value = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if word not in dashed:
            continue
        if not _is_key(key):
            counterpart = counterpart_of(key)
            problems += [f"--{name}: {counterpart}"] if counterpart else []
            continue
        following = arguments[position + 1 : position + 2]
        if not equals and following and not following[0].startswith("--"):
            value = following[0]
            word = f"{word} {value}"
        dashed_keys.append(word)
        replacements.append(shlex.quote(f"{key}={value}") if value else f"{key}=VALUE")
    if dashed_keys:
        problems.append(f"{' '.join(dashed_keys)}: configuration keys have no dashes; write {' '.join(replacements)}")
    return "; ".join(problems)


def _is_key(name: str) -> bool:
    """Whether this is a configuration key. A mapping, such as algorithm.options, may have any key."""
    return any(name == key.name or (_is_mapping(key) and name.startswith(f"{key.name}.")) for key in list_keys())


def _is_mapping(key: Key) -> bool:
    kind, _ = split_annotated(key.kind)
    return get_origin(kind) is Mapping


# -- the device ------------------------------------------------------------------------------------


def choose_device(name: str | None) -> str:
    """The device of `--device`, or by default a GPU if there is one. Raises a ValueError if it does not exist."""
    import torch

    count = torch.cuda.device_count()
    if not name:
        return "cuda" if count else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cuda", "cpu") or (":" in name and not index.isdecimal()):
        raise ValueError(f"--device {name}: expected cuda or cpu")
    if kind == "cuda" and not count:
        raise ValueError(f"--device {name}: no CUDA device is available; use --device cpu")
    if kind == "cuda" and int(index or 0) >= count:
        raise ValueError(f"--device {name}: there are only {count} CUDA devices")
    return name
