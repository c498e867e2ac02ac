"""The training loop: sample, update, validate, log, save.

Start reading at `take_step`. `run/setup.py` builds everything before the first step, including all graphs.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rollgraph.checkpoint.lock import lock_folder
from rollgraph.checkpoint.start import MODEL, REPORT, Finished, Fresh, FromPeers, Resume, find_start, prefer_peers
from rollgraph.config import Config
from rollgraph.errors import UserError
from rollgraph.files import write_atomically
from rollgraph.inputs.base_model import resolve_adapter
from rollgraph.inputs.inputs import check_inputs, recomputes_old_logprobs
from rollgraph.log import ProgressDisplay, check_sinks, make_display
from rollgraph.parallel.ranks.stop import StopRequest, StopSignals
from rollgraph.parallel.ranks.world import World
from rollgraph.plan.chosen_memory import restore_choices
from rollgraph.rl.data.hub_pins import pin_sources
from rollgraph.rl.data.python_objects import NO_OBJECTS, PythonObjects, write_model_object
from rollgraph.run.begin import start_or_resume
from rollgraph.run.outcome import show_outcome
from rollgraph.run.rollouts import (
    REWARD_FAILURES,
    UNREWARDED,
    collect_rollouts,
    sample_details,
    show_reward_failures,
    summarize_reward_failures,
    warn_if_nothing_to_learn,
)
from rollgraph.run.saving import (
    checkpoint_score,
    copy_to_peers,
    delete_warm_start_checkpoints,
    save_after_step,
    save_before_stop,
    saved_on_error,
    wait_for_peer_copies,
)
from rollgraph.run.setup import POLICY_LOSS, Run, WarmWorker, gc_frozen, make_run
from rollgraph.run.step_log import OnStep, StepLog
from rollgraph.run.validation import validate
from rollgraph.types import Batch, Rollout


class NothingToLearn(UserError, RuntimeError):
    """With these rewards and settings, no step of the run could teach the policy anything."""


def train(
    config: Config,
    world: World | None = None,
    *,
    stop: StopRequest | None = None,
    view: ProgressDisplay | None = None,
    on_step: OnStep | None = None,
    warm_worker: WarmWorker | None = None,
) -> Run | None:
    """Take all steps of a run, resuming from its last checkpoint. Returns None if they were all taken before.

    `stop` ends the run early from any thread, after saving. A `view` shows progress in place of the display that
    `log.progress` selects, on each rank that passes one. `on_step` is called on rank 0 after each step. A `warm_worker`
    keeps the captured policy for another attempt in the same process.
    """
    world = world or World.current()
    with open_run(config, world, stop=stop, view=view, on_step=on_step, warm_worker=warm_worker) as (run, first_step):
        if run is not None and first_step is not None:
            for _ in take_steps(run, first_step):
                pass
    return run


@contextmanager
def open_run(
    config: Config,
    world: World,
    objects: PythonObjects = NO_OBJECTS,
    *,
    stop: StopRequest | None = None,
    view: ProgressDisplay | None = None,
    on_step: OnStep | None = None,
    warm_worker: WarmWorker | None = None,
    stays_open: bool = False,
) -> Iterator[tuple[Run | None, int | None]]:
    """Open a run in its locked folder. Yields the run and its first step.

    The step is None if the run was asked to stop before it. Both are None if all steps were taken before. A run that
    `stays_open` can be used after the block, until it is closed.
    """
    view = view or make_display(config.log.progress if world.rank == 0 else "none", config.steps)
    claim = None if warm_worker is None else warm_worker.claim(world)
    with view, StopSignals(world, stop) as signals, lock_folder(config.output, world, claim) as lock:
        if world.rank == 0:
            check_sinks(config.log, note=lambda text: None)
        start = find_start(config, world.attempt)
        if config.checkpoint.peers and warm_worker is not None:
            start = prefer_peers(start, warm_worker.copies, world)
        write_model_object(config, world, objects, fresh=isinstance(start, Fresh))
        view.phase("read data", 0, 0)
        config = resolve_adapter(pin_sources(config, world, note=view.note, writes=True))
        resume_from = None
        if not isinstance(start, Fresh):
            resume_from = start.newest
            config = restore_choices(config)
        on_rows = partial(view.phase, "read data")
        inputs = check_inputs(config, world, resume_from=resume_from, objects=objects, on_progress=on_rows)
        if isinstance(start, Finished):
            inputs.rewards.close()
            finished = f"{config.output} has taken {start.newest.step + 1} already"
            view.note(f"steps: {config.steps}, and {finished}; nothing to do. Raise `steps`, or choose another output")
            yield None, None
            return
        log = StepLog(config, world, view, on_step)
        if warm_worker is not None and not isinstance(start, Resume | FromPeers):
            warm_worker.discard_policy()  # this start begins with other weights
        with gc_frozen(config.steps):
            run = make_run(config, world, inputs=inputs, log=log, stop=signals, lock=lock, warm_worker=warm_worker)
            try:
                with reporting_failure_to_ranks(world):
                    yield run, start_or_resume(run, start)
            except BaseException:
                run.close()
                raise
        if not stays_open or signals.interrupted:
            run.close()


@contextmanager
def reporting_failure_to_ranks(world: World) -> Iterator[None]:
    """Report an error to the other ranks before anything is closed: they may be waiting for this one."""
    try:
        yield
    except GeneratorExit:  # no error: the caller left its loop, and all ranks end together
        raise
    except BaseException as error:
        if world.liveness is not None:
            world.liveness.report_failure(error)
        raise


def take_steps(run: Run, first_step: int) -> Generator[int, None, None]:
    """Take the steps of a run one by one. Yields the number of each finished step.

    If the generator is closed or a stop is requested on any rank, all ranks save and end together.
    """
    if run.world.rank == 0:
        (Path(run.config.output) / REPORT).unlink(missing_ok=True)  # an earlier report, of fewer steps
    with run.stop.in_steps(), run.world.in_phase("step"):
        with run.log.writing(first_step), saved_on_error(run):
            if run.on_any_rank(run.stop.requested):
                save_before_stop(run)
                return
            for step in range(first_step, run.config.steps):
                keeps_going = take_step(run, step)
                if run.progress.finished_steps == step + 1:  # otherwise the step was abandoned
                    try:
                        yield step
                    except GeneratorExit:  # the caller left its loop
                        run.stop.request()
                if not keeps_going or run.on_any_rank(run.stop.requested):
                    save_before_stop(run)
                    break
        finish_run(run)


def take_step(run: Run, step: int) -> bool:
    """Sample, update, validate, log and save. Returns False if the run was asked to stop.

    A stop that also killed reward workers abandons the step before its update.
    """
    # Surplus groups were sampled from an older policy. `collect_rollouts` replaces them, so this comes first.
    is_exact = run.policy.is_exact and not run.progress.surplus_groups
    rollouts = collect_rollouts(run, step)
    if reward_workers_stopped(run):
        return False
    check_has_rewards(run, step)
    batch = make_batch(run, rollouts, step)
    warn_if_nothing_to_learn(run, step, batch)
    train_metrics = update_policy(run, batch, step, is_exact)
    copy_to_peers(run)
    validation_metrics = validate(run, step)
    wait_for_peer_copies(run)
    # An algorithm may report a `loss` of its own: the graphs of DPO compute only a gradient. So its metrics come later.
    metrics = {**train_metrics, **batch.metrics, **validation_metrics}
    details = sample_details(run, step, rollouts, batch)
    run.lock.check()
    run.log.write(step, rollouts, batch, metrics, details)
    stopping = run.on_any_rank(run.stop.requested)
    save_after_step(run, step, checkpoint_score(validation_metrics), stopping)
    return not stopping


def make_batch(run: Run, rollouts: list[Rollout], step: int) -> Batch:
    minibatches = min(run.config.algorithm.minibatches, len(rollouts))  # fewer if the algorithm kept few rollouts
    return run.inputs.algorithm.make_batch(rollouts, minibatches=minibatches, seed=step)


def update_policy(run: Run, batch: Batch, step: int, is_exact: bool) -> dict[str, float]:
    """Train on the batch. Ctrl-C cannot separate the update from its record, so there is always a step to save.

    `is_exact` says that training computes exactly the log-probabilities that the tokens were sampled with.
    """
    with run.stop.uninterrupted():
        with run.log.timed("train"):
            train_metrics = run.policy.train(
                batch,
                POLICY_LOSS,
                epochs=run.config.algorithm.epochs,
                score_old=recomputes_old_logprobs(run.config, run.inputs.algorithm, is_exact),
                on_progress=partial(run.log.display.phase, "train"),
            )
        check_can_learn(run, step, batch, train_metrics)
        if is_exact:
            check_logprobs_match(run, step, train_metrics)
        if run.progress.end is None:  # the first step of this process
            check_graph_report(run)
        run.progress.finish_step(step, run.policy.optimizer.steps)
    if run.inputs.data.dropped:
        train_metrics["data/dropped_prompts"] = float(run.inputs.data.dropped)
    return train_metrics


def reward_workers_stopped(run: Run) -> bool:
    """Whether the signal that stops the run also killed reward workers, on any rank: then the step has no rewards."""
    workers_died = run.log.step_metrics.get(f"{REWARD_FAILURES}died", 0) > 0
    return workers_died and run.on_any_rank(run.stop.requested)


def check_has_rewards(run: Run, step: int) -> None:
    """End the run if rewards failed for every rollout of its first step."""
    if step == 0 and run.log.step_metrics.get(UNREWARDED) == 1.0:
        reasons = "; ".join(run.inputs.rewards.messages.values())
        raise NothingToLearn(f"no rollout of the first step got a reward: {reasons}")


def check_can_learn(run: Run, step: int, batch: Batch, train_metrics: dict[str, float]) -> None:
    """End the run without saving if it can learn nothing more."""
    if batch.metrics.get("failures/rollouts") == 1.0 or not math.isfinite(train_metrics["loss"]):
        raise NothingToLearn(
            f"step {step}: every rollout failed, or the loss is not finite. Resume from an earlier checkpoint with a "
            "smaller learning rate"
        )


def check_logprobs_match(run: Run, step: int, train_metrics: dict[str, float]) -> None:
    """Show a note if generation and training differ although they should not; with `exact: must`, end the run."""
    largest = train_metrics["policy/token_mult_prob_error_max"]
    if largest == 1.0:
        return
    message = (
        f"step {step}: generation and training disagree about a log-probability by {math.log(largest):.2g}, although "
        "all matmuls agree"
    )
    if run.config.graph.exact == "must":
        raise RuntimeError(f"{message}. `rollgraph check --exact MODEL` names the first operation that differs")
    if run.progress.end is None:  # once is enough
        run.log.note(message)


def check_graph_report(run: Run) -> None:
    """End the run after its first step if the graphs it replayed are not the configured ones."""
    graph = run.config.graph
    report = run.policy.pool.report()
    configured_backend = run.policy.backend_name
    graph_backends = {record.backend for record in report.graphs}
    eager_runs = report.eager_runs if graph.impl != "none" and graph.on_mismatch == "raise" else 0
    if graph_backends != {configured_backend} or eager_runs:
        raise RuntimeError(
            f"graph.impl: {graph.impl} asks for {configured_backend} graphs, but the report has "
            f"{', '.join(sorted(graph_backends))} and {eager_runs} eager runs:\n{report}"
        )


def finish_run(run: Run) -> None:
    """Wait until everything is on disk, export the model, and show the outcome."""
    output = Path(run.config.output)
    run.checkpoints.wait()
    run.lock.check()
    delete_warm_start_checkpoints(run)
    if run.config.checkpoint.export_at_end:
        run.export(output / MODEL)
    report = run.policy.pool.report()
    if run.world.rank == 0:
        write_atomically(output / REPORT, report.to_json())
    run.log.note_if_verbose(report.summary())
    show_reward_failures(run)
    if failure_summary := summarize_reward_failures(run.inputs):
        run.log.note(failure_summary)
    show_outcome(run)
