"""Checks the names and options of built-in algorithms and rewards, before a run starts.

`config/rules.py` checks everything that needs no import. What people bring themselves, by an import path, is a program
and is checked when a run starts. PyTorch is imported only if an algorithm's options have to be read.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollgraph.config import Config
from rollgraph.config.algorithm_names import ALGORITHM_PATHS
from rollgraph.errors import InvalidInput
from rollgraph.rl.paths import LoadError


def wrong_names(config: Config) -> list[tuple[str, str, str]]:
    """(rule, key, what is wrong) for each mistake, like `broken_rules`."""
    return [*_of_the_algorithm(config), *_of_rewards(config)]


def _of_the_algorithm(config: Config) -> Iterable[tuple[str, str, str]]:
    name, options = config.algorithm.name, config.algorithm.options
    if ":" in name or (name in ALGORITHM_PATHS and not options):
        return
    from rollgraph.rl.algorithms import load_algorithm

    try:
        load_algorithm(name, options)
    except LoadError as error:
        yield "algorithm_built_in", "algorithm.name", error.detail
    except InvalidInput as error:
        key = f"algorithm.options.{error.argument}" if error.argument else "algorithm.options"
        yield "algorithm_built_in", key, error.detail
    except TypeError as error:
        yield "algorithm_built_in", "algorithm.options", str(error)


def _of_rewards(config: Config) -> Iterable[tuple[str, str, str]]:
    from rollgraph.rl.rewards import RewardSpec, load_reward

    labels: set[str] = set()
    for index, given in enumerate(config.reward.functions):
        label = given.label or given.name.rpartition(":")[2]
        if label in labels:
            detail = f"two rewards are called {label!r}; give one of them another label"
            yield "reward_labels", f"reward.functions[{index}].label", detail
        labels.add(label)
        if ":" in given.name:
            continue
        try:
            load_reward(RewardSpec(given.name, given.weight, given.options, given.label))
        except ImportError:
            pass  # the name is right, but a package is missing; a run says how to install it
        except InvalidInput as error:
            yield "reward_built_in", f"reward.functions[{index}].{error.argument or 'name'}", error.detail
