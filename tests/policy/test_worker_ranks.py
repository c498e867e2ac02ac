"""Two workers on gloo learn the same as one, and do not generate from stale weights."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.graph import GraphError
from rollgraph.inference import SamplingParams
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import PolicyWorker
from rollgraph.types import Batch, Prompt, Rollout, Sample
from tests.parallel.worlds import run_world
from tests.policy.small_worker import (
    ALONE,
    LIMITS,
    assert_equal_up_to_rounding,
    captured_again,
    gradient_pieces,
    join,
    make_batch,
    make_samples,
    make_worker,
    parameters,
    reset,
    sample_rollouts,
)

pytestmark = pytest.mark.multi

ONE_SIZE = replace(LIMITS, token_buckets=(48,))
CALLS = 3
Pieces = dict[tuple[str, int], Tensor]
SCORED = make_samples(4, seed=9)


def make(world: World, **options: Any) -> PolicyWorker:
    return make_worker(world, limits=ONE_SIZE, scopes=("layer",), reduction="ordered", **options)


def paired(call: int) -> list[Sample]:
    """Four samples of 24 tokens, two of which fill a microbatch. Sorted by prompt, 0 and 2 come first."""
    samples = make_samples(4, seed=call, lengths=[20] * 4)
    return [replace(one, prompt=[first, *one.prompt[1:]]) for one, first in zip(samples, (0, 2, 1, 3), strict=True)]


def poisoned_batch() -> Batch:
    """A batch in which one sample, on the second rank, has NaN advantages."""
    batch = make_batch(1, 4, seed=7)
    batch.samples[1].advantages = [math.nan] * len(batch.samples[1].tokens)
    return batch


def local_rollouts(world: World) -> list[Rollout]:
    """Three rollouts in two groups on the first rank, two in one group on the second."""
    groups = [[0, 0, 1], [4, 4]][world.rank]
    return [
        Rollout(
            Prompt(world.rank, (1, 2), "é", {"answer": "7", "numbers": [1, 2]}),
            [3 + index, 4],
            [True, False],
            [-0.1 - 1e-9 * world.rank, 0.0],
            reward=1 / 3,
            rewards={"exact": 1 / 3},
            reference_logprobs=[-0.3, 0.0] if index else None,
            group=group,
        )
        for index, group in enumerate(groups)
    ]


def run_all(world: World) -> dict[str, Any]:
    """Run everything that the tests check, because starting ranks is slow."""
    worker = make(world)
    results: dict[str, Any] = {}
    results["scored"] = worker.logprobs(SCORED)

    results["paired"] = [(worker.train(Batch([paired(call)])), parameters(worker)) for call in range(CALLS)]
    results["reference"] = worker.logprobs(SCORED, "reference")

    results["spread"] = [first_step(worker, make_batch(1, 7, call), score_old=True) for call in range(CALLS)]
    results["alone"] = [first_step(worker, Batch([make_samples(1, seed=call)])) for call in range(CALLS)]

    results["before"] = [r.tokens for r in sample_rollouts(worker, 3, "a")]
    worker.train(Batch([paired(0)]))
    results["stale"] = worker.sharded.gathers.stale()
    assert worker.engine is not None
    try:
        with worker.sharded.paused(gather=False):
            worker.engine.generate([[1, 2]], SamplingParams(max_tokens=2))
        results["refused"] = "nothing"
    except GraphError as error:
        results["refused"] = str(error)
    rollouts = sample_rollouts(worker, 3, "a")
    results["after"] = [r.tokens for r in rollouts]
    results["recorded"] = [r.logprobs for r in rollouts]
    zeros = [[0.0] * len(r.tokens) for r in rollouts]
    samples = [Sample(r.prompt.tokens, r.tokens, z, z, z) for r, z in zip(rollouts, zeros, strict=True)]
    results["scored after"] = worker.logprobs(samples)

    before = parameters(worker)
    results["poisoned"] = worker.train(poisoned_batch())
    results["kept"] = torch.equal(parameters(worker), before)

    handle = worker.model.embed_tokens.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        worker.train(make_batch(1, 6))
    handle.remove()
    results["kept after a failure"] = torch.equal(parameters(worker), before)
    reset(worker)
    results["after a failure"] = [(worker.train(Batch([paired(0)])), parameters(worker))]

    local = local_rollouts(world)
    results["gathered"] = worker.gather_rollouts(local)
    results["gathered from one"] = worker.gather_rollouts(local if world.rank else [])
    results["local"] = local

    results["captured again"], results["eager runs"] = captured_again(worker), worker.pool.report().eager_runs
    worker.close()
    results["hooks"] = sum(len(m._forward_pre_hooks) for m in worker.model.modules())

    eager = make(world, backend="eager")  # with hooks, without graphs
    results["eager"] = [
        (eager.train(Batch([paired(call)]), score_old=call > 0), parameters(eager)) for call in range(2)
    ]
    results["eager tokens"] = [r.tokens for r in sample_rollouts(eager, 3, "a")]
    eager.close()
    return results


def first_step(worker: PolicyWorker, batch: Batch, **options: Any) -> tuple[dict[str, float], Pieces, Tensor]:
    """One step from the initial weights: its metrics, this rank's pieces of the gradient, and the new weights."""
    reset(worker)
    metrics = worker.train(batch, **options)
    return metrics, gradient_pieces(worker), parameters(worker)


