"""Training equals a plain loop, with any scope and backend, and captures nothing on the way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.parallel.optim.adamw import ParameterState
from rollgraph.policy import PolicyWorker
from rollgraph.types import Batch
from tests.policy.small_worker import (
    ALGORITHM,
    DECAY,
    LIMITS,
    RATE,
    TINY,
    assert_equal_up_to_rounding,
    captured_again,
    gradient,
    make_batch,
    make_model,
    make_samples,
    make_worker,
    parameters,
    reset,
    sample_rollouts,
)
from tests.policy.worker_fixtures import get, plain_loss, worker, workers

__all__ = ["get", "worker", "workers"]


def plain_gradient(weights: dict[str, Tensor], batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The loss and its gradient at these weights, computed sample by sample and returned in float64."""
    model = make_model().to(dtype)
    model.load_state_dict(weights)
    loss = torch.stack([plain_loss(model, sample) for sample in batch.samples]).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach().double(), torch.cat([gradient.flatten() for gradient in gradients]).double()


def in_order(worker: PolicyWorker, values: Callable[[ParameterState], Tensor]) -> Tensor:
    """A value of the optimizer for each element, in the order of `parameters()`, in float64."""
    by_name = {
        piece.parameter.name: values(piece).detach().double().flatten() for piece in worker.optimizer.parameter_states
    }
    return torch.cat([by_name[name] for name, _ in worker.model.named_parameters()])


def moments(worker: PolicyWorker) -> list[Tensor]:
    return [in_order(worker, lambda piece, name=name: piece.state[name]) for name in ("exp_avg", "exp_avg_sq")]


def largest(values: Tensor) -> float:
    return float(values.abs().max())


@pytest.mark.parametrize("prompts", [None, 2], ids=["separate prompts", "shared prompts"])
def test_training_equals_a_plain_loop(worker: PolicyWorker, prompts: int | None) -> None:
    """Compare each call, starting from the worker's current state, with the same step written out in float64.

    Adam divides a gradient by its own magnitude, so where the gradient is only rounding error, weights that were
    trained twice may differ by up to the learning rate. A single step can be compared: the gradient is as close to
    float64 as that of a plain loop in fp32, and the rest is one formula for each element.
    """
    matrices = in_order(worker, lambda piece: torch.full_like(piece.master, len(piece.parameter.shape) >= 2))
    fp32 = torch.finfo(torch.float32).eps
    for call in range(4):
        batch = make_batch(1, 5 + call, call)
        if prompts is not None:
            for index, sample in enumerate(batch.samples):
                sample.prompt = [3 + index % prompts, *range(call, call + 6)]
        before = {name: tensor.clone() for name, tensor in worker.model.state_dict().items()}
        weights = parameters(worker).double()
        first, second = (moment.clone() for moment in moments(worker))
        metrics = worker.train(batch)

        loss, gradient = plain_gradient(before, batch, torch.float64)
        rounded_loss, rounded = plain_gradient(before, batch, torch.float32)
        norm = gradient.norm()
        noise = 8 * max(largest(rounded - gradient), fp32 * largest(gradient))
        assert noise < 1e-4 * largest(gradient)  # otherwise the comparison would be meaningless
        loss_noise = 8 * max(largest(rounded_loss - loss), fp32)  # it is a sum of terms that add up to about one
        assert metrics["loss"] == pytest.approx(float(loss), rel=0, abs=loss_noise)
        assert metrics["optimizer/grad_norm"] == pytest.approx(float(norm), rel=0, abs=noise * math.sqrt(len(gradient)))

        clipped = gradient * min(1.0, 1.0 / (float(norm) + 1e-6))
        expected = 0.9 * first + 0.1 * clipped, 0.999 * second + 0.001 * clipped.square()
        first, second = moments(worker)
        torch.testing.assert_close(first, expected[0], rtol=0, atol=0.1 * noise + fp32)
        torch.testing.assert_close(second, expected[1], rtol=8 * fp32, atol=0.002 * noise)

        steps = call + 1
        update = (first / (1 - 0.9**steps)) / ((second / (1 - 0.999**steps)).sqrt() + 1e-8)
        stepped = weights * (1 - RATE * DECAY * matrices) - RATE * update
        sizes = weights.abs() + RATE * update.abs()
        assert bool(((parameters(worker) - stepped).abs() <= 8 * fp32 * sizes).all())
        assert largest(stepped - weights) > 0.3 * RATE


