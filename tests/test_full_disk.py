"""A full disk ends a run, which names what is missing, loses nothing that was saved, and goes on once there is room."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from rollgraph.checkpoint import write as checkpoint_writer
from rollgraph.checkpoint.format import CheckpointError, verify
from rollgraph.files import DiskFull, reporting_full_disk, write_new
from rollgraph.log.metrics import JsonlSink
from rollgraph.train import train
from tests.test_train import ONE, assert_same_run, eager_config, folder

__all__ = ["folder"]

OPTIONS = ("steps=12", "checkpoint.every=2", "data.validation=null", "log.progress=plain")
MISSING = r"No space left on device \(it takes ([\d,]+) bytes and ([\d,]+) are free: ([\d,]+) are missing\)"

Disk = Callable[[int], None]  # makes it as large as so many KiB


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Disk]]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o"]
    if subprocess.run([*mount, "size=64k", "none", place], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root's rights")

    def resize(kib: int) -> None:
        subprocess.run([*mount, f"remount,size={kib}k", "none", place], check=True)

    try:
        yield place, resize
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def steps_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step_*"))


def test_a_run_on_a_full_disk_goes_on_once_there_is_room(
    folder: Path, disk: tuple[Path, Disk], capsys: pytest.CaptureFixture[str]
) -> None:
    place, resize = disk
    resize(300)
    options = [*OPTIONS, f"output={place / 'run'}", "algorithm.options={}"]
    with pytest.raises(CheckpointError, match=rf"rank0\.safetensors cannot be written: {MISSING}") as raised:
        train(eager_config(folder, *options), ONE)
    numbers = re.search(MISSING, str(raised.value))
    assert numbers is not None
    takes, free, missing = (int(number.replace(",", "")) for number in numbers.groups())
    assert takes == free + missing
    assert 0 < missing < 300 * 1024
    out = capsys.readouterr().out
    assert out.count("was not written") == 1  # and the second one is the error
    assert "[12/12]" not in out
    saved = steps_in(place / "run")
    assert saved
    for name in saved:
        verify(place / "run" / "checkpoints" / name)
    resize(4096)
    train(eager_config(folder, *options), ONE)
    train(eager_config(folder, *options, f"output={folder / 'undisturbed'}"), ONE)
    assert_same_run(place / "run", folder / "undisturbed", 11)


def fail_saves(monkeypatch: pytest.MonkeyPatch, numbers: set[int]) -> None:
    """Let the operating system refuse the tensors of these saves, counted from 1."""
    saves = 0
    save_file = checkpoint_writer.save_file

    def refuse(tensors: Any, path: Path) -> None:
        nonlocal saves
        saves += path.name == "rank0.safetensors"
        if saves in numbers:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint_writer, "save_file", refuse)


def test_a_disk_that_was_full_for_a_moment_costs_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_saves(monkeypatch, {1})
    train(eager_config(folder, *OPTIONS), ONE)
    assert steps_in(folder / "run")[-1] == "step_00000011"
    assert "step_00000001 was not written" in capsys.readouterr().out


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_does_not_train_on_through_saves_that_fail(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asynchronous: bool
) -> None:
    fail_saves(monkeypatch, set(range(2, 99)))
    options = [*OPTIONS, "steps=1000", f"checkpoint.asynchronous={str(asynchronous).lower()}"]
    with pytest.raises(CheckpointError, match=r"rank0\.safetensors cannot be written: No space left on device"):
        train(eager_config(folder, *options), ONE)
    assert capsys.readouterr().out.count("was not written") == asynchronous
    assert steps_in(folder / "run") == ["step_00000001"]


Usage = namedtuple("Usage", ["total", "used", "free"])


def test_the_bytes_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"before")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, 10))

    def write(number: int) -> None:
        with reporting_full_disk(file, 2000):
            file.write_bytes(b"before" + b"x" * 500)  # a part that is cut off again
            raise OSError(number, "whatever")

    with pytest.raises(DiskFull) as raised:
        write(errno.ENOSPC)
    text = "No space left on device (it takes 2,000 bytes and 510 are free: 1,490 are missing)"
    assert str(raised.value) == f"{file} cannot be written: {text}"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, 10_000))
    with pytest.raises(DiskFull, match=r"file cannot be written: Disk quota exceeded$"):
        write(errno.EDQUOT)
    with pytest.raises(PermissionError):
        write(errno.EACCES)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is of Linux")
def test_lines_of_metrics_name_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rollgraph.log.metrics.open_to_append", lambda path: os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    )
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for act in (lambda: sink.write(0, {"loss": 1.0}), sink.close):
        with pytest.raises(DiskFull, match=r"metrics\.jsonl cannot be written: No space left on device"):
            act()


def test_a_small_file_names_itself(disk: tuple[Path, Disk]) -> None:
    place, _ = disk
    with pytest.raises(DiskFull, match=rf"disk/file cannot be written: {MISSING}"):
        write_new(place / "file", b"x" * 2**20)
