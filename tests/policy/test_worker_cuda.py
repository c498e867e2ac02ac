"""The worker on a GPU: CUDA graphs, bf16, flash attention, pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.checkpoint.keep import Checkpoints
from rollgraph.graph import GraphError
from rollgraph.inference import SamplingParams
from rollgraph.model import Architecture, Decoder
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import Limits, PolicyWorker
from rollgraph.rl.algorithms import Algorithm, load_algorithm
from rollgraph.types import Batch, Rollout, Sample
from tests.policy.small_worker import sample_rollouts

pytestmark = pytest.mark.gpu

SMALL = Architecture("qwen2", vocabulary=200, hidden=64, mlp=128, layers=3, heads=4, kv_heads=2, head_dim=16)
LIMITS = Limits(max_length=64, rows=16, token_buckets=(128, 512), cache_bytes=1 << 21, prefill_tokens=64)


def make_worker(
    algorithm: Algorithm, *, location: str = "device", checkpointing: int = 0, **options: Any
) -> PolicyWorker:
    torch.manual_seed(0)
    model = Decoder(SMALL, checkpointing=checkpointing)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    worker = PolicyWorker(
        model.to("cuda:0", torch.bfloat16),
        None,
        World(0, 1, "cuda:0"),
        LIMITS,
        sampling=SamplingParams(max_tokens=24),
        optimizer={"lr": 1e-2},
        verify_weights=True,
        **options,
    )
    worker.weights.save("reference", location)  # type: ignore[arg-type]
    worker.capture_all({"policy": (algorithm.loss, algorithm.needs_entropy)})
    return worker


@pytest.fixture
def make() -> Iterator[Callable[..., PolicyWorker]]:
    workers: list[PolicyWorker] = []

    def make(algorithm: Algorithm | None = None, **options: Any) -> PolicyWorker:
        workers.append(make_worker(algorithm or GRPO, **options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


GRPO = load_algorithm("grpo", {"kl_coef": 0.04})


def roll_out(worker: PolicyWorker, seed: str, count: int = 24) -> list[Rollout]:
    return sample_rollouts(worker, count, seed, 24, [tuple(range(first, 9)) for first in range(1, 5)])


def bare(rollout: Rollout) -> Sample:
    zeros = [0.0] * len(rollout.tokens)
    return Sample(rollout.prompt.tokens, rollout.tokens, zeros, zeros, rollout.logprobs)


def step(worker: PolicyWorker, algorithm: Algorithm, seed: str) -> dict[str, float]:
    rollouts = roll_out(worker, seed)
    worker.score(rollouts)
    return worker.train(algorithm.make_batch(rollouts), score_old=algorithm.needs_old_logprobs)


def parameters(worker: PolicyWorker) -> Tensor:
    worker.sharded.require_full_parameters("gather")
    return torch.cat([parameter.detach().flatten() for parameter in worker.model.parameters()]).clone()


def test_graphs_train_like_eager_up_to_the_noise_of_eager(make: Callable[..., PolicyWorker]) -> None:
    graphs, eager, eager_again = make(), make(backend="eager"), make(backend="eager")
    rollouts = roll_out(graphs, "a")
    graphs.score(rollouts)
    batch = GRPO.make_batch(rollouts, minibatches=2)
    metrics = [worker.train(Batch(batch.minibatches)) for worker in (graphs, eager, eager_again)]
    after = [parameters(worker).float() for worker in (graphs, eager, eager_again)]
    noise = (after[1] - after[2]).abs().max().item()
    assert (after[0] - after[1]).abs().max().item() <= 2 * noise + 2**-8 * 1e-2
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], abs=1e-4)
    assert graphs.pool.report().eager_runs == 0
    assert not torch.equal(after[0], parameters(make()).float())  # training changed the weights


def test_alternating_phases_capture_nothing_and_need_no_new_memory(make: Callable[..., PolicyWorker]) -> None:
    worker = make()
    captures, memory = worker.pool.report().captures, 0
    for round_ in range(12):
        metrics = step(worker, GRPO, str(round_))
        assert metrics["policy/token_mult_prob_error"] < 1.1
        if round_ == 1:
            memory = torch.cuda.memory_allocated()
    report = worker.pool.report()
    assert (report.captures, report.eager_runs) == (captures, 0)
    assert torch.cuda.memory_allocated() == memory


def test_before_updates_the_ratio_is_near_one_and_the_reference_equal(
    make: Callable[..., PolicyWorker],
) -> None:
    worker = make()
    rollouts = roll_out(worker, "a")
    worker.score(rollouts)
    for rollout, logprobs in zip(rollouts, worker.logprobs([bare(rollout) for rollout in rollouts]), strict=True):
        assert rollout.reference_logprobs == logprobs  # the reference equals the policy: same graph, same numbers
    metrics = worker.train(GRPO.make_batch(rollouts))
    assert abs(metrics["policy/ratio"] - 1) < 0.02


@pytest.mark.parametrize("location", ["device", "host"])
def test_the_reference_scores_as_before_and_the_policy_is_restored(
    make: Callable[..., PolicyWorker], location: str
) -> None:
    worker = make(location=location)
    assert worker.weights.nbytes(location) > 0  # type: ignore[arg-type]
    rollouts = roll_out(worker, "a")
    samples = GRPO.make_batch(rollouts).samples
    before = worker.logprobs(samples)
    worker.score(rollouts)
    worker.train(GRPO.make_batch(rollouts))
    policy, learned = parameters(worker), worker.logprobs(samples)
    assert learned != before
    for _ in range(5):  # the host does not wait between the exchanges
        assert worker.logprobs(samples, "reference") == before
        assert worker.logprobs(samples) == learned
    with pytest.raises(ValueError, match="inside"), worker.weights.use("reference"):
        raise ValueError("inside")
    assert torch.equal(parameters(worker), policy)
    worker.weights.save("reference", location)  # type: ignore[arg-type]
    assert worker.logprobs(samples, "reference") == learned


@pytest.mark.parametrize("index", [0, 2])
def test_an_exchange_with_host_memory_that_fails_halfway_is_undone(
    make: Callable[..., PolicyWorker], index: int
) -> None:
    worker = make(location="host")
    policy = parameters(worker)
    slot = worker.weights._slots["reference"]
    index %= len(slot)
    whole = slot[index]
    slot[index] = torch.full((3,), 5.0, dtype=whole.dtype).pin_memory()
    with pytest.raises(RuntimeError), worker.weights.use("reference"):
        pytest.fail("the body ran with half of the weights")
    slot[index] = whole
    assert torch.equal(parameters(worker), policy)
    with worker.weights.use("reference"):
        assert torch.equal(parameters(worker), policy)  # the reference equals it


def test_another_slot_cannot_be_trained(make: Callable[..., PolicyWorker]) -> None:
    worker = make()
    rollouts = roll_out(worker, "a")
    worker.score(rollouts)
    batch = GRPO.make_batch(rollouts)
    with worker.weights.use("reference"), pytest.raises(GraphError, match="the weights in the model are 'reference'"):
        worker.train(batch)
    assert worker.train(batch)["optimizer/skipped_steps"] == 0


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo", "cispo", "sft"])
def test_every_algorithm_is_captured_and_trains(make: Callable[..., PolicyWorker], name: str) -> None:
    settings = {"grpo": {"kl_coef": 0.04, "entropy_coef": 0.01}, "dr_grpo": {"max_tokens": 24}}
    algorithm = load_algorithm(name, settings.get(name, {}))
    worker, eager = make(algorithm), make(algorithm, backend="eager")
    rollouts = roll_out(worker, "a")
    worker.score(rollouts)
    batch = algorithm.make_batch(rollouts)
    metrics, expected = worker.train(batch), eager.train(batch)
    assert metrics.keys() == expected.keys()
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-2, abs=1e-4)
    assert metrics["optimizer/grad_norm"] == pytest.approx(expected["optimizer/grad_norm"], rel=2e-2)
    assert worker.pool.report().eager_runs == 0


@pytest.mark.parametrize("scopes", [("layer",), ("attn", "mlp")])
def test_graphs_of_parts_train_like_one_graph_of_the_step(
    make: Callable[..., PolicyWorker], scopes: tuple[str, ...]
) -> None:
    whole, parts = make(), make(scopes=scopes)
    rollouts = roll_out(whole, "a")
    whole.score(rollouts)
    batch = GRPO.make_batch(rollouts)
    step_metrics, parts_metrics = whole.train(batch), parts.train(batch)
    assert parts_metrics["loss"] == pytest.approx(step_metrics["loss"], abs=1e-4)
    assert parts_metrics["optimizer/grad_norm"] == pytest.approx(step_metrics["optimizer/grad_norm"], rel=2e-2)
    assert parts.pool.report().eager_runs == 0
    for round_ in range(3):
        step(parts, GRPO, str(round_))
    assert parts.pool.report().eager_runs == 0


@pytest.mark.parametrize("scopes", [("step",), ("layer",), ("attn", "mlp"), ("attn",), ("mlp",)])
def test_recomputing_changes_no_bit_of_training(make: Callable[..., PolicyWorker], scopes: tuple[str, ...]) -> None:
    batch = None
    results = []
    for count in (0, 1, SMALL.layers):
        worker = make(scopes=scopes, checkpointing=count)
        if batch is None:
            rollouts = roll_out(worker, "a")
            worker.score(rollouts)
            batch = GRPO.make_batch(rollouts, minibatches=2)
        metrics = worker.train(Batch(batch.minibatches))
        assert worker.pool.report().eager_runs == 0
        results.append((metrics, parameters(worker)))
    for metrics, weights in results[1:]:
        assert metrics == results[0][0]
        assert torch.equal(weights, results[0][1])


@pytest.mark.parametrize("scopes", [("step",), ("layer",)])
def test_graphs_that_recompute_need_less_memory(scopes: tuple[str, ...]) -> None:
    """The pool of the training graphs, at a size at which activations matter."""
    wide = replace(SMALL, layers=8, hidden=256, mlp=1024)
    limits = Limits(max_length=64, rows=16, token_buckets=(4096,), cache_bytes=1 << 21, prefill_tokens=64)
    sizes = []
    for count in (0, 4, 8):
        model = Decoder(wide, checkpointing=count).to("cuda:0", torch.bfloat16)
        worker = PolicyWorker(
            model, None, World(0, 1, "cuda:0"), limits, sampling=SamplingParams(), optimizer={"lr": 1e-2}, scopes=scopes
        )
        worker.capture_all({"policy": (GRPO.loss, False)}, generates=False)
        sizes.append(worker.pool.report().pool_bytes)
        worker.close()
    layer = 4096 * 4 * wide.mlp * 2  # less than the activations of a layer: gate, up, their product, and more
    assert sizes[0] - sizes[1] > 3 * layer
    assert sizes[1] - sizes[2] > 2 * layer


def test_a_checkpoint_restores_everything(make: Callable[..., PolicyWorker], tmp_path: Path) -> None:
    worker, restored = make(), make()
    step(worker, GRPO, "a")
    with worker.phases.enter("save"):
        checkpoints = Checkpoints(tmp_path, worker.sharded, worker.optimizer)
        checkpoints.save(0, {})
    saved = parameters(worker)
    step(worker, GRPO, "b")  # while it is written
    checkpoints.close()
    reader = Checkpoints(tmp_path, restored.sharded, restored.optimizer)
    latest = reader.latest()
    assert latest is not None
    reader.load(latest)
    reader.close()
    assert torch.equal(parameters(restored), saved)
    rollouts = roll_out(restored, "b")
    restored.score(rollouts)
    assert [r.tokens for r in rollouts] == [r.tokens for r in roll_out_at(worker, saved, "b")]


def roll_out_at(worker: PolicyWorker, values: Tensor, seed: str) -> list[Rollout]:
    """Sample rollouts with these weights in the model."""
    offset = 0
    with torch.no_grad():
        for parameter in worker.model.parameters():
            parameter.copy_(values[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
    return roll_out(worker, seed)
