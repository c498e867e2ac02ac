"""Brings a run to its first step: resumes from a checkpoint, or from the memory of peers, or starts afresh.

Also records the start and runs the warm start. `checkpoint/start.py` decides which kind of start it is.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rollgraph.checkpoint.changes import DEMONSTRATION_ORDER, allows_other_data
from rollgraph.checkpoint.format import read_states
from rollgraph.checkpoint.keep import Checkpoints
from rollgraph.checkpoint.start import (
    DEMONSTRATIONS,
    WARM_START,
    FromPeers,
    Resume,
    ResumeWarmStart,
    Start,
    no_intact_checkpoint,
)
from rollgraph.config import to_dict, to_yaml
from rollgraph.files import append_line, write_atomically
from rollgraph.inputs.base_model import BASE_RECORDS, restore_base, save_base
from rollgraph.inputs.sampled_data import PROMPT_TOKENS
from rollgraph.model.arithmetic import ARITHMETIC
from rollgraph.parallel.ranks.world import World
from rollgraph.plan.chosen_memory import record_memory
from rollgraph.rl.algorithms import load_algorithm
from rollgraph.rl.data.demonstrations import OfflineData
from rollgraph.run.progress import restore_position
from rollgraph.run.reference import restore_reference, set_reference
from rollgraph.run.rollouts import sample_rollouts
from rollgraph.run.saving import has_save_failed, save_if_missing, show_checkpoint_problems
from rollgraph.run.setup import SUPERVISED, Run
from rollgraph.run.validation import evaluate_policy

# -- the record of starts --------------------------------------------------------------------------
# config.yaml     the configuration of the last start with all defaults; `rollgraph train` accepts it as it is
# starts.jsonl    one line per start, never changed: time, command, machine and configuration
# memory.json     the memory settings that were chosen, and the plan behind them: see `plan/chosen_memory.py`

CONFIG = "config.yaml"
STARTS = "starts.jsonl"


def record_start(run: Run, first_step: int) -> None:
    """Record this start in the run folder. Only rank 0 writes."""
    if run.world.rank != 0:
        return
    folder = Path(run.config.output)
    folder.mkdir(parents=True, exist_ok=True)
    append_line(folder / STARTS, json.dumps(describe_start(run, first_step), ensure_ascii=False))
    write_atomically(folder / CONFIG, to_yaml(run.config))
    record_memory(run.memory)


def note_changes(run: Run) -> None:
    """Show what has changed since the checkpoint of a resumed run was saved."""
    if run.inputs.changes:
        run.log.note(f"changed since then: {'; '.join(map(str, run.inputs.changes))}")


def describe_start(run: Run, first_step: int) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "first_step": first_step,
        "command": shlex.join(sys.orig_argv),
        "folder": str(Path.cwd()),
        "seed": run.config.seed,
        "ranks": run.world.size,
        "device": describe_device(run.world),
        "versions": software_versions(),
        "fingerprints": dict(run.inputs.fingerprints),
        "changes": [vars(change) for change in run.inputs.changes],
        "config": to_dict(run.config),
    }


def software_versions() -> dict[str, str | None]:
    return {
        "rollgraph": sys.modules["rollgraph"].__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
    }


def describe_device(world: World) -> str:
    """The name of the GPU or, without one, of the CPU."""
    if world.device.startswith("cuda"):
        return torch.cuda.get_device_name(world.device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# -- the warm start --------------------------------------------------------------------------------
# It saves to a separate folder, `warm_start` in the run folder, so that it can be stopped, killed and resumed like the
# steps after it. These checkpoints are deleted once the run has saved a step.


@dataclass
class WarmStartProgress:
    """The progress of a warm start. Checkpoints hold its fields by name."""

    taken: int = 0  # steps
    done: bool = False


def run_warm_start(run: Run, start: Start) -> bool:
    """Take the remaining steps of the warm start. False if the run was asked to stop: then its progress is saved."""
    settings = run.config.warm_start
    data = run.inputs.warm_start
    assert settings is not None
    assert data is not None
    optimizer = run.policy.optimizer
    lr, schedule = optimizer.base_lr, optimizer.schedule
    optimizer.restart(settings.lr, schedule=None)  # a constant rate, without moments; resuming loads saved ones
    with _warm_start_checkpoints(run) as checkpoints:
        progress = _resume_warm_start(run, start, checkpoints, data)
        while not progress.done:
            run.log.display.phase("warm start", progress.taken, settings.steps)
            _take_warm_start_step(run, data, progress)
            stopping = run.on_any_rank(run.stop.requested)
            save_failed = has_save_failed(run, checkpoints)  # then save again now, not at the next multiple of `every`
            if progress.done or stopping or save_failed or progress.taken % run.config.checkpoint.every == 0:
                _save_warm_start(run, checkpoints, data, progress)
            if stopping:
                checkpoints.wait()
                run.log.note(f"asked to stop: saved after {progress.taken} of {settings.steps} steps of the warm start")
                return False
    run.log.display.end_phase()
    optimizer.restart(lr, schedule)  # the RL steps begin without the moments of the warm start
    return True


def _take_warm_start_step(run: Run, data: OfflineData, progress: WarmStartProgress) -> None:
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
    rollouts = sample_rollouts(run, run.inputs.data.next_prompts(), seed=f"warm start/{step}")
    return sum(rollout.reward for rollout in rollouts) / len(rollouts)


# -- checkpoints -----------------------------------------------------------------------------------


@contextmanager
def _warm_start_checkpoints(run: Run) -> Iterator[Checkpoints]:
    folder = Path(run.config.output) / WARM_START
    settings = run.config.checkpoint
    checkpoints = Checkpoints(
        folder, run.policy.sharded, run.policy.optimizer, keep_last=1, keep_best=0, asynchronous=settings.asynchronous
    )
    try:
        yield checkpoints
    finally:
        checkpoints.close()


def _save_warm_start(run: Run, checkpoints: Checkpoints, data: OfflineData, progress: WarmStartProgress) -> None:
    state: dict[str, Any] = {
        "data": run.inputs.data.state(),  # sampling for the mean reward advances it
        DEMONSTRATIONS: data.prompts.state(),
        "warm_start": vars(progress),
        "config": to_dict(run.config),
        "fingerprints": dict(run.inputs.fingerprints),
        "arithmetic": dict(ARITHMETIC),
        PROMPT_TOKENS: run.inputs.max_prompt_tokens,
        BASE_RECORDS: run.progress.base_files,
    }
    with run.policy.phases.enter("save"), run.stop.uninterrupted():
        checkpoints.save(progress.taken - 1, state)


def _resume_warm_start(run: Run, start: Start, checkpoints: Checkpoints, data: OfflineData) -> WarmStartProgress:
    if not isinstance(start, ResumeWarmStart):
        return WarmStartProgress()
    saved = checkpoints.newest_intact(start.folder.warm_start, start.folder.broken)
    if saved is None:
        raise no_intact_checkpoint(checkpoints.folder, checkpoints.broken.values())
    run.restore_base(saved)
    state = checkpoints.load(saved)
    restore_position(run.inputs.data, state["data"], may_change=allows_other_data(run.config))
    may_change = allows_other_data(run.config, DEMONSTRATION_ORDER)
    restore_position(data.prompts, state[DEMONSTRATIONS], may_change=may_change)
    progress = WarmStartProgress(**state["warm_start"])
    settings = run.config.warm_start
    assert settings is not None
    progress.done = progress.done or progress.taken >= settings.steps
    run.log.note(f"resumed after {progress.taken} of {settings.steps} steps of the warm start")
    note_changes(run)
    for problem in checkpoints.new_problems():
        run.log.note(problem)
    return progress


# -- the start -------------------------------------------------------------------------------------


def start_or_resume(run: Run, start: Start) -> int | None:
    """Bring the run to its first step and return the step, or None if the run was asked to stop on the way."""
    if isinstance(start, Resume):
        return _resume_from_checkpoint(run, start)
    if isinstance(start, FromPeers):
        return _resume_from_peers(run, start)
    if not isinstance(start, ResumeWarmStart):
        _save_base(run)
    record_start(run, 0)
    if run.config.warm_start is not None:
        with run.stop.in_steps(setup_follows=True):
            if not run_warm_start(run, start):
                return None
    set_reference(run)
    data = run.inputs.data
    data.load_state({**data.state(), "cursor": 0})  # the warm start has sampled prompts
    run.inputs.rewards.logged.clear()  # and rewarded their completions
    if run.inputs.can_validate:
        metrics = evaluate_policy(run, "before")
        summary = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        run.log.note(f"before the first step: {summary}")
        run.log.baseline = metrics
    return 0


def _save_base(run: Run) -> None:
    with run.policy.phases.enter("save"):
        # `policy.world` counts data parallel ranks: all ranks of the first tensor parallel group save together.
        if run.policy.world.rank == 0:
            run.progress.base_files = save_base(run.config, run.policy.full_model, run.inputs.tokenizer)


def _resume_from_checkpoint(run: Run, start: Resume) -> int:
    """Load the newest intact checkpoint. Returns the step to continue with."""
    saved = run.checkpoints.newest_intact(start.folder.checkpoints, start.folder.broken)
    if saved is None:
        raise no_intact_checkpoint(start.folder.checkpoint_folder, run.checkpoints.broken.values())
    with run.log.phase("load checkpoint"):
        state_of_rank_0 = read_states(saved.path)[0]  # it lists the files of the reference policy
        restore_reference(run, saved.path, state_of_rank_0)
        state = run.load_weights(saved)
        run.progress.load_state(state)
    run.checkpoints.prune_after_load(saved)
    show_checkpoint_problems(run)
    run.log.note(f"resumed after {saved.step + 1} of {run.config.steps} steps")
    note_changes(run)
    if any(change.is_fixed for change in run.inputs.changes):
        run.progress.surplus_groups = []  # they were sampled, rewarded or filtered under other settings
    record_start(run, saved.step + 1)
    if run.peers is not None:
        run.peers.start_copy(saved.step, state)
        run.peers.wait_briefly()  # for the copies of a small state; those of a large one overlap with the first step
    return saved.step + 1


def _resume_from_peers(run: Run, start: FromPeers) -> int:
    """Resume from the copies of the state that the ranks hold in memory."""
    assert run.peers is not None
    step = start.version.step
    with run.log.phase("load checkpoint"):
        copy, state_of_rank_0 = run.peers.find(start.version)
        checkpoint_path = run.checkpoints.path_of(step)  # where this step would be on disk
        restore_reference(run, checkpoint_path, state_of_rank_0)
        run.progress.base_files = restore_base(run.config, run.policy, checkpoint_path, state_of_rank_0)
        run.peers.load(copy)
        run.progress.finished_steps = step + 1
        run.progress.load_state(copy.metadata["state"])
    run.log.note(f"resumed after {step + 1} of {run.config.steps} steps, from the memory of the ranks")
    record_start(run, step + 1)
    run.peers.start_copy(step, copy.metadata["state"])
    run.peers.wait_briefly()
    save_if_missing(run, step)
    return step + 1