def fail(_: Tensor) -> None:
    raise ArithmeticError("the backward failed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    results = run_world(2, folder, run_all)
    for result in results:
        assert isinstance(result, dict), result
    return results


@pytest.fixture(scope="module")
def single_worker() -> PolicyWorker:
    return make(ALONE, backend="eager")


@pytest.fixture
def alone(single_worker: PolicyWorker) -> PolicyWorker:
    reset(single_worker)
    return single_worker


@pytest.mark.slow
def test_two_ranks_equal_one_process_with_the_same_microbatches(
    ranks: list[dict[str, Any]], alone: PolicyWorker
) -> None:
    """Rank 0 has samples 0 and 2; the single process sums the same two microbatches in the order of ranks."""
    for call in range(CALLS):
        first, second, third, fourth = paired(call)
        metrics = alone.train(Batch([[first, third, second, fourth]]))
        for result in ranks:
            theirs, weights = result["paired"][call]
            assert torch.equal(weights, parameters(alone))
            assert theirs == pytest.approx(metrics, abs=1e-6)


@pytest.mark.parametrize("name", ["spread", "alone"])
def test_two_ranks_learn_the_same_as_one_with_any_distribution_of_samples(
    ranks: list[dict[str, Any]], alone: PolicyWorker, name: str
) -> None:
    """Other microbatches are summed in another order. In "alone" the second rank has no sample at all."""
    for call in range(CALLS):
        if name == "spread":
            metrics, pieces, _ = first_step(alone, make_batch(1, 7, call), score_old=True)
        else:
            metrics, pieces, _ = first_step(alone, Batch([make_samples(1, seed=call)]))
        both = [result[name][call] for result in ranks]
        assert_equal_up_to_rounding(join(*(theirs for _, theirs, _ in both)), join(pieces))
        for theirs, _, weights in both:
            assert torch.equal(weights, both[0][2])
            assert theirs == both[0][0]
            for metric in metrics.keys() - {"tokens/padding"}:
                assert theirs[metric] == pytest.approx(metrics[metric], abs=2e-6), metric


def test_the_reference_is_swapped_in_and_out_on_all_ranks(ranks: list[dict[str, Any]], alone: PolicyWorker) -> None:
    for result in ranks:
        assert result["reference"] == result["scored"] == alone.logprobs(SCORED)


def test_stale_weights_do_not_generate(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert "holds the parameters of step" in result["stale"]
        assert "refused" in result["refused"]
        assert "holds the parameters of step" in result["refused"]
        assert result["after"] != result["before"]
        assert result["after"] == ranks[0]["after"]
        for recorded, scored in zip(result["recorded"], result["scored after"], strict=True):
            assert recorded == pytest.approx(scored, abs=1e-5)


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["kept"]
        assert result["poisoned"]["optimizer/skipped_steps"] == 1
        assert math.isnan(result["poisoned"]["loss"])


def test_a_failed_backward_does_not_affect_the_next_step(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["kept after a failure"]
        assert torch.equal(result["after a failure"][0][1], result["paired"][0][1])


def test_every_rank_gets_all_rollouts_with_distinct_groups(ranks: list[dict[str, Any]]) -> None:
    gathered = ranks[0]["gathered"]
    assert gathered == ranks[1]["gathered"]
    local = [rollout for result in ranks for rollout in result["local"]]
    assert [replace(rollout, group=0) for rollout in gathered] == [replace(rollout, group=0) for rollout in local]
    groups = [rollout.group for rollout in gathered]
    assert groups[0] == groups[1] != groups[2]
    assert groups[3] == groups[4]
    assert groups[3] not in groups[:3]
    for result in ranks:
        assert [replace(r, group=4) for r in result["gathered from one"]] == ranks[1]["local"]


def test_no_rank_captures_again_or_leaves_a_hook(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert not result["captured again"]
        assert result["eager runs"] == 0
        assert result["hooks"] == 0


def test_without_graphs_the_bits_are_the_same(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert torch.equal(result["eager"][0][1], result["paired"][0][1])
        assert result["eager"][1][0]["policy/ratio"] == 1.0
        assert result["eager tokens"] == ranks[0]["eager tokens"]
