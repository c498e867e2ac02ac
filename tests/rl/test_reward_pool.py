"""`reward.place: cluster` treats failing functions like worker processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollgraph.parallel.ranks.stop import restore_termination_handlers
from rollgraph.rl.rewards.pool import WorkerPool
from rollgraph.rl.rewards.ray_pool import ClusterPool, PoolActor
from rollgraph.rl.rewards.rewards import RewardFunctions
from rollgraph.types import Prompt, Rollout

ray: Any = pytest.importorskip("ray", reason="needs Ray: pip install 'rollgraph[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.multi]
FUNCTIONS = "tests.rl.reward_functions"


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with restore_termination_handlers():
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def rollouts(*texts: str) -> list[Rollout]:
    prompt = Prompt(id=0, text="2+2=", tokens=(1,), columns={})
    return [Rollout(prompt, tokens=[1], sampled=[True], logprobs=[0.0], text=text) for text in texts]


def score(make_pool: Any, *names: str) -> tuple[list[dict[str, float]], dict[str, int]]:
    entries = [f"{FUNCTIONS}:{name}" for name in names]
    with RewardFunctions(
        entries, workers=2, timeout=3.0, on_failure=-1.0, batch_size=2, make_pool=make_pool
    ) as rewards:
        scored = rollouts("a", "hang", "crash", "raise", "bb")
        rewards.score(scored)
        return [rollout.rewards for rollout in scored], dict(rewards.failures)


def test_values_and_failures_equal_those_of_local_workers() -> None:
    names = ("lengths", "hangs", "crashes", "raises")
    local = score(WorkerPool, *names)
    assert score(ClusterPool, *names) == local
    assert local[1] == {"timeout": 2, "died": 2, "raised": 1}


def test_a_call_whose_host_is_lost_is_repeated_once(tmp_path: Path) -> None:
    marker = str(tmp_path / "called")

    class TellingHost(PoolActor):
        def ready(self) -> None:
            Path(f"{marker}.host").write_text(str(os.getpid()))

    pool = partial(ClusterPool)
    entry = {"name": f"{FUNCTIONS}:kills_host_once", "options": {"marker": marker}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollgraph.rl.rewards.ray_pool.PoolActor", TellingHost)
        rewards = RewardFunctions([entry], workers=1, timeout=60.0, make_pool=pool)
    with rewards:
        scored = rollouts("a", "b")
        rewards.score(scored)
    assert [rollout.reward for rollout in scored] == [4.0, 4.0]
    assert not rewards.failures
