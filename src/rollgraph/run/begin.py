"""Brings a run to its first step: loads its checkpoint, or prepares a fresh start. `resume.py` decides which."""

from __future__ import annotations

from rollgraph.run.base_model import keep_base, restore_base
from rollgraph.run.record import record_start, tell_changes
from rollgraph.run.reference import keep_reference, restore_reference
from rollgraph.run.resume import FromPeers, Resume, ResumeWarmStart, Start, none_whole
from rollgraph.run.rollouts import evaluate
from rollgraph.run.saving import save_if_missing, show_checkpoint_problems
from rollgraph.run.setup import Run
from rollgraph.run.warm_start import warm_start
from rollgraph.sharding.manifest import read_states


def begin(run: Run, start: Start) -> int | None:
    """Bring the run to its first step and return its number, or None if the run was asked to stop on the way."""
    if isinstance(start, Resume):
        return _load_checkpoint(run, start)
    if isinstance(start, FromPeers):
        return _load_from_peers(run, start)
    if not isinstance(start, ResumeWarmStart):
        _keep_base(run)
    record_start(run, 0)
    if run.config.warm_start is not None:
        with run.stop.in_steps(setup_goes_on=True):
            if not warm_start(run, start):
                return None
    keep_reference(run)
    data = run.inputs.data
    data.load_state({**data.state(), "cursor": 0})  # the warm start has drawn prompts
    run.inputs.rewards.logged.clear()  # and has rewarded their completions
    if run.inputs.can_validate:
        found = evaluate(run, "before")
        shown = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
        run.log.note(f"before the first step: {shown}")
        run.log.baseline = found
    return 0


def _keep_base(run: Run) -> None:
    with run.policy.phases.enter("save"):
        if run.policy.world.rank == 0:  # with those that divide its layers
            run.progress.base_files = keep_base(run.config, run.policy.reader, run.inputs.tokenizer)


def _load_checkpoint(run: Run, start: Resume) -> int:
    saved = run.checkpoints.newest_sound(start.folder.checkpoints, start.folder.broken)
    if saved is None:
        raise none_whole(start.folder.checkpoint_folder, run.checkpoints.broken.values())
    with run.log.phase("load checkpoint"):
        restore_reference(run, saved.path, read_states(saved.path)[0])
        state = run.load_weights(saved)
        run.progress.load_state(state)
    run.checkpoints.clear_surplus(saved)
    show_checkpoint_problems(run)
    run.log.note(f"resumed after {saved.step + 1} of {run.config.steps} steps")
    tell_changes(run)
    if any(change.is_fixed for change in run.inputs.changes):
        run.progress.surplus = []  # these groups were sampled, rewarded or kept in another way
    record_start(run, saved.step + 1)
    if run.peers is not None:
        run.peers.keep(saved.step, state)
        run.peers.linger()
    return saved.step + 1


def _load_from_peers(run: Run, start: FromPeers) -> int:
    """Restore what the ranks hold."""
    assert run.peers is not None
    step = start.version.step
    with run.log.phase("load checkpoint"):
        copy, state_of_rank_0 = run.peers.find(start.version)
        place = run.checkpoints.path_of(step)  # where it would be on the disk
        restore_reference(run, place, state_of_rank_0)
        run.progress.base_files = restore_base(run.config, run.policy, place, state_of_rank_0)
        run.peers.load(copy)
        run.progress.taken = step + 1
        run.progress.load_state(copy.about["state"])
    run.log.note(f"went on after {step + 1} of {run.config.steps} steps, with what the ranks had in memory")
    record_start(run, step + 1)
    run.peers.keep(step, copy.about["state"])
    run.peers.linger()
    save_if_missing(run, step)
    return step + 1
