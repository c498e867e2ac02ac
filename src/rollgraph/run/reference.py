"""The reference policy of a run: which folder holds its weights, and that these are the ones the run began with.

A run that made its reference itself, at random or by a warm start, keeps it in its own folder; otherwise the folder of
`model.path` is the reference. Each checkpoint records the checksums of the files that a resumed run will read.
"""

from __future__ import annotations

from pathlib import Path

from rollgraph.config import Config
from rollgraph.model import load_weights, save_model, weight_files
from rollgraph.model.hf_weights import CONFIG
from rollgraph.run.checkpoints import Saved
from rollgraph.run.setup import Run
from rollgraph.sharding import CheckpointError
from rollgraph.sharding.manifest import FileRecord, check_files, read_states, record_files


def keep_reference(run: Run) -> None:
    """Of a run that begins: the policy as it is now."""
    folder = _own_folder(run.config)
    if run.inputs.algorithm.needs_reference:
        run.policy.weights.save("reference")
    if folder is not None:
        with run.policy.phases.enter("save"):
            if run.world.rank == 0:
                save_model(run.policy.model, folder)
    if run.world.rank == 0:
        run.progress.reference_files = _record(run)


def restore_reference(run: Run, saved: Saved) -> None:
    """Of a run that goes on. Files that are not those it began with are an error, on all ranks.

    The weights of the policy are the reference's afterwards: a checkpoint is loaded next.
    """
    problem = ""
    if run.world.rank == 0:
        try:
            _check(run, saved)
        except (CheckpointError, ValueError, OSError) as error:
            problem = str(error)
    if found := run.policy.sharded.collectives.all_gather_text(problem)[0]:
        raise CheckpointError(f"{found}. It holds the reference policy: put it back as it was, or give another output")
    if not run.inputs.algorithm.needs_reference:
        return
    folder = _own_folder(run.config)
    if folder is not None:
        load_weights(run.policy.model, folder)
    run.policy.weights.save("reference")


def _check(run: Run, saved: Saved) -> None:
    run.progress.reference_files = read_states(saved.path)[0].get("reference", [])
    if not run.inputs.algorithm.needs_reference:
        return
    if run.progress.reference_files:
        check_files(_folder(run.config), run.progress.reference_files)
        return
    run.log.note(f"{saved.path} has no checksums of the reference policy: {_folder(run.config)} was not checked")
    run.progress.reference_files = _record(run)


def _record(run: Run) -> list[FileRecord]:
    """The checksums of what a resumed run will read."""
    folder, own = _folder(run.config), _own_folder(run.config)
    if own is not None:
        return record_files(folder, [folder / CONFIG, *weight_files(folder)])
    if run.inputs.algorithm.needs_reference:
        return record_files(folder, weight_files(folder))
    return []


def _folder(config: Config) -> Path:
    own = _own_folder(config)
    if own is not None:
        return own
    assert config.model.path is not None, "the configuration was checked"
    return Path(config.model.path)


def _own_folder(config: Config) -> Path | None:
    """Where the run keeps its reference, unless the model's own folder is the reference."""
    if config.model.path is None or config.warm_start is not None:
        return Path(config.output) / "reference"
    return None
