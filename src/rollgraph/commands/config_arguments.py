"""The words of a command that reads a configuration: its file, and key=value anywhere among the options."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_words(parser: argparse.ArgumentParser, example: str, nargs: str | None = None) -> None:
    parser.add_argument("config", nargs=nargs, help="YAML file of a run; see docs/config.md")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"anywhere, e.g. {example}")


def sort_words(options: argparse.Namespace, rest: list[str]) -> list[str]:
    """Take key=value from what argparse found no place for, because it came after an option; gives what is left.

    The file is the first word that is no key=value, or is a file nevertheless.
    """
    if not hasattr(options, "overrides"):
        return rest
    left = [word for word in rest if word.startswith("-")]
    words = [word for word in (options.config, *options.overrides, *rest) if word is not None and word not in left]
    at = next((i for i, word in enumerate(words) if "=" not in word or Path(word).is_file()), 0)
    if words:
        options.config, options.overrides = words[at], words[:at] + words[at + 1 :]
    return left
