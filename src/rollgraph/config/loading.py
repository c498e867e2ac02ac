"""Loading a configuration from a file, a string, or Python keyword arguments."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollgraph.config.fields import ConfigError, ConfigProblem, Key, ObjectPath, keys_of, schema_of
from rollgraph.config.keys import Config
from rollgraph.config.merging import load_tree
from rollgraph.config.names import OPTIONS, RENAMED, counterpart_of, option_keys
from rollgraph.config.reader import BrokenRule, read_tree
from rollgraph.config.rules import broken_rules
from rollgraph.config.yaml_tree import Node
from rollgraph.errors import nearest

# -- from a file or a string -----------------------------------------------------------------------

Rules = Callable[[Config], list[BrokenRule]]


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), *more_rules: Rules) -> Config:
    """Read a YAML file and the files it names under `defaults`.

    `overrides` are strings such as `rollout.temperature=0.7`. `more_rules` are checked after `broken_rules`; what they
    find is reported in the same way, with file and line.
    """
    return read_tree(Config, load_tree(Path(path)), overrides, combine_rules(*more_rules))


def combine_rules(*more_rules: Rules) -> Rules:
    """One function that runs `broken_rules`, then `more_rules`."""

    def check_all(config: Config) -> list[BrokenRule]:
        broken = broken_rules(config)
        for rules in more_rules:
            broken += rules(config)
        return broken

    return check_all


def parse_config(text: str, overrides: Sequence[str] = (), name: str = "<text>") -> Config:
    """Like `load_config`, but from a string. Its `defaults` are relative to the working directory."""
    return read_tree(Config, load_tree(Path(name), text), overrides, broken_rules)


def list_keys() -> tuple[Key, ...]:
    """Every key in the order of the sections, sections included."""
    return keys_of(Config)


def json_schema() -> dict[str, Any]:
    """A JSON schema that lets an editor complete and check a configuration file."""
    schema = schema_of(Config)
    string_list = {"type": "array", "items": {"type": "string"}}
    schema["properties"]["defaults"] = {
        "description": "Files that this one builds on, relative to it; later ones win.",
        "anyOf": [{"type": "string"}, string_list],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "rollgraph", **schema}


# -- from keyword arguments ------------------------------------------------------------------------
# How an argument maps to a key: `max_tokens` is `rollout.max_tokens`, `checkpoint_every` is `checkpoint.every`, and
# `checkpoint={"every": 5}` is a section.

# Several sections may have a key of the same name. The bare name means the key of the first section in this list.
PREFERRED_SECTIONS = ("rollout", "optimizer", "algorithm", "data")

# Keys whose argument of `rollgraph.Trainer` has another name.
TRAINER_ARGUMENTS = {
    "algorithm.name": "algorithm",
    "data.train": "train",
    "data.validation": "validation",
    "model.path": "model",
    "reward.functions": "rewards",
    "tokenizer.path": "tokenizer",
}

ENVIRONMENT_KEY = "rollout.environment"
CODE_KEYS = ("algorithm.name", f"{ENVIRONMENT_KEY}.name", f"{ENVIRONMENT_KEY}.options")  # may be objects


def config_from_keywords(arguments: Mapping[str, Any], *more_rules: Rules) -> Config:
    """Read a configuration from arguments such as {"output": "runs/mine", "max_tokens": 64, "optimizer": {"lr": 1e-6}}.

    All problems are reported at once. `more_rules` are checked after `broken_rules`.
    """
    problems: list[ConfigProblem] = []
    tree: dict[str, Node] = {}
    for name, value in arguments.items():
        location = f"argument {name}"
        try:
            key = argument_key(name)
            _insert_node(tree, key.split("."), _to_node(value, key, location), key)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return read_tree(Config, Node(tree, "arguments"), (), combine_rules(*more_rules))


def argument_key(name: str) -> str:
    """The configuration key for an argument's name."""
    keys = _matching_keys(name)
    if len(keys) == 1:
        return keys[0]
    detail = f"there is no such key{_suggest_argument(name)}"
    if keys:
        choices = " or ".join(key.replace(".", "_") for key in keys)
        detail = f"several sections have this key; write {choices}"
    raise ConfigError([ConfigProblem(detail, location=f"argument {name}")])


