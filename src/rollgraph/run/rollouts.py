"""The rollouts of a step and of a validation: sampled, rewarded, kept or dropped, and scored; or written and scored."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from rollgraph.inference import Progress
from rollgraph.policy.group_turns import run_in_group
from rollgraph.policy.weights import POLICY
from rollgraph.rl.algorithms import UnrewardedAlgorithm
from rollgraph.rl.algorithms.batches import describe, is_constant
from rollgraph.rl.demonstrations import WrittenData
from rollgraph.run.demonstrations import share_of
from rollgraph.run.failures import count_failures, share_failures, show_reward_failures
from rollgraph.run.progress import Group
from rollgraph.run.rank_times import share_rank_times
from rollgraph.run.reward_state import share_logged, trainer_state
from rollgraph.run.setup import Run
from rollgraph.run.step_log import OnProgress
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
    dropped: list[Group] = []
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
    run.log.pending |= {"groups/rounds": float(rounds), "groups/dropped": float(len(dropped))}
    if constant and run.inputs.rewarded:
        run.log.pending["groups/frac_reward_zero_std"] = sum(constant) / len(constant)
    run.log.pending |= _describe(run, sampled)
    run.log.pending |= share_failures(run, failures_before, len(sampled))
    run.log.pending |= share_logged(run)
    run.log.pending |= share_rank_times(run)
    show_reward_failures(run)
    if not groups:
        why = "; ".join(run.inputs.rewards.messages.values()) or "the rewards within each group are all equal"
        raise RuntimeError(f"the algorithm kept no group of {MAX_ROUNDS} rounds of sampling: {why}")
    run.progress.surplus = groups[wanted:]
    trained = groups[:wanted]
    run.log.dropped = number_groups(dropped, first=len(trained))
    return number_groups(trained)


def number_groups(groups: Sequence[Group], first: int = 0) -> list[Rollout]:
    """The rollouts of these groups, with the groups numbered in their order."""
    return [replace(rollout, group=number) for number, group in enumerate(groups, first) for rollout in group]


def sample(run: Run, prompts: Sequence[Prompt], seed: str) -> list[Rollout]:
    """Rollouts of these prompts with rewards, and those of the other ranks.

    Where KL needs it, those that the algorithm keeps also have the reference's log-probabilities.
    """
    on_progress = _counting_requests(partial(run.log.view.phase, "generate"))
    with run.log.timed("generate"):
        generate = run.policy.generator(seed=seed, on_progress=on_progress)
        rollouts = run_in_group(run.inputs.environment, generate, prompts, run.policy.sharded.tensor)
    if run.inputs.rewarded:
        with run.log.timed("reward"):
            reward(run, rollouts)
    rollouts = share_in_group(run, rollouts)
    show_reward_failures(run)
    if run.inputs.algorithm.needs_reference:
        kept, _ = keep(run, rollouts)
        with run.log.timed("score"):
            run.policy.score([rollout for group in kept for rollout in group], "reference")
    return run.policy.gather_rollouts(rollouts)


def reward(run: Run, rollouts: list[Rollout]) -> None:
    """Fill in the rewards. Of the ranks that divide layers, the one that has the rollouts asks for them."""
    tensor = run.policy.sharded.tensor
    if tensor is None or tensor.rank == 0:
        run.inputs.rewards.score(rollouts, trainer_state(run))


def share_in_group(run: Run, rollouts: list[Rollout]) -> list[Rollout]:
    """The rollouts of the first of the ranks that divide layers, on all of them: these ranks must not differ."""
    tensor = run.policy.sharded.tensor
    if tensor is None:
        return rollouts
    mine = json.dumps([rollout.to_dict() for rollout in rollouts]) if tensor.rank == 0 else ""
    return [Rollout.from_dict(entry) for entry in json.loads(tensor.collectives.all_gather_text(mine)[0])]


def _counting_requests(show: OnProgress) -> Callable[[Progress], None]:
    """Show how many of the engine's requests are finished."""

    def count(progress: Progress) -> None:
        show(progress.finished, progress.finished + progress.running + progress.waiting)

    return count


def keep(run: Run, rollouts: Sequence[Rollout]) -> tuple[list[Group], list[Group]]:
    """The groups that are worth training on, and the others."""
    kept: list[Group] = []
    others: list[Group] = []
    for group in group_by_prompt(rollouts):
        (kept if run.inputs.algorithm.keeps(group) else others).append(group)
    return kept, others


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


def evaluate(run: Run, seed: str) -> dict[str, float]:
    """Metrics of the validation data, which ranks divide among themselves."""
    found: dict[str, float] = {}
    if run.inputs.left_out:
        found["validation/dropped_prompts"] = float(run.inputs.left_out)
    if run.inputs.rewarded:
        return found | _evaluate_samples(run, seed)
    return found | _evaluate_unrewarded(run, seed)


def _evaluate_unrewarded(run: Run, seed: str) -> dict[str, float]:
    """What the algorithm says about completions of the data, or about samples as in a step."""
    algorithm = cast(UnrewardedAlgorithm, run.inputs.algorithm)
    with run.log.timed("validate"), run.log.phase("validate") as show:
        if run.inputs.written is not None:
            rollouts = share_of(run.inputs.examples, run.policy.world)
            score_written(run, rollouts)
        else:
            mine = run.inputs.validation[run.policy.world.rank :: run.policy.world.size]
            generate = run.policy.generator(seed=seed, on_progress=_counting_requests(show))
            rollouts = run_in_group(run.inputs.examiner, generate, mine, run.policy.sharded.tensor)
            rollouts = share_in_group(run, rollouts)
            run.policy.score(rollouts, "reference")
        rollouts = run.policy.gather_rollouts(rollouts)
    run.log.examined = rollouts
    return {f"validation/{name}": value for name, value in algorithm.examine(rollouts).items()}


def _evaluate_samples(run: Run, seed: str) -> dict[str, float]:
    """Metrics of completions of prompts.

    `RewardFunctions.is_right` says which samples are right; pass@k is the share of prompts with at least one of them.
    """
    inputs, world = run.inputs, run.policy.world  # those that divide layers have the same share
    settings = run.config.validation
    params = replace(run.policy.sampling, temperature=settings.temperature)
    with run.log.timed("validate"), run.log.phase("validate") as show:
        mine = inputs.validation[world.rank :: world.size]
        generate = run.policy.generator(seed=seed, params=params, on_progress=_counting_requests(show))
        rollouts = run_in_group(inputs.examiner, generate, mine, run.policy.sharded.tensor)
        reward(run, rollouts)
        rollouts = run.policy.gather_rollouts(share_in_group(run, rollouts))
    run.log.examined = rollouts
    right = [[inputs.rewards.is_right(rollout) for rollout in group] for group in group_by_prompt(rollouts)]
    found = {"validation/reward": math.fsum(rollout.reward for rollout in rollouts) / len(rollouts)}
    found |= _rewards_by_function(rollouts)
    found["validation/accuracy"] = sum(map(sum, right)) / len(rollouts)
    found[f"validation/pass@{settings.samples}"] = sum(map(any, right)) / len(right)
    found |= {f"validation/{name}": value for name, value in share_logged(run).items()}
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