def test_graphs_and_eager_execution_give_the_same_bits(worker: PolicyWorker, get: Callable[..., PolicyWorker]) -> None:
    eager = get("eager")
    for call in range(3):
        batch = make_batch(2, 6, call)
        assert worker.train(batch, epochs=2, score_old=True) == eager.train(batch, epochs=2, score_old=True)
        assert torch.equal(parameters(worker), parameters(eager))
    left, right = sample_rollouts(worker, 5, "a"), sample_rollouts(eager, 5, "a")
    assert left == right


@pytest.mark.parametrize("name", ["graph", "layer"])
def test_many_calls_equal_one_with_many_minibatches(get: Callable[..., PolicyWorker], name: str) -> None:
    worker = get(name)
    batch = make_batch(4, 5)
    calls = [worker.train(Batch([minibatch])) for minibatch in batch.minibatches]
    after_calls = parameters(worker)
    reset(worker)
    together = worker.train(batch)
    assert torch.equal(parameters(worker), after_calls)
    for metric in ("loss", "optimizer/grad_norm", "loss/weight"):  # the mean over minibatches
        assert together[metric] == pytest.approx(sum(metrics[metric] for metrics in calls) / 4, rel=1e-6)
    assert together["tokens/train"] == sum(metrics["tokens/train"] for metrics in calls)
    reset(worker)
    for _ in range(2):
        for minibatch in batch.minibatches:
            worker.train(Batch([minibatch]))
    twice = parameters(worker)
    reset(worker)
    worker.train(batch, epochs=2)
    assert torch.equal(parameters(worker), twice)


@pytest.mark.parametrize(
    "scopes",
    [("layer",), ("attn", "mlp"), *(pytest.param((part,), marks=pytest.mark.slow) for part in ("attn", "mlp"))],
    ids="+".join,
)
def test_smaller_graphs_give_the_same_bits(worker: PolicyWorker, scopes: tuple[str, ...]) -> None:
    """With one token bucket, all of them sum in the same order."""
    parts = make_worker(scopes=scopes)
    batches = [Batch([make_samples(5, call, lengths=[14, 9, 15, 11, 15])]) for call in range(3)]  # 84 tokens
    for batch in batches:
        assert worker.train(batch) == parts.train(batch)
        assert torch.equal(parameters(worker), parameters(parts))
    assert sample_rollouts(worker, 3, "a") == sample_rollouts(parts, 3, "a")
    report = parts.pool.report()
    assert report.eager_runs == 0
    units = [graph for graph in report.graphs if graph.backward_replays]
    assert len(units) == 2 * len(scopes)
    assert all(graph.replays == graph.backward_replays == 3 for graph in units)
    parts.close()


def test_graphs_of_layers_train_like_a_graph_of_the_step(get: Callable[..., PolicyWorker]) -> None:
    step, layer = get("graph"), get("layer")
    for call in range(3):
        batch = make_batch(1, 9, call)
        reset(step)
        reset(layer)
        step_metrics, layer_metrics = step.train(batch, score_old=True), layer.train(batch, score_old=True)
        for name in step_metrics.keys() - {"tokens/padding"}:
            assert step_metrics[name] == pytest.approx(layer_metrics[name], abs=1e-6)
        assert_equal_up_to_rounding(gradient(step), gradient(layer))


