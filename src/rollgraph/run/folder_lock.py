"""One run in a folder at a time: its lock, taken before anything else and gone with the process, however it ends.

Readers of a folder (`rollgraph eval`, `rollgraph export`) do not take it. What protects the checkpoints of a run that
is being read is `checkpoint.py`'s.
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
_OWNER = re.compile(r"(process \d+ on .*\n)?")  # what a lock says, also of a process that was killed


class FolderError(RuntimeError):
    """The folder of a run cannot be used: it cannot be written, or another run is using it."""


@contextmanager
def lock_folder(folder: str | os.PathLike[str], world: World) -> Iterator[None]:
    """Inside, the folder is there, can be written, and belongs to this run; rank 0 holds the lock for all."""
    path, lock, problem = Path(folder), None, ""
    if world.rank == 0:
        try:
            lock = _take(path)
        except FolderError as error:
            problem = str(error)
        except (FileError, OSError) as error:
            problem = f"output: {path} cannot be used: {error}"
    if world.size > 1 and torch.distributed.is_initialized():  # if not, that will be said later on
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
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go when the process ends
        except BlockingIOError:
            owner = lock.read().strip() or "another process"
            lock.close()
            raise FolderError(
                f"output: {folder} is in use by another run ({owner}): wait for it, or give another output"
            ) from None
        except OSError:
            pass  # a file system without locks: nobody can be kept out
        if _is_at(folder / LOCK, lock):
            break
        lock.close()  # its owner let go of it, and removed it, after we had opened it
    if not _OWNER.fullmatch(lock.read()):
        lock.close()
        raise FolderError(f"output: {folder / LOCK} is no lock of a run: move it away, or give another output")
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
    """A folder in which nothing came to be goes as well."""
    with suppress(OSError):
        (folder / LOCK).unlink()
    lock.close()
    with suppress(OSError):
        folder.rmdir()
