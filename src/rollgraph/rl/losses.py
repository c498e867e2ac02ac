"""Loss terms: pure functions over packed tokens, from which algorithms are put together.

Everything here runs inside a captured graph: no value is read on the host, no shape depends on data. Terms are
given for each token; only `weighted_sums` adds them up, so the tokens of a minibatch may fall into any microbatches
on any ranks. Streams first go through `without_weightless`: padding may hold anything, -inf and NaN included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # e^20 is far beyond any clip; without a limit, exp overflows and 0 x inf is NaN in backward

Term = tuple[Tensor, dict[str, Tensor]]  # a loss for each token, and what is worth seeing of each token


@dataclass
class TokenStreams:
    """The packed tokens of a microbatch: tensors [T], fp32 unless said."""

    logprobs: Tensor  # of the policy being trained; requires grad
    old_logprobs: Tensor  # of the policy before this batch of updates
    rollout_logprobs: Tensor  # as sampled
    advantages: Tensor
    weights: Tensor  # how much a token counts; 0: not trained on
    sequence: Tensor  # int64: the sequence of the microbatch a token belongs to; padding has one of its own
    sequences: int  # all values of `sequence` are below it
    entropy: Tensor | None = None
    reference_logprobs: Tensor | None = None


def without_weightless(streams: TokenStreams) -> TokenStreams:
    """The same streams with 0 wherever the weight is 0: inf x 0 would be NaN, forward and backward."""
    live = streams.weights != 0

    def keep(stream: Tensor) -> Tensor:
        return torch.where(live, stream, 0.0)

    return replace(
        streams,
        logprobs=keep(streams.logprobs),
        old_logprobs=keep(streams.old_logprobs),
        rollout_logprobs=keep(streams.rollout_logprobs),
        advantages=keep(streams.advantages),
        entropy=None if streams.entropy is None else keep(streams.entropy),
        reference_logprobs=None if streams.reference_logprobs is None else keep(streams.reference_logprobs),
    )


def weighted_sums(per_token: Tensor, weights: Tensor, seen: Mapping[str, Tensor]) -> Term:
    """The loss, and metrics that add up over microbatches and ranks.

    `loss` and `weight` are sums over tokens of weight x loss and of weight; every other metric is the sum of
    weight x value, so that its mean is that sum divided by `weight`: see `means`.
    """
    loss = (weights * per_token).sum()
    with torch.no_grad():
        metrics = {name: (weights * value).sum() for name, value in seen.items()}
        return loss, {"loss": loss.detach().clone(), "weight": weights.sum(), **metrics}


def means(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What to show of metrics that were added up: the loss as it is, the weighted mean of all others."""
    weight = metrics["weight"]
    divisor = torch.where(weight == 0, 1.0, weight)  # nothing was trained on: all sums are 0
    return {name: value if name in ("loss", "weight") else value / divisor for name, value in metrics.items()}


def token_ratio(streams: TokenStreams) -> Tensor:
    """policy / old policy, of each token."""
    return _exp(streams.logprobs - streams.old_logprobs)


def sequence_ratio(streams: TokenStreams) -> Tensor:
    """(policy / old policy)^(1/length) of the token's whole sequence, for each of its tokens.

    Every token's gradient goes to all tokens of its sequence. With weights that are equal within a sequence, their
    sum is that of one loss for the sequence that counts as much as all its tokens together.
    """
    difference = streams.logprobs - streams.old_logprobs
    live = (streams.weights != 0).to(difference.dtype)
    # index_put sorts before it adds, so the order of summation is fixed; index_add's on a GPU is not.
    empty = difference.new_zeros(streams.sequences)
    total = empty.index_put((streams.sequence,), difference, accumulate=True)
    length = empty.index_put((streams.sequence,), live, accumulate=True)
    return _exp((total / length.clamp(min=1))[streams.sequence])


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None
) -> Term:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A); where A < 0 no more than -dual_clip A."""
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
    """-stop_gradient(clip(ratio, 1 - low, 1 + high)) A logprob: a clipped token keeps a gradient (CISPO)."""
    factor = ratio.detach().clamp(1 - low, 1 + high)
    seen = {"ratio": ratio, "clipped_low": ratio < 1 - low, "clipped_high": ratio > 1 + high}
    return -factor * advantages * logprobs, seen


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log(policy / reference): unbiased as a value. As a loss its gradient has mean 0: use it in the reward."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log(policy / reference)^2 / 2: biased as a value. As a loss it has the gradient of KL(policy || reference)."""
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(r) - r - 1, r = log(reference / policy): an unbiased value, never negative.

    As a loss its gradient, (1 - exp(r)) of the log-probability, is that of KL(reference || policy).
    """
    r = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return r.exp() - r - 1


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def importance_correction(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """min(old / rollout, cap), without a gradient: for tokens drawn from another distribution than training sees."""
    return _exp((old_logprobs - rollout_logprobs).detach()).clamp(max=cap)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
