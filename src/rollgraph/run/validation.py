"""Validation: what the policy reaches on the validation data, as metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from rollgraph.policy.generate import run_on_tensor_group
from rollgraph.rl.algorithms import UnrewardedAlgorithm
from rollgraph.rl.data.demonstrations import rollouts_of_rank
from rollgraph.run.rollouts import (
    assign_rewards,
    broadcast_in_tensor_group,
    count_requests,
    gather_logged,
    group_rollouts,
    score_offline,
)
from rollgraph.run.setup import Run
from rollgraph.types import Rollout


def validate(run: Run, step: int) -> dict[str, float]:
    """Metrics of the validation data, at intervals and after the last step; otherwise empty."""
    at_interval = (step + 1) % run.config.validation.every == 0
    is_last = step == run.config.steps - 1
    if not run.inputs.can_validate or not (at_interval or is_last):
        return {}
    return evaluate_policy(run, f"validation/{step}")


def evaluate_policy(run: Run, seed: str) -> dict[str, float]:
    """Metrics of the validation data. Each data parallel rank evaluates its share."""
    metrics: dict[str, float] = {}
    if run.inputs.dropped_validation_prompts:
        metrics["validation/dropped_prompts"] = float(run.inputs.dropped_validation_prompts)
    if run.inputs.has_rewards:
        return metrics | _evaluate_rewards(run, seed)
    return metrics | _evaluate_losses(run, seed)


def _evaluate_losses(run: Run, seed: str) -> dict[str, float]:
    """The algorithm's own validation metrics, on offline completions or on samples drawn as in training."""
    algorithm = cast(UnrewardedAlgorithm, run.inputs.algorithm)
    with run.log.timed("validate"), run.log.phase("validate") as show:
        if run.inputs.offline_data is not None:
            rollouts = rollouts_of_rank(run.inputs.offline_validation, run.policy.world)
            score_offline(run, rollouts)
        else:
            prompts = run.inputs.validation[run.policy.world.rank :: run.policy.world.size]
            generate = run.policy.generator(seed=seed, on_progress=count_requests(show), validates=True)
            rollouts = run_on_tensor_group(
                run.inputs.validation_environment, generate, prompts, run.policy.sharded.tensor
            )
            rollouts = broadcast_in_tensor_group(run, rollouts)
            run.policy.score(rollouts, "reference")
        rollouts = run.policy.gather_rollouts(rollouts)
    run.log.validation_rollouts = rollouts
    return {f"validation/{name}": value for name, value in algorithm.examine(rollouts).items()}


def _evaluate_rewards(run: Run, seed: str) -> dict[str, float]:
    """Mean reward, accuracy and pass@k of sampled completions.

    `RewardFunctions.is_correct` decides which samples are right. pass@k is the fraction of prompts with a right sample.
    """
    inputs, world = run.inputs, run.policy.world  # tensor parallel ranks evaluate the same share
    settings = run.config.validation
    params = replace(run.policy.sampling, temperature=settings.temperature)
    with run.log.timed("validate"), run.log.phase("validate") as show:
        prompts = inputs.validation[world.rank :: world.size]
        on_progress = count_requests(show)
        generate = run.policy.generator(seed=seed, params=params, on_progress=on_progress, validates=True)
        rollouts = run_on_tensor_group(inputs.validation_environment, generate, prompts, run.policy.sharded.tensor)
        assign_rewards(run, rollouts)
        rollouts = run.policy.gather_rollouts(broadcast_in_tensor_group(run, rollouts))
    run.log.validation_rollouts = rollouts
    is_right = [[inputs.rewards.is_correct(rollout) for rollout in group] for group in group_rollouts(rollouts)]
    metrics = {"validation/reward": math.fsum(rollout.reward for rollout in rollouts) / len(rollouts)}
    metrics |= _rewards_by_function(rollouts)
    metrics["validation/accuracy"] = sum(map(sum, is_right)) / len(rollouts)
    metrics[f"validation/pass@{settings.samples}"] = sum(map(any, is_right)) / len(is_right)
    metrics |= {f"validation/{name}": value for name, value in gather_logged(run).items()}
    return metrics


def _rewards_by_function(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The mean reward by function, if there are several. A rollout may lack some of them."""
    by_function: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, reward in rollout.rewards.items():
            by_function.setdefault(name, []).append(reward)
    if len(by_function) < 2:
        return {}
    return {f"validation/rewards/{name}": math.fsum(rewards) / len(rewards) for name, rewards in by_function.items()}
