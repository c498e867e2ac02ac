"""Rollouts of a step, and of held-out prompts: sampled, rewarded, scored, and those of all ranks together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rollgraph.inference import Progress
from rollgraph.run.setup import Run
from rollgraph.run.step_log import describe_sampling, share_troubles, tell_failures, troubles
from rollgraph.telemetry import View
from rollgraph.types import Prompt, Rollout

RIGHT = 1 - 1e-6  # the reward of a right answer: weights that add up to 1 do so but for rounding
MOST_ROUNDS = 8  # of sampling for one step, where an algorithm keeps only some groups


def collect(run: Run, step: int, view: View) -> list[Rollout]:
    """The rollouts of a step, scored: as many groups as it has prompts, of those that the algorithm keeps."""
    wanted, groups, before = run.config.data.prompts_per_step, run.surplus, troubles(run)
    sampled: list[Rollout] = []
    rounds = dropped = 0
    while len(groups) < wanted and rounds < MOST_ROUNDS:
        rollouts = sample(run, run.data.next_prompts(), f"{run.config.seed}/{step}/{rounds}", view)
        found = grouped(rollouts)
        kept = [group for group in found if run.algorithm.keeps(group)]
        groups, sampled = groups + kept, sampled + rollouts
        rounds, dropped = rounds + 1, dropped + len(found) - len(kept)
    run.pending |= describe_sampling(run, sampled, rounds, dropped) | share_troubles(run, before, len(sampled))
    tell_failures(run, view)
    if not groups:
        why = "; ".join(run.rewards.messages.values()) or "the rewards of each group are all equal"
        raise RuntimeError(f"{MOST_ROUNDS} rounds of sampling gave no group that the algorithm keeps: {why}")
    run.surplus = groups[wanted:]
    return [replace(rollout, group=index) for index, group in enumerate(groups[:wanted]) for rollout in group]


def sample(run: Run, prompts: Sequence[Prompt], seed: str, view: View) -> list[Rollout]:
    """Rollouts of prompts, with rewards and, where KL needs it, with the reference's log-probabilities."""

    def show(progress: Progress) -> None:
        view.phase("generate", progress.finished, progress.finished + progress.running + progress.waiting)

    with run.timed("generate"):
        rollouts = run.environment.run(partial(run.policy.generate, seed=seed, on_progress=show), prompts)
    with run.timed("reward"):
        run.rewards.score(rollouts)
    tell_failures(run, view)
    if run.algorithm.needs_reference:
        with run.timed("score"):
            run.policy.score(rollouts, "reference")
    return run.policy.gather_rollouts(rollouts)


def grouped(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return list(groups.values())


def evaluate(run: Run, seed: str) -> dict[str, float]:
    """Of the held-out prompts, which ranks divide among themselves."""
    v, world = run.config.validation, run.world
    params = replace(run.policy.sampling, temperature=v.temperature)
    with run.timed("validate"):
        mine = run.validation[world.rank :: world.size]
        rollouts = run.examiner.run(partial(run.policy.generate, seed=seed, params=params), mine)
        run.rewards.score(rollouts)
        rollouts = run.policy.gather_rollouts(rollouts)
    right = [[rollout.reward >= RIGHT for rollout in group] for group in grouped(rollouts)]
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.rewards)
    parts = {name: [r.rewards[name] for r in rollouts if name in r.rewards] for name in names}
    left_out = {"validation/dropped_prompts": float(run.left_out)} if run.left_out else {}
    return left_out | {
        "validation/reward": math.fsum(rollout.reward for rollout in rollouts) / len(rollouts),
        **{f"validation/reward/{name}": math.fsum(part) / len(part) for name, part in parts.items() if len(parts) > 1},
        "validation/accuracy": sum(map(sum, right)) / len(rollouts),
        f"validation/pass@{v.samples}": sum(map(any, right)) / len(right),
    }
