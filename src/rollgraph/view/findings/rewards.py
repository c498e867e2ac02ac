"""Rewards that teach nothing, and rewards that fail."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rollgraph.view.findings.finding import History, RunFinding, samples

EQUAL_GROUPS = (0.9, 0.6)  # share of groups with equal rewards: a problem, a warning
FAILING = (0.9, 0.05)  # share of the sampled rollouts whose reward failed: a problem, a warning
FAILURES = "failures/reward/"
KINDS = {
    "raised": "raised an exception",
    "timeout": "timed out",
    "died": "crashed its process",
    "not_finite": "returned a number that is not finite",
    "too_large": "returned a number that is too large",
    "wrong_type": "returned something that is no number",
    "wrong_length": "returned the wrong number of rewards",
    "unscored": "had no reward",
}


def find_equal_rewards(history: History) -> Iterator[RunFinding]:
    curve = history.curve("groups/frac_reward_zero_std")
    if curve is None:
        return
    if curve.now < EQUAL_GROUPS[1]:
        yield RunFinding("equal-rewards", "good", f"In {1 - curve.now:.0%} of the groups rewards differ.")
        return
    yield RunFinding(
        "equal-rewards",
        "problem" if curve.now >= EQUAL_GROUPS[0] else "warning",
        f"In {curve.now:.0%} of the groups all rewards are equal, and such groups teach nothing.",
        "If no answer is right, use easier prompts, a warm start, or a reward with partial credit; if all are right, "
        "use harder prompts. More rollout.samples_per_prompt or a higher rollout.temperature make groups differ.",
        [curve.evidence("reward", recent=True)],
    )


def find_failing_rewards(history: History) -> Iterator[RunFinding]:
    """Counts are of rollouts, so that they are compared with how many were sampled."""
    sampled = _sampled_rollouts(history)
    fails = False
    for name in history.names:
        if not name.startswith(FAILURES):
            continue
        counts = history.recent_counts(name)
        share = float(np.mean(counts > 0)) if sampled is None else min(1.0, float(np.mean(counts / sampled)))
        if share >= FAILING[1]:
            fails = True
            yield describe_failure(name, share)
    if not fails and history.curve("failures/unrewarded") is not None:
        yield RunFinding("failing-reward", "good", "Reward functions do not fail.")


def describe_failure(name: str, share: float) -> RunFinding:
    kind = name.removeprefix(FAILURES)
    always = share >= FAILING[0]
    what = KINDS.get(kind, f"failed ({kind})")
    how_often = "nearly all" if always else f"{share:.0%} of the"
    return RunFinding(
        f"failing-reward-{kind}",
        "problem" if always else "warning",
        f"A reward function {what} for {how_often} rollouts of the last steps.",
        "What it said stands beside the samples. Until it is repaired, reward.on_failure counts in its place.",
        [{"kind": "series", "names": [name]}, samples("samples with what failed", finish="error")],
    )


def _sampled_rollouts(history: History) -> float | None:
    prompts = history.number("data.prompts_per_step")
    each = history.number("rollout.samples_per_prompt")
    if not prompts or not each:
        return None
    rounds = history.curve("groups/rounds")
    return prompts * each * (max(1.0, rounds.now) if rounds is not None else 1.0)
