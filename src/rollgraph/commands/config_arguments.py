"""Command-line arguments of every command that reads a configuration: its file, and key=value among the options."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_words(parser: argparse.ArgumentParser, example: str, nargs: str | None = None) -> None:
    parser.add_argument("config", nargs=nargs, help="YAML file of a run; see docs/config.md")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help=f"override a key, anywhere on the line, e.g. {example}"
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
