"""Loading a configuration from a file or a text, and describing all of its keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rollgraph.config.field_types import Key, keys_of, schema_of
from rollgraph.config.inheritance import load_tree
from rollgraph.config.keys import Config
from rollgraph.config.reader import BrokenRule, read_tree
from rollgraph.config.rules import broken_rules

Rules = Callable[[Config], list[BrokenRule]]


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), *more_rules: Rules) -> Config:
    """Read a YAML file and the files it names under `defaults`.

    `overrides` are like `rollout.temperature=0.7`. `more_rules` are checked after `broken_rules` and are reported in
    the same way, with their places.
    """
    return read_tree(Config, load_tree(Path(path)), overrides, with_more_rules(*more_rules))


def with_more_rules(*more_rules: Rules) -> Rules:
    """`broken_rules`, and these after it."""

    def check(config: Config) -> list[BrokenRule]:
        broken = broken_rules(config)
        for rules in more_rules:
            broken += rules(config)
        return broken

    return check


def parse_config(text: str, overrides: Sequence[str] = (), name: str = "<text>") -> Config:
    """Like `load_config`, for the text of a file; its `defaults` are relative to the working directory."""
    return read_tree(Config, load_tree(Path(name), text), overrides, broken_rules)


def list_keys() -> Iterator[Key]:
    """Every key in the order of the sections, including the sections themselves."""
    return keys_of(Config)


def json_schema() -> dict[str, Any]:
    """A JSON schema with which editors complete and check a file while it is typed."""
    schema = schema_of(Config)
    texts = {"type": "array", "items": {"type": "string"}}
    schema["properties"]["defaults"] = {
        "description": "Files that this one builds on, relative to it; later ones win.",
        "anyOf": [{"type": "string"}, texts],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "rollgraph", **schema}
