"""Microbatches with logits for half of their tokens give the same log-probabilities and gradients as with all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.graph import GraphPool
from rollgraph.model import logprobs as model_logprobs
from rollgraph.model.lora import AdapterSpec
from rollgraph.parallel.ranks.world import World
from rollgraph.policy import Limits, PolicyWorker
from rollgraph.policy.microbatch import PackedArrays, TokenBucket
from rollgraph.policy.score_graphs import CaptureSettings, ScoreGraphs
from rollgraph.rl.losses import TokenStreams
from rollgraph.types import Batch, Sample
from tests.parallel.worlds import run_world
from tests.policy.small_worker import (
    LIMITS,
    assert_equal_up_to_rounding,
    captured_again,
    gradient,
    gradient_pieces,
    join,
    make_samples,
    make_worker,
    parameters,
)
from tests.policy.test_exactness import ARCHITECTURES, check_agreement, decoder, worker_of
from tests.policy.test_tensor_parallel_worker import make as make_tensor_parallel

LONG = replace(LIMITS, half_logits=True)
HALF, WHOLE = TokenBucket(96, 48), TokenBucket(96, 96)
Pieces = dict[tuple[str, int], Tensor]


def long_samples(*completions: int, prompt: int = 10, seed: int = 0) -> list[Sample]:
    """Samples with completions of these lengths and different prompts."""
    generator = torch.Generator().manual_seed(seed)
    samples = make_samples(len(completions), seed, lengths=list(completions))
    return [replace(one, prompt=torch.randint(40, (prompt,), generator=generator).tolist()) for one in samples]


def entries_of(samples: Sequence[Sample], arrays: PackedArrays) -> Tensor:
    """The entries that predict the tokens of samples."""
    entries: list[int] = []
    for sample, start in zip(samples, arrays.starts, strict=True):
        entries += range(start, start + len(sample.tokens))
    return torch.tensor(entries)


# -- the same numbers ------------------------------------------------------------------------------


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute logits in chunks of at most 90 rows, with the models below."""
    monkeypatch.setattr(model_logprobs, "CHUNK_ELEMENTS", 90 * 96)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "whole_logits", [pytest.param(True, id="whole"), pytest.param(False, id="chunks", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("name", "dtype"), [("a window", torch.float32), ("head norms", torch.bfloat16)])
def test_logit_rows_have_the_same_bits_in_all_phases(name: str, dtype: torch.dtype, whole_logits: bool) -> None:
    """In generation, in scoring with all logits and with half of them, and in training."""
    architecture = ARCHITECTURES[name]
    worker = worker_of(architecture, "cpu", dtype, half_logits=True, whole_logits=whole_logits)
    generator = torch.Generator().manual_seed(1)
    requests = []
    for key, length in enumerate((120, 110, 90, 90)):  # with completions of up to 24 tokens: more than 256 tokens
        if key < 3:
            prompt = torch.randint(architecture.vocabulary, (length,), generator=generator).tolist()
        requests.append((prompt, key))
    for step in range(2):
        samples = check_agreement(worker, requests, f"step {step}")
        ((indices, bucket),) = worker.limits.plan(samples, worker.limits.buckets)
        assert bucket == (512, 256)
        ordered = [samples[index] for index in indices]
        half, whole = (worker.limits.collate(ordered, TokenBucket(512, logits)) for logits in (256, 512))
        with worker.phases.enter("score"):
            scored = worker.train_graphs.score(half).clone()
            expected = worker.train_graphs.score(whole).clone()
        assert half.logit_rows is not None
        rows = torch.from_numpy(half.logit_rows)
        assert set(entries_of(ordered, half).tolist()) <= set(rows.tolist())
        assert torch.equal(scored[rows], expected[rows])
        assert scored.count_nonzero() == expected[rows].count_nonzero()  # all others are 0
        metrics = worker.train(Batch([samples]))
        assert metrics["policy/token_mult_prob_error"] == 1.0
        assert metrics["policy/token_mult_prob_error_max"] == 1.0
    trained = {graph.name: graph for graph in worker.pool.report().graphs if graph.name.startswith("train")}
    assert list(trained) == ["train 512, logits of 256"]
    assert trained["train 512, logits of 256"].replays == 1  # the first of two steps is its recording
    worker.close()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("whole_logits", [True, False], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", ["groups of 7, a bias", "a window"])  # the first ties embedding and head
def test_gradients_equal_those_of_all_logits(name: str, whole_logits: bool) -> None:
    """In float64. The two ways add up the same numbers, and zeros, in another order.

    A sum of n numbers is off by at most n x 1.1e-16 of the sum of their magnitudes. With n below 1,000 in each of the
    few sums that a gradient goes through, that is far below 1e-10 of the largest gradient; a row that is missing or in
    the wrong place would change it by about 1/100.
    """
    model = decoder(ARCHITECTURES[name], "cpu").double()
    limits = Limits(max_length=160, token_buckets=(512,), half_logits=True)
    graphs = ScoreGraphs(model, limits, CaptureSettings(GraphPool(), "eager"), temperature=0.7)
    samples = [*long_samples(20, 30, prompt=100), *[replace(s, prompt=[7] * 90) for s in long_samples(9, 40, 17)]]
    generator = torch.Generator().manual_seed(0)
    weights = torch.zeros(2, 512, dtype=torch.float64)
    results = []
    for bucket in graphs.buckets:
        arrays = limits.collate(samples, bucket)
        if not results:
            entries = entries_of(samples, arrays)
            weights[:, entries] = torch.randn(2, len(entries), dtype=torch.float64, generator=generator)
        logprobs, entropy = graphs._logprobs(
            model, arrays.to(torch.device("cpu")), needs_entropy=True, whole_logits=whole_logits
        )
        assert entropy is not None
        values = torch.stack((logprobs, entropy))
        (weights * values).sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append((values.detach()[:, entries], gradients))
        model.zero_grad(set_to_none=True)
    (half, half_gradients), (whole, gradients) = results
    torch.testing.assert_close(half, whole, rtol=0, atol=1e-10)
    for name, expected in gradients.items():
        actual = half_gradients[name]
        assert actual is not None
        assert expected is not None
        assert expected.abs().max() > 0
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10 * expected.abs().max().item())


def with_entropy(streams: TokenStreams) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that does not mask tokens without weight first."""
    assert streams.entropy is not None
    ratio = (streams.logprobs - streams.old_logprobs).exp()
    loss = -(streams.weights * (ratio * streams.advantages + 0.1 * streams.entropy)).sum()
    return loss, {
        "loss": loss.detach().clone(),
        "weight": streams.weights.sum(),
        "entropy": (streams.weights * streams.entropy).sum(),
    }


def train_once(limits: Limits, samples: list[Sample], **options: Any) -> tuple[dict[str, float], Tensor]:
    """The metrics of one update, and its gradient."""
    worker = make_worker(limits=limits, **options)
    metrics = worker.train(Batch([samples]))
    assert not captured_again(worker)
    assert worker.pool.report().eager_runs == 0
    result = gradient(worker)
    worker.close()
    return metrics, result


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="step"),
        pytest.param({"scopes": ("layer",)}, id="layer", marks=pytest.mark.slow),
        pytest.param({"adapter": AdapterSpec(rank=2)}, id="adapters", marks=pytest.mark.slow),
        pytest.param({"loss": with_entropy, "needs_entropy": True}, id="entropy"),
    ],
)
def test_a_worker_learns_the_same_as_with_all_logits(options: dict[str, Any]) -> None:
    samples = long_samples(12, 9, 14, 10)
    half, half_gradient = train_once(LONG, samples, **options)
    whole, whole_gradient = train_once(LIMITS, samples, **options)
    assert half.keys() == whole.keys()
    for name, value in whole.items():
        assert half[name] == pytest.approx(value, abs=1e-6)
    assert_equal_up_to_rounding(half_gradient, whole_gradient)


def test_tape_eager_and_layers_have_the_same_bits() -> None:
    samples = long_samples(12, 9, 14, 10)
    results = []
    for options in ({}, {"backend": "eager"}, {"scopes": ("attn", "mlp")}):
        worker = make_worker(limits=LONG, **options)
        results.append((worker.train(Batch([samples])), parameters(worker)))
        worker.close()
    (metrics, trained), *others = results
    for other_metrics, other_trained in others:
        assert other_metrics == metrics
        assert torch.equal(other_trained, trained)


# -- choice of microbatches -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker() -> Iterator[PolicyWorker]:
    half_worker = make_worker(limits=LONG, entropies=True)
    yield half_worker
    half_worker.close()


def test_half_of_the_logits_are_used_if_they_are_enough(worker: PolicyWorker) -> None:
    def planned(*completions: int) -> list[TokenBucket]:
        return [bucket for _, bucket in worker.limits.plan(long_samples(*completions), worker.limits.buckets)]

    assert planned(12, 12, 12, 12) == [HALF]  # 48 of 88 tokens
    assert planned(12, 12, 12, 13) == [WHOLE]
    assert planned(19, 9) == [TokenBucket(48, 48)]  # a smaller microbatch has all logits
    assert planned(19, 10) == [HALF]
    assert planned() == []


def test_without_half_logits_all_tokens_have_logits() -> None:
    assert LIMITS.buckets == (TokenBucket(48, 48), WHOLE)
    assert LONG.buckets == (TokenBucket(48, 48), HALF, WHOLE)
    assert replace(LONG, max_length=1, token_buckets=(1,)).buckets == (TokenBucket(1, 1),)  # nothing to halve


def test_a_graph_is_captured_when_its_size_is_first_needed() -> None:
    worker = make_worker(limits=LONG, entropies=True)
    assert not worker.pool.report().graphs
    sizes = {"96, logits of 48": (12, 12, 12, 12), "96": (12, 12, 12, 13), "48": (19, 9)}
    for name, completions in sizes.items():
        samples = long_samples(*completions)
        worker.logprobs(samples)
        assert worker.pool.report().graphs[-1].name == f"score {name}"
        worker.train(Batch([samples]))
        assert worker.pool.report().graphs[-1].name == f"train {name}"
    worker.logprobs_and_entropies(samples)
    assert worker.pool.report().graphs[-1].name == "score 96, entropy"
    assert not captured_again(worker)
    worker.close()


def test_scoring_with_entropies_uses_all_logits(worker: PolicyWorker) -> None:
    samples = long_samples(12, 9, 14, 10)
    both = worker.logprobs_and_entropies(samples)
    assert [logprobs for logprobs, _ in both] == worker.logprobs(samples)
    assert all(min(entropies) > 0 for _, entropies in both)


def test_samples_without_tokens_have_nothing_to_score_or_learn(worker: PolicyWorker) -> None:
    empty = [replace(one, prompt=[1, 2, 3] * 10 + [index]) for index, one in enumerate(long_samples(0, 0, 0))]
    assert [bucket for _, bucket in worker.limits.plan(empty, worker.limits.buckets)] == [HALF]
    assert worker.logprobs(empty) == [[], [], []]
    with worker.phases.enter("train"):
        worker.train_graphs.train("policy", worker.limits.collate(empty, HALF), last=True)
        shards = worker.sharded.gradients.shards()
        assert shards
        assert all(torch.equal(shard, torch.zeros_like(shard)) for shard in shards)


def test_more_tokens_than_half_of_the_logits_are_refused(worker: PolicyWorker) -> None:
    with pytest.raises(ValueError, match="samples of 49 tokens do not fit a microbatch with the logits of 48"):
        worker.limits.collate(long_samples(12, 12, 12, 13), HALF)


# -- several ranks ---------------------------------------------------------------------------------


def update_of_rank(world: World) -> tuple[dict[str, float], Pieces, int]:
    limits = replace(LONG, token_buckets=(48,))
    worker = make_worker(world, limits=limits, scopes=("layer",), reduction="ordered")
    metrics = worker.train(Batch([long_samples(6, 7, 5, prompt=20)]))  # two microbatches on one rank, one on the other
    results = metrics, gradient_pieces(worker), worker.pool.report().eager_runs
    worker.close()
    return results


@pytest.mark.multi
@pytest.mark.slow
def test_ranks_with_fewer_microbatches_run_padding(tmp_path: Path) -> None:
    results = run_world(2, tmp_path, update_of_rank)
    assert [eager for *_, eager in results] == [0, 0]
    alone, expected = train_once(replace(LIMITS, token_buckets=(48,)), long_samples(6, 7, 5, prompt=20))
    assert_equal_up_to_rounding(join(*(pieces for _, pieces, _ in results)), expected)
    assert results[0][0]["loss"] == pytest.approx(alone["loss"], abs=1e-6)


def tensor_parallel_update(world: World) -> tuple[list[list[float]], dict[str, float], dict[str, int]]:
    """Two tensor parallel ranks, each with the full head: scores, metrics, and the calls of each graph."""
    worker = make_tensor_parallel(world, 2, limits=LONG)
    samples = long_samples(12, 9, 14, 10)
    scored = worker.logprobs(samples)
    metrics = worker.train(Batch([samples]))
    calls = {graph.name: graph.captures + graph.replays for graph in worker.pool.report().graphs}
    worker.close()
    return scored, metrics, calls


@pytest.mark.multi
@pytest.mark.slow
def test_tensor_parallel_ranks_learn_the_same(tmp_path: Path, worker: PolicyWorker) -> None:
    results = run_world(2, tmp_path, tensor_parallel_update)
    expected = worker.logprobs(long_samples(12, 9, 14, 10))
    metrics, _ = train_once(LONG, long_samples(12, 9, 14, 10))
    for scored, rank_metrics, calls in results:
        for one, other in zip(scored, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-5)
        assert rank_metrics["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
        assert rank_metrics["optimizer/grad_norm"] == pytest.approx(metrics["optimizer/grad_norm"], rel=1e-5)
        assert calls["score 96, logits of 48"] == calls["train 96, logits of 48"] == 1
