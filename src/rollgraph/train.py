"""The training loop. `run/setup.py` makes everything it calls before the first step, graphs included."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rollgraph.config import Config
from rollgraph.distributed.world import World
from rollgraph.errors import UserError
from rollgraph.files import write_atomically
from rollgraph.run.base_model import resolve_adapter
from rollgraph.run.begin import begin
from rollgraph.run.chosen_memory import keep_choices
from rollgraph.run.failures import REWARD_FAILURES, UNREWARDED, show_reward_failures, summarize_reward_failures
from rollgraph.run.folder_lock import lock_folder
from rollgraph.run.given import NOTHING, Given, write_given_model
from rollgraph.run.hub_pins import pin_sources
from rollgraph.run.inputs import check_inputs, scores_old
from rollgraph.run.learning_notes import tell_if_nothing_to_learn
from rollgraph.run.peer_recovery import prefer_peers
from rollgraph.run.resume import MODEL, REPORT, Finished, Fresh, FromPeers, Resume, find_start
from rollgraph.run.rollouts import collect, evaluate
from rollgraph.run.sample_details import detail_samples
from rollgraph.run.saving import (
    forget_warm_start,
    save_after_step,
    save_before_stop,
    saved_on_error,
    score_of,
    share_with_peers,
    wait_for_peers,
)
from rollgraph.run.setup import POLICY_LOSS, Run, make_run
from rollgraph.run.step_log import OnStep, StepLog
from rollgraph.run.stop import StopRequest, StopSignals
from rollgraph.run.tenure import Tenure
from rollgraph.telemetry import View, check_sinks, make_view
from rollgraph.types import Batch, Rollout


class NothingToLearn(UserError, RuntimeError):
    """No step of this run could teach anything, with its rewards and settings."""


def train(
    config: Config,
    world: World | None = None,
    *,
    stop: StopRequest | None = None,
    view: View | None = None,
    on_step: OnStep | None = None,
    tenure: Tenure | None = None,
) -> Run | None:
    """Take all steps of a run, from its last checkpoint if there is one; None if they were taken already.

    `stop` ends it early, saved, from any thread. A `view` shows its progress, in place of what `log.progress` says, and
    on every rank that is given one. `on_step` is called on rank 0 after each step. A `tenure` keeps
    what takes long to make for another attempt in the same process.
    """
    world = world or World.current()
    with open_run(config, world, stop=stop, view=view, on_step=on_step, tenure=tenure) as (run, first_step):
        if run is not None and first_step is not None:
            for _ in take_steps(run, first_step):
                pass
    return run


@contextmanager
def open_run(
    config: Config,
    world: World,
    given: Given = NOTHING,
    *,
    stop: StopRequest | None = None,
    view: View | None = None,
    on_step: OnStep | None = None,
    tenure: Tenure | None = None,
    stays_open: bool = False,
) -> Iterator[tuple[Run | None, int | None]]:
    """A run in its locked folder, and its first step: None if all steps were taken, or it was asked to stop before.

    If all steps were taken, there is no run either. A run that `stays_open` can be used afterwards, until it is closed.
    """
    view = view or make_view(config.log.progress if world.rank == 0 else "none", config.steps)
    claim = None if tenure is None else tenure.claim(world)
    with view, StopSignals(world, stop) as signals, lock_folder(config.output, world, claim) as lock:
        if world.rank == 0:
            check_sinks(config.log, note=lambda text: None)
        start = find_start(config, world.attempt)
        if config.checkpoint.peers and tenure is not None:
            start = prefer_peers(start, tenure.copies, world)
        write_given_model(config, world, given, fresh=isinstance(start, Fresh))
        view.phase("read data", 0, 0)
        config = resolve_adapter(pin_sources(config, world, note=view.note, writes=True))
        resume_from = None
        if not isinstance(start, Fresh):
            resume_from = start.newest
            config = keep_choices(config)
        inputs = check_inputs(config, world, resume_from=resume_from, given=given)
        if isinstance(start, Finished):
            inputs.rewards.close()
            taken = start.newest.step + 1
            view.note(f"{config.output} is finished after {taken} steps: raise `steps`, or choose another output")
            yield None, None
            return
        log = StepLog(config, world, view, on_step)
        if tenure is not None and not isinstance(start, Resume | FromPeers):
            tenure.give_up_policy()  # its weights are not those that this start begins with
        run = make_run(config, world, inputs=inputs, log=log, stop=signals, lock=lock, tenure=tenure)
        try:
            with telling_others(world):
                yield run, begin(run, start)
        except BaseException:
            run.close()
            raise
        if not stays_open or signals.interrupted:
            run.close()


@contextmanager
def telling_others(world: World) -> Iterator[None]:
    """Tell the other ranks of an error before anything is closed: they may be waiting for this one."""
    try:
        yield
    except GeneratorExit:  # no error: the loop of whoever takes the steps was left, and all ranks end together
        raise
    except BaseException as error:
        if world.liveness is not None:
            world.liveness.report_failure(error)
        raise


def take_steps(run: Run, first_step: int) -> Generator[int, None, None]:
    """Take the steps of a run one by one, and yield the number of each once it is taken.

    If it is closed on any rank, or if that is asked to stop meanwhile, all ranks save and end together.
    """
    captures = run.policy.pool.report().captures
    if run.world.rank == 0:
        (Path(run.config.output) / REPORT).unlink(missing_ok=True)  # of the same run with fewer steps
    with run.stop.in_steps(), run.world.in_phase("step"):
        with run.log.writing(first_step), saved_on_error(run):
            if run.on_any_rank(run.stop.requested):
                save_before_stop(run)
                return
            for step in range(first_step, run.config.steps):
                goes_on = take_step(run, step)
                try:
                    yield step
                except GeneratorExit:  # the loop of whoever takes the steps was left
                    run.stop.request()
                if not goes_on or run.on_any_rank(run.stop.requested):
                    save_before_stop(run)
                    break
        finish(run, captures)


def take_step(run: Run, step: int) -> bool:
    """Sample, learn, validate, log and save. Whether to go on: the run may have been asked to stop."""
    exact = run.policy.is_exact and not run.progress.surplus  # groups left over are of the policy before
    rollouts = collect(run, step)
    if lost_rewards(run):
        return False
    batch = make_batch(run, rollouts, step)
    tell_if_nothing_to_learn(run, step, batch)
    learned = update(run, batch, step, exact)
    share_with_peers(run)
    validated = validate(run, step)
    wait_for_peers(run)
    values = {**learned, **batch.metrics, **validated}  # an algorithm's own loss counts
    details = detail_samples(run, step, rollouts, batch)
    run.lock.check()
    run.log.write(step, rollouts, batch, values, details)
    stopping = run.on_any_rank(run.stop.requested)
    save_after_step(run, step, score_of(validated), stopping)
    return not stopping


def make_batch(run: Run, rollouts: list[Rollout], step: int) -> Batch:
    minibatches = min(run.config.algorithm.minibatches, len(rollouts))  # fewer if few groups were kept
    return run.inputs.algorithm.make_batch(rollouts, minibatches=minibatches, seed=step)


def update(run: Run, batch: Batch, step: int, exact: bool) -> dict[str, float]:
    """Train on the batch. The update and the record of it happen as a whole, so that either can be saved.

    `exact`: training gives all tokens the log-probabilities that they were drawn with.
    """
    with run.stop.uninterrupted():
        with run.log.timed("train"):
            learned = run.policy.train(
                batch,
                POLICY_LOSS,
                epochs=run.config.algorithm.epochs,
                score_old=scores_old(run.config, run.inputs.algorithm, exact),
                on_progress=partial(run.log.view.phase, "train"),
            )
        refuse_dead(run, step, batch, learned)
        if exact:
            check_agreement(run, step, learned)
        if run.progress.end is None:  # the first step that this process takes
            check_report(run)
        run.progress.finish_step(step, run.policy.optimizer.steps)
    if run.inputs.data.dropped:
        learned["data/dropped_prompts"] = float(run.inputs.data.dropped)
    return learned


def validate(run: Run, step: int) -> dict[str, float]:
    """At intervals and after the last step: metrics of the validation data."""
    at_interval = (step + 1) % run.config.validation.every == 0
    is_last = step == run.config.steps - 1
    if not run.inputs.can_validate or not (at_interval or is_last):
        return {}
    return evaluate(run, f"validation/{step}")


def lost_rewards(run: Run) -> bool:
    """Whether reward workers died, on any rank, of the signal that asked the run to stop: the step has no rewards."""
    died = run.log.pending.get(f"{REWARD_FAILURES}died", 0) > 0
    return died and run.on_any_rank(run.stop.requested)


def refuse_dead(run: Run, step: int, batch: Batch, learned: dict[str, float]) -> None:
    """End the run, and leave its checkpoints alone, if it can learn nothing more."""
    if batch.metrics.get("failures/rollouts") == 1.0 or not math.isfinite(learned["loss"]):
        raise NothingToLearn(
            f"step {step}: every rollout failed, or the loss is not finite. Resume from an earlier checkpoint with a "
            "smaller learning rate"
        )
    if step == 0 and run.log.pending.get(UNREWARDED) == 1.0:
        reasons = "; ".join(run.inputs.rewards.messages.values())
        raise NothingToLearn(f"no rollout of the first step got a reward: {reasons}")


def check_agreement(run: Run, step: int, learned: dict[str, float]) -> None:
    """Tell if generation and training differ although they should not; with `exact: must`, end the run."""
    largest = learned["policy/token_mult_prob_error_max"]
    if largest == 1.0:
        return
    found = (
        f"step {step}: generation and training disagree about a log-probability by {math.log(largest):.2g}, although "
        "all products agree"
    )
    if run.config.graph.exact == "must":
        raise RuntimeError(f"{found}. `rollgraph check --exact MODEL` names the first operation that differs")
    if run.progress.end is None:  # once is enough
        run.log.note(found)


def check_report(run: Run) -> None:
    """After the first step: refuse to go on if what was captured and replayed is not what was configured."""
    graph = run.config.graph
    report = run.policy.pool.report()
    wanted = run.policy.backend_name
    used = {record.backend for record in report.graphs}
    eager = 0
    if graph.impl != "none" and graph.on_mismatch == "raise":
        eager = report.eager_runs
    if used != {wanted} or eager:
        raise RuntimeError(
            f"graph.impl: {graph.impl} asks for {wanted} graphs, but the report has {', '.join(sorted(used))} and "
            f"{eager} eager runs:\n{report}"
        )


def finish(run: Run, captures_before: int) -> None:
    """Put everything on disk, and tell what the graphs did."""
    output = Path(run.config.output)
    run.checkpoints.wait()
    run.lock.check()
    forget_warm_start(run)
    if run.config.checkpoint.export_at_end:
        run.export(output / MODEL)
    report = run.policy.pool.report()
    if run.world.rank == 0:
        write_atomically(output / REPORT, report.to_json())
    later = report.captures - captures_before
    run.log.note(f"graphs: {report.replays} replays, {report.eager_runs} eager runs, {later} captures after warm-up")
    show_reward_failures(run)
    if failed := summarize_reward_failures(run.inputs):
        run.log.note(failed)
