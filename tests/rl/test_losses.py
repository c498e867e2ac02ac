"""Loss terms: values and gradients computed by hand, padding that may hold anything, and capture."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rollgraph.rl.losses import (
    KL_ESTIMATORS,
    TokenStreams,
    clipped_importance,
    clipped_surrogate,
    importance_correction,
    k1,
    k2,
    k3,
    means,
    sequence_ratio,
    token_ratio,
    weighted_sums,
    zero_unweighted,
)


def column(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def make_streams(
    logprobs: Tensor, old: Tensor, weights: Tensor | None = None, sequence: Tensor | None = None
) -> TokenStreams:
    return TokenStreams(
        logprobs=logprobs,
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=torch.ones_like(old),
        weights=torch.ones_like(old) if weights is None else weights,
        sequence=torch.zeros(len(old), dtype=torch.int64) if sequence is None else sequence,
        sequences=4,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, None),
        (1.1, 2.0, -2.2, -2.0, None),
        (1.5, 2.0, -2.6, 0.0, "clipped_high"),
        (0.5, 2.0, -1.0, -2.0, None),  # a good token that became rare: no clip
        (0.5, -2.0, 1.6, 0.0, "clipped_low"),
        (2.0, -2.0, 4.0, 2.0, None),  # a bad token that became frequent: no clip ...
        (5.0, -2.0, 6.0, 0.0, "clipped_dual"),  # ... but the dual one
        (5.0, 2.0, -2.6, 0.0, "clipped_high"),
        (5.0, 0.0, 0.0, 0.0, None),
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, loss: float, slope: float, clipped: str | None) -> None:
    leaf = column(ratio, grad=True)
    value, metrics = clipped_surrogate(leaf, column(advantage), 0.2, 0.3, dual_clip=3.0)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert leaf.grad is not None
    assert leaf.grad.item() == slope
    assert {name for name, flag in metrics.items() if name != "ratio" and flag} == ({clipped} if clipped else set())


def test_a_clipped_token_keeps_its_gradient_in_cispo() -> None:
    logprobs, advantages = column(-1.0, -2.0, -3.0, grad=True), column(1.0, -1.0, 2.0)
    ratio = token_ratio(make_streams(logprobs, column(-1.0, -4.0, 0.0)))
    value, metrics = clipped_importance(logprobs, ratio, advantages, 0.5, 1.0)
    value.sum().backward()
    factors = [1.0, 2.0, 0.5]  # of ratios 1, e^2 and e^-3
    assert value.tolist() == pytest.approx([1.0, -4.0, 3.0])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-f * a for f, a in zip(factors, advantages.tolist(), strict=True)]
    assert metrics["clipped_high"].tolist() == [False, True, False]
    assert metrics["clipped_low"].tolist() == [False, False, True]


def test_a_sequence_has_one_ratio_with_a_gradient_for_each_of_its_tokens() -> None:
    logprobs = column(-1.0, -2.0, -3.0, -9.0, -1.0, grad=True)
    old = column(-1.5, -2.5, -1.0, -1.0, -2.0)
    weights, sequence = column(0.5, 0.5, 0.25, 0.0, 0.25), torch.tensor([0, 0, 2, 2, 2])  # sequence 1 is empty
    ratio = sequence_ratio(zero_unweighted(make_streams(logprobs, old, weights, sequence)))
    first, last = math.exp(0.5), math.exp((-2.0 + 1.0) / 2)
    assert [ratio[i].item() for i in (0, 1, 2, 4)] == pytest.approx([first, first, last, last])
    (weights * ratio).sum().backward()  # one loss of weight 1 for the first sequence, of 0.5 for the other
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([first / 2, first / 2, 0.5 * last / 2, 0, 0.5 * last / 2])


def test_kl_estimators() -> None:
    reference = column(-0.3, -2.0, -5.0)
    for r in (-1.5, -0.1, 0.0, 0.7, 3.0):
        policy = reference - r
        assert k1(policy, reference).tolist() == pytest.approx([-r] * 3)
        assert k2(policy, reference).tolist() == pytest.approx([r * r / 2] * 3)
        assert k3(policy, reference).tolist() == pytest.approx([math.exp(r) - r - 1] * 3)
    for estimator in KL_ESTIMATORS.values():
        assert estimator(reference, reference).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("estimator", "direction"), [("k1", None), ("k2", "policy || reference"), ("k3", "reference || policy")]
)
def test_each_estimator_has_the_gradient_of_its_kl(estimator: str, direction: str | None) -> None:
    """In expectation over samples of the policy, which leaves nothing of the gradient of k1."""
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    reference = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).log_softmax(0)
    policy = logits.log_softmax(0)
    expected_loss = (policy.exp().detach() * KL_ESTIMATORS[estimator](policy, reference)).sum()
    (gradient,) = torch.autograd.grad(expected_loss, logits, retain_graph=True)
    kl = {
        None: 0 * policy.sum(),
        "policy || reference": (policy.exp() * (policy - reference)).sum(),
        "reference || policy": (reference.exp() * (reference - policy)).sum(),
    }[direction]
    (expected,) = torch.autograd.grad(kl, logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_importance_correction_is_capped_and_has_no_gradient() -> None:
    old = column(-1.0, -1.0, -1.0, grad=True)
    factor = importance_correction(old, column(-1.0, -2.0, 0.0), cap=2.0)
    assert factor.tolist() == pytest.approx([1.0, 2.0, math.exp(-1)])
    assert not factor.requires_grad


def test_extreme_ratios_stay_finite() -> None:
    logprobs = column(-1e4, 0.0, -500.0, grad=True)
    streams = make_streams(logprobs, column(0.0, -1e4, -500.0))
    for ratio in (token_ratio(streams), sequence_ratio(streams)):
        for advantage in (1.0, -1.0):
            value, _ = clipped_surrogate(ratio, torch.full_like(ratio, advantage), 0.2, 0.2)
            (gradient,) = torch.autograd.grad(value.sum(), logprobs, retain_graph=True)
            assert value.isfinite().all()
            assert gradient.isfinite().all()
    value = k3(logprobs, streams.old_logprobs)
    assert value.isfinite().all()
    assert torch.autograd.grad(value.sum(), logprobs)[0].isfinite().all()


@pytest.mark.parametrize("garbage", [-math.inf, math.inf, math.nan, 1e300])
def test_tokens_of_weight_zero_have_no_effect(garbage: float) -> None:
    weights = column(0.5, 0.0, 0.5)
    logprobs = column(-1.0, garbage, -2.0, grad=True)
    others = column(-1.2, garbage, -1.9)
    clean = zero_unweighted(
        TokenStreams(logprobs, others, others, others, weights, torch.tensor([0, 1, 0]), 2, others, others)
    )
    assert clean.entropy is not None
    assert clean.reference_logprobs is not None
    per_token = token_ratio(clean) * clean.advantages + sequence_ratio(clean) + clean.entropy
    per_token = per_token + k3(clean.logprobs, clean.reference_logprobs) + clean.rollout_logprobs
    loss, metrics = weighted_sums(per_token, clean.weights, {"per_token": per_token})
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[1] == 0
    assert logprobs.grad.isfinite().all()
    assert metrics["per_token"] == loss == metrics["loss"]
    assert loss.isfinite()


def test_means_of_sums() -> None:
    per_token, weights = column(1.0, 5.0, 3.0), column(0.5, 0.0, 1.5)
    _, metrics = weighted_sums(per_token, weights, {"x": per_token, "flag": per_token > 2})
    averages = means(metrics)
    assert {name: value.item() for name, value in averages.items()} == {"loss": 5, "weight": 2, "x": 2.5, "flag": 0.75}
    _, nothing = weighted_sums(per_token, 0 * weights, {"x": per_token})
    assert means(nothing)["x"] == 0
