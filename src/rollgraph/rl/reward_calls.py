"""Calling reward functions: with copies of their arguments, and with every value they return checked.

A function that fails gives a `Failure` in place of a score. Plain functions run one after the other; coroutine
functions run at the same time, in an event loop. This is the same in the run's process and in a worker.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from rollgraph.rl.event_loop import EventLoop
from rollgraph.rl.reward_arguments import LOG_EXTRA, LOG_METRIC, STATE, RewardBatch, RewardLog
from rollgraph.rl.reward_loading import LARGEST, Reward, is_allowed
from rollgraph.rl.worker_messages import Failure, describe, show
from rollgraph.rl.worker_process import leave_if_forked

Score = float | None | Failure
_UNORDERED = (Mapping, Set, str, bytes, bytearray, memoryview)  # iterable, but not lists of numbers
_TEXT = (str, bytes, bytearray)  # float() would read a number from these


class RewardJob(NamedTuple):
    """One function to call for one batch."""

    reward: int  # index of the function
    share: int  # index of the batch, which is a share of all rollouts
    batch: RewardBatch


class Scored(NamedTuple):
    """What a call has given: a score for each rollout of its batch, and what the function logged."""

    scores: list[Score]
    log: RewardLog

    @classmethod
    def failed(cls, failure: Failure, count: int) -> Scored:
        return cls([failure] * count, RewardLog(count))


class RewardCaller:
    """Calls functions in this process. A coroutine has `timeout` seconds; a plain function cannot be interrupted."""

    def __init__(self, rewards: Sequence[Reward], timeout: float) -> None:
        self._rewards = rewards
        self._timeout = timeout
        self._loop = EventLoop() if any(reward.is_async for reward in rewards) else None

    def run(self, jobs: Sequence[RewardJob]) -> list[Scored]:
        results: dict[int, Scored] = {}
        concurrent: list[int] = []
        for place, job in enumerate(jobs):
            if self._rewards[job.reward].is_async:
                concurrent.append(place)
            else:
                results[place] = call_reward(self._rewards[job.reward], job.batch)
        if concurrent:
            assert self._loop is not None
            coroutines = [call_async_reward(self._rewards[jobs[i].reward], jobs[i].batch) for i in concurrent]
            for place, found in zip(concurrent, self._loop.gather(coroutines, self._timeout), strict=True):
                results[place] = found
                if isinstance(found, Failure):
                    results[place] = Scored.failed(found, len(jobs[place].batch))
        return [results[place] for place in range(len(jobs))]

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()


def call_reward(reward: Reward, batch: RewardBatch) -> Scored:
    """The scores of a batch. A call that raises is repeated for each rollout, so that a bad one costs no other."""
    log = RewardLog(len(batch))
    pid = os.getpid()
    try:
        returned = reward.function(**_make_arguments(reward, batch, log))
        return Scored(_read_scores(returned, len(batch)), log)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and the panics of libraries written in Rust, are not Exceptions
        failure = describe(error)
    finally:
        leave_if_forked(pid)
    if len(batch) == 1:
        return Scored.failed(failure, 1)
    return _join(call_reward(reward, single) for single in batch.split())


async def call_async_reward(reward: Reward, batch: RewardBatch) -> Scored:
    """The same for a coroutine function; the repeated calls run at the same time."""
    log = RewardLog(len(batch))
    pid = os.getpid()
    try:
        returned = await reward.function(**_make_arguments(reward, batch, log))
        return Scored(_read_scores(returned, len(batch)), log)
    except asyncio.CancelledError:  # the time is over
        raise
    except BaseException as error:
        failure = describe(error)
    finally:
        leave_if_forked(pid)
    if len(batch) == 1:
        return Scored.failed(failure, 1)
    return _join(await asyncio.gather(*(call_async_reward(reward, single) for single in batch.split())))


def _make_arguments(reward: Reward, batch: RewardBatch, log: RewardLog) -> dict[str, Any]:
    """Copies of the lists and options, because a function may sort or empty what it is given."""
    arguments: dict[str, Any] = copy_value({**reward.options, **batch.lists})
    more = {STATE: batch.state, LOG_EXTRA: log.log_extra, LOG_METRIC: log.log_metric}
    return arguments | {name: value for name, value in more.items() if reward.takes(name)}


def _read_scores(returned: Any, count: int) -> list[Score]:
    if inspect.iscoroutine(returned):
        returned.close()  # nobody will await it
        detail = "returned a coroutine, which only an `async def` function may; is it hidden by a decorator?"
        return [Failure("wrong_type", detail)] * count
    if isinstance(returned, _UNORDERED):
        kind = type(returned).__name__
        return [Failure("wrong_type", f"returned a {kind} instead of a list of numbers")] * count
    scores = list(returned)
    if len(scores) != count:
        return [Failure("wrong_length", f"{len(scores)} rewards for {count} completions")] * count
    return [check_score(score) for score in scores]


def _join(parts: Iterable[Scored]) -> Scored:
    whole = Scored([], RewardLog(0))
    for part in parts:
        whole.scores.extend(part.scores)
        whole.log.add(part.log)
    return whole


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
