"""Only one run may use a folder at a time, and a run that fails early leaves no trace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgraph.checkpoint.lock import LOCK, Claim, FolderError, TakenOver, lock_folder
from rollgraph.parallel.ranks.world import World
from rollgraph.train import train
from tests.test_train import ONE, config_of, folder

__all__ = ["folder"]

HOLD = """
import sys
from rollgraph.checkpoint.lock import lock_folder
from rollgraph.parallel.ranks.world import World
with lock_folder(sys.argv[1], World(0, 1, "cpu")):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_before_anything_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*arguments: object, **options: object) -> None:
        raise AssertionError("the run was built")

    monkeypatch.setattr("rollgraph.train.make_run", build)
    with (
        lock_folder(folder / "run", ONE),
        pytest.raises(FolderError, match=rf"run is in use by another run \(process {os.getpid()} on .*another output"),
    ):
        train(config_of(folder), ONE)
    with pytest.raises(AssertionError):  # the lock was released
        train(config_of(folder), ONE)


def test_a_killed_run_holds_no_lock(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(FolderError, match=f"process {process.pid} "), lock_folder(tmp_path, ONE):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (tmp_path / LOCK).exists()
    with lock_folder(tmp_path, ONE):
        pass
    with lock_folder(tmp_path, ONE):
        pass


def test_a_run_that_fails_early_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock_folder(tmp_path / "new" / "run", ONE):
        raise KeyError
    assert not (tmp_path / "new" / "run").exists()
    with lock_folder(tmp_path / "kept", ONE):
        (tmp_path / "kept" / "metrics.jsonl").touch()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["metrics.jsonl"]


def test_an_unusable_folder_is_reported_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(FolderError, match=r"output: .*file/run cannot be used"),
        lock_folder(tmp_path / "file/run", ONE),
    ):
        pass


@pytest.mark.parametrize("to", ["a file", "nothing"])
def test_a_lock_is_not_written_through_a_link(tmp_path: Path, to: str) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine.txt"
    run.mkdir()
    if to == "a file":
        mine.write_text("years of work")
    (run / LOCK).symlink_to(mine)
    with pytest.raises(FolderError, match=r"output: .*run\.lock: is a link; .*: remove it"), lock_folder(run, ONE):
        pass
    assert (run / LOCK).is_symlink()
    assert mine.exists() == (to == "a file")
    if to == "a file":
        assert mine.read_text() == "years of work"


def test_files_that_only_look_like_locks_stay(tmp_path: Path) -> None:
    lock = tmp_path / LOCK
    lock.write_text("process of elimination\n")
    with (
        pytest.raises(FolderError, match=r"run\.lock is not the lock of a run: move it away"),
        lock_folder(tmp_path, ONE),
    ):
        pass
    assert lock.read_text() == "process of elimination\n"
    lock.unlink()
    os.mkfifo(lock)  # no process has its other end open
    with pytest.raises(FolderError, match=r"run\.lock: is not a regular file"), lock_folder(tmp_path, ONE):
        pass
    lock.unlink()
    lock.write_text("process 7 on a.machine\n")  # left by a killed run
    with lock_folder(tmp_path, ONE):
        assert lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


@pytest.mark.parametrize("file_locks", [True, False])
def test_a_newer_attempt_takes_the_folder_over_from_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_locks: bool
) -> None:
    """The older attempt is alive and holds its lock, like a rank 0 whose network is down."""

    def unsupported(*_: object) -> None:
        raise OSError("no locks")

    if not file_locks:
        monkeypatch.setattr("fcntl.flock", unsupported)
    with lock_folder(tmp_path, ONE, Claim("ab12", 1)) as older:
        older.check()
        with lock_folder(tmp_path, ONE, Claim("ab12", 2)) as newer:
            with pytest.raises(TakenOver):
                older.check()
            newer.check()
            older.release()  # leaves the lock of the newer attempt
            newer.check()
            assert (tmp_path / LOCK).read_text().endswith("attempt 2 of run ab12\n")


@pytest.mark.parametrize("claim", [None, Claim("ab12", 2), Claim("ab12", 1), Claim("cd34", 9)])
def test_only_a_newer_attempt_of_the_same_run_takes_the_folder_over(tmp_path: Path, claim: Claim | None) -> None:
    with lock_folder(tmp_path, ONE, Claim("ab12", 2)) as held:
        with pytest.raises(FolderError, match="attempt 2 of run ab12"), lock_folder(tmp_path, ONE, claim):
            pass
        held.check()


def try_to_lock(rank: int, folder: str, out: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        with lock_folder(f"{folder}/run", World(rank, 2, "cpu")):
            out.put((rank, ""))
            torch.distributed.barrier()
    except FolderError as error:
        out.put((rank, str(error)))


@pytest.mark.multi
@pytest.mark.parametrize("taken", [True, False])
def test_all_ranks_learn_that_a_folder_is_taken(tmp_path: Path, taken: bool) -> None:
    """Only rank 0 looks at the lock. If it did not tell the other ranks, they would wait forever."""
    context = torch.multiprocessing.get_context("forkserver")
    out = context.SimpleQueue()
    with lock_folder(tmp_path / "run", ONE) if taken else nullcontext():
        ranks = [context.Process(target=try_to_lock, args=(rank, str(tmp_path), out)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(600)
    errors = dict(out.get() for _ in ranks)
    assert ["is in use by another run" in errors[rank] for rank in range(2)] == [taken, taken]
