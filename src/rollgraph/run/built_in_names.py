"""Whether names and options of what is built in are right: algorithms and rewards, each by its key.

What a configuration can check without loading anything is `config.py`'s. What people bring themselves, by a path, is a
program, and is looked at when a run begins. PyTorch is imported where an algorithm's options have to be read.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollgraph.config import Config
from rollgraph.config.algorithm_names import ALGORITHM_PATHS
from rollgraph.errors import InvalidInput
from rollgraph.rl.paths import LoadError


def wrong_names(config: Config) -> list[tuple[str, str, str]]:
    """(rule, key, what is wrong), like `broken_rules`."""
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

    for index, given in enumerate(config.reward.functions):
        if ":" in given.name:
            continue
        try:
            load_reward(RewardSpec(given.name, given.weight, given.options, given.label))
        except ImportError:
            pass  # right, but not installed here: a run says how
        except InvalidInput as error:
            yield "reward_built_in", f"reward.functions[{index}].{error.argument or 'name'}", error.detail
