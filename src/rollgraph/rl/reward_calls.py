"""Calling a reward function: with copies of its arguments, and with every value it returns checked.

A function that fails gives a `Failure` in place of a score. This runs in the run's process or in a worker alike.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from rollgraph.rl.reward_loading import LARGEST, Arguments, Reward, RewardSpec, is_allowed, load_reward
from rollgraph.rl.worker_messages import Failure, describe, show
from rollgraph.rl.worker_process import leave_if_forked

Score = float | None | Failure
_UNORDERED = (Mapping, Set, str, bytes, bytearray, memoryview)  # iterable, but not lists of numbers
_TEXT = (str, bytes, bytearray)  # float() would read a number from these


def make_caller(specs: Sequence[RewardSpec]) -> Callable[[int, Arguments], list[Score]]:
    """What a worker does: the same as the run's process would."""
    rewards = [load_reward(spec) for spec in specs]
    return lambda index, arguments: call_reward(rewards[index], arguments)


def call_reward(reward: Reward, arguments: Arguments) -> list[Score]:
    """The scores of a batch. A call that raises is repeated for each rollout, so that a bad one costs no other."""
    count = len(next(iter(arguments.values())))
    pid = os.getpid()
    try:
        # Copies, because a function may sort or empty what it is given.
        returned = reward.function(**copy_value({**reward.options, **arguments}))
        if isinstance(returned, _UNORDERED):
            kind = type(returned).__name__
            return [Failure("wrong_type", f"returned a {kind} instead of a list of numbers")] * count
        scores = list(returned)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and the panics of libraries written in Rust, are not Exceptions
        if count == 1:
            return [describe(error)]
        return _call_one_by_one(reward, arguments, count)
    finally:
        leave_if_forked(pid)
    if len(scores) != count:
        return [Failure("wrong_length", f"{len(scores)} rewards for {count} completions")] * count
    return [check_score(score) for score in scores]


def _call_one_by_one(reward: Reward, arguments: Arguments, count: int) -> list[Score]:
    scores: list[Score] = []
    for i in range(count):
        single = {name: [values[i]] for name, values in arguments.items()}
        scores += call_reward(reward, single)
    return scores


def check_score(score: Any) -> Score:
    if score is None:
        return None
    try:
        number = math.nan if isinstance(score, _TEXT) else float(score)  # also numpy's and torch's scalars
    except OverflowError:  # an integer or a fraction that no float can hold
        return Failure("too_large", f"{show(score)} is beyond {LARGEST:g}")
    except Exception:  # whatever an object of the user's own class raises
        number = math.nan
    if not math.isfinite(number):
        return Failure("not_finite", f"{show(score)} is not a finite number")
    if not is_allowed(number):
        return Failure("too_large", f"{show(score)} is beyond {LARGEST:g}")
    return number


def copy_value(value: Any) -> Any:
    """A deep copy; for what JSON can hold, faster than `deepcopy`."""
    kind = type(value)
    if kind is str or kind is int or kind is float:
        return value
    if kind is list:
        return [copy_value(inner) for inner in value]
    if kind is dict:
        return {key: copy_value(inner) for key, inner in value.items()}
    return copy.deepcopy(value)
