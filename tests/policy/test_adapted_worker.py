"""A worker with adapters: all scopes learn the same, no graph runs with a stale copy, and the base stays unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.graph import GraphError
from rollgraph.model.lora import AdapterSpec
from rollgraph.model.weights.hf import parameter_views
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import PolicyWorker
from rollgraph.policy.weights import SlotError
from rollgraph.types import Batch, Sample
from tests.parallel.worlds import run_world
from tests.policy.small_worker import (
    ALONE,
    LIMITS,
    assert_equal_up_to_rounding,
    captured_again,
    gradient,
    gradient_pieces,
    join,
    make_batch,
    make_model,
    make_samples,
    make_worker,
    parameters,
)

SPEC = AdapterSpec(rank=3, alpha=3.0)
ONE_SIZE = replace(LIMITS, token_buckets=(96,))
SAMPLES = make_samples(4, seed=9)


def make(world: World = ALONE, spec: AdapterSpec = SPEC, **options: Any) -> PolicyWorker:
    return make_worker(world, limits=ONE_SIZE, adapter=spec, **options)


@pytest.fixture(scope="module")
def shared() -> Iterator[PolicyWorker]:
    worker = make()
    yield worker
    worker.close()


@pytest.fixture
def worker(shared: PolicyWorker) -> Iterator[PolicyWorker]:
    """A captured worker. After each test it is idle, its adapters are on, and nothing was captured again."""
    yield shared
    adapters = shared.model.adapters
    assert adapters is not None
    assert adapters.enabled
    assert adapters.scale == SPEC.scale
    assert shared.phases.current == "idle"
    assert not captured_again(shared)


def test_sampled_logprobs_equal_those_of_training(worker: PolicyWorker) -> None:
    """Before and after an update; `test_exactness.py` has more shapes."""
    for seed in ("a", "b"):
        requests = [([1, 2, 3 + key], key) for key in range(6)]
        samples = []
        for (prompt, _), turn in zip(requests, worker.generate(requests, seed=seed), strict=True):
            ones = [1.0] * len(turn.tokens)
            samples.append(Sample(prompt, turn.tokens, ones, ones, turn.logprobs, None, turn.logprobs))
        metrics = worker.train(Batch([samples]))
        assert metrics["policy/token_mult_prob_error_max"] == 1.0


def test_the_reference_is_the_base_before_and_after_updates(worker: PolicyWorker) -> None:
    base = worker.logprobs(SAMPLES, "reference")
    assert base != worker.logprobs(SAMPLES)
    base_weights = [view.clone() for view in parameter_views(worker.model).values()]
    before = parameters(worker)
    worker.train(make_batch(2, 2))
    assert not torch.equal(parameters(worker), before)
    assert worker.logprobs(SAMPLES, "reference") == base
    for view, kept in zip(parameter_views(worker.model).values(), base_weights, strict=True):
        assert torch.equal(view, kept)
    for view, drawn in zip(base_weights, parameter_views(make_model()).values(), strict=True):
        assert torch.equal(view, drawn)


def test_adapters_have_slots_like_other_weights(worker: PolicyWorker) -> None:
    worker.weights.save("start")
    at_start = worker.logprobs(SAMPLES)
    worker.train(make_batch(1, 3, seed=4))
    now = worker.logprobs(SAMPLES)
    assert now != at_start
    assert worker.logprobs(SAMPLES, "start") == at_start
    assert worker.logprobs(SAMPLES) == now
    worker.weights.drop("start")


def test_nothing_runs_with_a_stale_copy(worker: PolicyWorker) -> None:
    first = next(worker.model.parameters())
    flat = worker.sharded.flat.buckets[0].parameters
    for change in (lambda: first.mul_(0.5), lambda: flat.mul_(0.5)):
        with worker.phases.enter("generate"):
            with torch.no_grad():
                change()
            with pytest.raises(GraphError, match="refresh"):
                worker.generate([([1, 2], 0)], seed="a")
        assert worker.engine is not None
        worker.engine.reset()
        assert worker.generate([([1, 2], 0)], seed="a")  # entering the phase refreshes it


def test_a_failure_without_adapters_switches_them_on_again(
    worker: PolicyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        assert worker.model.adapters is not None
        assert not worker.model.adapters.enabled
        raise KeyboardInterrupt

    before = worker.logprobs(SAMPLES)
    monkeypatch.setattr(worker.train_graphs, "score", fail)
    with pytest.raises(KeyboardInterrupt):
        worker.logprobs(SAMPLES, "reference")
    monkeypatch.undo()
    assert worker.logprobs(SAMPLES) == before


def test_training_is_refused_while_adapters_are_off(worker: PolicyWorker) -> None:
    with worker.adapted.use("reference"), pytest.raises(GraphError, match="switched off"):
        worker.train(make_batch(1, 1))


def test_only_the_base_scores_while_adapters_are_off(worker: PolicyWorker) -> None:
    """All of them would be the base."""
    worker.weights.save("start")
    with worker.adapted.use("reference"):
        base = worker.logprobs(SAMPLES, "reference")
        for name in ("policy", "start"):
            with pytest.raises(SlotError, match="switched off"):
                worker.logprobs(SAMPLES, name)
    with worker.adapted.use("start"):
        assert worker.logprobs(SAMPLES, "reference") == base
    for name in ("policy", "start"):
        with pytest.raises(SlotError, match="a slot already"):
            worker.adapted.name_base(name)
    worker.weights.drop("start")


def test_adapters_stay_off_until_the_last_use_of_the_base_ends(worker: PolicyWorker) -> None:
    adapters = worker.model.adapters
    assert adapters is not None
    first, second = ExitStack(), ExitStack()
    first.enter_context(adapters.off())
    second.enter_context(adapters.off())
    first.close()
    assert adapters.scale == 0
    second.close()
    assert adapters.scale == SPEC.scale


def first_gradient(spec: AdapterSpec, **options: Any) -> Tensor:
    worker = make(spec=spec, **options)
    worker.train(make_batch(1, 6))
    result = gradient(worker)
    worker.close()
    return result


MLP_ONLY = replace(SPEC, targets=("down_proj",))


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        pytest.param(SPEC, {"scopes": ("layer",)}, id="layer"),
        pytest.param(MLP_ONLY, {"scopes": ("attn", "mlp")}, id="nothing to train in the first attention"),
        pytest.param(MLP_ONLY, {"scopes": ("layer",)}, id="only the update has a gradient"),
        pytest.param(SPEC, {"scopes": ("attn", "mlp")}, id="attn, mlp"),
        pytest.param(SPEC, {"backend": "eager"}, id="eager"),
    ],
)
@pytest.mark.slow
def test_every_scope_learns_the_same(spec: AdapterSpec, options: dict[str, Any]) -> None:
    assert_equal_up_to_rounding(first_gradient(spec, **options), first_gradient(spec))


def on_ranks(world: World) -> dict[str, Any]:
    worker = make(world, scopes=("layer",), reduction="ordered")
    worker.train(make_batch(1, 6))
    results: dict[str, Any] = {"gradient": gradient_pieces(worker)}
    worker.train(make_batch(2, 4, seed=1))
    results |= {"base": worker.logprobs(SAMPLES, "reference"), "policy": worker.logprobs(SAMPLES)}
    turns = worker.generate([([1, 2], 0)], seed="a")
    results["turn"] = (list(turns[0].tokens), list(turns[0].logprobs))
    worker.close()
    return results


@pytest.mark.slow
@pytest.mark.multi
def test_two_ranks_learn_the_same_as_one(tmp_path: Path) -> None:
    one = on_ranks(ALONE)
    results = run_world(2, tmp_path, on_ranks)
    joined = join(*(rank["gradient"] for rank in results))
    assert_equal_up_to_rounding(joined, join(one["gradient"]))
    for rank in results:
        assert rank["base"] == one["base"]
        assert rank["policy"] == results[0]["policy"]
        assert rank["turn"] == results[0]["turn"]


@pytest.mark.parametrize("backend", ["eager", pytest.param("tape", marks=pytest.mark.slow)])
def test_only_training_drops_out_and_its_masks_depend_on_the_update(backend: Any) -> None:
    worker = make(spec=replace(SPEC, dropout=0.5), backend=backend)
    assert not worker.is_exact
    turn = worker.generate([([1, 2], 0)], seed="a")[0]
    zeros = [0.0] * len(turn.tokens)
    assert worker.logprobs([Sample([1, 2], turn.tokens, zeros, zeros, zeros)]) == [list(turn.logprobs)]

    def gradient_at(steps: int) -> Tensor:
        worker.optimizer.restart(0.0, None)
        worker.optimizer.steps = steps
        worker.train(make_batch(1, 6))
        return gradient(worker)

    first = gradient_at(0)
    assert not torch.equal(gradient_at(1), first)
    assert torch.equal(gradient_at(0), first)
    worker.close()


def test_dropout_is_refused_if_training_must_be_exact() -> None:
    with pytest.raises(ValueError, match="dropout"):
        make(spec=replace(SPEC, dropout=0.5), exact="must")
