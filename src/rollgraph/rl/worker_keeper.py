"""The keeper of a worker: a process without foreign code that ends the worker and everything the worker started.

A keeper ends when the pool tells it to or when the pool's process is gone. It takes with it every process that the
worker started, also those that left the worker's process group or lost their parent. The worker is its child.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import time
from contextlib import suppress
from typing import NoReturn

from rollgraph.rl.worker_messages import STOP_SIGNALS
from rollgraph.rl.worker_process import serve

_END_SECONDS = 10.0  # for killed processes to be gone
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(connection: int, life: int, path: list[str]) -> NoReturn:
    """Become a keeper with a worker. `connection` is the worker's; `life` becomes readable when the keeper must end."""
    with suppress(OSError):
        os.dup2(2, 1)  # what calls print does not belong to the output of the command that runs
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # descendants that lose their parent become the keeper's children
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(life)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # the keeper was gone before the line above
            os._exit(1)
        os.setpgid(0, 0)
        serve(connection, path)
    os.close(connection)
    with suppress(OSError):
        os.setpgid(worker, worker)
    _leave(_keep(worker, life))


def _keep(worker: int, life: int) -> int:
    """Wait until the worker or the pool ends; returns the worker's wait status."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, because an ignored signal does not wake
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    events = select.poll()
    events.register(life, select.POLLIN)
    events.register(woken, select.POLLIN)
    while (status := _collect(worker)) is None:
        if any(descriptor == life for descriptor, _ in events.poll()):
            break
        with suppress(BlockingIOError):
            os.read(woken, 4096)
    return _end_all(worker, status)


def _collect(worker: int) -> int | None:
    """Reap all children that have ended; returns the worker's status if it is among them."""
    found = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == worker:
                found = status
            if pid == 0:
                break
    return found


def _end_all(worker: int, status: int | None) -> int:
    """Kill until no process is left: the children of a killed process become the keeper's and are killed in turn."""
    limit = time.monotonic() + _END_SECONDS
    with suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    while time.monotonic() < limit:
        for child in _find_children():
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
        try:
            pid, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == worker:
            status = found
        if pid == 0:
            time.sleep(0.002)
    return status or 0


def _find_children() -> list[int]:
    own_pid = str(os.getpid())
    found = []
    with suppress(OSError):  # a system without /proc: killing the process group has to do
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError, IndexError), open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                parent = fields[1].decode()
                if parent == own_pid:
                    found.append(int(entry))
    return found


def _leave(status: int) -> NoReturn:
    """Exit the way the worker did, so that the pool can say how it ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file, the worker's, is enough
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        with suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    """Only Linux has prctl; elsewhere, a process that left the worker's group outlives it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
