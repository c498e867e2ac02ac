"""One worker: generation and scoring agree, and both use the weights that it has just trained."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch

from rollgraph.inference import SamplingParams
from rollgraph.policy import PolicyWorker
from tests.policy.small_worker import (
    ALGORITHM,
    make_batch,
    make_model,
    make_samples,
    make_worker,
    parameters,
    reset,
    sample_rollouts,
)
from tests.policy.worker_fixtures import bare, flat, get, rollout_logprobs, worker, workers

__all__ = ["get", "worker", "workers"]


def test_scoring_gives_the_log_probabilities_of_the_rollout(worker: PolicyWorker) -> None:
    rollouts = sample_rollouts(worker, 7, "a")
    scored = flat(worker.logprobs([bare(rollout) for rollout in rollouts]))
    torch.testing.assert_close(scored, rollout_logprobs(rollouts), rtol=0, atol=1e-5)
    assert scored.std() > 0.5  # they differ, so an entry at the wrong index would show


def test_entropies_equal_those_of_the_categorical_distribution() -> None:
    worker = make_worker(entropies=True, temperature=0.7)
    samples = make_samples(7)  # more than one microbatch
    scores_and_entropies = worker.logprobs_and_entropies(samples)
    scored = flat(worker.logprobs(samples))
    torch.testing.assert_close(flat([logprobs for logprobs, _ in scores_and_entropies]), scored, rtol=0, atol=1e-5)
    model = make_model().double()
    for sample, (_, entropies) in zip(samples, scores_and_entropies, strict=True):
        ids = torch.tensor([*sample.prompt, *sample.tokens])
        cu_seqlens = torch.tensor([0, len(ids)], dtype=torch.int32)
        with torch.no_grad():
            hidden = model(ids, torch.arange(len(ids)), cu_seqlens, len(ids))[len(sample.prompt) - 1 : -1]
            expected = torch.distributions.Categorical(logits=model.logits(hidden) / 0.7).entropy()
        torch.testing.assert_close(torch.tensor(entropies, dtype=torch.float64), expected, rtol=1e-4, atol=1e-4)


def test_scoring_uses_the_sampling_temperature() -> None:
    cool = make_worker(scopes=("mlp",), temperature=0.7, reference=False)
    rollouts = sample_rollouts(cool, 7, "a")
    scored = flat(cool.logprobs([bare(rollout) for rollout in rollouts]))
    torch.testing.assert_close(scored, rollout_logprobs(rollouts), rtol=0, atol=1e-5)
    metrics = cool.train(ALGORITHM.make_batch(rollouts))
    assert metrics["policy/token_mult_prob_error_max"] < 1 + 1e-5
    assert abs(metrics["policy/ratio"] - 1) < 1e-5
    cool.close()


def test_a_sample_depends_on_its_seed_and_key_alone(worker: PolicyWorker) -> None:
    prompts = [[1, 2], [3], [4, 5, 6], [1, 2], [7, 8]]
    requests = list(zip(prompts, count(10)))
    together = [turn.tokens for turn in worker.generate(requests, seed="s")]
    backwards = [turn.tokens for turn in worker.generate(requests[::-1], seed="s")]
    assert backwards[::-1] == together
    for request, tokens in zip(requests, together, strict=True):
        assert worker.generate([request], seed="s")[0].tokens == tokens
    assert together[0] != together[3]  # same prompt, other key
    assert worker.generate(requests[:1], seed="t")[0].tokens != together[0]
    assert worker.generate([], seed="s") == []


def test_a_completion_ends_at_the_maximum_length(worker: PolicyWorker) -> None:
    (turn,) = worker.generate([([1] * 37, 0)], seed="s", params=SamplingParams(max_tokens=12))
    assert (len(turn.tokens), turn.finish_reason) == (3, "length")
    short, full = worker.generate([([1], 0), ([1] * 40, 1)], seed="s")
    assert (len(short.tokens), full.tokens, full.finish_reason) == (12, [], "length")
    with pytest.raises(ValueError, match="token 40 is not in the model's vocabulary"):
        worker.generate([([1], 0), ([40], 1)], seed="s")
    assert worker.generate([([1], 0)], seed="s") == [short]


def test_only_sampled_tokens_get_reference_log_probabilities(worker: PolicyWorker) -> None:
    (rollout,) = sample_rollouts(worker, 1, "a")
    rollout.sampled = [index % 2 == 0 for index in range(len(rollout.tokens))]
    worker.score([rollout])
    (all_logprobs,) = worker.logprobs([bare(rollout)], "reference")
    assert rollout.reference_logprobs is not None
    assert rollout.reference_logprobs[0::2] == all_logprobs[0::2]
    assert set(rollout.reference_logprobs[1::2]) == {0.0}


def test_the_reference_policy_stays_while_the_policy_learns(
    worker: PolicyWorker, get: Callable[..., PolicyWorker]
) -> None:
    """Scoring between steps gives the reference's log-probabilities and does not change the training."""
    samples = make_samples(6, seed=5)
    initial = worker.logprobs(samples)
    for step in range(3):
        worker.train(make_batch(1, 4, step))
        assert worker.logprobs(samples, "reference") == initial
        policy = worker.logprobs(samples)
        assert (flat(policy) - flat(initial)).abs().max() > 1e-3
    trained = parameters(worker)
    reset(worker)
    for step in range(3):
        worker.train(make_batch(1, 4, step))
    assert torch.equal(parameters(worker), trained)


def test_generation_uses_the_trained_weights_at_once(worker: PolicyWorker) -> None:
    before = sample_rollouts(worker, 5, "a")
    for step in range(3):
        worker.train(make_batch(2, 4, step))
    after = sample_rollouts(worker, 5, "a")
    assert [r.tokens for r in after] != [r.tokens for r in before]
    scored = flat(worker.logprobs([bare(rollout) for rollout in after]))
    torch.testing.assert_close(scored, rollout_logprobs(after), rtol=0, atol=1e-5)
    with worker.weights.use("reference"):  # and it uses the weights of the current slot
        assert [r.tokens for r in sample_rollouts(worker, 5, "a")] == [r.tokens for r in before]
