"""Calls reward functions in worker processes, where they may hang or crash.

A worker gets the functions once, at its start, and then jobs. All coroutine functions for one chunk of rollouts go to
the same worker, which runs them concurrently.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import cloudpickle

from rollgraph.rl.paths import LoadError
from rollgraph.rl.rewards.arguments import RewardLog
from rollgraph.rl.rewards.calls import RewardCaller, RewardJob, ScoredBatch
from rollgraph.rl.rewards.loading import Reward, RewardSpec, load_reward
from rollgraph.rl.rewards.pool import PoolFactory, WorkerPool
from rollgraph.rl.rewards.process import Failure

# -- pickling functions ----------------------------------------------------------------------------
# cloudpickle pickles a function of a loaded module by name, and any other by value. We refuse a module that is loaded
# here but that a worker could not import.


def pickle_function(value: Any) -> bytes:
    """Pickle a function and its options for `pickle.loads` in a worker."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(value)
    except Exception as error:  # pickle raises many classes of errors, and users' objects raise any
        reason = f"cloudpickle cannot pickle it and what it refers to ({type(error).__name__}: {error})"
        raise _cannot_send(reason) from error
    missing = {module for module in pickler.modules if not _is_importable(module)}
    if missing:
        raise _cannot_send(f"it is defined in the module {', '.join(sorted(missing))}, which they cannot import")
    return buffer.getvalue()


def _cannot_send(reason: str) -> LoadError:
    detail = f"cannot be sent to reward workers: {reason}; move the function into a module that can be imported"
    return LoadError(detail, alternative=("workers", 0))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Records the modules of all functions and classes that it pickles, except for scripts and notebooks."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.modules: set[str] = set()

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, FunctionType | type) and value.__module__ not in (None, "__main__"):  # None: from `exec`
            self.modules.add(value.__module__)


def _is_importable(module: str) -> bool:
    """Whether a process with our search path can import it. That it is loaded here proves nothing."""
    top = module.partition(".")[0]
    return any(finder.find_spec(top, None) is not None for finder in sys.meta_path)


# -- workers ---------------------------------------------------------------------------------------

PickledSpec = tuple[RewardSpec, bytes | None]  # the spec without its Python function, and (function, options) pickled
_GRACE_SECONDS = 5.0  # for a worker to cancel coroutines itself, before it is killed for a time-out


class RewardWorkers:
    """Calls functions in the `count` processes of a pool, with a time-out for each call.

    The workers load the functions from `specs`. `rewards` are the same functions in this process; they are not called.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        rewards: Sequence[Reward],
        count: int,
        timeout: float,
        make_pool: PoolFactory = WorkerPool,
    ) -> None:
        self._rewards = rewards
        self._timeout = timeout
        pickled = [_pickle_spec(index, spec) for index, spec in enumerate(specs)]
        self._pool = make_pool(count, "rollgraph.rl.rewards.workers:make_caller", (pickled, timeout), timeout=timeout)

    def run(self, jobs: Sequence[RewardJob]) -> list[ScoredBatch]:
        results: dict[int, ScoredBatch] = {}
        retried_jobs: list[int] = []  # jobs of a call that hung or crashed: another job may be to blame
        groups = self._group(jobs)
        for indices, result in zip(groups, self._call(jobs, groups), strict=True):
            if isinstance(result, Failure) and len(indices) > 1:
                retried_jobs += indices
            else:
                results |= _scored_batches(jobs, indices, result)
        single_jobs = [[index] for index in retried_jobs]
        for indices, result in zip(single_jobs, self._call(jobs, single_jobs), strict=True):
            results |= _scored_batches(jobs, indices, result)
        return [results[index] for index in range(len(jobs))]

    def _group(self, jobs: Sequence[RewardJob]) -> list[list[int]]:
        """The indices of the jobs of each call: all coroutines of a chunk together, any other job alone."""
        groups: dict[tuple[str, int], list[int]] = {}
        for index, job in enumerate(jobs):
            key = ("chunk", job.chunk) if self._rewards[job.reward].is_async else ("job", index)
            groups.setdefault(key, []).append(index)
        return list(groups.values())

    def _call(self, jobs: Sequence[RewardJob], groups: Sequence[Sequence[int]]) -> list[Any]:
        calls = [tuple(jobs[index] for index in indices) for indices in groups]
        timeouts = [self._timeout + self._grace(call) for call in calls]
        return self._pool.run(calls, timeouts)

    def _grace(self, call: Sequence[RewardJob]) -> float:
        return _GRACE_SECONDS if self._rewards[call[0].reward].is_async else 0.0

    def close(self) -> None:
        self._pool.close()


def make_caller(pickled: Sequence[PickledSpec], timeout: float) -> Callable[..., list[Any]]:
    """In a worker: make a function that takes jobs and returns [scores, log] for each, as JSON types."""
    caller = RewardCaller([load_reward(_unpickle_spec(*pickled_spec)) for pickled_spec in pickled], timeout)

    def call(*jobs: RewardJob) -> list[Any]:
        return [[scored.scores, scored.log.to_text()] for scored in caller.run(jobs)]

    return call


def _scored_batches(jobs: Sequence[RewardJob], indices: Sequence[int], result: Any) -> dict[int, ScoredBatch]:
    """The scored batch of each job of one call, by job index. `result`: a Failure, or [scores, log] per job."""
    results = {}
    for position, index in enumerate(indices):
        count = len(jobs[index].batch)
        if isinstance(result, Failure):
            results[index] = ScoredBatch.failed(result, count)
        else:
            scores, log_text = result[position]
            results[index] = ScoredBatch(scores, RewardLog.from_text(log_text, count))
    return results


def _pickle_spec(index: int, spec: RewardSpec) -> PickledSpec:
    if spec.function is None:
        return spec, None
    try:
        pickled = pickle_function((spec.function, spec.options))
    except LoadError as error:
        detail = f"reward {spec.name!r} {error.detail}"
        raise LoadError(detail, argument=f"functions[{index}]", alternative=error.alternative) from error
    return replace(spec, function=None, options={}), pickled


def _unpickle_spec(spec: RewardSpec, pickled: bytes | None) -> RewardSpec:
    if pickled is None:
        return spec
    function, options = pickle.loads(pickled)
    return replace(spec, function=function, options=options)