def test_the_gradient_does_not_depend_on_the_microbatches() -> None:
    samples = make_samples(12, seed=3)
    results = []
    for buckets in ((24,), (48, 96), (256,)):
        limits = replace(LIMITS, max_length=24, token_buckets=buckets, tokens_per_sequence=4)
        worker = make_worker(backend="eager", limits=limits)
        metrics = worker.train(Batch([samples]))
        runs = sum(g.eager_runs.total() for g in worker.pool.report().graphs if g.name.startswith("train"))
        results.append((runs, metrics["loss"], gradient(worker)))
        worker.close()
    (many, loss, gradients), *others = results
    assert [many > 4, others[0][0] > 1, others[1][0] == 1] == [True] * 3
    for _, other_loss, other_gradients in others:
        assert other_loss == pytest.approx(loss, abs=1e-6)
        assert_equal_up_to_rounding(other_gradients, gradients)


@pytest.mark.parametrize("name", ["graph", "eager", "layer"])
def test_before_any_update_the_ratio_is_one_and_the_kl_is_zero(get: Callable[..., PolicyWorker], name: str) -> None:
    worker = get(name)
    rollouts = sample_rollouts(worker, 9, "a")
    worker.score(rollouts)
    metrics = worker.train(ALGORITHM.make_batch(rollouts), score_old=True)
    assert metrics["policy/ratio"] == 1.0
    assert metrics["policy/kl"] == 0.0
    assert metrics["policy/clipped_low"] == metrics["policy/clipped_high"] == 0.0
    assert abs(metrics["loss"]) < 1e-6  # the advantages of a group add up to zero
    assert metrics["optimizer/grad_norm"] > 0.01
    assert metrics["policy/token_mult_prob_error_max"] < 1 + 1e-5


def test_the_ratio_stays_one_with_a_learning_rate_of_zero(worker: PolicyWorker) -> None:
    reset(worker, rate=0.0)
    before = parameters(worker)
    batch = make_batch(3, 5)
    metrics = worker.train(batch, epochs=2, score_old=True)
    assert torch.equal(parameters(worker), before)
    assert metrics["policy/ratio"] == 1.0
    assert worker.train(batch)["policy/ratio"] == 1.0  # the samples keep their old log-probabilities


@pytest.mark.slow
def test_hundreds_of_steps_capture_nothing_and_leave_no_hook(worker: PolicyWorker) -> None:
    hooked = worker.sharded.hooks.modules
    addresses = [parameter.data_ptr() for parameter in worker.model.parameters()]
    for step in range(300):
        rollouts = sample_rollouts(worker, 4, str(step), max_tokens=2)
        worker.score(rollouts)
        metrics = worker.train(ALGORITHM.make_batch(rollouts, minibatches=1 + step % 2, seed=step))
        assert metrics["policy/token_mult_prob_error_max"] < 1 + 1e-4
        if step == 1:
            report = worker.pool.report()
    later = worker.pool.report()
    assert not captured_again(worker)
    assert later.eager_runs == 0
    assert later.pool_bytes == report.pool_bytes
    assert sum(g.replays for g in later.graphs if g.name.startswith("train")) >= 450
    assert worker.sharded.hooks.modules == hooked
    assert [parameter.data_ptr() for parameter in worker.model.parameters()] == addresses
    assert metrics["optimizer/skipped_steps"] == 0


@pytest.mark.parametrize(
    "options", [{}, {"scopes": ("layer",)}, {"backend": "eager", "scopes": ("attn", "mlp")}], ids=str
)
def test_close_restores_the_model(options: dict[str, Any]) -> None:
    worker = make_worker(**options)
    worker.train(make_batch(1, 3))
    worker.close()
    worker.close()
    model = worker.model
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not module._backward_hooks
        assert "forward" not in vars(module)
    assert not model._state_dict_pre_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not worker.pool.report().graphs
    torch.stack([plain_loss(model, sample) for sample in make_samples(2)]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())  # autograd keeps them again


@pytest.mark.slow
def test_whole_logits_and_chunks_give_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgraph.model.logprobs.CHUNK_ELEMENTS", 7 * TINY.vocabulary)
    after = []
    for whole in (True, False):
        worker = make_worker(limits=replace(LIMITS, whole_logits=whole))
        worker.train(make_batch(minibatches=1, each=6))
        after.append(gradient(worker))
        worker.close()
    assert_equal_up_to_rounding(*after)
