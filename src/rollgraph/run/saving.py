"""When a run saves: at intervals, after a better validation, on a stop request, and when an exception ends it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rollgraph.checkpoint.keep import Checkpoints
from rollgraph.checkpoint.start import WARM_START
from rollgraph.run.setup import Run

PROGRESS_LOST = "progress since the last checkpoint is lost"


def save_after_step(run: Run, step: int, score: float | None, stopping: bool) -> None:
    """Save at every interval, after the last step, and when the validation score is among the best.

    If the previous save failed, retry at once. A second failure ends the run.
    """
    must_retry_save = has_save_failed(run, run.checkpoints)
    at_interval = (step + 1) % run.config.checkpoint.every == 0
    due = stopping or must_retry_save or at_interval or step == run.config.steps - 1
    if due or (score is not None and _is_best(run, score)):
        save_checkpoint(run, score, due)
    show_checkpoint_problems(run)


def has_save_failed(run: Run, checkpoints: Checkpoints) -> bool:
    """Whether the save in progress has failed on any rank."""
    return checkpoints.is_saving and run.on_any_rank(checkpoints.has_failed)


def save_if_missing(run: Run, step: int) -> None:
    """Save a step of an earlier attempt if a save was due and that attempt did not complete it."""
    saved = run.world.rank == 0 and run.checkpoints.has(step)  # rank 0 decides, because all ranks save together
    if not run.on_any_rank(saved):
        run.progress.finish_step(step, run.policy.optimizer.steps)
        save_after_step(run, step, score=None, stopping=False)


def checkpoint_score(metrics: Mapping[str, float]) -> float | None:
    """The score of a checkpoint, higher is better: the validation reward, or minus the loss without rewards."""
    if "validation/loss" in metrics:
        return -metrics["validation/loss"]
    return metrics.get("validation/reward")


def _is_best(run: Run, score: float) -> bool:
    """Whether to save for this score. Rank 0 decides, because all ranks save together."""
    return run.on_any_rank(run.world.rank == 0 and run.checkpoints.is_best(score))


def save_checkpoint(run: Run, score: float | None = None, due: bool = True) -> None:
    """Save the end of the last step."""
    assert run.progress.end is not None
    step = run.progress.end.step
    state = run.progress.state()
    with run.log.timed("save"), run.policy.phases.enter("save"):
        run.checkpoints.finish_save()  # the disk may be slow, so Ctrl-C is allowed here
        delete_warm_start_checkpoints(run)
        with run.stop.uninterrupted():
            try:
                run.checkpoints.save(step, state, score, due=due)
            except Exception:
                run.progress.save_failed = True
                raise


def copy_to_peers(run: Run) -> None:
    """With `checkpoint.peers`, start copying the end of the last step into a neighbour's memory."""
    if run.peers is not None:
        assert run.progress.end is not None
        run.peers.start_copy(run.progress.end.step, run.progress.state())


def wait_for_peer_copies(run: Run) -> None:
    """Wait briefly for the copies before reporting the step: once copied, it cannot be lost."""
    if run.peers is not None:
        run.peers.wait_briefly()


def delete_warm_start_checkpoints(run: Run) -> None:
    """Delete the checkpoints of the warm start once there is a checkpoint of a step on disk."""
    folder = Path(run.config.output) / WARM_START
    if run.world.rank == 0 and folder.exists() and run.checkpoints.complete():
        shutil.rmtree(folder, ignore_errors=True)


def save_before_stop(run: Run) -> None:
    """Save the state at the end of the last step, and log it once it is on disk."""
    end = run.progress.end
    if end is None:
        run.log.note("asked to stop before the end of the first step: there is nothing new to save")
        return
    saved = run.world.rank == 0 and run.checkpoints.has(end.step)  # rank 0 decides, because all ranks save together
    if not run.on_any_rank(saved):
        save_checkpoint(run)
    run.checkpoints.wait()
    show_checkpoint_problems(run)
    run.log.note(f"asked to stop: saved after {end.step + 1} of {run.config.steps} steps")


@contextmanager
def saved_on_error(run: Run) -> Iterator[None]:
    """If an exception ends the loop, save the end of the last step, provided the weights still belong to it.

    With several ranks nothing is saved, because saving would wait for ranks that raised no exception. Lost progress is
    reported.
    """
    try:
        yield
    except BaseException:
        try:
            run.checkpoints.finish_save()
            _save_last_step(run)
        except KeyboardInterrupt:
            run.log.note(f"interrupted while saving: {PROGRESS_LOST}")
        except Exception as error:  # raise the first exception, not this one
            run.log.note(f"saving failed, too: {error}")
        show_checkpoint_problems(run)
        raise


def _save_last_step(run: Run) -> None:
    end = run.progress.end
    if end is None or any(saved.step == end.step for saved in run.checkpoints.complete()):
        return
    if run.world.size > 1:
        if run.peers is None:
            run.log.note(f"several ranks do not save after an error: {PROGRESS_LOST}")
        return
    if run.progress.save_failed:  # this is that exception, or it was reported
        return
    if run.policy.optimizer.steps != end.updates:
        run.log.note(f"step {end.step + 1} ended between its updates: {PROGRESS_LOST}")
        return
    save_checkpoint(run)
    run.checkpoints.wait()
    run.log.note(f"saved after {end.step + 1} of {run.config.steps} steps")


def show_checkpoint_problems(run: Run) -> None:
    for problem in run.checkpoints.new_problems():
        run.log.note(problem)
