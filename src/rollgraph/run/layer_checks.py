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


def stages_exchanges(config: Config, ranks: int, device: str) -> bool:
    """Whether so many ranks would exchange tensors through host memory, as `join` in `distributed/attempt.py` says."""
    return device.startswith("cuda") and ranks > 1 and config.ranks.backend == "gloo"


def check_division(config: Config, architecture: Architecture, staged: bool) -> None:
    """Refuse a division of layers that cannot be."""
    if problem := find_problem(config, architecture, staged):
        raise ConfigError([problem])


def find_problem(config: Config, architecture: Architecture, staged: bool) -> ConfigProblem | None:
    """Why layers cannot be divided: parts would not be equal, or ranks would share heads that have adapters, or
    graphs would contain exchanges that are `staged`, which means that they pass through host memory.
    """
    if wrong := architecture.why_indivisible(config.tensor_parallel):
        return ConfigProblem(wrong, _KEY, rule="layers_divide")
    if config.adapter is not None and config.tensor_parallel > architecture.kv_heads:
        wrong = f"with adapters, ranks cannot share the {architecture.kv_heads} key/value heads: use at most as many"
        return ConfigProblem(wrong, _KEY, rule="adapters_of_own_heads")
    if staged and config.tensor_parallel > 1 and config.graph.impl != "none":
        wrong = (
            "with ranks.backend: gloo, ranks that divide layers exchange tensors through host memory, which no CUDA "
            "graph can contain: set this to none, to run eagerly"
        )
        return ConfigProblem(wrong, "graph.impl", rule="exchanges_in_graphs")
    return None
