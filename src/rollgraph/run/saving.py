"""When a run saves: every so often, for a better validation, and when it ends by an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollgraph.config import to_dict
from rollgraph.run.setup import Run
from rollgraph.telemetry import View

LOST = "what came after the last checkpoint is lost"


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
        "reference": run.reference,
    }
    with run.timed("save"), run.policy.phases.enter("save"):
        run.checkpoints.settle()  # a slow disk may take its time: here Ctrl-C is heard
        with run.uninterrupted():
            _save(run, state, score, due)


def _save(run: Run, state: dict[str, Any], score: float | None, due: bool) -> None:
    assert run.end is not None
    try:
        run.checkpoints.save(run.end.step, state, score, due=due)
    except Exception:
        run.save_failed = True
        raise


def save_end(run: Run, view: View) -> None:
    """Where a run was asked to stop: the end of its last step is on the disk, and then that is said."""
    if run.end is None:
        view.note("asked to stop: before the end of the first step, so there is nothing new to save")
        return
    has = run.world.rank == 0 and run.checkpoints.has(run.end.step)  # what rank 0 says: all ranks save together
    if not run.on_any_rank(has):
        save(run)
    run.checkpoints.wait()
    tell_problems(run, view)
    view.note(f"asked to stop: saved after {run.end.step + 1} of {run.config.steps} steps")


@contextmanager
def saved_on_error(run: Run, view: View) -> Iterator[None]:
    """Whatever ends the loop, what was learned is saved: the end of its last step, if the weights are still those.

    Not with several ranks: those where nothing happened would be waited for. What is lost is told.
    """
    try:
        yield
    except BaseException:
        try:
            run.checkpoints.settle()
            save_rest(run, view)
        except KeyboardInterrupt:
            view.note(f"interrupted while it was saved: {LOST}")
        except Exception as error:  # the first one is the one to raise
            view.note(f"and what was learned could not be saved: {error}")
        tell_problems(run, view)
        raise


def save_rest(run: Run, view: View) -> None:
    """What no checkpoint has yet."""
    if run.end is None or run.end.step in [saved.step for saved in run.checkpoints.complete()]:
        return
    if run.world.size > 1:
        view.note(f"with several ranks nothing is saved after an error: {LOST}")
        return
    if run.save_failed:  # which is the error, or was told
        return
    if run.policy.optimizer.steps != run.end.updates:
        view.note(f"step {run.end.step + 1} ended between its updates: {LOST}")
        return
    save(run)
    run.checkpoints.wait()
    view.note(f"saved after {run.end.step + 1} of {run.config.steps} steps")


def tell_problems(run: Run, view: View) -> None:
    for problem in run.checkpoints.unread():
        view.note(problem)
