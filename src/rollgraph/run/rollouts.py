"""Collects the rollouts of a step: sample, reward, filter, score; or read offline data and score it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from rollgraph.inference import Progress
from rollgraph.inputs.inputs import Inputs
from rollgraph.log.samples import SampleDetails, choose_groups
from rollgraph.policy.generate import run_on_tensor_group
from rollgraph.policy.weights import POLICY
from rollgraph.rl.algorithms.batch import has_equal_rewards, rollout_failed, rollout_metrics
from rollgraph.rl.data.demonstrations import OfflineData
from rollgraph.rl.rewards.arguments import TrainerState
from rollgraph.run.progress import Group
from rollgraph.run.setup import Run, logs_token_values
from rollgraph.run.step_log import OnProgress
from rollgraph.types import Batch, Prompt, Rollout, Sample

# -- failures that do not end a run ----------------------------------------------------------------
# Counted by kind, summed over ranks, and logged as metrics of the step.

REWARD_FAILURES = "failures/reward/"  # metric: count by kind
ENVIRONMENT_FAILURES = "failures/environment/"
UNREWARDED = "failures/unrewarded"  # metric: the fraction of rollouts without a valid reward


def count_failures(inputs: Inputs) -> Counter[str]:
    """Failures since this process began, by the name of their metric."""
    counts = Counter({REWARD_FAILURES + kind: count for kind, count in inputs.rewards.failures.items()})
    in_environment = getattr(inputs.environment, "failures", {})
    counts.update({ENVIRONMENT_FAILURES + kind: count for kind, count in in_environment.items()})
    counts[UNREWARDED] = inputs.rewards.unrewarded
    return counts


def gather_failures(run: Run, before: Counter[str], sampled: int) -> dict[str, float]:
    """Metrics of the failures on all ranks since `before`; `sampled` is the number of rollouts of all ranks.

    Each rank also receives the failure messages of the others.
    """
    rewards = run.inputs.rewards
    environment = run.inputs.environment
    local = [count_failures(run.inputs) - before, rewards.messages, getattr(environment, "messages", {})]
    total: Counter[str] = Counter()
    for rank, text in enumerate(run.policy.sharded.exchange_text(json.dumps(local))):
        counts, messages, of_environment = json.loads(text)
        total.update(counts)
        if rank != run.world.rank:
            of_rewards = {
                name.removeprefix(REWARD_FAILURES): count
                for name, count in counts.items()
                if name.startswith(REWARD_FAILURES)
            }
            rewards.add_failures(of_rewards, messages)
            if of_environment:
                getattr(environment, "hear", lambda messages: None)(of_environment)
    return {**total, UNREWARDED: total[UNREWARDED] / max(1, sampled)}


def show_reward_failures(run: Run) -> None:
    """Show failures as soon as they are known: the first few distinct reward failures, and each kind of reply."""
    for message in run.inputs.rewards.unread():
        run.log.note(f"a reward failed and counts as {run.config.reward.on_failure:g}: {message}")
    for environment in (run.inputs.environment, run.inputs.validation_environment):
        for message in getattr(environment, "unread", list)():
            run.log.note(f"the environment failed: {message}")


def summarize_reward_failures(inputs: Inputs) -> str:
    """A line for the end of the run; empty if no reward failed."""
    failures = inputs.rewards.failures
    if not failures:
        return ""
    kinds = ", ".join(f"{count} {kind}" for kind, count in failures.items())
    return f"rewards failed for {failures.total()} rollouts: {kinds}"


# -- notes on a run that learns nothing ------------------------------------------------------------

EQUAL_REWARDS = (
    "the rewards within each group are all equal. If no answer is right, use easier prompts, a warm_start, or a reward "
    "with partial credit; if all are right, use harder prompts. More rollout.samples_per_prompt or a higher "
    "rollout.temperature make groups differ. samples.jsonl in the output folder shows the completions and their rewards"
)
ALL_MASKED = (
    "mask_truncated masks every sample that has an advantage. Raise rollout.max_tokens, or set "
    "algorithm.options: {mask_truncated: false}"
)
FAILED_REWARDS = (
    "rewards have failed, and those that have not are equal. Repair the functions first: metrics.jsonl counts their "
    "failures, and samples.jsonl has their messages"
)


def warn_if_nothing_to_learn(run: Run, step: int, batch: Batch) -> None:
    """Show a note when all advantages of a step are 0, and not again until some are not."""
    if not run.inputs.algorithm.needs_rewards:
        return
    learns_nothing = not any(any(sample.advantages) for sample in batch.samples)
    reason = EQUAL_REWARDS
    if batch.metrics.get("advantage/abs_max"):  # computed before samples are masked
        reason = ALL_MASKED
    elif any(name.startswith(REWARD_FAILURES) for name in run.log.step_metrics):
        reason = FAILED_REWARDS
    reward = batch.metrics.get("reward", 0.0)
    text = f"step {step}, mean reward {reward:.3g}: nothing can be learned from the rewards, because {reason}"
    run.log.note_once_while(learns_nothing, "nothing to learn", text)


# -- times of ranks --------------------------------------------------------------------------------

RANKS = "speed/ranks/"  # followed by the rank and the name of its metric


def gather_rank_times(run: Run) -> dict[str, float]:
    """With several ranks, metrics of each: the seconds of its phases so far, and its peak memory."""
    if run.world.size == 1:
        return {}
    local: dict[str, float] = {f"seconds/{phase}": seconds for phase, seconds in run.log.seconds.items()}
    local["memory_gib"] = run.log.memory.peak / 2**30
    metrics: dict[str, float] = {}
    for rank, text in enumerate(run.policy.sharded.exchange_text(json.dumps(local))):
        metrics |= {f"{RANKS}{rank}/{name}": value for name, value in json.loads(text).items()}
    return metrics


# -- state of the run for reward functions ---------------------------------------------------------

LOGGED = "logged/"  # metric: the mean of the values that reward functions passed to `log_metric`, by name


def trainer_state(run: Run) -> TrainerState:
    return TrainerState(
        global_step=run.progress.finished_steps,
        max_steps=run.config.steps,
        epoch=run.inputs.data.epoch,
    )


def gather_logged(run: Run) -> dict[str, float]:
    """The mean of all values that reward functions logged on any rank since the last call."""
    logged = run.inputs.rewards.logged
    values: dict[str, list[float]] = {}
    for text in run.policy.sharded.exchange_text(json.dumps(logged)):
        for name, logged_values in json.loads(text).items():
            values.setdefault(name, []).extend(logged_values)
    logged.clear()
    return {LOGGED + name: math.fsum(means) / len(means) for name, means in values.items()}


# -- rollouts --------------------------------------------------------------------------------------

MAX_ROUNDS = 8  # of sampling per step, if the algorithm drops groups (dynamic sampling)


def collect_rollouts(run: Run, step: int) -> list[Rollout]:
    """The rollouts of a step: sampled, or read from offline data. Every rank gets all of them."""
    if run.inputs.offline_data is not None:
        return next_offline_rollouts(run, run.inputs.offline_data)
    return sample_groups(run, step)


def next_offline_rollouts(run: Run, data: OfflineData) -> list[Rollout]:
    """The next offline rows. Pairs are also scored, because their loss compares policy and reference."""
    rollouts = data.next_rollouts()
    run.log.step_metrics["data/epoch"] = data.prompts.epoch
    if run.inputs.algorithm.source == "pairs":
        with run.log.timed("score"):
            score_offline(run, rollouts)
    return run.policy.gather_rollouts(rollouts)


def score_offline(run: Run, rollouts: Sequence[Rollout]) -> None:
    run.policy.score(rollouts, POLICY)
    if run.inputs.algorithm.needs_reference:
        run.policy.score(rollouts, "reference")


def sample_groups(run: Run, step: int) -> list[Rollout]:
    """Sample until the algorithm has kept one group per prompt of the step; returns the rollouts of these groups.

    Begins with the surplus groups of the step before, and leaves its own to the next one. After MAX_ROUNDS rounds, the
    step trains on the groups there are; if there are none, this raises.
    """
    needed = run.config.data.prompts_per_step
    groups = run.progress.surplus_groups
    failures_before = count_failures(run.inputs)
    groups_have_equal_rewards: list[bool] = []  # for each sampled group
    sampled: list[Rollout] = []
    rounds = 0
    dropped: list[Group] = []
    while len(groups) < needed and rounds < MAX_ROUNDS:
        prompts = run.inputs.data.next_prompts()
        rollouts = sample_rollouts(run, prompts, seed=f"{run.config.seed}/{step}/{rounds}")
        kept, newly_dropped = filter_groups(run, rollouts)
        groups = groups + kept
        dropped += newly_dropped
        groups_have_equal_rewards += [has_equal_rewards(group) for group in group_rollouts(rollouts)]
        sampled += rollouts
        rounds += 1
    run.log.step_metrics |= {"groups/rounds": float(rounds), "groups/dropped": float(len(dropped))}
    if groups_have_equal_rewards and run.inputs.has_rewards:
        fraction = sum(groups_have_equal_rewards) / len(groups_have_equal_rewards)
        run.log.step_metrics["groups/frac_reward_zero_std"] = fraction
    _log_sampling(run, sampled, failures_before)
    if not groups:
        why = "; ".join(run.inputs.rewards.messages.values()) or "the rewards within each group are all equal"
        raise RuntimeError(f"the algorithm kept no group of {MAX_ROUNDS} rounds of sampling: {why}")
    run.progress.surplus_groups = groups[needed:]
    training_groups = groups[:needed]
    # Dropped groups are numbered after those that are trained on.
    run.log.dropped_rollouts = number_groups(dropped, first=len(training_groups))
    return number_groups(training_groups)


def _log_sampling(run: Run, sampled: Sequence[Rollout], failures_before: Counter[str]) -> None:
    """Log the metrics of sampling: of all rollouts of a step, of reward functions, and of each rank."""
    run.log.step_metrics |= _sampling_metrics(run, sampled)
    run.log.step_metrics |= gather_failures(run, failures_before, len(sampled))
    run.log.step_metrics |= gather_logged(run)
    run.log.step_metrics |= gather_rank_times(run)
    show_reward_failures(run)


def number_groups(groups: Sequence[Group], first: int = 0) -> list[Rollout]:
    """The rollouts of these groups, numbering the groups consecutively."""
    return [replace(rollout, group=number) for number, group in enumerate(groups, first) for rollout in group]


def sample_rollouts(run: Run, prompts: Sequence[Prompt], seed: str) -> list[Rollout]:
    """Sample and reward completions of these prompts; returns the rollouts of all ranks.

    If the algorithm needs a reference (KL), rollouts in groups that it keeps also get reference log-probabilities.
    """
    on_progress = count_requests(partial(run.log.display.phase, "generate"))
    with run.log.timed("generate"):
        generate = run.policy.generator(seed=seed, on_progress=on_progress)
        rollouts = run_on_tensor_group(run.inputs.environment, generate, prompts, run.policy.sharded.tensor)
    if run.inputs.has_rewards:
        with run.log.timed("reward"):
            assign_rewards(run, rollouts)
    rollouts = broadcast_in_tensor_group(run, rollouts)
    show_reward_failures(run)
    if run.inputs.algorithm.needs_reference:
        kept, _ = filter_groups(run, rollouts)
        with run.log.timed("score"):
            run.policy.score([rollout for group in kept for rollout in group], "reference")
    return run.policy.gather_rollouts(rollouts)


def assign_rewards(run: Run, rollouts: list[Rollout]) -> None:
    """Fill in the rewards. In a tensor parallel group, only rank 0 calls the reward functions."""
    tensor = run.policy.sharded.tensor
    if tensor is None or tensor.rank == 0:
        run.inputs.rewards.score(rollouts, trainer_state(run))


def broadcast_in_tensor_group(run: Run, rollouts: list[Rollout]) -> list[Rollout]:
    """Broadcast the rollouts of tensor parallel rank 0: all ranks of the group must train on the same ones."""
    tensor = run.policy.sharded.tensor
    if tensor is None:
        return rollouts
    payload = json.dumps([rollout.to_dict() for rollout in rollouts]) if tensor.rank == 0 else ""
    return [Rollout.from_dict(entry) for entry in json.loads(tensor.collectives.all_gather_text(payload)[0])]


def count_requests(show: OnProgress) -> Callable[[Progress], None]:
    """A callback that shows how many of the engine's requests have finished."""

    def count(progress: Progress) -> None:
        show(progress.finished, progress.finished + progress.running + progress.waiting)

    return count


