"""Whether names and options of what is built in are right: algorithms and rewards, each by its key.

What a configuration can check without loading anything is `config.py`'s. What people bring themselves, by a path, is a
program, and is looked at when a run begins. PyTorch is imported where an algorithm's options have to be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rollgraph.config import Config

ALGORITHMS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo", "cispo", "sft")  # of rl/algorithms


def wrong_names(config: Config) -> list[tuple[str, str, str]]:
    """(rule, key, what is wrong), like `broken_rules`."""
    return [*_of_the_algorithm(config), *_of_rewards(config)]


def _of_the_algorithm(config: Config) -> Iterable[tuple[str, str, str]]:
    name, options = config.algorithm.name, config.algorithm.options
    if ":" in name or (name in ALGORITHMS and not options):
        return
    from rollgraph.rl.algorithms import load_algorithm

    try:
        load_algorithm(name, options)
    except (ValueError, TypeError) as error:
        key = _guilty("algorithm.options", options, error) if name in ALGORITHMS else "algorithm.name"
        yield "algorithm_built_in", key, str(error)


def _of_rewards(config: Config) -> Iterable[tuple[str, str, str]]:
    from rollgraph.rl.builtin_rewards import BUILT_IN
    from rollgraph.rl.rewards import RewardSpec, load_reward

    for index, given in enumerate(config.reward.functions):
        if ":" in given.name:
            continue
        place = f"reward.functions[{index}]"
        try:
            load_reward(RewardSpec(given.name, given.weight, given.options, given.label))
        except ImportError:
            pass  # right, but not installed here: a run says how
        except (ValueError, TypeError) as error:
            key = _guilty(f"{place}.options", given.options, error) if given.name in BUILT_IN else f"{place}.name"
            yield "reward_built_in", key, str(error)


def _guilty(section: str, options: Iterable[str], error: Exception) -> str:
    """The option that a message begins with, or quotes; else all of them."""
    found = (name for name in options if re.search(rf"^{re.escape(name)}\b|'{re.escape(name)}'", str(error)))
    return next((f"{section}.{name}" for name in found), section)
