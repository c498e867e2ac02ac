"""One run in a folder at a time, and no trace of one that came to nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollgraph.claim import LOCK, FolderError, claim_folder
from rollgraph.train import train
from rollgraph.world import World
from tests.test_train import ONE, config_of, folder

__all__ = ["folder"]

HOLD = """
import sys
from rollgraph.claim import claim_folder
from rollgraph.world import World
with claim_folder(sys.argv[1], World(0, 1, "cpu")):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_before_anything_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*arguments: object, **options: object) -> None:
        raise AssertionError("something was made")

    monkeypatch.setattr("rollgraph.train.make_run", made)
    with (
        claim_folder(folder / "run", ONE),
        pytest.raises(FolderError, match=rf"run is in use by another run \(process {os.getpid()} on .*another output"),
    ):
        train(config_of(folder), ONE)
    with pytest.raises(AssertionError):  # it was let go of
        train(config_of(folder), ONE)


def test_a_run_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": "src"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(FolderError, match=f"process {process.pid} "), claim_folder(tmp_path, ONE):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (tmp_path / LOCK).exists()
    with claim_folder(tmp_path, ONE):
        pass
    with claim_folder(tmp_path, ONE):
        pass


def test_nothing_is_left_of_a_run_that_came_to_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), claim_folder(tmp_path / "new" / "run", ONE):
        raise KeyError
    assert not (tmp_path / "new" / "run").exists()
    with claim_folder(tmp_path / "kept", ONE):
        (tmp_path / "kept" / "metrics.jsonl").touch()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["metrics.jsonl"]


def test_a_folder_that_cannot_be_made_is_named_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(FolderError, match=r"output: .*file/run cannot be used"),
        claim_folder(tmp_path / "file/run", ONE),
    ):
        pass


def test_other_ranks_do_not_take_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda said, **options: None)
    with claim_folder(tmp_path, World(0, 2, "cpu")), claim_folder(tmp_path, World(1, 2, "cpu")):
        pass
