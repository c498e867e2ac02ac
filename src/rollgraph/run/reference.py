"""The reference policy of a run: which folder holds its weights, and whether they have changed since the run began.

If there is a teacher, it is the reference. Otherwise it is the policy at the first step. If those weights are random or
come from a warm start, the run saves them in its own folder; if not, they are those of `model.path`. With adapters, the
reference is the base model. If the adapters come from a warm start or from `adapter.path`, the run saves the initial
adapter instead. Each checkpoint records checksums of the files that a resumed run will read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollgraph.checkpoint.format import CheckpointError, FileRecord, check_files, record_files
from rollgraph.checkpoint.start import CannotResume
from rollgraph.config import Config
from rollgraph.inputs.base_model import BASE_FOLDER, base_is_reference, describe_base
from rollgraph.model import load_weights, save_model, weight_files
from rollgraph.model.weights.adapter_files import ADAPTER_WEIGHTS, load_adapter, save_adapter
from rollgraph.model.weights.hf import CONFIG
from rollgraph.model.weights.peft_config import ADAPTER_CONFIG
from rollgraph.rl.data.hub import model_folder
from rollgraph.run.setup import Run


def set_reference(run: Run) -> None:
    """Set the reference of a fresh run: the teacher, the base under the adapters, or else the current policy.

    Fills the weight slot `reference` if one is needed, and saves the weights if no folder of a model has them.
    """
    folder = _saved_reference_folder(run.config)  # None if a model's folder has these weights
    if run.inputs.teacher is not None:
        _load_teacher(run)
    elif run.inputs.algorithm.needs_reference and not base_is_reference(run.config):
        run.policy.weights.save("reference")
    if folder is not None:
        with run.policy.phases.enter("save"):
            # `policy.world` counts data parallel ranks: all ranks of the first tensor parallel group save together.
            if run.policy.world.rank == 0:
                _save_reference(run, folder)
    if run.world.rank == 0:
        run.progress.reference_files = _record_reference_files(run)


def restore_reference(run: Run, source: Path, state: Mapping[str, Any]) -> None:
    """Load the reference of a resumed run. Raises on all ranks if its files have changed since the run began.

    `state` is what rank 0 saved in the checkpoint `source`. Load the checkpoint afterwards: until then, the policy may
    hold the reference's weights.
    """
    problem = ""
    if run.world.rank == 0:
        try:
            _check_reference_files(run, source, state)
        except (CheckpointError, ValueError, OSError) as error:
            problem = str(error)
    if error_text := run.policy.sharded.exchange_text(problem)[0]:
        raise CannotResume(f"{error_text}. It holds the reference policy: restore it, or choose another output")
    if run.inputs.teacher is not None:
        _load_teacher(run)
        return
    if not run.inputs.algorithm.needs_reference:
        return
    if base_is_reference(run.config):
        return
    folder = _saved_reference_folder(run.config)
    if folder is None:
        return  # it was saved to its slot when the model was loaded
    with run.policy.sharded.writing_full_model():  # without updating the optimizer's master weights
        if run.config.adapter is not None:
            load_adapter(run.policy.full_model, folder)
        else:
            load_weights(run.policy.full_model, folder)
    run.policy.weights.save("reference")


def _save_reference(run: Run, folder: Path) -> None:
    if run.config.adapter is None:
        save_model(run.policy.full_model, folder)
    else:
        base, revision = describe_base(run.config)
        save_adapter(run.policy.full_model, folder, base=base, revision=revision)


def _load_teacher(run: Run) -> None:
    """Load the teacher into the reference slot. A teacher that is a separate model has been loaded already."""
    if "reference" in run.policy.weights:
        with run.policy.weights.use("reference"), run.policy.sharded.writing_full_model():
            load_weights(run.policy.full_model, _reference_folder(run.config), cast=True)


def _check_reference_files(run: Run, source: Path, state: Mapping[str, Any]) -> None:
    run.progress.reference_files = state.get("reference", [])
    if not run.inputs.algorithm.needs_reference:
        return
    folder = _reference_folder(run.config)
    base_changed = any(change.key == "model.path" and change.is_fixed for change in run.inputs.changes)
    if base_changed and _saved_reference_folder(run.config) is None:
        run.log.note(f"{folder} is the reference policy from now on")
    elif run.progress.reference_files:
        check_files(folder, run.progress.reference_files)
        return
    else:
        run.log.note(f"{source} has no checksums of the reference policy: {folder} was not checked")
    run.progress.reference_files = _record_reference_files(run)


def _record_reference_files(run: Run) -> list[FileRecord]:
    """Checksums of the reference files that a resumed run will read."""
    folder = _reference_folder(run.config)
    saved_folder = _saved_reference_folder(run.config)
    if saved_folder is not None and run.config.adapter is not None:
        return record_files(folder, [folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS])
    if saved_folder is not None:
        return record_files(folder, [folder / CONFIG, *weight_files(folder)])
    if run.inputs.algorithm.needs_reference:
        return record_files(folder, weight_files(folder))
    return []


def _reference_folder(config: Config) -> Path:
    if config.algorithm.teacher is not None:
        return model_folder(config.algorithm.teacher)
    saved_folder = _saved_reference_folder(config)
    if saved_folder is not None:
        return saved_folder
    if config.model.path is None:  # a random base with adapters
        return Path(config.output) / BASE_FOLDER
    return model_folder(config.model.path)


def _saved_reference_folder(config: Config) -> Path | None:
    """The folder in the run where the reference is saved; None if it is read from the folder of a model."""
    if config.algorithm.teacher is not None or base_is_reference(config):
        return None
    if config.model.path is None or config.warm_start is not None or config.adapter is not None:
        return Path(config.output) / "reference"
    return None
