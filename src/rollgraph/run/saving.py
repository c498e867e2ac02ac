"""When a run saves: at intervals, for a better validation, when asked to stop, and when an exception ends it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rollgraph.run.resume import WARM_START
from rollgraph.run.setup import Run

LOST = "progress since the last checkpoint is lost"


def save_after_step(run: Run, step: int, score: float | None, stopping: bool) -> None:
    """Save at every interval, after the last step, and when validation beats the checkpoints that are kept for it."""
    at_interval = (step + 1) % run.config.checkpoint.every == 0
    due = stopping or at_interval or step == run.config.steps - 1
    if due or (score is not None and _is_best(run, score)):
        save(run, score, due)
    show_checkpoint_problems(run)


def save_if_missing(run: Run, step: int) -> None:
    """Save a step that was taken by an earlier attempt, if it was due and that attempt did not get to save it."""
    saved = run.world.rank == 0 and run.checkpoints.has(step)  # rank 0 decides: all ranks save together
    if not run.on_any_rank(saved):
        run.progress.finish_step(step, run.policy.optimizer.steps)
        save_after_step(run, step, score=None, stopping=False)


def score_of(validated: Mapping[str, float]) -> float | None:
    """What the best checkpoints are kept by, the higher the better: a reward, or a loss where nothing is rewarded."""
    if "validation/loss" in validated:
        return -validated["validation/loss"]
    return validated.get("validation/reward")


def _is_best(run: Run, score: float) -> bool:
    """Rank 0 decides, because all ranks save together."""
    return run.on_any_rank(run.world.rank == 0 and run.checkpoints.is_best(score))


def save(run: Run, score: float | None = None, due: bool = True) -> None:
    """Save the end of the last step."""
    assert run.progress.end is not None
    step = run.progress.end.step
    state = run.progress.state()
    with run.log.timed("save"), run.policy.phases.enter("save"):
        run.checkpoints.settle()  # a slow disk may take its time, so Ctrl-C is allowed here
        forget_warm_start(run)
        with run.stop.uninterrupted():
            try:
                run.checkpoints.save(step, state, score, due=due)
            except Exception:
                run.progress.save_failed = True
                raise


def share_with_peers(run: Run) -> None:
    """Begin to copy the end of the last step into the memory of a neighbour, if there are to be such copies."""
    if run.peers is not None:
        assert run.progress.end is not None
        run.peers.keep(run.progress.end.step, run.progress.state())


def wait_for_peers(run: Run) -> None:
    """Give those copies a moment, before people hear of the step: it is not lost any more once they are made."""
    if run.peers is not None:
        run.peers.linger()


def forget_warm_start(run: Run) -> None:
    """Delete the checkpoints of the warm start, if there is one of a step on disk."""
    folder = Path(run.config.output) / WARM_START
    if run.world.rank == 0 and folder.exists() and run.checkpoints.complete():
        shutil.rmtree(folder, ignore_errors=True)


def save_before_stop(run: Run) -> None:
    """Put the end of the last step on disk, and say so once it is there."""
    end = run.progress.end
    if end is None:
        run.log.note("asked to stop before the end of the first step: there is nothing new to save")
        return
    saved = run.world.rank == 0 and run.checkpoints.has(end.step)  # rank 0 decides: all ranks save together
    if not run.on_any_rank(saved):
        save(run)
    run.checkpoints.wait()
    show_checkpoint_problems(run)
    run.log.note(f"asked to stop: saved after {end.step + 1} of {run.config.steps} steps")


@contextmanager
def saved_on_error(run: Run) -> Iterator[None]:
    """If an exception ends the loop, save the end of the last step, provided the weights still belong to it.

    With several ranks nothing is saved, because the ranks without an exception would be waited for. What is lost is
    reported.
    """
    try:
        yield
    except BaseException:
        try:
            run.checkpoints.settle()
            _save_unsaved(run)
        except KeyboardInterrupt:
            run.log.note(f"interrupted while saving: {LOST}")
        except Exception as error:  # the first exception is the one to raise
            run.log.note(f"saving failed, too: {error}")
        show_checkpoint_problems(run)
        raise


def _save_unsaved(run: Run) -> None:
    end = run.progress.end
    if end is None or any(saved.step == end.step for saved in run.checkpoints.complete()):
        return
    if run.world.size > 1:
        if run.peers is None:
            run.log.note(f"several ranks do not save after an error: {LOST}")
        return
    if run.progress.save_failed:  # that is the exception, or it was reported
        return
    if run.policy.optimizer.steps != end.updates:
        run.log.note(f"step {end.step + 1} ended between its updates: {LOST}")
        return
    save(run)
    run.checkpoints.wait()
    run.log.note(f"saved after {end.step + 1} of {run.config.steps} steps")


def show_checkpoint_problems(run: Run) -> None:
    for problem in run.checkpoints.unread():
        run.log.note(problem)
