"""A configuration from keyword arguments of Python, with the keys, the checks and the errors of a file.

Owns how an argument is spelled: `max_tokens` is `rollout.max_tokens`, `checkpoint_every` is `checkpoint.every`, and
`checkpoint={"every": 5}` is a section.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from rollgraph.config.keys import Config
from rollgraph.config.loading import Rules, list_keys, with_more_rules
from rollgraph.config.problems import ConfigError, ConfigProblem
from rollgraph.config.reader import read_tree
from rollgraph.config.yaml_tree import Node
from rollgraph.errors import nearest

# Where several sections have a key of the same name, the bare name means that of the first of these.
PREFERRED = ("rollout", "optimizer", "algorithm", "data")

# What others call it. A name that looks like one of these may be near to another key, which would mislead.
ELSEWHERE = {
    "beta": "kl_coef",
    "eval_dataset": "validation",
    "eval_steps": "validation_every",
    "learning_rate": "lr",
    "logging_steps": "log_every",
    "lr_scheduler_type": "schedule",
    "max_completion_length": "max_tokens",
    "max_grad_norm": "clip_norm",
    "max_new_tokens": "max_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "max_steps": "steps",
    "num_generations": "samples_per_prompt",
    "output_dir": "output",
    "peft_config": "adapter",
    "reward_funcs": "rewards",
    "save_steps": "checkpoint_every",
    "train_dataset": "train",
}


def config_from_keywords(arguments: Mapping[str, Any], *more_rules: Rules) -> Config:
    """Read a configuration from arguments such as {"output": "runs/mine", "max_tokens": 64, "optimizer": {"lr": 1e-6}}.

    Everything that is wrong is reported at once. `more_rules` are checked after `broken_rules`.
    """
    problems: list[ConfigProblem] = []
    tree: dict[str, Node] = {}
    for name, value in arguments.items():
        place = f"argument {name}"
        try:
            key = key_of(name)
            _insert(tree, key.split("."), _node_of(value, key, place), key)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return read_tree(Config, Node(tree, "arguments"), (), with_more_rules(*more_rules))


def key_of(name: str) -> str:
    """The key that an argument means."""
    keys = [key.name for key in list_keys() if "[]" not in key.name]
    if name in keys:
        return name
    with_section = {key.replace(".", "_"): key for key in keys}
    if name in with_section:
        return with_section[name]
    candidates = [key for key in keys if key.count(".") == 1 and key.endswith(f".{name}")]
    for section in PREFERRED:
        if f"{section}.{name}" in candidates:
            return f"{section}.{name}"
    if len(candidates) == 1:
        return candidates[0]
    place = f"argument {name}"
    if candidates:
        choices = " or ".join(key.replace(".", "_") for key in candidates)
        raise ConfigError([ConfigProblem(f"several sections have this key; write {choices}", place=place)])
    raise ConfigError([ConfigProblem(f"there is no such key{_suggest(name, keys)}", place=place)])


def _suggest(name: str, keys: Iterable[str]) -> str:
    if name in ELSEWHERE:
        return f"; here it is {ELSEWHERE[name]}"
    spellings: dict[str, None] = {}  # in the order of the keys
    for key in keys:
        spellings[key.replace(".", "_")] = None
        if key.count(".") == 1:
            spellings[key.rpartition(".")[2]] = None
    near = nearest(name, spellings)
    return "" if near is None else f"; did you mean {near}?"


def _insert(tree: dict[str, Node], names: list[str], node: Node, key: str) -> None:
    """Put a node into the tree; sections are merged, and a value that is there already is an error."""
    name, *below = names
    present = tree.get(name)
    if below:
        if present is None:
            present = tree[name] = Node({}, node.place)
        if isinstance(present.value, dict):
            _insert(present.value, below, node, key)
            return
    elif present is None:
        tree[name] = node
        return
    elif isinstance(present.value, dict) and isinstance(node.value, dict):
        for inner_name, inner in node.value.items():
            _insert(present.value, [inner_name], inner, f"{key}.{inner_name}")
        return
    raise ConfigError([ConfigProblem(f"also given by {present.place}", key, node.place)])


def _node_of(value: Any, key: str, place: str) -> Node:
    if isinstance(value, Mapping):
        return Node({str(name): _node_of(inner, f"{key}.{name}", place) for name, inner in value.items()}, place)
    if isinstance(value, list | tuple):
        inside = [_node_of(inner, f"{key}[{index}]", place) for index, inner in enumerate(value)]
        return Node(inside, place)
    if isinstance(value, os.PathLike):
        return Node(os.fspath(value), place)
    if not isinstance(value, str | bool | int | float | None) and hasattr(value, "item"):
        value = value.item()  # a scalar of NumPy or PyTorch
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError([ConfigProblem(f"expected a finite number, got {value}", key, place)])
    if not isinstance(value, str | bool | int | float | None):
        detail = f"expected text, a number, a list or a mapping, got a {type(value).__name__}"
        raise ConfigError([ConfigProblem(detail, key, place)])
    return Node(value, place)