def _matching_keys(name: str) -> list[str]:
    """The keys that an argument may mean: several if sections share the name and none of them is preferred."""
    keys = _key_names()
    full_names = [key for key in keys if name in (key, key.replace(".", "_"))]
    in_sections = [key for key in keys if key.count(".") == 1 and key.endswith(f".{name}")]
    preferred = [key for section in PREFERRED_SECTIONS for key in in_sections if key == f"{section}.{name}"]
    return full_names or preferred[:1] or in_sections


def _key_names() -> list[str]:
    return [key.name for key in list_keys() if "[]" not in key.name]


def _suggest_argument(name: str) -> str:
    counterpart = counterpart_of(name)
    if counterpart is not None:
        return f"; {counterpart.describe(argument_name)}"
    for old, new in RENAMED.items():
        if name in (old.rpartition(".")[2], old.replace(".", "_")):
            return f"; it is {argument_name(new)} now"
    spellings: dict[str, str] = {}
    for key in _key_names():
        spellings[key.replace(".", "_")] = key.replace(".", "_")
        if key.count(".") == 1:
            last = key.rpartition(".")[2]
            spellings[last] = last
    for key in option_keys():
        spellings.setdefault(key.removeprefix(OPTIONS), argument_name(key))
    near = nearest(name, spellings)
    return "" if near is None else f"; did you mean {spellings[near]}?"


def argument_name(key: str) -> str:
    """The argument of `rollgraph.Trainer` for a key."""
    key = key.partition("[]")[0]
    if key in TRAINER_ARGUMENTS:
        return TRAINER_ARGUMENTS[key]
    if key.startswith(OPTIONS):
        return f'algorithm_options={{"{key.removeprefix(OPTIONS)}": ...}}'
    section, _, last = key.rpartition(".")
    return last if section in PREFERRED_SECTIONS and _matching_keys(last) == [key] else key.replace(".", "_")


def _insert_node(tree: dict[str, Node], names: list[str], node: Node, key: str) -> None:
    """Put a node into the tree. Sections are merged; setting the same value twice is an error."""
    name, *inner_names = names
    existing = tree.get(name)
    if inner_names:
        if existing is None:
            existing = tree[name] = Node({}, node.location)
        if isinstance(existing.value, dict):
            _insert_node(existing.value, inner_names, node, key)
            return
    elif existing is None:
        tree[name] = node
        return
    elif isinstance(existing.value, dict) and isinstance(node.value, dict):
        for inner_name, inner in node.value.items():
            _insert_node(existing.value, [inner_name], inner, f"{key}.{inner_name}")
        return
    raise ConfigError([ConfigProblem(f"also given by {existing.location}", key, node.location)])


def _to_node(value: Any, key: str, location: str) -> Node:
    if key == ENVIRONMENT_KEY and (callable(value) or isinstance(value, str)):
        value = {"name": value}
    if callable(value) and any(key == code or key.startswith((f"{code}.", f"{code}[")) for code in CODE_KEYS):
        return Node(ObjectPath(value), location)
    if isinstance(value, Mapping):
        return Node({str(name): _to_node(inner, f"{key}.{name}", location) for name, inner in value.items()}, location)
    if isinstance(value, list | tuple):
        items = [_to_node(item, f"{key}[{index}]", location) for index, item in enumerate(value)]
        return Node(items, location)
    if isinstance(value, os.PathLike):
        return Node(os.fspath(value), location)
    if not isinstance(value, str | bool | int | float | None) and hasattr(value, "item"):
        value = value.item()  # a scalar of NumPy or PyTorch
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError([ConfigProblem(f"expected a finite number, got {value}", key, location)])
    if not isinstance(value, str | bool | int | float | None):
        detail = f"expected text, a number, a list or a mapping, got a {type(value).__name__}"
        raise ConfigError([ConfigProblem(detail, key, location)])
    return Node(value, location)
