"""The warm start: supervised training on demonstrations, until the policy can learn from its own samples.

It has checkpoints of its own, in the folder `warm_start` of the run, so that it can be stopped, killed and resumed like
the steps that follow. They are deleted once the run has saved one of those steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollgraph.config import to_dict
from rollgraph.rl.algorithms import load_algorithm
from rollgraph.rl.demonstrations import WrittenData
from rollgraph.run.base_model import RECORDED
from rollgraph.run.checkpoints import Checkpoints
from rollgraph.run.config_changes import DEMONSTRATION_ORDER, allows_other_data
from rollgraph.run.progress import restore_position
from rollgraph.run.record import tell_changes
from rollgraph.run.resume import DEMONSTRATIONS, WARM_START, ResumeWarmStart, Start, none_whole
from rollgraph.run.rollouts import sample
from rollgraph.run.setup import SUPERVISED, Run


@dataclass
class WarmStartProgress:
    """How far a warm start has come."""

    taken: int = 0  # steps
    done: bool = False


def warm_start(run: Run, start: Start) -> bool:
    """Take the steps that are left; False if the run was asked to stop, in which case they are saved up to there."""
    settings = run.config.warm_start
    data = run.inputs.warm_start
    assert settings is not None
    assert data is not None
    optimizer = run.policy.optimizer
    lr, schedule = optimizer.base, optimizer.schedule
    optimizer.restart(settings.lr, None)
    with _checkpoints(run) as checkpoints:
        progress = _resume(run, start, checkpoints, data)
        while not progress.done:
            run.log.view.phase("warm start", progress.taken, settings.steps)
            _take_step(run, data, progress)
            stopping = run.on_any_rank(run.stop.requested)
            if progress.done or stopping or progress.taken % run.config.checkpoint.every == 0:
                _save(run, checkpoints, data, progress)
            if stopping:
                checkpoints.wait()
                run.log.note(f"asked to stop: saved after {progress.taken} of {settings.steps} steps of the warm start")
                return False
    run.log.view.end_phase()
    optimizer.restart(lr, schedule)
    return True


def _take_step(run: Run, data: WrittenData, progress: WarmStartProgress) -> None:
    settings = run.config.warm_start
    assert settings is not None
    rollouts = run.policy.gather_rollouts(data.next_rollouts())
    loss = run.policy.train(load_algorithm(SUPERVISED).make_batch(rollouts), SUPERVISED)["loss"]
    progress.taken += 1
    progress.done = progress.taken >= settings.steps
    if settings.stop_at is not None and progress.taken % settings.check_every == 0:
        reward = _mean_reward(run, progress.taken - 1)
        run.log.note(f"warm start, step {progress.taken}: loss {loss:.3f}, mean reward of samples {reward:.3f}")
        progress.done = progress.done or reward >= settings.stop_at


def _mean_reward(run: Run, step: int) -> float:
    rollouts = sample(run, run.inputs.data.next_prompts(), seed=f"warm start/{step}")
    return sum(rollout.reward for rollout in rollouts) / len(rollouts)


# -- checkpoints -----------------------------------------------------------------------------------


@contextmanager
def _checkpoints(run: Run) -> Iterator[Checkpoints]:
    folder = Path(run.config.output) / WARM_START
    settings = run.config.checkpoint
    opened = Checkpoints(
        folder, run.policy.sharded, run.policy.optimizer, keep_last=1, keep_best=0, asynchronous=settings.asynchronous
    )
    try:
        yield opened
    finally:
        opened.close()


def _save(run: Run, checkpoints: Checkpoints, data: WrittenData, progress: WarmStartProgress) -> None:
    state: dict[str, Any] = {
        "data": run.inputs.data.state(),  # rewards of samples were looked at
        DEMONSTRATIONS: data.prompts.state(),
        "warm_start": vars(progress),
        "config": to_dict(run.config),
        "fingerprints": dict(run.inputs.fingerprints),
        RECORDED: run.progress.base_files,
    }
    with run.policy.phases.enter("save"), run.stop.uninterrupted():
        checkpoints.save(progress.taken - 1, state)


def _resume(run: Run, start: Start, checkpoints: Checkpoints, data: WrittenData) -> WarmStartProgress:
    if not isinstance(start, ResumeWarmStart):
        return WarmStartProgress()
    saved = checkpoints.newest_sound(start.folder.warm_start, start.folder.broken)
    if saved is None:
        raise none_whole(checkpoints.folder, checkpoints.broken.values())
    run.restore_base(saved)
    state = checkpoints.load(saved)
    restore_position(run.inputs.data, state["data"], may_change=allows_other_data(run.config))
    others = allows_other_data(run.config, DEMONSTRATION_ORDER)
    restore_position(data.prompts, state[DEMONSTRATIONS], may_change=others)
    progress = WarmStartProgress(**state["warm_start"])
    settings = run.config.warm_start
    assert settings is not None
    progress.done = progress.done or progress.taken >= settings.steps
    run.log.note(f"resumed after {progress.taken} of {settings.steps} steps of the warm start")
    tell_changes(run)
    for problem in checkpoints.unread():
        run.log.note(problem)
    return progress
