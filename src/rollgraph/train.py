"""The loop. Everything it calls was made by `setup.py` before the first step, graphs included."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollgraph.checkpoint import CheckpointError, none_whole
from rollgraph.claim import claim_folder
from rollgraph.config import Config, to_dict
from rollgraph.dashboard import View, check_sinks, make_view
from rollgraph.inference import Progress
from rollgraph.inputs import check_inputs, find_saved, scores_old
from rollgraph.logbook import (
    UNREWARDED,
    Logbook,
    count_failures,
    describe_sampling,
    share_troubles,
    tell_failures,
    troubles,
)
from rollgraph.model import load_weights, save_model
from rollgraph.rl.algorithms import load_algorithm
from rollgraph.setup import POLICY_LOSS, SUPERVISED, Run, StepEnd, make_run
from rollgraph.types import Batch, Prompt, Rollout
from rollgraph.world import World

REPORT = "graphs.json"  # in the folder of a run: the last thing it writes
RIGHT = 1 - 1e-6  # the reward of a right answer: weights that add up to 1 do so but for rounding
MOST_ROUNDS = 8  # of sampling for one step, where an algorithm keeps only some groups


def train(config: Config, world: World | None = None) -> Run | None:
    """A whole run, from the last checkpoint if there is one; None if it is finished already."""
    world = world or World.current()
    shown = "none" if world.rank else config.log.progress
    with make_view(shown, config.steps) as view, _sigterm() as asked_to_stop, claim_folder(config.output, world):
        if world.rank == 0:
            check_sinks(config.log, note=lambda text: None)
        inputs = check_inputs(config, world, resumes=True)
        if taken := finished_steps(config):
            inputs.rewards.close()
            view.note(f"{config.output} is finished, with {taken} steps: raise `steps`, or give another output")
            return None
        run = make_run(
            config, world, lambda name, done, total: view.phase(f"capture {name}", done, total), inputs=inputs
        )
        try:
            first_step = resume(run, view, asked_to_stop)
            if first_step is None:
                return run
            captured = run.policy.pool.report().captures
            if world.rank == 0:
                (Path(config.output) / REPORT).unlink(missing_ok=True)  # of the same run, with fewer steps
            with Logbook(run, view, first_step) as logbook, saved_on_error(run, view):
                for step in range(first_step, config.steps):
                    rollouts = collect(run, step, view)
                    parts = min(config.algorithm.minibatches, len(rollouts))  # few, where few groups were kept
                    batch = run.algorithm.make_batch(rollouts, minibatches=parts, seed=step)
                    with run.timed("train"):
                        learned = run.policy.train(
                            batch,
                            POLICY_LOSS,
                            epochs=config.algorithm.epochs,
                            score_old=scores_old(config, run.algorithm),
                        )
                    refuse_dead(run, step, batch, learned)
                    if step == first_step:
                        check_report(run)
                    run.end = StepEnd(step, run.policy.optimizer.steps, run.data.state(), run.surplus)
                    found = validate(run, step)
                    logbook.write(step, rollouts, batch, {**learned, **found})
                    stopping = run.on_any_rank(bool(asked_to_stop))
                    maybe_save(run, step, found.get("validation/reward"), stopping)
                    tell_problems(run, view)
                    if stopping:
                        view.note(f"asked to stop: saved after {step + 1} of {config.steps} steps")
                        break
            finish(run, view, captured)
        finally:
            run.close()
    return run


def finished_steps(config: Config) -> int:
    """The steps that a run has taken, if these are all and it has left everything, too; else 0."""
    saved, output = find_saved(config), Path(config.output)
    taken = saved.step + 1 if saved is not None else 0
    exported = (output / "model").exists() or not config.checkpoint.export_at_end
    return taken if taken >= config.steps and exported and (output / REPORT).exists() else 0


def refuse_dead(run: Run, step: int, batch: Batch, learned: dict[str, float]) -> None:
    """End the run, with its checkpoints as they are, where nothing can be learned any more."""
    if batch.metrics.get("failed") == 1.0 or not math.isfinite(learned["loss"]):
        raise RuntimeError(
            f"step {step}: every rollout failed or the loss is not finite. Go back to a checkpoint from before, with a "
            "smaller learning rate"
        )
    if step == 0 and run.pending.get(UNREWARDED) == 1.0:
        raise RuntimeError("no rollout of the first step was rewarded: " + "; ".join(run.rewards.messages.values()))


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


def validate(run: Run, step: int) -> dict[str, float]:
    """Every so often: the mean reward of held-out prompts, and pass@k: of how many any sample has a reward of 1."""
    v = run.config.validation
    if not run.validation or ((step + 1) % v.every and step != run.config.steps - 1):
        return {}
    return evaluate(run, f"validation/{step}")


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
    return {
        "validation/reward": math.fsum(rollout.reward for rollout in rollouts) / len(rollouts),
        **{f"validation/reward/{name}": math.fsum(part) / len(part) for name, part in parts.items() if len(parts) > 1},
        "validation/accuracy": sum(map(sum, right)) / len(rollouts),
        f"validation/pass@{v.samples}": sum(map(any, right)) / len(right),
    }


def warm_start(run: Run, view: View, asked_to_stop: Sequence[int]) -> bool:
    """Supervised training on demonstrations, until it is good enough to learn from its own samples; whether it ended
    by itself."""
    w = run.config.warm_start
    assert w is not None
    algorithm, rows, end = load_algorithm(SUPERVISED), run.demonstrations, run.tokenizer.eos_id
    optimizer, settings = run.policy.optimizer, (run.policy.optimizer.base, run.policy.optimizer.schedule)
    optimizer.restart(w.lr, None)
    order = torch.Generator().manual_seed(run.config.seed)
    for step in range(w.steps):
        if run.on_any_rank(bool(asked_to_stop)):
            view.note(f"asked to stop: in step {step} of the warm start, of which nothing is saved")
            return False
        chosen = torch.randint(len(rows), (w.batch_size,), generator=order).tolist()
        rollouts = []
        for index in chosen:
            row = rows[index]
            tokens = run.tokenizer.encode(str(row.columns["completion"]), special=False)
            tokens = tokens if end is None else [*tokens, end]
            prompt = Prompt(index, tuple(run.tokenizer.encode(str(row.prompt))), str(row.prompt))
            rollouts.append(Rollout(prompt, tokens, [True] * len(tokens), [0.0] * len(tokens)))
        loss = run.policy.train(algorithm.make_batch(rollouts), SUPERVISED)["loss"]
        view.phase("warm start", step + 1, w.steps)
        if w.stop_at is not None and (step + 1) % w.check_every == 0:
            rollouts = sample(run, run.data.next_prompts(), f"warm start/{step}", view)
            reward = sum(rollout.reward for rollout in rollouts) / len(rollouts)
            view.note(f"warm start, step {step + 1}: loss {loss:.3f}, mean reward of samples {reward:.3f}")
            if reward >= w.stop_at:
                break
    optimizer.restart(*settings)
    return True


def resume(run: Run, view: View, asked_to_stop: Sequence[int] = ()) -> int | None:
    """Continue where the last whole checkpoint left off, or begin; gives the first step to take, or None to stop."""
    config, folder = run.config, Path(run.config.output)
    saved = None if config.resume == "never" else run.checkpoints.latest()
    if saved is None and run.checkpoints.broken:
        raise none_whole(folder / "checkpoints", run.checkpoints.broken.values())
    if saved is None and config.resume == "must":
        raise CheckpointError(f"resume: must, but {folder / 'checkpoints'} has no whole checkpoint")
    reference = folder / "reference"
    if saved is None:
        if config.warm_start is not None and not warm_start(run, view, asked_to_stop):
            return None
        if run.algorithm.needs_reference:
            run.policy.weights.save("reference")
        if config.model.path is None or config.warm_start is not None:  # or the model's own folder is the reference
            with run.policy.phases.enter("save"):
                if run.world.rank == 0:
                    save_model(run.policy.model, reference)
        run.data.load_state({**run.data.state(), "cursor": 0})  # a warm start has looked at some prompts
        if run.validation:
            found = evaluate(run, "before")
            view.note("before the first step: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
            run.pending = {f"before/{name}": value for name, value in found.items()}
        return 0
    if run.algorithm.needs_reference:
        if config.model.path is None or config.warm_start is not None:
            load_weights(run.policy.model, reference)
        run.policy.weights.save("reference")
    state = run.checkpoints.load(saved)
    run.data.load_state(state["data"])
    run.surplus = [[Rollout.from_dict(entry) for entry in group] for group in state["surplus"]]
    tell_problems(run, view)
    view.note(f"resumed after {saved.step + 1} of {config.steps} steps")
    return saved.step + 1


def maybe_save(run: Run, step: int, score: float | None, now: bool = False) -> None:
    """Every so often, after the last step, and wherever validation is better than it was in what is kept."""
    due = now or (step + 1) % run.config.checkpoint.every == 0 or step == run.config.steps - 1
    if due or (score is not None and is_best(run, score)):
        save(run, score, due)


def is_best(run: Run, score: float) -> bool:
    """Whether a checkpoint is kept for it: what rank 0 says, because all ranks save together."""
    return run.on_any_rank(run.world.rank == 0 and run.checkpoints.is_best(score))


def save(run: Run, score: float | None = None, due: bool = True) -> None:
    """The end of the last step."""
    assert run.end is not None
    state = {
        "data": run.end.data,
        "surplus": [[rollout.to_dict() for rollout in group] for group in run.end.surplus],
        "config": to_dict(run.config),
    }
    run.saving = True
    with run.timed("save"), run.policy.phases.enter("save"):
        run.checkpoints.save(run.end.step, state, score, due=due)
    run.saving = False


@contextmanager
def saved_on_error(run: Run, view: View) -> Iterator[None]:
    """Whatever ends the loop, what was learned is saved: the end of its last step, if the weights are still those.

    Not with several ranks: those where nothing happened would be waited for.
    """
    try:
        yield
    except BaseException:
        try:
            run.checkpoints.settle()
            if run.world.size == 1 and not run.saving:
                save_rest(run, view)
        except Exception as error:  # the first one is the one to raise
            view.note(f"and what was learned could not be saved: {error}")
        tell_problems(run, view)
        raise


def save_rest(run: Run, view: View) -> None:
    """What no checkpoint has yet."""
    if run.end is None or run.end.step in [saved.step for saved in run.checkpoints.complete()]:
        return
    if run.policy.optimizer.steps != run.end.updates:
        view.note(f"step {run.end.step + 1} ended between its updates: what came after the last checkpoint is lost")
        return
    save(run)
    run.checkpoints.wait()
    view.note(f"saved after {run.end.step + 1} of {run.config.steps} steps")


def tell_problems(run: Run, view: View) -> None:
    for problem in run.checkpoints.unread():
        view.note(problem)


def check_report(run: Run) -> None:
    """After the first step: what was captured and replayed has to be what the configuration asked for."""
    graph, report = run.config.graph, run.policy.pool.report()
    wanted = run.policy.backend_name
    used = {record.backend for record in report.graphs}
    eager = report.eager_runs if graph.impl != "none" and graph.on_mismatch == "raise" else 0
    if used != {wanted} or eager:
        raise RuntimeError(
            f"graph.impl: {graph.impl} asks for {wanted} graphs, but the report has {', '.join(sorted(used))} and "
            f"{eager} eager runs:\n{report}"
        )


def finish(run: Run, view: View, captured: int) -> None:
    """The end of a run: everything on disk, and what the graphs did."""
    run.checkpoints.wait()
    if run.config.checkpoint.export_at_end:
        run.policy.export(Path(run.config.output) / "model")
    report = run.policy.pool.report()
    later = report.captures - captured
    if run.world.rank == 0:
        (Path(run.config.output) / REPORT).write_text(report.to_json())
    view.note(f"graphs: {report.replays} replays, {report.eager_runs} eager runs, {later} captures after warm-up")
    tell_failures(run, view)
    if failed := count_failures(run):
        view.note(failed)


class _sigterm:
    """Inside, SIGTERM is remembered instead of ending the process: the loop saves and leaves."""

    def __init__(self) -> None:
        self._asked: list[int] = []
        self._found: Any = None

    def __enter__(self) -> list[int]:
        try:
            self._found = signal.signal(signal.SIGTERM, self._ask)
        except ValueError:  # not the main thread: somebody else's matter
            self._found = None
        return self._asked

    def __exit__(self, *error: object) -> None:
        if self._found is not None:
            signal.signal(signal.SIGTERM, self._found)

    def _ask(self, number: int, frame: Any) -> None:
        self._asked.append(number)
        if len(self._asked) > 1:  # asked twice: the step does not end
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
