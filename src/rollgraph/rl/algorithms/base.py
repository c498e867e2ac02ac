"""The interface of an algorithm, and the base class of those that learn from rewards: settings, clipping, KL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from rollgraph.errors import InvalidInput
from rollgraph.rl.algorithms.advantages import set_turn_advantages, turn_rewards_differ
from rollgraph.rl.algorithms.batch import (
    build_batch,
    check_length,
    has_equal_rewards,
    loss_mask,
    rollout_failed,
    rollout_metrics,
)
from rollgraph.rl.losses import (
    KL_ESTIMATORS,
    LossAndMetrics,
    TokenStreams,
    clipped_surrogate,
    importance_correction,
    k3,
    token_ratio,
    weighted_sums,
    zero_unweighted,
)
from rollgraph.types import Batch, Rollout

# -- the interface ---------------------------------------------------------------------------------

Source = Literal["policy", "demonstrations", "pairs"]


class Algorithm(Protocol):
    """Turns rollouts into a batch and a batch into a loss. Stateless beyond its settings."""

    @property
    def source(self) -> Source:
        """Where rollouts come from: sampled by the policy, or read from the data, one or two for each row.

        Pairs have been scored by the policy before `make_batch`; the one with the higher reward is preferred.
        """

    @property
    def needs_rewards(self) -> bool:
        """Whether sampled rollouts must have rewards."""

    @property
    def needs_reference(self) -> bool:
        """Whether rollouts must have `reference_logprobs` before `make_batch`."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `loss` needs `streams.entropy`."""

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether samples must have `old_logprobs` before training."""

    def keeps(self, group: Sequence[Rollout]) -> bool:
        """Whether to train on the rollouts of one prompt; if not, those of another prompt are sampled instead."""

    def make_batch(self, rollouts: Sequence[Rollout], *, minibatches: int = 1, seed: int = 0) -> Batch:
        """Turn the rollouts of all ranks into samples with advantages and weights, deterministically."""

    def loss(self, streams: TokenStreams) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a microbatch and its metrics, both as sums over tokens; runs inside a captured graph."""


