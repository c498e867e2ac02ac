"""Calling reward functions in worker processes, where they may hang or crash.

Owns what a worker is given: the functions once, at its start, and then jobs. For one share of the rollouts, all
coroutine functions go to the same worker, which runs them at the same time.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rollgraph.rl.paths import LoadError
from rollgraph.rl.reward_arguments import RewardLog
from rollgraph.rl.reward_calls import RewardCaller, RewardJob, Score, Scored
from rollgraph.rl.reward_loading import Reward, RewardSpec, load_reward
from rollgraph.rl.reward_pickling import pack
from rollgraph.rl.worker_messages import Failure
from rollgraph.rl.workers import MakePool, WorkerPool

PackedSpec = tuple[RewardSpec, bytes | None]  # without its Python function, and that function with its options
_GRACE_SECONDS = 5.0  # for a worker to end coroutines itself, before it is killed for taking too long


class RewardWorkers:
    """Calls functions in `count` processes of a pool; a call that takes longer than `timeout` seconds is ended."""

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        rewards: Sequence[Reward],
        count: int,
        timeout: float,
        make_pool: MakePool = WorkerPool,
    ) -> None:
        self._rewards = rewards
        self._timeout = timeout
        packed = [_pack_spec(index, spec) for index, spec in enumerate(specs)]
        self._pool = make_pool(count, "rollgraph.rl.reward_workers:make_caller", (packed, timeout), timeout=timeout)

    def run(self, jobs: Sequence[RewardJob]) -> list[Scored]:
        results: dict[int, Scored] = {}
        unclear: list[int] = []  # jobs of a call that hung or died, where it may have been the fault of another job
        groups = self._group(jobs)
        for group, found in zip(groups, self._call(jobs, groups), strict=True):
            if isinstance(found, Failure) and len(group) > 1:
                unclear += group
            else:
                results |= _read(jobs, group, found)
        alone = [[place] for place in unclear]
        for group, found in zip(alone, self._call(jobs, alone), strict=True):
            results |= _read(jobs, group, found)
        return [results[place] for place in range(len(jobs))]

    def _group(self, jobs: Sequence[RewardJob]) -> list[list[int]]:
        """The jobs of each call, by their places: coroutines of one share together, any other job alone."""
        groups: dict[tuple[str, int], list[int]] = {}
        for place, job in enumerate(jobs):
            key = ("share", job.share) if self._rewards[job.reward].is_async else ("job", place)
            groups.setdefault(key, []).append(place)
        return list(groups.values())

    def _call(self, jobs: Sequence[RewardJob], groups: Sequence[Sequence[int]]) -> list[Any]:
        calls = [tuple(jobs[place] for place in group) for group in groups]
        timeouts = [self._timeout + self._grace(call) for call in calls]
        return self._pool.run(calls, timeouts)

    def _grace(self, call: Sequence[RewardJob]) -> float:
        return _GRACE_SECONDS if self._rewards[call[0].reward].is_async else 0.0

    def close(self) -> None:
        self._pool.close()


def make_caller(packed: Sequence[PackedSpec], timeout: float) -> Callable[..., list[Any]]:
    """In a worker: a function that takes jobs and returns, as JSON can hold it, what their calls have given."""
    caller = RewardCaller([load_reward(_unpack_spec(*each)) for each in packed], timeout)

    def call(*jobs: RewardJob) -> list[Any]:
        return [[found.scores, found.log.to_text()] for found in caller.run(jobs)]

    return call


def _read(jobs: Sequence[RewardJob], group: Sequence[int], found: Any) -> dict[int, Scored]:
    """The results of a call by the places of its jobs."""
    results = {}
    for number, place in enumerate(group):
        count = len(jobs[place].batch)
        if isinstance(found, Failure):
            results[place] = Scored.failed(found, count)
        else:
            scores: list[Score] = found[number][0]
            results[place] = Scored(scores, RewardLog.from_text(found[number][1], count))
    return results


def _pack_spec(index: int, spec: RewardSpec) -> PackedSpec:
    if spec.function is None:
        return spec, None
    try:
        packed = pack((spec.function, spec.options))
    except LoadError as error:
        detail = f"reward {spec.name!r} {error.detail}"
        raise LoadError(detail, argument=f"functions[{index}]", alternative=error.alternative) from error
    return replace(spec, function=None, options={}), packed


def _unpack_spec(spec: RewardSpec, packed: bytes | None) -> RewardSpec:
    if packed is None:
        return spec
    function, options = pickle.loads(packed)
    return replace(spec, function=function, options=options)
