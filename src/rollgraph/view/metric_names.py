"""What each metric is, in a sentence. docs/metrics.md says more: what is normal, and what to do when it is not."""

from __future__ import annotations

import re
from collections.abc import Iterable

PLACE = re.compile(r"<\w+>")  # stands for any text without a slash

DESCRIPTIONS = {
    "reward": "Mean reward of the rollouts that are trained on: the weighted sum of all reward functions.",
    "reward/std": "Standard deviation of the rewards, over all groups.",
    "reward/shaped": "Mean of what advantages are computed from: the reward with KL and length penalties.",
    "reward/sampled": "Mean reward of everything that was sampled, whether it is trained on or not.",
    "rewards/<label>": "Mean of one reward function before its weight.",
    "logged/<name>": "Mean of what reward functions logged under this name.",
    "validation/logged/<name>": "Mean of what reward functions logged under this name in the validation.",
    "groups/frac_reward_zero_std": "Share of groups whose rewards are all equal: they teach nothing.",
    "groups/rounds": "Rounds of sampling in this step.",
    "groups/dropped": "Groups that were sampled and that the algorithm did not keep.",
    "advantage/abs_mean": "Mean of the absolute advantages.",
    "advantage/abs_max": "The largest absolute advantage.",
    "length/mean": "Mean length of the completions, in tokens.",
    "length/min": "Length of the shortest completion, in tokens.",
    "length/max": "Length of the longest completion, in tokens.",
    "length/truncated": "Share of rollouts that were cut off at a limit.",
    "loss": "The loss of a minibatch, averaged over the updates of the step.",
    "loss/weight": "Sum of the token weights of a minibatch.",
    "policy/entropy": "Entropy of the policy at each token, in nats.",
    "policy/kl": "Divergence from the reference policy.",
    "policy/ratio": "Probability under the policy, divided by that under the policy before this step.",
    "policy/clipped_low": "Share of tokens whose ratio was clipped from below.",
    "policy/clipped_high": "Share of tokens whose ratio was clipped from above.",
    "policy/clipped_dual": "Share of tokens that dual_clip bounded.",
    "policy/importance": "Correction for how tokens were drawn: min(old / rollout, cap).",
    "policy/rollout_kl": "Divergence of what generation sampled from, from the policy that is trained.",
    "policy/token_mult_prob_error": "Mean factor between probabilities of generation and training; 1 if they agree.",
    "policy/token_mult_prob_error_max": "Largest factor between the probabilities of generation and training.",
    "policy/<name>": "Reported by the loss of the algorithm.",
    "data/epoch": "How often all rows have been trained on.",
    "data/dropped_prompts": "Training prompts that were left out because they are too long.",
    "tokens/trained": "Tokens of the step that the assistant wrote.",
    "rewards/chosen": "Mean of β × log(policy / reference) of the preferred completions.",
    "rewards/rejected": "Mean of β × log(policy / reference) of the other completions.",
    "rewards/margins": "Mean difference between the two completions of a pair.",
    "rewards/accuracies": "Share of pairs in which the preferred completion is ahead.",
    "teacher/kl": "Mean of log(policy / teacher) over sampled tokens.",
    "optimizer/lr": "Learning rate of the last update.",
    "optimizer/grad_norm": "Norm of the gradient before clipping, averaged over the updates of the step.",
    "optimizer/skipped_steps": "Updates that were skipped so far because a gradient was not finite.",
    "validation/reward": "Mean reward of the held-out prompts.",
    "validation/rewards/<label>": "Mean of one reward function on the held-out prompts.",
    "validation/accuracy": "Share of held-out samples that are right.",
    "validation/pass@<k>": "Share of held-out prompts with at least one right sample out of k.",
    "validation/loss": "The loss of held-out rows.",
    "validation/perplexity": "The exponential of the loss of held-out rows.",
    "validation/rewards/chosen": "Mean of β × log(policy / reference) of the preferred held-out completions.",
    "validation/rewards/rejected": "Mean of β × log(policy / reference) of the other held-out completions.",
    "validation/rewards/margins": "Mean difference between the two completions of a held-out pair.",
    "validation/rewards/accuracies": "Share of held-out pairs in which the preferred completion is ahead.",
    "validation/teacher/kl": "Mean of log(policy / teacher) over samples of held-out prompts.",
    "validation/dropped_prompts": "Held-out prompts that were left out because they are too long.",
    "failures/rollouts": "Share of the rollouts that ended with an error.",
    "failures/unrewarded": "Share of the sampled rollouts that no reward function had a reward for.",
    "failures/reward/<kind>": "Rollouts for which a reward function failed in this way.",
    "failures/environment/<exception>": "Replies of the environment that failed in this way.",
    "failures/environment/<tool>/<exception>": "Calls of this tool that failed in this way.",
    "tokens/generate": "Tokens that were sampled.",
    "tokens/score": "Tokens of prompts and completions that the reference policy scored.",
    "tokens/train": "Tokens in the microbatches of all epochs.",
    "tokens/padding": "Share of the positions in microbatches that hold no token.",
    "speed/seconds": "Duration of the step.",
    "speed/seconds/<phase>": "Duration of this phase of the step.",
    "speed/tokens_per_second": "Tokens of the completions that are trained on, per second of the step.",
    "speed/tokens_per_second/<phase>": "Tokens of this phase, per second of it.",
    "speed/memory_gib": "Peak memory of the process, in GiB: on the GPU or, without one, in main memory.",
    "speed/memory_gib/<phase>": "Memory of this phase, in GiB: the most on the GPU or, without one, at its end.",
    "speed/ranks/<rank>/seconds/<phase>": "Duration of this phase on one rank, before it waits for others.",
    "speed/ranks/<rank>/memory_gib": "Peak memory of one rank, in GiB.",
}


def describe_metrics(names: Iterable[str]) -> list[dict[str, str]]:
    """Name, topic (what stands before the first slash) and description of each metric."""
    found = []
    for name in names:
        found.append({"name": name, "topic": name.partition("/")[0], "description": describe_metric(name)})
    return found


def describe_metric(name: str) -> str:
    """The sentence about a metric; empty if it is not one of ours."""
    if name in DESCRIPTIONS:
        return DESCRIPTIONS[name]
    for known, description in DESCRIPTIONS.items():
        if "<" in known and matches(name, known):
            return description
    return ""


def matches(name: str, known: str) -> bool:
    pattern = "[^/]+".join(re.escape(part) for part in PLACE.split(known))
    return re.fullmatch(pattern, name) is not None