class UnrewardedAlgorithm(Algorithm, Protocol):
    """An algorithm that needs no rewards."""

    def examine(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The metrics of a validation, from rollouts with the policy's log-probabilities.

        If `loss` is among them, it decides which checkpoints are the best.
        """


# -- checks of settings ----------------------------------------------------------------------------

PLAIN_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "none"}


def check_types(settings: Any) -> None:
    """Check the fields of a dataclass whose annotation is a plain type or a union of plain types.

    YAML 1.1 reads 1e-3 as text, and Python accepts True as a number: neither may pass unnoticed.
    """
    hints = get_type_hints(type(settings))
    for field in fields(settings):
        value = getattr(settings, field.name)
        hint = hints[field.name]
        allowed = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        if all(kind in PLAIN_TYPES for kind in allowed):
            is_valid = type(value) in allowed or (type(value) is int and float in allowed)
            check_setting(field.name, is_valid, value, " or ".join(PLAIN_TYPES[kind] for kind in allowed))


def check_setting(name: str, is_valid: bool, value: object, expected: str) -> None:
    if not is_valid:
        raise InvalidInput(f"expected {expected}, got {value!r}", argument=name)


# -- policy gradients ------------------------------------------------------------------------------
# A subclass defines the advantages, the token weights and, if it differs from PPO's, the policy term of the loss.


@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """Settings shared by all algorithms that learn from rewards."""

    clip_low: float = 0.2  # the ratio is clipped to 1 - clip_low ... 1 + clip_high
    clip_high: float = 0.2
    dual_clip: float | None = None  # upper bound on the ratio of tokens with a negative advantage
    kl_coef: float = 0.0  # 0: no reference policy is needed
    kl_estimator: str = "k3"  # or "k1" or "k2"
    kl_in: str = "loss"  # or "reward": the KL of all sampled tokens is subtracted from the reward
    entropy_coef: float = 0.0  # weight of the entropy bonus
    importance_cap: float | None = None  # multiply the policy term by min(old / rollout, importance_cap)
    mask_truncated: bool = False  # do not train on rollouts that were cut off at the token limit
    dynamic_sampling: bool = False  # drop groups in which all rewards are equal
    reward_to_go: bool = False  # a turn's advantage comes from the rewards from this turn on, not from all of them

    source = "policy"

    def __post_init__(self) -> None:
        check_types(self)
        check_setting("kl_estimator", self.kl_estimator in KL_ESTIMATORS, self.kl_estimator, " or ".join(KL_ESTIMATORS))
        check_setting("kl_in", self.kl_in in ("loss", "reward"), self.kl_in, "loss or reward")
        check_setting("clip_low", 0 <= self.clip_low <= 1, self.clip_low, "a number from 0 to 1")
        for name in ("clip_high", "kl_coef", "entropy_coef"):
            check_setting(
                name, 0 <= getattr(self, name) < math.inf, getattr(self, name), "a number that is not negative"
            )
        check_setting(
            "dual_clip", self.dual_clip is None or self.dual_clip > 1, self.dual_clip, "a number above 1, or none"
        )
        cap = self.importance_cap
        check_setting("importance_cap", cap is None or cap > 0, cap, "a number above 0, or none")

    @property
    def needs_rewards(self) -> bool:
        return True

    @property
    def needs_reference(self) -> bool:
        """Whether rollouts must have `reference_logprobs` before `make_batch`."""
        return self.kl_coef != 0

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether samples are scored before training; otherwise the rollout's log-probabilities are the old ones."""
        return self.importance_cap is not None

    def advantages(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[float]:
        """The advantage of each rollout from its shaped reward. Failed rollouts are not passed in."""
        raise NotImplementedError

    def weights(self, lengths: Sequence[int]) -> list[float]:
        """The weight of one token in each sequence of a minibatch; `lengths` counts the tokens trained on."""
        raise NotImplementedError

    def policy_term(self, streams: TokenStreams) -> LossAndMetrics:
        ratio = token_ratio(streams)
        return clipped_surrogate(ratio, streams.advantages, self.clip_low, self.clip_high, self.dual_clip)

    def shaped_reward(self, rollout: Rollout) -> float:
        if not math.isfinite(rollout.reward):
            raise ValueError(
                f"the reward of a rollout of prompt {rollout.prompt.id} is {rollout.reward}, not a finite number"
            )
        if self.kl_in != "reward" or not self.kl_coef:
            return rollout.reward
        return rollout.reward - self.kl_coef * sampled_kl(rollout, self.kl_estimator)

    def keeps(self, group: Sequence[Rollout]) -> bool:
        """Without dynamic sampling always True; with it, whether the rewards of the group differ."""
        if not self.dynamic_sampling or not has_equal_rewards(group):
            return True
        return self.reward_to_go and turn_rewards_differ(group)

    def make_batch(self, rollouts: Sequence[Rollout], *, minibatches: int = 1, seed: int = 0) -> Batch:
        """Turn the rollouts of all ranks into minibatches of samples, shuffled by `seed`."""
        usable_indices = [i for i, rollout in enumerate(rollouts) if not rollout_failed(rollout)]
        rewards = [self.shaped_reward(rollouts[i]) for i in usable_indices]
        usable_advantages = self._checked_advantages([rollouts[i] for i in usable_indices], rewards)
        advantages = [0.0] * len(rollouts)
        for i, advantage in zip(usable_indices, usable_advantages, strict=True):
            advantages[i] = advantage
        loss_masks = [loss_mask(rollout, self.mask_truncated) for rollout in rollouts]
        magnitudes = [abs(advantage) for advantage in usable_advantages]
        metrics = rollout_metrics(rollouts) | {
            "reward/shaped": math.fsum(rewards) / max(1, len(rewards)),
            "advantage/abs_mean": math.fsum(magnitudes) / max(1, len(magnitudes)),
            "advantage/abs_max": max(magnitudes, default=0.0),
        }
        batch = build_batch(
            rollouts, loss_masks, advantages, self.weights, minibatches=minibatches, seed=seed, metrics=metrics
        )
        if self.reward_to_go:
            set_turn_advantages(
                batch, rollouts, dict(zip(usable_indices, rewards, strict=True)), self._checked_advantages
            )
        return batch

    def _checked_advantages(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[float]:
        advantages = self.advantages(rollouts, rewards)
        check_length(self.advantages, advantages, len(rollouts), "rollouts")
        return advantages

    def loss(self, streams: TokenStreams) -> LossAndMetrics:
        """The policy term with its importance correction, plus KL, minus entropy; and metrics as sums."""
        s = zero_unweighted(streams)
        per_token, metrics = self.policy_term(s)
        # KL(rollout || policy): 0 before the first update, apart from numerics.
        metrics["rollout_kl"] = k3(s.rollout_logprobs, s.logprobs)
        if self.importance_cap is not None:
            metrics["importance"] = importance_correction(s.old_logprobs, s.rollout_logprobs, self.importance_cap)
            per_token = per_token * metrics["importance"]
        if s.reference_logprobs is not None:
            metrics["kl"] = KL_ESTIMATORS[self.kl_estimator](s.logprobs, s.reference_logprobs)
            if self.kl_coef and self.kl_in == "loss":
                per_token = per_token + self.kl_coef * metrics["kl"]
        if s.entropy is None:
            metrics["entropy"] = -s.logprobs  # a free estimate: its mean over sampled tokens is unbiased
        else:
            metrics["entropy"] = s.entropy
            per_token = per_token - self.entropy_coef * s.entropy
        return weighted_sums(per_token, s.weights, metrics)


def sampled_kl(rollout: Rollout, estimator: str) -> float:
    """The estimate of KL(policy || reference), summed over all sampled tokens."""
    if rollout.reference_logprobs is None:
        raise ValueError("KL in the reward needs rollouts that were scored by the reference policy before make_batch")
    streams = zip(rollout.sampled, rollout.logprobs, rollout.reference_logprobs, strict=True)
    logprob_pairs = [
        (policy_logprob, reference_logprob) for is_sampled, policy_logprob, reference_logprob in streams if is_sampled
    ]
    policy_logprob, reference_logprob = torch.tensor(logprob_pairs, dtype=torch.float64).reshape(-1, 2).unbind(1)
    return math.fsum(KL_ESTIMATORS[estimator](policy_logprob, reference_logprob).tolist())
