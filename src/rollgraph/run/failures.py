"""Failures that do not end a run: rewards and environments that raised, timed out or died.

They are counted by kind, shared between ranks, and become metrics of the step.
"""

from __future__ import annotations

import json
from collections import Counter

from rollgraph.run.inputs import Inputs
from rollgraph.run.setup import Run

REWARD_FAILURES = "failures/reward/"  # metric: count by kind
ENVIRONMENT_FAILURES = "failures/environment/"
UNREWARDED = "failures/unrewarded"  # metric: the share of rollouts that no reward function gave a reward


def count_failures(inputs: Inputs) -> Counter[str]:
    """By the name of their metric, since this process began."""
    found = Counter({REWARD_FAILURES + kind: count for kind, count in inputs.rewards.failures.items()})
    in_environment = getattr(inputs.environment, "failures", {})
    found.update({ENVIRONMENT_FAILURES + kind: count for kind, count in in_environment.items()})
    found[UNREWARDED] = inputs.rewards.unrewarded
    return found


def share_failures(run: Run, before: Counter[str], sampled: int) -> dict[str, float]:
    """Metrics of what failed on any rank since `before`, where all ranks together sampled so many rollouts.

    Each rank also learns the messages of the others.
    """
    rewards = run.inputs.rewards
    environment = run.inputs.environment
    mine = [count_failures(run.inputs) - before, rewards.messages, getattr(environment, "messages", {})]
    total: Counter[str] = Counter()
    for rank, text in enumerate(run.policy.sharded.exchange_text(json.dumps(mine))):
        counts, messages, of_environment = json.loads(text)
        total.update(counts)
        if rank != run.world.rank:
            of_rewards = {
                name.removeprefix(REWARD_FAILURES): count
                for name, count in counts.items()
                if name.startswith(REWARD_FAILURES)
            }
            rewards.hear(of_rewards, messages)
            if of_environment:
                getattr(environment, "hear", lambda messages: None)(of_environment)
    return {**total, UNREWARDED: total[UNREWARDED] / max(1, sampled)}


def show_reward_failures(run: Run) -> None:
    """Tell of failures as soon as they are known: the first few rewards of a run that differ, each kind of reply."""
    for message in run.inputs.rewards.unread():
        run.log.note(f"a reward failed and counts as {run.config.reward.on_failure:g}: {message}")
    for environment in (run.inputs.environment, run.inputs.examiner):
        for message in getattr(environment, "unread", list)():
            run.log.note(f"the environment failed: {message}")


def summarize_reward_failures(inputs: Inputs) -> str:
    """One line for the end of a run; empty if nothing failed."""
    failures = inputs.rewards.failures
    if not failures:
        return ""
    kinds = ", ".join(f"{count} {kind}" for kind, count in failures.items())
    return f"rewards failed for {failures.total()} rollouts: {kinds}"
