"""The rollouts of a step and of a validation: sampled, rewarded, kept or dropped, and scored; or written and scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from rollgraph.inference import Progress
from rollgraph.policy.weights import POLICY
from rollgraph.rl.algorithms import UnrewardedAlgorithm
from rollgraph.rl.algorithms.batches import describe, is_constant
from rollgraph.rl.demonstrations import WrittenData
from rollgraph.run.demonstrations import share_of
from rollgraph.run.failures import count_failures, share_failures, show_reward_failures
from rollgraph.run.progress import Group
from rollgraph.run.setup import Run
from rollgraph.types import Prompt, Rollout

MAX_ROUNDS = 8  # of sampling for one step, if the algorithm drops groups


def collect(run: Run, step: int) -> list[Rollout]:
    """The rollouts of a step, from where the algorithm takes them; every rank has all of them."""
    if run.inputs.written is not None:
        return take_written(run, run.inputs.written)
    return sample_groups(run, step)


def take_written(run: Run, data: WrittenData) -> list[Rollout]:
    """The next rows of the data. Pairs are scored, because their loss compares policy and reference."""
    rollouts = data.next_rollouts()
    run.log.pending["data/epoch"] = data.prompts.epoch
    if run.inputs.algorithm.source == "pairs":
        with run.log.timed("score"):
            score_written(run, rollouts)
    return run.policy.gather_rollouts(rollouts)


def score_written(run: Run, rollouts: Sequence[Rollout]) -> None:
    run.policy.score(rollouts, POLICY)
    if run.inputs.algorithm.needs_reference:
        run.policy.score(rollouts, "reference")


def sample_groups(run: Run, step: int) -> list[Rollout]:
    """Sample until the algorithm has kept a group for each prompt of the step; groups beyond that wait for the next."""
    wanted = run.config.data.prompts_per_step
    groups = run.progress.surplus
    failures_before = count_failures(run.inputs)
    sampled: list[Rollout] = []
    rounds = 0
    dropped = 0
    constant: list[bool] = []  # for each group that was sampled
    while len(groups) < wanted and rounds < MAX_ROUNDS:
        prompts = run.inputs.data.next_prompts()
        rollouts = sample(run, prompts, seed=f"{run.config.seed}/{step}/{rounds}")
        kept, others = keep(run, rollouts)
        groups = groups + kept
        dropped += others
        constant += [is_constant(group) for group in group_by_prompt(rollouts)]
        sampled += rollouts
        rounds += 1
    run.log.pending |= {"groups/rounds": float(rounds), "groups/dropped": float(dropped)}
    if constant and run.inputs.rewarded:
        run.log.pending["groups/frac_reward_zero_std"] = sum(constant) / len(constant)
    run.log.pending |= _describe(run, sampled)
    run.log.pending |= share_failures(run, failures_before, len(sampled))
    show_reward_failures(run)
    if not groups:
        why = "; ".join(run.inputs.rewards.messages.values()) or "the rewards within each group are all equal"
        raise RuntimeError(f"the algorithm kept no group of {MAX_ROUNDS} rounds of sampling: {why}")
    run.progress.surplus = groups[wanted:]
    return [replace(rollout, group=index) for index, group in enumerate(groups[:wanted]) for rollout in group]


def sample(run: Run, prompts: Sequence[Prompt], seed: str) -> list[Rollout]:
    """Rollouts of these prompts with rewards, and those of the other ranks.

    Where KL needs it, those that the algorithm keeps also have the reference's log-probabilities.
    """

    def show(progress: Progress) -> None:
        total = progress.finished + progress.running + progress.waiting
        run.log.view.phase("generate", progress.finished, total)

    with run.log.timed("generate"):
        generate = partial(run.policy.generate, seed=seed, on_progress=show)
        rollouts = run.inputs.environment.run(generate, prompts)
    if run.inputs.rewarded:
        with run.log.timed("reward"):
            run.inputs.rewards.score(rollouts)
    show_reward_failures(run)
    if run.inputs.algorithm.needs_reference:
        kept, _ = keep(run, rollouts)
        with run.log.timed("score"):
            run.policy.score([rollout for group in kept for rollout in group], "reference")
    return run.policy.gather_rollouts(rollouts)


def keep(run: Run, rollouts: Sequence[Rollout]) -> tuple[list[Group], int]:
    """The groups that are worth training on, and the number of the others."""
    groups = group_by_prompt(rollouts)
    kept = [group for group in groups if run.inputs.algorithm.keeps(group)]
    return kept, len(groups) - len(kept)


def group_by_prompt(rollouts: Sequence[Rollout]) -> list[Group]:
    groups: dict[int, Group] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return list(groups.values())


def _describe(run: Run, sampled: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of everything that all ranks sampled in a step, whether it is trained on or not."""
    found = {"tokens/generate": float(sum(sum(rollout.sampled) for rollout in sampled))}
    if run.inputs.algorithm.needs_reference:
        scored = [rollout for rollout in sampled if rollout.reference_logprobs is not None]
        found["tokens/score"] = float(sum(len(rollout.prompt.tokens) + len(rollout.tokens) for rollout in scored))
    if sampled and run.inputs.rewarded:
        found["reward/sampled"] = describe(sampled)["reward"]
    return found


