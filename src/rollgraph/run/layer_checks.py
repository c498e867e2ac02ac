"""Whether the ranks of a run can divide layers as `tensor_parallel` says. What cannot be is refused by a named rule."""

from __future__ import annotations

from rollgraph.config import Config, ConfigError
from rollgraph.config.problems import ConfigProblem
from rollgraph.model import Architecture

_KEY = "tensor_parallel"


def check_groups(config: Config, ranks: int) -> None:
    """Refuse a number of ranks that cannot form groups which divide layers."""
    if ranks % config.tensor_parallel:
        wrong = f"{config.tensor_parallel} must divide the number of ranks, {ranks}: start others, or set this to 1"
        raise ConfigError([ConfigProblem(wrong, _KEY, rule="ranks_form_groups")])


def check_division(config: Config, architecture: Architecture) -> None:
    """Refuse a division of layers that cannot be."""
    if problem := find_problem(config, architecture):
        raise ConfigError([problem])


def find_problem(config: Config, architecture: Architecture) -> ConfigProblem | None:
    """Why layers cannot be divided: parts would not be equal, or ranks would share heads that have adapters."""
    if wrong := architecture.why_indivisible(config.tensor_parallel):
        return ConfigProblem(wrong, _KEY, rule="layers_divide")
    if config.adapter is not None and config.tensor_parallel > architecture.kv_heads:
        wrong = f"with adapters, ranks cannot share the {architecture.kv_heads} key/value heads: use at most as many"
        return ConfigProblem(wrong, _KEY, rule="adapters_of_own_heads")
    return None
