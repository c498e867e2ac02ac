"""Calls reward functions, plain and async, with copies of their arguments, and checks every value they return.

A function that fails gives a `Failure` in place of a score. Plain functions run one after the other; coroutine
functions run concurrently in an event loop. The run's process and workers use the same code.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import os
from collections.abc import Coroutine, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple, TypeVar

from rollgraph.rl.rewards.arguments import LOG_EXTRA, LOG_METRIC, STATE, RewardBatch, RewardLog
from rollgraph.rl.rewards.loading import MAX_REWARD, Reward, is_in_range
from rollgraph.rl.rewards.process import Failure, exit_if_forked, failure_of, short_repr

# -- an event loop for coroutines ------------------------------------------------------------------
# It lives as long as its owner, so that a function can keep an HTTP client from call to call. It has a thread, because
# in a notebook the main thread already runs a loop.

T = TypeVar("T")
_CANCEL_SECONDS = 2.0  # for cancelled tasks to end


class EventLoop:
    """An event loop in a thread, which runs coroutines concurrently."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = Thread(target=self._serve, name="rollgraph event loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C: nobody waits for the result any more
            future.cancel()
            raise

    def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]], timeout: float) -> list[Any]:
        """The result of each coroutine; a Failure if it raised or took longer than `timeout` seconds."""

        async def run_all() -> list[Any]:
            return await asyncio.gather(*(_run_with_timeout(coroutine, timeout) for coroutine in coroutines))

        return self.run(run_all())

    def close(self) -> None:
        """Cancel all tasks. Code that blocks the loop cannot be interrupted; the thread then ends with the process."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(2 * _CANCEL_SECONDS)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closed:
            with suppress(BaseException):  # a SystemExit in a task that a coroutine started propagates through the loop
                self._loop.run_forever()
        with suppress(BaseException):
            self._loop.run_until_complete(_cancel_all())
        self._loop.close()


async def run_for(coroutine: Coroutine[Any, Any, T], timeout: float) -> asyncio.Task[T]:
    """A task of the coroutine, done or cancelled. `asyncio.timeout` could lose a result, as after Ctrl-Z and `fg`."""
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait({task}, timeout=timeout)
    finally:
        task.cancel()  # no effect on a task that is done; we do not wait, because a task can refuse
    return task


async def _run_with_timeout(coroutine: Coroutine[Any, Any, Any], timeout: float) -> Any:
    """The result of a coroutine; a Failure if it raised or took longer than `timeout` seconds."""
    task = await run_for(coroutine, timeout)
    if not task.done():
        return Failure("timeout", f"no result after {timeout} s")
    try:
        return task.result()
    except BaseException as error:  # including a CancelledError that it raised itself
        return failure_of(error)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)


# -- calls -----------------------------------------------------------------------------------------

Score = float | None | Failure
_NOT_LISTS = (Mapping, Set, str, bytes, bytearray, memoryview)  # iterable, but not lists of numbers
_TEXT_TYPES = (str, bytes, bytearray)  # float() would read a number from these


class RewardJob(NamedTuple):
    """One function to call for one batch."""

    reward: int  # index of the function
    chunk: int  # index of the batch: each batch has a chunk of all rollouts
    batch: RewardBatch


class ScoredBatch(NamedTuple):
    """The result of a call: a score for each rollout of its batch, and what the function logged."""

    scores: list[Score]
    log: RewardLog

    @classmethod
    def failed(cls, failure: Failure, count: int) -> ScoredBatch:
        return cls([failure] * count, RewardLog(count))


class RewardCaller:
    """Calls functions in this process. A coroutine has `timeout` seconds; a plain function cannot be interrupted."""

    def __init__(self, rewards: Sequence[Reward], timeout: float) -> None:
        self._rewards = rewards
        self._timeout = timeout
        self._loop = EventLoop() if any(reward.is_async for reward in rewards) else None

    def run(self, jobs: Sequence[RewardJob]) -> list[ScoredBatch]:
        results: dict[int, ScoredBatch] = {}
        async_indices: list[int] = []
        for index, job in enumerate(jobs):
            if self._rewards[job.reward].is_async:
                async_indices.append(index)
            else:
                results[index] = call_reward(self._rewards[job.reward], job.batch)
        if async_indices:
            assert self._loop is not None
            coroutines = [call_async_reward(self._rewards[jobs[i].reward], jobs[i].batch) for i in async_indices]
            for index, outcome in zip(async_indices, self._loop.gather(coroutines, self._timeout), strict=True):
                results[index] = outcome
                if isinstance(outcome, Failure):
                    results[index] = ScoredBatch.failed(outcome, len(jobs[index].batch))
        return [results[index] for index in range(len(jobs))]

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()


def call_reward(reward: Reward, batch: RewardBatch) -> ScoredBatch:
    """Score a batch. A call that raises is repeated rollout by rollout, so that only the bad ones fail."""
    log = RewardLog(len(batch))
    pid = os.getpid()
    try:
        returned = reward.function(**_make_arguments(reward, batch, log))
        return ScoredBatch(_read_scores(returned, len(batch)), log)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and the panics of libraries written in Rust, are not Exceptions
        failure = failure_of(error)
    finally:
        exit_if_forked(pid)
    if len(batch) == 1:
        return ScoredBatch.failed(failure, 1)
    return _concatenate(call_reward(reward, single) for single in batch.split())


async def call_async_reward(reward: Reward, batch: RewardBatch) -> ScoredBatch:
    """`call_reward` for a coroutine function; the repeated calls run concurrently."""
    log = RewardLog(len(batch))
    pid = os.getpid()
    try:
        returned = await reward.function(**_make_arguments(reward, batch, log))
        return ScoredBatch(_read_scores(returned, len(batch)), log)
    except asyncio.CancelledError:  # timed out
        raise
    except BaseException as error:
        failure = failure_of(error)
    finally:
        exit_if_forked(pid)
    if len(batch) == 1:
        return ScoredBatch.failed(failure, 1)
    return _concatenate(await asyncio.gather(*(call_async_reward(reward, single) for single in batch.split())))


def _make_arguments(reward: Reward, batch: RewardBatch, log: RewardLog) -> dict[str, Any]:
    """Keyword arguments for a call; lists and options are copied, because a function may modify them."""
    arguments: dict[str, Any] = copy_value({**reward.options, **batch.lists})
    optional = {STATE: batch.state, LOG_EXTRA: log.log_extra, LOG_METRIC: log.log_metric}
    return arguments | {name: value for name, value in optional.items() if reward.takes(name)}


def _read_scores(returned: Any, count: int) -> list[Score]:
    if inspect.iscoroutine(returned):
        returned.close()  # nobody will await it
        detail = "returned a coroutine, which only an `async def` function may; is it hidden by a decorator?"
        return [Failure("wrong_type", detail)] * count
    if isinstance(returned, _NOT_LISTS):
        kind = type(returned).__name__
        return [Failure("wrong_type", f"returned a {kind} instead of a list of numbers")] * count
    scores = list(returned)
    if len(scores) != count:
        return [Failure("wrong_length", f"{len(scores)} rewards for {count} completions")] * count
    return [check_score(score) for score in scores]


def _concatenate(parts: Iterable[ScoredBatch]) -> ScoredBatch:
    scored = ScoredBatch([], RewardLog(0))
    for part in parts:
        scored.scores.extend(part.scores)
        scored.log.add(part.log)
    return scored


def check_score(score: Any) -> Score:
    if score is None:
        return None
    try:
        number = math.nan if isinstance(score, _TEXT_TYPES) else float(score)  # accepts scalars of numpy and torch
    except OverflowError:  # an integer or a fraction that no float can hold
        return Failure("too_large", f"{short_repr(score)} is beyond {MAX_REWARD:g}")
    except Exception:  # an object of a user's class can raise anything
        number = math.nan
    if not math.isfinite(number):
        return Failure("not_finite", f"{short_repr(score)} is not a finite number")
    if not is_in_range(number):
        return Failure("too_large", f"{short_repr(score)} is beyond {MAX_REWARD:g}")
    return number


def copy_value(value: Any) -> Any:
    """A deep copy, faster than `deepcopy` for JSON types."""
    kind = type(value)
    if kind is str or kind is int or kind is float:
        return value
    if kind is list:
        return [copy_value(inner) for inner in value]
    if kind is dict:
        return {key: copy_value(inner) for key, inner in value.items()}
    return copy.deepcopy(value)
