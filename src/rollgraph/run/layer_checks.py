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
    """Refuse to divide layers into parts that would not be equal, and adapters of heads that ranks share."""
    if problem := architecture.why_indivisible(config.tensor_parallel):
        raise ConfigError([ConfigProblem(problem, _KEY, rule="layers_divide")])
    if config.adapter is not None and config.tensor_parallel > architecture.kv_heads:
        wrong = f"with adapters, ranks cannot share the {architecture.kv_heads} key/value heads: use at most as many"
        raise ConfigError([ConfigProblem(wrong, _KEY, rule="adapters_of_own_heads")])