def evaluate(
    run: Run, seed: str, prompts: Sequence[Prompt] | None = None, examples: Sequence[Rollout] | None = None
) -> dict[str, float]:
    """Metrics of the validation data, or of other prompts or examples, which ranks divide among themselves."""
    found: dict[str, float] = {}
    if run.inputs.left_out:
        found["validation/dropped_prompts"] = float(run.inputs.left_out)
    everyones = run.inputs.validation if prompts is None else prompts
    if run.inputs.rewarded:
        return found | _evaluate_samples(run, seed, everyones)
    return found | _evaluate_unrewarded(run, seed, everyones, run.inputs.examples if examples is None else examples)


def _evaluate_unrewarded(
    run: Run, seed: str, prompts: Sequence[Prompt], examples: Sequence[Rollout]
) -> dict[str, float]:
    """What the algorithm says about completions of the data, or about samples as in a step."""
    algorithm = cast(UnrewardedAlgorithm, run.inputs.algorithm)
    with run.log.timed("validate"):
        if run.inputs.written is not None:
            rollouts = share_of(examples, run.world)
            score_written(run, rollouts)
        else:
            mine = prompts[run.world.rank :: run.world.size]
            rollouts = run.inputs.examiner.run(partial(run.policy.generate, seed=seed), mine)
            run.policy.score(rollouts, "reference")
        rollouts = run.policy.gather_rollouts(rollouts)
    return {f"validation/{name}": value for name, value in algorithm.examine(rollouts).items()}


def _evaluate_samples(run: Run, seed: str, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Metrics of completions of prompts.

    `RewardFunctions.is_right` says which samples are right; pass@k is the share of prompts with at least one of them.
    """
    inputs, world = run.inputs, run.world
    settings = run.config.validation
    params = replace(run.policy.sampling, temperature=settings.temperature)
    with run.log.timed("validate"):
        mine = prompts[world.rank :: world.size]
        rollouts = inputs.examiner.run(partial(run.policy.generate, seed=seed, params=params), mine)
        inputs.rewards.score(rollouts)
        rollouts = run.policy.gather_rollouts(rollouts)
    right = [[inputs.rewards.is_right(rollout) for rollout in group] for group in group_by_prompt(rollouts)]
    found = {"validation/reward": math.fsum(rollout.reward for rollout in rollouts) / len(rollouts)}
    found |= _rewards_by_function(rollouts)
    found["validation/accuracy"] = sum(map(sum, right)) / len(rollouts)
    found[f"validation/pass@{settings.samples}"] = sum(map(any, right)) / len(right)
    return found


def _rewards_by_function(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The mean reward of each function, if there are several; not every rollout has one of each."""
    given: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, reward in rollout.rewards.items():
            given.setdefault(name, []).append(reward)
    if len(given) < 2:
        return {}
    return {f"validation/rewards/{name}": math.fsum(rewards) / len(rewards) for name, rewards in given.items()}
