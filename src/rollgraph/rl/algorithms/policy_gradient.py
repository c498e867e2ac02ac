"""The common base of all algorithms that learn from rewards: their settings, and the order in which terms are applied.

A subclass defines the advantage, the weight of a token and, if necessary, the policy term of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollgraph.rl.algorithms.batches import build_batch, describe, has_failed, is_constant, trained_tokens
from rollgraph.rl.algorithms.settings import check, check_types
from rollgraph.rl.algorithms.turn_advantages import rewards_differ_by_turn, set_advantages_by_turn
from rollgraph.rl.losses import (
    KL_ESTIMATORS,
    Term,
    TokenStreams,
    clipped_surrogate,
    importance_correction,
    k3,
    token_ratio,
    weighted_sums,
    without_weightless,
)
from rollgraph.types import Batch, Rollout


@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """Settings shared by all algorithms that learn from rewards."""

    clip_low: float = 0.2  # the ratio is clipped to the range from 1 - clip_low to 1 + clip_high
    clip_high: float = 0.2
    dual_clip: float | None = None  # bounds the ratio if the advantage is negative
    kl_coef: float = 0.0  # 0: no reference policy is needed
    kl_estimator: str = "k3"  # or "k1" or "k2"
    kl_in: str = "loss"  # or "reward": the KL of all sampled tokens is subtracted from the reward
    entropy_coef: float = 0.0  # weight of the entropy, which is encouraged
    importance_cap: float | None = None  # corrects for old / rollout by at most this factor
    mask_truncated: bool = False  # do not train on rollouts that were cut off at the token limit
    dynamic_sampling: bool = False  # leave out groups in which all rewards are equal
    reward_to_go: bool = False  # a turn's advantage comes from the rewards from this turn on, not from all of them

    source = "policy"

    def __post_init__(self) -> None:
        check_types(self)
        check("kl_estimator", self.kl_estimator in KL_ESTIMATORS, self.kl_estimator, " or ".join(KL_ESTIMATORS))
        check("kl_in", self.kl_in in ("loss", "reward"), self.kl_in, "loss or reward")
        check("clip_low", 0 <= self.clip_low <= 1, self.clip_low, "a number from 0 to 1")
        for name in ("clip_high", "kl_coef", "entropy_coef"):
            check(name, 0 <= getattr(self, name) < math.inf, getattr(self, name), "a number that is not negative")
        check("dual_clip", self.dual_clip is None or self.dual_clip > 1, self.dual_clip, "a number above 1, or none")
        cap = self.importance_cap
        check("importance_cap", cap is None or cap > 0, cap, "a number above 0, or none")

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
        """Whether samples must be scored before training; otherwise the old log-probabilities are the rollout's."""
        return self.importance_cap is not None

    def advantages(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[float]:
        """The advantage of each rollout, from shaped rewards; failed rollouts are not among them."""
        raise NotImplementedError

    def weights(self, lengths: Sequence[int]) -> list[float]:
        """The weight of a token in each sequence of a minibatch, from the number of its tokens that are trained on."""
        raise NotImplementedError

    def policy_term(self, streams: TokenStreams) -> Term:
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
        """Whether there is anything to learn from the rollouts of one prompt."""
        if not self.dynamic_sampling or not is_constant(group):
            return True
        return self.reward_to_go and rewards_differ_by_turn(group)

    def make_batch(self, rollouts: Sequence[Rollout], *, minibatches: int = 1, seed: int = 0) -> Batch:
        """Turn the rollouts of all ranks into minibatches of samples; `seed` decides which samples go together."""
        usable = [i for i, rollout in enumerate(rollouts) if not has_failed(rollout)]
        rewards = [self.shaped_reward(rollouts[i]) for i in usable]
        usable_advantages = self.advantages([rollouts[i] for i in usable], rewards)
        advantages = [0.0] * len(rollouts)
        for i, advantage in zip(usable, usable_advantages, strict=True):
            advantages[i] = advantage
        trained = [trained_tokens(rollout, self.mask_truncated) for rollout in rollouts]
        sizes = [abs(advantage) for advantage in usable_advantages]
        metrics = describe(rollouts) | {
            "reward/shaped": math.fsum(rewards) / max(1, len(rewards)),
            "advantage/abs_mean": math.fsum(sizes) / max(1, len(sizes)),
            "advantage/abs_max": max(sizes, default=0.0),
        }
        batch = build_batch(
            rollouts, trained, advantages, self.weights, minibatches=minibatches, seed=seed, metrics=metrics
        )
        if self.reward_to_go:
            set_advantages_by_turn(batch, rollouts, dict(zip(usable, rewards, strict=True)), self.advantages)
        return batch

    def loss(self, streams: TokenStreams) -> Term:
        """The policy term, corrected for how tokens were drawn, plus KL, minus entropy; and metrics as sums."""
        s = without_weightless(streams)
        per_token, seen = self.policy_term(s)
        seen["rollout_kl"] = k3(
            s.rollout_logprobs, s.logprobs
        )  # KL(rollout || policy): at first 0, apart from numerics
        if self.importance_cap is not None:
            seen["importance"] = importance_correction(s.old_logprobs, s.rollout_logprobs, self.importance_cap)
            per_token = per_token * seen["importance"]
        if s.reference_logprobs is not None:
            seen["kl"] = KL_ESTIMATORS[self.kl_estimator](s.logprobs, s.reference_logprobs)
            if self.kl_coef and self.kl_in == "loss":
                per_token = per_token + self.kl_coef * seen["kl"]
        if s.entropy is None:
            seen["entropy"] = -s.logprobs  # an estimate that costs nothing: its mean over tokens that were sampled
        else:
            seen["entropy"] = s.entropy
            per_token = per_token - self.entropy_coef * s.entropy
        return weighted_sums(per_token, s.weights, seen)


def sampled_kl(rollout: Rollout, estimator: str) -> float:
    """The sum of the estimates of KL(policy || reference) at all sampled tokens."""
    if rollout.reference_logprobs is None:
        raise ValueError("KL in the reward needs rollouts that were scored by the reference policy before make_batch")
    streams = zip(rollout.sampled, rollout.logprobs, rollout.reference_logprobs, strict=True)
    pairs = [(policy, reference) for on, policy, reference in streams if on]
    policy, reference = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).unbind(1)
    return math.fsum(KL_ESTIMATORS[estimator](policy, reference).tolist())