def filter_groups(run: Run, rollouts: Sequence[Rollout]) -> tuple[list[Group], list[Group]]:
    """The groups that the algorithm keeps for training, and those it drops."""
    kept: list[Group] = []
    dropped: list[Group] = []
    for group in group_rollouts(rollouts):
        (kept if run.inputs.algorithm.keeps(group) else dropped).append(group)
    return kept, dropped


def group_rollouts(rollouts: Sequence[Rollout]) -> list[Group]:
    groups: dict[int, Group] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return list(groups.values())


def _sampling_metrics(run: Run, sampled: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of all rollouts that all ranks sampled in a step, including dropped ones."""
    metrics = {"tokens/generate": float(sum(sum(rollout.sampled) for rollout in sampled))}
    if run.inputs.algorithm.needs_reference:
        scored = [rollout for rollout in sampled if rollout.reference_logprobs is not None]
        metrics["tokens/score"] = float(sum(len(rollout.prompt.tokens) + len(rollout.tokens) for rollout in scored))
    if sampled and run.inputs.has_rewards:
        metrics["reward/sampled"] = rollout_metrics(sampled)["reward"]
    return metrics


# -- details of written samples --------------------------------------------------------------------

CUT_OFF = "it was cut off at the limit of tokens, and mask_truncated is set"
FAILED = "it failed"
NOT_KEPT = "the algorithm did not keep its group"
EQUAL = "the rewards of its group are all equal"


def sample_details(run: Run, step: int, rollouts: Sequence[Rollout], batch: Batch) -> dict[int, SampleDetails]:
    """Details of the few samples that are written to samples.jsonl, by index into `rollouts` and then dropped rollouts.

    Samples that were trained on are scored again with the new weights. All ranks take part in scoring.
    """
    dropped = run.log.dropped_rollouts
    log = run.config.log
    all_rollouts = [*rollouts, *dropped]
    written_groups = choose_groups(
        all_rollouts, log.sample_groups, every=log.samples_every, seed=run.config.seed, step=step
    )
    if not written_groups or run.inputs.offline_data is not None:
        return {}
    samples = {}
    for sample in batch.samples:
        if sample.rollout is not None and rollouts[sample.rollout].group in written_groups:
            samples[sample.rollout] = sample
    new_logprobs = _score_with_new_weights(run, samples) if logs_token_values(run.config, run.inputs) else {}
    details = {}
    for index, sample in samples.items():
        left_out = "" if any(sample.weights) else _exclusion_reason(rollouts[index])
        logprobs, entropies = new_logprobs.get(index, (None, None))
        details[index] = SampleDetails(sample.advantages, logprobs, entropies, left_out)
    for index, rollout in enumerate(dropped, len(rollouts)):
        if rollout.group in written_groups:
            group = [sibling for sibling in dropped if sibling.group == rollout.group]
            details[index] = SampleDetails(left_out=EQUAL if has_equal_rewards(group) else NOT_KEPT)
    return details


def _score_with_new_weights(run: Run, samples: dict[int, Sample]) -> dict[int, tuple[list[float], list[float]]]:
    """Log-probabilities and entropies of samples that are short enough to log, by index."""
    short = {index: sample for index, sample in samples.items() if len(sample.tokens) <= run.config.log.token_values}
    if not short:
        return {}
    with run.log.timed("log"):
        return dict(zip(short, run.policy.logprobs_and_entropies(list(short.values())), strict=True))


def _exclusion_reason(rollout: Rollout) -> str:
    if rollout_failed(rollout):
        return FAILED
    return CUT_OFF if rollout.finish_reason == "length" else NOT_KEPT
