"""A full disk ends a run, which names the missing bytes, keeps its checkpoints, and resumes once there is room."""

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

Disk = Callable[[int], None]  # resizes the disk to a number of KiB


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Disk]]:
    """A small file system, and a function that resizes it."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o"]
    if subprocess.run([*mount, "size=64k", "none", mount_point], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")

    def resize(kib: int) -> None:
        subprocess.run([*mount, f"remount,size={kib}k", "none", mount_point], check=True)

    try:
        yield mount_point, resize
    finally:
        subprocess.run(["umount", "--lazy", mount_point], check=True)


def steps_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step_*"))


def test_a_run_on_a_full_disk_resumes_once_there_is_room(
    folder: Path, disk: tuple[Path, Disk], capsys: pytest.CaptureFixture[str]
) -> None:
    mount_point, resize = disk
    resize(300)
    options = [*OPTIONS, f"output={mount_point / 'run'}", "algorithm.options={}"]
    with pytest.raises(CheckpointError, match=rf"rank0\.safetensors cannot be written: {MISSING}") as raised:
        train(eager_config(folder, *options), ONE)
    numbers = re.search(MISSING, str(raised.value))
    assert numbers is not None
    takes, free, missing = (int(number.replace(",", "")) for number in numbers.groups())
    assert takes == free + missing
    assert 0 < missing < 300 * 1024
    out = capsys.readouterr().out
    assert out.count("was not written") == 1  # the second failure is the error
    assert "[12/12]" not in out
    saved = steps_in(mount_point / "run")
    assert saved
    for name in saved:
        verify(mount_point / "run" / "checkpoints" / name)
    resize(4096)
    train(eager_config(folder, *options), ONE)
    train(eager_config(folder, *options, f"output={folder / 'undisturbed'}"), ONE)
    assert_same_run(mount_point / "run", folder / "undisturbed", 11)


def fail_saves(monkeypatch: pytest.MonkeyPatch, numbers: set[int]) -> None:
    """Let the saves with these numbers, counted from 1, fail with a full disk."""
    saves = 0
    save_file = checkpoint_writer.save_file

    def refuse(tensors: Any, path: Path) -> None:
        nonlocal saves
        saves += path.name == "rank0.safetensors"
        if saves in numbers:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint_writer, "save_file", refuse)


def test_one_failed_save_does_not_end_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_saves(monkeypatch, {1})
    train(eager_config(folder, *OPTIONS), ONE)
    assert steps_in(folder / "run")[-1] == "step_00000011"
    assert "step_00000001 was not written" in capsys.readouterr().out


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_second_failed_save_ends_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asynchronous: bool
) -> None:
    fail_saves(monkeypatch, set(range(2, 99)))
    options = [*OPTIONS, "steps=1000", f"checkpoint.asynchronous={str(asynchronous).lower()}"]
    with pytest.raises(CheckpointError, match=r"rank0\.safetensors cannot be written: No space left on device"):
        train(eager_config(folder, *options), ONE)
    assert capsys.readouterr().out.count("was not written") == asynchronous
    assert steps_in(folder / "run") == ["step_00000001"]


Usage = namedtuple("Usage", ["total", "used", "free"])


def test_the_error_counts_the_missing_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"before")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, 10))

    def write(number: int) -> None:
        with reporting_full_disk(file, 2000):
            file.write_bytes(b"before" + b"x" * 500)  # part of a write, truncated afterwards
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_failed_write_of_metrics_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rollgraph.log.metrics.open_to_append", lambda path: os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    )
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for operation in (lambda: sink.write(0, {"loss": 1.0}), sink.close):
        with pytest.raises(DiskFull, match=r"metrics\.jsonl cannot be written: No space left on device"):
            operation()


def test_a_failed_small_write_names_the_file(disk: tuple[Path, Disk]) -> None:
    mount_point, _ = disk
    with pytest.raises(DiskFull, match=rf"disk/file cannot be written: {MISSING}"):
        write_new(mount_point / "file", b"x" * 2**20)
