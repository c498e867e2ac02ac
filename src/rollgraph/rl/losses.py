"""Loss terms: pure functions of packed tokens. `algorithms/base.py` combines them.

All of this runs inside a captured graph: no value is read on the host, and no shape depends on data. Terms are per
token, and only `weighted_sums` adds them up, so the tokens of a minibatch may be in any microbatch on any rank. Streams
first pass through `zero_unweighted`, because padding may hold anything, including -inf and NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # e^20 is far beyond any clip; without a limit, exp overflows and 0 x inf gives NaN in backward

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]  # per token, shape [T]; or from `weighted_sums`, 0-d sums


@dataclass
class TokenStreams:
    """The packed tokens of a microbatch: tensors of shape [T], fp32 unless stated otherwise."""

    logprobs: Tensor  # of the policy being trained; requires grad
    old_logprobs: Tensor  # of the policy before this batch of updates
    rollout_logprobs: Tensor  # as sampled
    advantages: Tensor
    weights: Tensor  # 0: the token is not trained on
    sequence: Tensor  # int64: index of the token's sequence in the microbatch; padding has an index of its own
    sequences: int  # number of sequences: all values of `sequence` are below it
    entropy: Tensor | None = None
    reference_logprobs: Tensor | None = None


def zero_unweighted(streams: TokenStreams) -> TokenStreams:
    """The streams with 0 where the weight is 0, because inf x 0 would be NaN in forward and backward."""
    is_trained = streams.weights != 0

    def mask(stream: Tensor) -> Tensor:
        return torch.where(is_trained, stream, 0.0)

    def mask_optional(stream: Tensor | None) -> Tensor | None:
        return None if stream is None else mask(stream)

    return replace(
        streams,
        logprobs=mask(streams.logprobs),
        old_logprobs=mask(streams.old_logprobs),
        rollout_logprobs=mask(streams.rollout_logprobs),
        advantages=mask(streams.advantages),
        entropy=mask_optional(streams.entropy),
        reference_logprobs=mask_optional(streams.reference_logprobs),
    )


def weighted_sums(per_token: Tensor, weights: Tensor, per_token_metrics: Mapping[str, Tensor]) -> LossAndMetrics:
    """The loss, and metrics that can be added up over microbatches and ranks; all are 0-d.

    `loss` is the sum over tokens of weight x loss, `weight` the sum of weights, and every other metric the sum of
    weight x value. `means` divides the latter by `weight`.
    """
    loss = (weights * per_token).sum()
    with torch.no_grad():
        metrics = {name: (weights * value).sum() for name, value in per_token_metrics.items()}
        return loss, {"loss": loss.detach().clone(), "weight": weights.sum(), **metrics}


def means(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The metrics to show, from sums: `loss` and `weight` unchanged, and the weighted mean of all others."""
    weight = metrics["weight"]
    divisor = torch.where(weight == 0, 1.0, weight)  # if nothing was trained on, all sums are 0
    return {name: value if name in ("loss", "weight") else value / divisor for name, value in metrics.items()}


def token_ratio(streams: TokenStreams) -> Tensor:
    """policy / old policy for each token."""
    return _exp(streams.logprobs - streams.old_logprobs)


def sequence_ratio(streams: TokenStreams) -> Tensor:
    """For each token, (policy / old policy)^(1/length) of its whole sequence.

    The gradient of each token's loss flows to all tokens of its sequence. If the weights within a sequence are equal,
    their sum is the weight of the sequence's loss.
    """
    difference = streams.logprobs - streams.old_logprobs
    is_trained = (streams.weights != 0).to(difference.dtype)
    # index_put sorts before it adds, so its order of summation is fixed; index_add on a GPU has no fixed order.
    empty = difference.new_zeros(streams.sequences)
    total = empty.index_put((streams.sequence,), difference, accumulate=True)
    length = empty.index_put((streams.sequence,), is_trained, accumulate=True)
    return _exp((total / length.clamp(min=1))[streams.sequence])


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None
) -> LossAndMetrics:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A); for A < 0, at most -dual_clip A."""
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    metrics = {
        "ratio": ratio,
        "clipped_low": (ratio < 1 - low) & (advantages < 0),
        "clipped_high": (ratio > 1 + high) & (advantages > 0),
    }
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
        metrics["clipped_dual"] = (ratio > dual_clip) & (advantages < 0)
    return -objective, metrics


def clipped_importance(logprobs: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> LossAndMetrics:
    """-stop_gradient(clip(ratio, 1 - low, 1 + high)) A logprob: a clipped token keeps its gradient (CISPO)."""
    clipped_ratio = ratio.detach().clamp(1 - low, 1 + high)
    metrics = {"ratio": ratio, "clipped_low": ratio < 1 - low, "clipped_high": ratio > 1 + high}
    return -clipped_ratio * advantages * logprobs, metrics


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log(policy / reference): an unbiased value. As a loss, its gradient has mean 0, so use it in the reward."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log(policy / reference)^2 / 2: a biased value. As a loss, it has the gradient of KL(policy || reference)."""
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(r) - r - 1 with r = log(reference / policy): an unbiased value that is never negative.

    As a loss, its gradient with respect to the log-probability, 1 - exp(r), is that of KL(reference || policy).
    """
    r = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return r.exp() - r - 1


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def importance_correction(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """min(old / rollout, cap) without a gradient, for tokens drawn from another distribution than training sees."""
    return _exp((old_logprobs - rollout_logprobs).detach()).clamp(max=cap)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
