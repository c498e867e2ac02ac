"""The lock of a run's folder: one run at a time may use it.

The lock is taken before anything else, and the kernel releases it when the process ends, however that happens. Readers
of a folder (`rollgraph eval`, `rollgraph export`) do not take it; `checkpoints.py` protects what they read.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch

from rollgraph.distributed.world import World
from rollgraph.files import FileError, open_own
from rollgraph.sharding import Collectives

LOCK = "run.lock"
_OWNER = re.compile(r"(process \d+ on .*\n)?")  # the text of a lock, even one whose owner was killed


class FolderError(RuntimeError):
    """The folder of a run cannot be written, or another run is using it."""


@contextmanager
def lock_folder(folder: str | os.PathLike[str], world: World) -> Iterator[None]:
    """Make the folder and keep other runs out of it. Rank 0 holds the lock for all ranks."""
    path = Path(folder)
    lock = None
    problem = ""
    if world.rank == 0:
        try:
            lock = _take(path)
        except FolderError as error:
            problem = str(error)
        except (FileError, OSError) as error:
            problem = f"output: {path} cannot be used: {error}"
    if world.size > 1 and torch.distributed.is_initialized():  # otherwise the missing process group is reported later
        problem = Collectives(world).all_gather_text(problem)[0]
    if problem:
        raise FolderError(problem)
    try:
        yield
    finally:
        if lock is not None:
            _release(path, lock)


def _take(folder: Path) -> IO[str]:
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        lock = os.fdopen(open_own(folder / LOCK, os.O_RDWR), "r+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it when the process ends
        except BlockingIOError:
            owner = lock.read().strip() or "another process"
            lock.close()
            raise FolderError(
                f"output: {folder} is in use by another run ({owner}): wait for it to end, or choose another output"
            ) from None
        except OSError:
            pass  # this file system has no locks, so nobody can be kept out
        if _is_at(folder / LOCK, lock):
            break
        lock.close()  # its owner removed it after we had opened it
    if not _OWNER.fullmatch(lock.read()):
        lock.close()
        raise FolderError(f"output: {folder / LOCK} is not the lock of a run: move it away, or choose another output")
    lock.seek(0)
    lock.truncate()
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _release(folder: Path, lock: IO[str]) -> None:
    """Remove the lock, and the folder too if it is empty."""
    with suppress(OSError):
        (folder / LOCK).unlink()
    lock.close()
    with suppress(OSError):
        folder.rmdir()
