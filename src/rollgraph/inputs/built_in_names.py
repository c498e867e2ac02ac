"""Checks the names and options of built-in algorithms and rewards, before a run starts.

`config/rules.py` checks everything that needs no import. Code that people name by an import path is checked when a run
starts. PyTorch is imported only to check an algorithm's options.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollgraph.config import Config
from rollgraph.config.names import ALGORITHM_PATHS
from rollgraph.errors import InvalidInput
from rollgraph.rl.paths import LoadError


def find_name_problems(config: Config) -> list[tuple[str, str, str]]:
    """The mistakes in names and options, each as (rule, configuration key, message), like `broken_rules`."""
    return [*_algorithm_problems(config), *_reward_problems(config)]


def _algorithm_problems(config: Config) -> Iterable[tuple[str, str, str]]:
    """Build the algorithm with its options, and report the errors as (rule, key, message)."""
    name, options = config.algorithm.name, config.algorithm.options
    is_import_path = ":" in name  # the user's own code: checked when a run starts
    if is_import_path or (name in ALGORITHM_PATHS and not options):  # nothing to check, so do not import PyTorch
        return
    from rollgraph.rl.algorithms import load_algorithm

    try:
        load_algorithm(name, options)
    except LoadError as error:
        yield "algorithm_built_in", "algorithm.name", error.detail
    except InvalidInput as error:
        key = f"algorithm.options.{error.argument}" if error.argument else "algorithm.options"
        yield "algorithm_built_in", key, error.detail
    except TypeError as error:  # an option has a value of the wrong type
        yield "algorithm_built_in", "algorithm.options", str(error)


def _reward_problems(config: Config) -> Iterable[tuple[str, str, str]]:
    """Check the labels of all rewards and load the built-in ones; report errors as (rule, key, message)."""
    from rollgraph.rl.rewards.loading import RewardSpec, load_reward

    labels: set[str] = set()
    for index, entry in enumerate(config.reward.functions):
        label = entry.label or entry.name.rpartition(":")[2]
        if label in labels:
            detail = f"two rewards are called {label!r}; give one of them another label"
            yield "reward_labels", f"reward.functions[{index}].label", detail
        labels.add(label)
        if ":" in entry.name:
            continue
        try:
            load_reward(RewardSpec(entry.name, entry.weight, entry.options, entry.label))
        except ImportError:
            pass  # the name is right, but a package is missing; the run will say how to install it
        except InvalidInput as error:
            yield "reward_built_in", f"reward.functions[{index}].{error.argument or 'name'}", error.detail
