"""One pure function decides from the contents of the folder how a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollgraph.checkpoint.format import CheckpointError
from rollgraph.checkpoint.keep import SavedCheckpoint
from rollgraph.checkpoint.start import (
    Finished,
    Fresh,
    Resume,
    ResumeWarmStart,
    RunFolder,
    Start,
    decide_start,
    scan_folder,
)

FOLDER = Path("runs/one")


def saved(step: int) -> SavedCheckpoint:
    return SavedCheckpoint(step, FOLDER / "checkpoints" / f"step_{step:08d}", None)


def decide(folder: RunFolder, resume: str = "auto", steps: int = 4, exports: bool = True) -> Start:
    return decide_start(folder, resume=resume, steps=steps, exports=exports)  # type: ignore[arg-type]


def test_an_empty_folder_starts_fresh() -> None:
    assert decide(RunFolder(FOLDER)) == Fresh()
    assert decide(RunFolder(FOLDER), resume="never") == Fresh()


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_run_without_a_step_goes_on_in_its_warm_start(resume: str) -> None:
    folder = RunFolder(FOLDER, warm_start=[saved(1), saved(3)])
    assert decide(folder, resume) == ResumeWarmStart(saved(3), folder)


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_the_newest_checkpoint_is_resumed(resume: str) -> None:
    folder = RunFolder(FOLDER, [saved(0), saved(2)])
    assert decide(folder, resume) == Resume(saved(2), folder)


def test_a_broken_checkpoint_beside_a_whole_one_is_skipped() -> None:
    folder = RunFolder(FOLDER, [saved(1)], {saved(2).path: CheckpointError("torn")})
    assert decide(folder) == Resume(saved(1), folder)


@pytest.mark.parametrize(
    ("resume", "folder", "message"),
    [
        ("never", RunFolder(FOLDER, [saved(0)]), "resume: never, but .*checkpoints has checkpoints"),
        ("never", RunFolder(FOLDER, warm_start=[saved(0)]), "resume: never"),
        ("never", RunFolder(FOLDER, broken={saved(0).path: CheckpointError("torn")}), "resume: never"),
        ("must", RunFolder(FOLDER), "resume: must, but .* has no whole checkpoint"),
        ("must", RunFolder(FOLDER, broken={saved(0).path: CheckpointError("torn")}), "no whole checkpoint.*: torn"),
        ("auto", RunFolder(FOLDER, broken={saved(0).path: CheckpointError("torn")}), "no whole checkpoint.*: torn"),
    ],
)
def test_a_start_that_contradicts_the_folder_is_refused(resume: str, folder: RunFolder, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decide(folder, resume)


@pytest.mark.parametrize("has_report", [False, True])
@pytest.mark.parametrize("has_model", [False, True])
@pytest.mark.parametrize("exports", [False, True])
@pytest.mark.parametrize("steps", [3, 4, 5])
def test_a_run_is_finished_after_its_last_step_and_its_last_file(
    has_report: bool, has_model: bool, exports: bool, steps: int
) -> None:
    folder = RunFolder(FOLDER, [saved(3)], has_report=has_report, has_model=has_model)
    finished = steps < 4 or (steps == 4 and has_report and (has_model or not exports))
    assert decide(folder, steps=steps, exports=exports) == (
        Finished(saved(3)) if finished else Resume(saved(3), folder)
    )


def test_a_scan_lists_checkpoints_and_exports(tmp_path: Path) -> None:
    assert scan_folder(tmp_path) == RunFolder(tmp_path)
    (tmp_path / "checkpoints" / "step_00000003").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    run_folder = scan_folder(tmp_path)
    assert run_folder.has_model
    assert not run_folder.has_report
    assert list(run_folder.broken) == [tmp_path / "checkpoints" / "step_00000003"]
