"""The loop. Everything it calls was made by `setup.py` before the first step, graphs included."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollgraph.config import Config
from rollgraph.distributed.world import World
from rollgraph.files import write_atomically
from rollgraph.rl.algorithms import load_algorithm
from rollgraph.run.checkpoints import CheckpointError, none_whole
from rollgraph.run.folder_lock import lock_folder
from rollgraph.run.inputs import check_inputs, find_saved, scores_old
from rollgraph.run.interrupts import Interrupts
from rollgraph.run.reference import keep_reference, restore_reference
from rollgraph.run.rollouts import collect, evaluate, sample
from rollgraph.run.saving import maybe_save, save_end, saved_on_error, tell_problems
from rollgraph.run.setup import POLICY_LOSS, SUPERVISED, Run, StepEnd, make_run
from rollgraph.run.step_log import REWARD_FAILURES, UNREWARDED, Logbook, count_failures, tell_failures
from rollgraph.telemetry import View, check_sinks, make_view
from rollgraph.types import Batch, Prompt, Rollout

REPORT = "graphs.json"  # in the folder of a run: the last thing it writes


def train(config: Config, world: World | None = None) -> Run | None:
    """A whole run, from the last checkpoint if there is one; None if it is finished already."""
    world = world or World.current()
    shown = "none" if world.rank else config.log.progress
    with (
        make_view(shown, config.steps) as view,
        _sigterm() as asked_to_stop,
        Interrupts(partial(asked_to_stop.append, signal.SIGINT), world) as ctrl_c,
        lock_folder(config.output, world),
    ):
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
            run.uninterrupted = ctrl_c.begin()
            with Logbook(run, view, first_step) as logbook, saved_on_error(run, view):
                for step in range(first_step, config.steps):
                    rollouts = collect(run, step, view)
                    if lost_rewards(run, asked_to_stop):
                        save_end(run, view)
                        break
                    parts = min(config.algorithm.minibatches, len(rollouts))  # few, where few groups were kept
                    batch = run.algorithm.make_batch(rollouts, minibatches=parts, seed=step)
                    with run.uninterrupted():  # the updates, and which step they are the end of
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
                        save_end(run, view)
                        break
            finish(run, view, captured)
        finally:
            run.close()
    return run


def lost_rewards(run: Run, asked_to_stop: Sequence[int]) -> bool:
    """Whether reward workers died in this step, on any rank, of what asked the run to stop: its rewards are none."""
    return run.pending.get(f"{REWARD_FAILURES}died", 0) > 0 and run.on_any_rank(bool(asked_to_stop))


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


def validate(run: Run, step: int) -> dict[str, float]:
    """Every so often: the mean reward of held-out prompts, and pass@k: of how many any sample has a reward of 1."""
    v = run.config.validation
    if not run.validation or ((step + 1) % v.every and step != run.config.steps - 1):
        return {}
    return evaluate(run, f"validation/{step}")


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
    if saved is None:
        if config.warm_start is not None and not warm_start(run, view, asked_to_stop):
            return None
        keep_reference(run)
        run.data.load_state({**run.data.state(), "cursor": 0})  # a warm start has looked at some prompts
        if run.validation:
            found = evaluate(run, "before")
            view.note("before the first step: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
            run.pending = {f"before/{name}": value for name, value in found.items()}
        return 0
    restore_reference(run, saved, view.note)
    state = run.checkpoints.load(saved)
    run.checkpoints.clear_surplus(saved)
    run.data.load_state(state["data"])
    run.surplus = [[Rollout.from_dict(entry) for entry in group] for group in state["surplus"]]
    tell_problems(run, view)
    view.note(f"resumed after {saved.step + 1} of {config.steps} steps")
    return saved.step + 1


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
        write_atomically(Path(run.config.output) / REPORT, report.to_json())
    view.note(f"graphs: {report.replays} replays, {report.eager_runs} eager runs, {later} captures after warm-up")
    tell_failures(run, view)
    if failed := count_failures(run):
        view.note(failed)


class _sigterm:
    """Inside, SIGTERM is remembered instead of ending the process: the loop saves and leaves.

    More of them ask for the same: where all processes of a job get one, `torchrun` hands on its own as well.
    """

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
