"""Loss terms: pure functions over packed tokens. `algorithms/policy_gradient.py` puts them together, KL included.

Everything here runs inside a captured graph: no value is read on the host, and no shape depends on data. Terms are per
token. Only `weighted_sums` adds them up, so the tokens of a minibatch may fall into any microbatches on any ranks.
Streams first pass through `without_weightless`, because padding may hold anything, including -inf and NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # e^20 is far beyond any clip; without a limit, exp overflows and 0 x inf is NaN in backward

Term = tuple[Tensor, dict[str, Tensor]]  # the loss of each token, and metrics of each token


@dataclass
class TokenStreams:
    """The packed tokens of a microbatch: tensors of shape [T], fp32 unless stated otherwise."""

    logprobs: Tensor  # of the policy being trained; requires grad
    old_logprobs: Tensor  # of the policy before this batch of updates
    rollout_logprobs: Tensor  # as sampled
    advantages: Tensor
    weights: Tensor  # how much each token counts; 0: it is not trained on
    sequence: Tensor  # int64: which sequence of the microbatch a token belongs to; padding has one of its own
    sequences: int  # all values of `sequence` are below it
    entropy: Tensor | None = None
    reference_logprobs: Tensor | None = None


def without_weightless(streams: TokenStreams) -> TokenStreams:
    """The streams with 0 wherever the weight is 0, because inf x 0 would be NaN in forward and backward."""
    live = streams.weights != 0

    def keep(stream: Tensor) -> Tensor:
        return torch.where(live, stream, 0.0)

    def keep_if_given(stream: Tensor | None) -> Tensor | None:
        return None if stream is None else keep(stream)

    return replace(
        streams,
        logprobs=keep(streams.logprobs),
        old_logprobs=keep(streams.old_logprobs),
        rollout_logprobs=keep(streams.rollout_logprobs),
        advantages=keep(streams.advantages),
        entropy=keep_if_given(streams.entropy),
        reference_logprobs=keep_if_given(streams.reference_logprobs),
    )


def weighted_sums(per_token: Tensor, weights: Tensor, seen: Mapping[str, Tensor]) -> Term:
    """The loss, and metrics that can be added up over microbatches and ranks.

    `loss` is the sum over tokens of weight x loss, and `weight` the sum of weights. Every other metric is the sum of
    weight x value, so its mean is that sum divided by `weight`; see `means`.
    """
    loss = (weights * per_token).sum()
    with torch.no_grad():
        metrics = {name: (weights * value).sum() for name, value in seen.items()}
        return loss, {"loss": loss.detach().clone(), "weight": weights.sum(), **metrics}


def means(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The metrics to show, from those that were added up: the loss as it is, and the weighted mean of all others."""
    weight = metrics["weight"]
    divisor = torch.where(weight == 0, 1.0, weight)  # if nothing was trained on, all sums are 0
    return {name: value if name in ("loss", "weight") else value / divisor for name, value in metrics.items()}


def token_ratio(streams: TokenStreams) -> Tensor:
    """policy / old policy for each token."""
    return _exp(streams.logprobs - streams.old_logprobs)


def sequence_ratio(streams: TokenStreams) -> Tensor:
    """(policy / old policy)^(1/length) of a token's whole sequence, for each token.

    Each token's gradient flows to all tokens of its sequence. If the weights within a sequence are equal, the sum is
    the same as that of one loss for the sequence, counting as much as all its tokens together.
    """
    difference = streams.logprobs - streams.old_logprobs
    live = (streams.weights != 0).to(difference.dtype)
    # index_put sorts before it adds, so its order of summation is fixed; that of index_add on a GPU is not.
    empty = difference.new_zeros(streams.sequences)
    total = empty.index_put((streams.sequence,), difference, accumulate=True)
    length = empty.index_put((streams.sequence,), live, accumulate=True)
    return _exp((total / length.clamp(min=1))[streams.sequence])


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None
) -> Term:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A); for A < 0, at most -dual_clip A."""
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    seen = {
        "ratio": ratio,
        "clipped_low": (ratio < 1 - low) & (advantages < 0),
        "clipped_high": (ratio > 1 + high) & (advantages > 0),
    }
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
        seen["clipped_dual"] = (ratio > dual_clip) & (advantages < 0)
    return -gain, seen


def clipped_importance(logprobs: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> Term:
    """-stop_gradient(clip(ratio, 1 - low, 1 + high)) A logprob: a clipped token keeps its gradient (CISPO)."""
    factor = ratio.detach().clamp(1 - low, 1 + high)
    seen = {"ratio": ratio, "clipped_low": ratio < 1 - low, "clipped_high": ratio > 1 + high}
    return -factor * advantages * logprobs, seen


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
