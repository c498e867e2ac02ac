"""Two workers on gloo learn what one worker does, and do not generate from stale weights."""

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


def poisoned() -> Batch:
    """A batch in which one sample, on the second rank, has NaN advantages."""
    batch = make_batch(1, 4, seed=7)
    batch.samples[1].advantages = [math.nan] * len(batch.samples[1].tokens)
    return batch


def own_rollouts(world: World) -> list[Rollout]:
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


def everything(world: World) -> dict[str, Any]:
    """Run everything that is tested, because starting ranks is slow."""
    worker = make(world)
    found: dict[str, Any] = {}
    found["scored"] = worker.logprobs(SCORED)

    found["paired"] = [(worker.train(Batch([paired(call)])), parameters(worker)) for call in range(CALLS)]
    found["reference"] = worker.logprobs(SCORED, "reference")

    found["spread"] = [first_step(worker, make_batch(1, 7, call), score_old=True) for call in range(CALLS)]
    found["alone"] = [first_step(worker, Batch([make_samples(1, seed=call)])) for call in range(CALLS)]

    found["before"] = [r.tokens for r in sample_rollouts(worker, 3, "a")]
    worker.train(Batch([paired(0)]))
    found["stale"] = worker.sharded.gathers.stale()
    assert worker.engine is not None
    try:
        with worker.sharded.paused(gather=False):
            worker.engine.generate([[1, 2]], SamplingParams(max_tokens=2))
        found["refused"] = "nothing"
    except GraphError as error:
        found["refused"] = str(error)
    rollouts = sample_rollouts(worker, 3, "a")
    found["after"] = [r.tokens for r in rollouts]
    found["recorded"] = [r.logprobs for r in rollouts]
    zeros = [[0.0] * len(r.tokens) for r in rollouts]
    samples = [Sample(r.prompt.tokens, r.tokens, z, z, z) for r, z in zip(rollouts, zeros, strict=True)]
    found["scored after"] = worker.logprobs(samples)

    before = parameters(worker)
    found["poisoned"] = worker.train(poisoned())
    found["kept"] = torch.equal(parameters(worker), before)

    handle = worker.model.embed_tokens.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        worker.train(make_batch(1, 6))
    handle.remove()
    found["kept after a failure"] = torch.equal(parameters(worker), before)
    reset(worker)
    found["after a failure"] = [(worker.train(Batch([paired(0)])), parameters(worker))]

    mine = own_rollouts(world)
    found["gathered"] = worker.gather_rollouts(mine)
    found["gathered from one"] = worker.gather_rollouts(mine if world.rank else [])
    found["mine"] = mine

    found["captured again"], found["eager runs"] = captured_again(worker), worker.pool.report().eager_runs
    worker.close()
    found["hooks"] = sum(len(m._forward_pre_hooks) for m in worker.model.modules())

    eager = make(world, backend="eager")  # with hooks, without graphs
    found["eager"] = [(eager.train(Batch([paired(call)]), score_old=call > 0), parameters(eager)) for call in range(2)]
    found["eager tokens"] = [r.tokens for r in sample_rollouts(eager, 3, "a")]
    eager.close()
    return found


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
    found = run_world(2, folder, everything)
    for result in found:
        assert isinstance(result, dict), result
    return found


@pytest.fixture(scope="module")
def one() -> PolicyWorker:
    return make(ALONE, backend="eager")


@pytest.fixture
def alone(one: PolicyWorker) -> PolicyWorker:
    reset(one)
    return one


@pytest.mark.slow
def test_two_ranks_give_the_bits_of_one_process_that_runs_the_same_microbatches(
    ranks: list[dict[str, Any]], alone: PolicyWorker
) -> None:
    """Rank 0 has samples 0 and 2; the single process sums the same two microbatches in the order of ranks."""
    for call in range(CALLS):
        first, second, third, fourth = paired(call)
        metrics = alone.train(Batch([[first, third, second, fourth]]))
        for found in ranks:
            theirs, weights = found["paired"][call]
            assert torch.equal(weights, parameters(alone))
            assert theirs == pytest.approx(metrics, abs=1e-6)


@pytest.mark.parametrize("name", ["spread", "alone"])
def test_two_ranks_learn_what_one_does_however_samples_are_distributed(
    ranks: list[dict[str, Any]], alone: PolicyWorker, name: str
) -> None:
    """Other microbatches are summed in another order. In "alone" the second rank has no sample at all."""
    for call in range(CALLS):
        if name == "spread":
            metrics, pieces, _ = first_step(alone, make_batch(1, 7, call), score_old=True)
        else:
            metrics, pieces, _ = first_step(alone, Batch([make_samples(1, seed=call)]))
        both = [found[name][call] for found in ranks]
        assert_equal_up_to_rounding(join(*(theirs for _, theirs, _ in both)), join(pieces))
        for theirs, _, weights in both:
            assert torch.equal(weights, both[0][2])
            assert theirs == both[0][0]
            for metric in metrics.keys() - {"tokens/padding"}:
                assert theirs[metric] == pytest.approx(metrics[metric], abs=2e-6), metric


def test_the_reference_is_swapped_in_and_out_on_all_ranks(ranks: list[dict[str, Any]], alone: PolicyWorker) -> None:
    for found in ranks:
        assert found["reference"] == found["scored"] == alone.logprobs(SCORED)


def test_stale_weights_do_not_generate(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "holds the parameters of step" in found["stale"]
        assert "refused" in found["refused"]
        assert "holds the parameters of step" in found["refused"]
        assert found["after"] != found["before"]
        assert found["after"] == ranks[0]["after"]
        for recorded, scored in zip(found["recorded"], found["scored after"], strict=True):
            assert recorded == pytest.approx(scored, abs=1e-5)


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["kept"]
        assert found["poisoned"]["optimizer/skipped_steps"] == 1
        assert math.isnan(found["poisoned"]["loss"])


def test_a_failed_backward_does_not_affect_the_next_step(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["kept after a failure"]
        assert torch.equal(found["after a failure"][0][1], found["paired"][0][1])


def test_every_rank_gets_all_rollouts_with_distinct_groups(ranks: list[dict[str, Any]]) -> None:
    gathered = ranks[0]["gathered"]
    assert gathered == ranks[1]["gathered"]
    mine = [rollout for found in ranks for rollout in found["mine"]]
    assert [replace(rollout, group=0) for rollout in gathered] == [replace(rollout, group=0) for rollout in mine]
    groups = [rollout.group for rollout in gathered]
    assert groups[0] == groups[1] != groups[2]
    assert groups[3] == groups[4]
    assert groups[3] not in groups[:3]
    for found in ranks:
        assert [replace(r, group=4) for r in found["gathered from one"]] == ranks[1]["mine"]


def test_no_rank_captures_again_or_leaves_a_hook(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert not found["captured again"]
        assert found["eager runs"] == 0
        assert found["hooks"] == 0


def test_without_graphs_the_bits_are_the_same(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert torch.equal(found["eager"][0][1], found["paired"][0][1])
        assert found["eager"][1][0]["policy/ratio"] == 1.0
        assert found["eager tokens"] == ranks[0]["eager tokens"]
