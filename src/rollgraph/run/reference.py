"""The reference policy of a run: which folder holds its weights, and whether they are still those the run began with.

A teacher takes its place if there is one. A run whose reference is random or comes from a warm start keeps it in its
own folder; otherwise the folder of `model.path` is the reference. Of a run with adapters it is the base, unless they
come from a warm start or from `adapter.path`: then the run keeps the adapter as it was. Each checkpoint records
checksums of the files that a resumed run will read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollgraph.config import Config
from rollgraph.model import load_weights, save_model, weight_files
from rollgraph.model.adapter_files import ADAPTER_WEIGHTS, load_adapter, save_adapter
from rollgraph.model.hf_weights import CONFIG
from rollgraph.model.peft_config import ADAPTER_CONFIG
from rollgraph.run.base_model import BASE, base_is_reference, describe_base
from rollgraph.run.hub_cache import model_folder
from rollgraph.run.resume import CannotResume
from rollgraph.run.setup import Run
from rollgraph.sharding import CheckpointError
from rollgraph.sharding.manifest import FileRecord, check_files, record_files


def keep_reference(run: Run) -> None:
    """Make the teacher or else the current policy the reference of a run that begins."""
    folder = _own_folder(run.config)
    if run.inputs.teacher is not None:
        _load_teacher(run)
    elif run.inputs.algorithm.needs_reference and not base_is_reference(run.config):
        run.policy.weights.save("reference")
    if folder is not None:
        with run.policy.phases.enter("save"):
            if run.policy.world.rank == 0:  # with those that divide its layers
                _write(run, folder)
    if run.world.rank == 0:
        run.progress.reference_files = _record(run)


def restore_reference(run: Run, source: Path, state: Mapping[str, Any]) -> None:
    """Load the reference of a run that goes on; raise on all ranks if its files have changed since the run began.

    `state` is what rank 0 saved in the checkpoint `source`. Afterwards the policy may have the weights of the
    reference: the checkpoint must be loaded next.
    """
    problem = ""
    if run.world.rank == 0:
        try:
            _check(run, source, state)
        except (CheckpointError, ValueError, OSError) as error:
            problem = str(error)
    if found := run.policy.sharded.exchange_text(problem)[0]:
        raise CannotResume(f"{found}. It holds the reference policy: restore it, or choose another output")
    if run.inputs.teacher is not None:
        _load_teacher(run)
        return
    if not run.inputs.algorithm.needs_reference:
        return
    if base_is_reference(run.config):
        return
    folder = _own_folder(run.config)
    if folder is None:
        return  # it was saved when the model had been loaded
    with run.policy.sharded.writing_reader():  # the optimizer does not learn of it
        if run.config.adapter is not None:
            load_adapter(run.policy.reader, folder)
        else:
            load_weights(run.policy.reader, folder)
    run.policy.weights.save("reference")


def _write(run: Run, folder: Path) -> None:
    if run.config.adapter is None:
        save_model(run.policy.reader, folder)
    else:
        base, revision = describe_base(run.config)
        save_adapter(run.policy.reader, folder, base=base, revision=revision)


def _load_teacher(run: Run) -> None:
    """Put the weights of the teacher into the slot; one that is a model of its own has been loaded already."""
    if "reference" in run.policy.weights:
        with run.policy.weights.use("reference"), run.policy.sharded.writing_reader():
            load_weights(run.policy.reader, _folder(run.config), cast=True)


def _check(run: Run, source: Path, state: Mapping[str, Any]) -> None:
    run.progress.reference_files = state.get("reference", [])
    if not run.inputs.algorithm.needs_reference:
        return
    folder = _folder(run.config)
    is_another = any(change.key == "model.path" and change.is_fixed for change in run.inputs.changes)
    if is_another and _own_folder(run.config) is None:
        run.log.note(f"{folder} is the reference policy from now on")
    elif run.progress.reference_files:
        check_files(folder, run.progress.reference_files)
        return
    else:
        run.log.note(f"{source} has no checksums of the reference policy: {folder} was not checked")
    run.progress.reference_files = _record(run)


def _record(run: Run) -> list[FileRecord]:
    """Checksums of the files that a resumed run will read."""
    folder = _folder(run.config)
    own = _own_folder(run.config)
    if own is not None and run.config.adapter is not None:
        return record_files(folder, [folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS])
    if own is not None:
        return record_files(folder, [folder / CONFIG, *weight_files(folder)])
    if run.inputs.algorithm.needs_reference:
        return record_files(folder, weight_files(folder))
    return []


def _folder(config: Config) -> Path:
    if config.algorithm.teacher is not None:
        return model_folder(config.algorithm.teacher)
    own = _own_folder(config)
    if own is not None:
        return own
    if config.model.path is None:  # the random base of adapters
        return Path(config.output) / BASE
    return model_folder(config.model.path)


def _own_folder(config: Config) -> Path | None:
    """Where the run keeps its reference; None if the model's own folder is the reference."""
    if config.algorithm.teacher is not None or base_is_reference(config):
        return None
    if config.model.path is None or config.warm_start is not None or config.adapter is not None:
        return Path(config.output) / "reference"
    return None
