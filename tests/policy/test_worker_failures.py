"""A failure in a worker does not affect its weights or its next step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.graph import CaptureError, GraphError
from rollgraph.inference import SamplingParams
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import PolicyWorker
from rollgraph.rl.losses import TokenStreams
from rollgraph.types import Batch, Prompt, Rollout, Sample
from tests.policy.small_worker import (
    ALGORITHM,
    ALONE,
    LIMITS,
    RATE,
    make_batch,
    make_model,
    make_samples,
    make_worker,
    parameters,
    reset,
)
from tests.policy.worker_fixtures import BREAKABLE, get, train_once, worker, workers

__all__ = ["get", "worker", "workers"]


@pytest.mark.parametrize("name", ["eager", "layer"])
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_failing_loss_leaves_the_weights_and_the_next_step_alone(
    get: Callable[..., PolicyWorker], name: str, calls: int
) -> None:
    worker, loss = get(name), BREAKABLE[name]
    batch = Batch([make_samples(6, seed, lengths=[35] * 6) for seed in range(2)])  # three microbatches each
    expected = train_once(worker, batch)
    reset(worker)
    worker.train(Batch(batch.minibatches[:1]))
    after_one = parameters(worker)
    reset(worker)
    before = parameters(worker)
    loss.calls_left = calls
    with pytest.raises(ArithmeticError, match="the loss failed"):
        worker.train(batch)
    loss.calls_left = math.inf
    assert torch.equal(parameters(worker), after_one if calls == 3 else before)  # a whole minibatch or nothing
    assert torch.equal(train_once(worker, batch), expected)


@pytest.mark.parametrize("name", ["layer", "eager"])
def test_a_backward_that_fails_at_the_end_leaves_no_gradient(get: Callable[..., PolicyWorker], name: str) -> None:
    """Backward reaches the embedding last, when the gradients of all layers exist."""
    worker = get(name)
    batch = make_batch(1, 9)
    expected = train_once(worker, batch)
    reset(worker)
    before = parameters(worker)

    def fail(_: Tensor) -> None:
        raise ArithmeticError("the backward failed")

    handle = worker.model.embed_tokens.weight.register_hook(fail)
    for _ in range(3):
        with pytest.raises(ArithmeticError, match="the backward failed"):
            worker.train(batch)
        assert torch.equal(parameters(worker), before)
    handle.remove()
    worker.train(batch)
    assert torch.equal(parameters(worker), expected)


@pytest.mark.parametrize("name", ["graph", "eager", "layer"])
def test_a_step_with_a_nan_gradient_is_skipped_and_counted(get: Callable[..., PolicyWorker], name: str) -> None:
    worker = get(name)
    good, bad = make_batch(1, 5), make_batch(1, 5, seed=1)
    expected = train_once(worker, good)
    bad.samples[2].advantages = [math.nan] * len(bad.samples[2].tokens)
    reset(worker)
    before = parameters(worker)
    metrics = worker.train(bad)
    assert metrics["optimizer/skipped_steps"] == 1
    assert math.isnan(metrics["optimizer/grad_norm"])
    assert torch.equal(parameters(worker), before)
    metrics = worker.train(good)
    assert metrics["optimizer/skipped_steps"] == 1
    assert torch.equal(parameters(worker), expected)  # the moments have not changed either


@pytest.mark.parametrize("name", ["graph", "eager", "layer"])
def test_another_slot_cannot_be_trained(get: Callable[..., PolicyWorker], name: str) -> None:
    worker = get(name)
    batch = make_batch(1, 5)
    expected = train_once(worker, batch)
    train_once(worker, make_batch(1, 5, seed=1))  # so that the policy differs from the reference
    before = parameters(worker)
    with worker.weights.use("reference"):
        inside = parameters(worker)
        assert not torch.equal(inside, before)
        with pytest.raises(GraphError, match="the weights in the model are 'reference'"):
            worker.train(batch)
        assert torch.equal(parameters(worker), inside)
    assert torch.equal(parameters(worker), before)
    assert torch.equal(train_once(worker, batch), expected)


def test_phases_cannot_be_nested(worker: PolicyWorker) -> None:
    batch, before = make_batch(1, 4), parameters(worker)
    with worker.phases.enter("train"):
        with pytest.raises(RuntimeError, match="cannot generate during train"):
            worker.generate([([1], 0)], seed="s")
        with pytest.raises(RuntimeError, match="cannot score during train"):
            worker.train(batch, score_old=True)
    with worker.phases.enter("score"):
        worker.logprobs(batch.samples)
        with pytest.raises(RuntimeError, match="cannot train during score"):
            worker.train(batch)
        assert not worker.sharded.hooks.modules
    assert worker.sharded.hooks.modules
    assert torch.equal(parameters(worker), before)


def test_a_reference_that_was_saved_after_the_capture_is_refused() -> None:
    """The captured loss has no KL term, so training on samples with a reference would silently ignore it."""
    worker = make_worker(backend="eager", reference=False)
    rollout = Rollout(Prompt(0, (1, 2), ""), [3, 4], [True] * 2, [-3.0] * 2, reward=1.0)
    assert "policy/kl" not in worker.train(ALGORITHM.make_batch([rollout]))
    worker.weights.save("reference")
    worker.score([rollout])
    with pytest.raises(ValueError, match=r"save\(\) it before capture_all"):
        worker.train(ALGORITHM.make_batch([rollout]))
    worker.close()


def test_samples_that_do_not_fit_are_refused(worker: PolicyWorker) -> None:
    before = parameters(worker)
    with pytest.raises(ValueError, match="41 tokens is longer than the 40"):
        worker.train(Batch([make_samples(2, lengths=[5, 37])]))
    with pytest.raises(ValueError, match="104 tokens does not fit a microbatch of 96"):
        worker.train(Batch([make_samples(2, lengths=[5, 100])]))
    assert torch.equal(parameters(worker), before)


@pytest.mark.parametrize("minibatches", [[], [[]], [make_samples(2), []]], ids=["no minibatch", "no sample", "one"])
def test_an_empty_batch_is_refused(worker: PolicyWorker, minibatches: list[list[Sample]]) -> None:
    before = parameters(worker)
    with pytest.raises(ValueError, match="nothing to train on"):
        worker.train(Batch(minibatches))
    assert torch.equal(parameters(worker), before)
    assert worker.optimizer.steps == 0


def test_a_loss_that_cannot_be_captured_changes_nothing() -> None:
    def reads_a_value(streams: TokenStreams) -> tuple[Tensor, dict[str, Tensor]]:
        return ALGORITHM.loss(replace(streams, weights=streams.weights * streams.logprobs.sum().item()))

    sampling = SamplingParams(max_tokens=12)
    worker = PolicyWorker(make_model(), None, ALONE, LIMITS, sampling=sampling, optimizer={"lr": RATE}, warmup=1)
    before = parameters(worker)
    worker.capture_all({"policy": (reads_a_value, False)})
    with pytest.raises(CaptureError, match="item"):
        worker.train(Batch([[replace(sample, reference_logprobs=None) for sample in make_samples(2)]]))
    assert worker.phases.current == "idle"
    assert torch.equal(parameters(worker), before)
    assert all(not shard.any() for shard in worker.sharded.gradients.shards())
    worker.close()
    assert not any(module._forward_pre_hooks for module in worker.model.modules())


def test_a_scope_that_cannot_work_on_several_ranks_is_refused() -> None:
    settings: dict[str, Any] = {"sampling": SamplingParams(), "optimizer": {"lr": RATE}}
    with pytest.raises(ValueError, match="communication of several ranks: use scope layer"):
        PolicyWorker(make_model(), None, World(0, 2, "cpu"), LIMITS, **settings)
