"""The lock of a run's folder: one run at a time may use it.

A run takes the lock before anything else, and the kernel releases it when the process ends, for whatever reason.
Readers of a folder (`rollgraph eval`, `rollgraph export`) do not take it; `keep.py` protects the checkpoints that they
read.

A driver that replaces lost ranks cannot always end them: a rank whose network is down runs on, and holds the lock. So
each attempt of a run writes its number into the lock, and a newer attempt takes the lock over from an older one. Before
each write, an attempt checks that it still has the lock.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from rollgraph.errors import MachineError, UserError
from rollgraph.files import FileError, open_for_writing
from rollgraph.parallel.data.collectives import Collectives
from rollgraph.parallel.ranks.world import World

LOCK = "run.lock"
# The text of a lock, also of one whose owner was killed.
_OWNER = re.compile(r"(process \d+ on .*\n(attempt (?P<attempt>\d+) of run (?P<run>[0-9a-f]+)\n)?)?")


class FolderError(UserError, RuntimeError):
    """The folder of a run cannot be written, or another run is using it."""


class TakenOver(MachineError, RuntimeError):
    """A newer attempt of the same run has the folder, so this one must not write to it any more."""


@dataclass(frozen=True)
class Claim:
    """The attempt of a run that claims a folder. `run` is a unique hexadecimal id."""

    run: str
    attempt: int

    def comes_after(self, owner: str) -> bool:
        """Whether a lock with this text belongs to an older attempt of the same run."""
        match = _OWNER.fullmatch(owner)
        return match is not None and match["run"] == self.run and int(match["attempt"]) < self.attempt


@dataclass(frozen=True)
class FolderLock:
    """The lock of a folder, which rank 0 holds for all ranks."""

    path: Path
    file: IO[str] | None = None  # None on other ranks
    owner: str = ""  # the text of the lock
    is_claimed: bool = False  # whether a newer attempt may take it over

    def check(self) -> None:
        """Call this on rank 0 before writing anything that a newer attempt could write, too."""
        if self.is_claimed and not self._is_held():
            raise TakenOver(f"{self.path.parent} belongs to a newer attempt of this run now: nothing more is written")

    def _is_held(self) -> bool:
        """Whether this process still has the lock. Without file locks, only the text of the lock tells."""
        if self.file is None:
            return True
        try:
            return _is_at(self.path, self.file) and self.path.read_text(encoding="utf-8") == self.owner
        except OSError:
            return False

    def release(self) -> None:
        """Remove the lock, and the folder, if it is empty. A lock that was taken over stays."""
        if self.file is None:
            return
        with suppress(OSError):
            if self._is_held():
                self.path.unlink()
        self.file.close()
        with suppress(OSError):
            self.path.parent.rmdir()


@contextmanager
def lock_folder(folder: str | os.PathLike[str], world: World, claim: Claim | None = None) -> Iterator[FolderLock]:
    """Create the folder, and keep other runs out of it. Rank 0 holds the lock for all ranks."""
    path = Path(folder)
    lock = FolderLock(path / LOCK)
    problem = ""
    if world.rank == 0:
        try:
            lock = _acquire(path, claim)
        except FolderError as error:
            problem = str(error)
        except (FileError, OSError) as error:
            problem = f"output: {path} cannot be used: {error}"
    if world.size > 1 and torch.distributed.is_initialized():  # without a process group, the error comes later
        problem = Collectives(world).all_gather_text(problem)[0]
    if problem:
        raise FolderError(problem)
    try:
        yield lock
    finally:
        lock.release()


def _acquire(folder: Path, claim: Claim | None) -> FolderLock:
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        lock = os.fdopen(open_for_writing(folder / LOCK, os.O_RDWR), "r+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel releases it when the process ends
        except BlockingIOError:
            owner = lock.read()
            if claim is not None and claim.comes_after(owner):
                if _is_at(folder / LOCK, lock):
                    (folder / LOCK).unlink()
                lock.close()
                continue
            lock.close()
            name = owner.strip().replace("\n", ", ") or "another process"
            raise FolderError(
                f"output: {folder} is in use by another run ({name}): wait for it to end, or choose another output"
            ) from None
        except OSError:
            pass  # this file system has no locks, so we cannot keep other runs out
        if _is_at(folder / LOCK, lock):
            break
        lock.close()  # its owner removed it after we opened it
    if not _OWNER.fullmatch(lock.read()):
        lock.close()
        raise FolderError(f"output: {folder / LOCK} is not the lock of a run: move it away, or choose another output")
    owner = f"process {os.getpid()} on {socket.gethostname()}\n"
    if claim is not None:
        owner += f"attempt {claim.attempt} of run {claim.run}\n"
    lock.seek(0)
    lock.truncate()
    lock.write(owner)
    lock.flush()
    return FolderLock(folder / LOCK, lock, owner, is_claimed=claim is not None)


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
