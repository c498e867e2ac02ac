"""Calls in other processes that may raise, hang or die there without harm to this one.

Owns worker processes from outside: started once, used again, killed with all they have started when a call takes too
long, and gone when the pool is closed or its process has ended, however it ended. They are programs of their own
rather than forks (the parent has threads and a CUDA context) or multiprocessing's children (which may have no children
themselves and would run the user's script again). Their inside is worker_process.py. Nothing here knows what is called.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rollgraph.rl.worker_process import (
    BEGUN,
    BROKEN,
    READY,
    RESULT,
    STOP_SIGNALS,
    Failure,
    Frames,
    GarbageError,
    decode_answer,
    describe,
    frame,
    leave_if_forked,
    show,
)

__all__ = ["Failure", "WorkerPool", "describe", "leave_if_forked", "show"]

# The standard library comes first until our own modules are there: a json.py of the user's is not ours to import.
_PROGRAM = """\
import os, sys
path, library = sys.argv[3:], os.path.dirname(os.__file__)
sys.path[:] = [library, os.path.join(library, "lib-dynload"), *path]
from rollgraph.rl.worker_process import main
main(int(sys.argv[1]), int(sys.argv[2]), path)
"""
_START_SECONDS = 120.0  # for imports on a busy machine; a call's own time begins after it
_END_SECONDS = 20.0  # for a keeper to kill what it keeps; it gives up sooner by itself


class WorkerPool:
    """Processes that each make a function by `factory(*arguments)`, a dotted path, and then call it for us.

    A result is what JSON can hold; a Failure, or one in a list, is given back as such.
    """

    def __init__(self, count: int, factory: str, arguments: tuple[Any, ...], *, timeout: float) -> None:
        self._timeout = timeout
        setup = pickle.dumps((factory, arguments))
        self._workers = [_Worker(setup) for _ in range(count)]
        self._closed = False
        try:
            for worker in self._workers:  # all at a time
                worker.start()
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def run(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The result of each call, in order; a Failure where it raised, took longer than `timeout`, or died.

        A process that died before it had begun a call, or of a signal that asks to stop, did not die of the call:
        it is given away once more.
        """
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        results: list[Any] = [None] * len(calls)
        waiting = deque(range(len(calls)))
        busy: dict[_Worker, int] = {}
        again: set[int] = set()

        def take(worker: _Worker, index: int, result: Any) -> None:
            lost = isinstance(result, Failure) and result.kind == "died"
            if lost and (not worker.begun or worker.stopped) and index not in again:
                again.add(index)
                waiting.appendleft(index)
            else:
                results[index] = result

        try:
            while waiting or busy:
                for worker in self._workers:
                    if waiting and worker not in busy:
                        index = waiting.popleft()
                        if (failure := worker.give(calls[index], self._timeout)) is not None:
                            take(worker, index, failure)
                        else:
                            busy[worker] = index
                _wait(busy)
                for worker in list(busy):
                    if (result := worker.take(self._timeout)) is not _NOT_YET:
                        take(worker, busy.pop(worker), result)
        finally:  # after Ctrl-C, a late answer must not be taken for that of the next call
            for worker in busy:
                worker.stop()
        return results

    def close(self) -> None:
        self._closed = True
        for worker in self._workers:
            worker.ask_to_end()  # all at a time
        for worker in self._workers:
            worker.stop()


_NOT_YET = object()


class _Worker:
    """A place for one process; it is filled again when the process has gone."""

    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None  # the keeper
        self.pid = 0  # of its child, which makes the calls
        self._life = -1  # its end comes when this is written to or closed
        self._ready = False
        self._calls = 0
        self._frames = Frames()
        self._unsent = memoryview(b"")
        self.begun = False  # it said so of the call that it was given last
        self.stopped = False  # it ended by a signal that asks to stop
        self.deadline = 0.0
        self.connection: socket.socket

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        life, self._life = os.pipe()
        ours.setblocking(False)
        self.connection, self._ready, self._frames = ours, False, Frames()
        path = [str(entry) for entry in sys.path]
        program = [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), str(life), *path]
        # Blocked until it has its handlers: a signal to all processes of a job can come at any moment.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._process = subprocess.Popen(
                program,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), life],
                start_new_session=True,  # Ctrl-C in a terminal is not for it
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        except BaseException:
            ours.close()
            self.ask_to_end()  # nobody, but the descriptor is closed
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
            os.close(life)
        self._unsent = memoryview(frame(self._setup))

    def wait_until_ready(self) -> None:
        self.deadline = time.monotonic() + _START_SECONDS
        while not self._ready:
            _wait([self])
            if (result := self.take(_START_SECONDS)) is not _NOT_YET:
                raise RuntimeError(f"a worker process could not be started: {result.message}")

    @property
    def has_unsent(self) -> bool:
        return len(self._unsent) > 0

    def give(self, call: tuple[Any, ...], timeout: float) -> Failure | None:
        """Send a call, to a new process if need be; a Failure if that is not possible."""
        self.begun, self.stopped = False, False
        self._calls += 1
        try:
            message = frame(pickle.dumps((self._calls, call)))
        except Exception as error:  # a column of somebody's own making that does not travel
            return describe(error)
        try:
            if self._process is None or self._process.poll() is not None:  # killed while idle, by the kernel perhaps
                self.stop()
                self.start()
            self._unsent = memoryview(bytes(self._unsent) + message)
            self._send()
        except OSError as error:
            self.stop()
            return Failure("died", f"cannot be reached ({error})")
        self.deadline = time.monotonic() + (timeout if self._ready else _START_SECONDS)
        return None

    def take(self, timeout: float) -> Any:
        """The result or a Failure, if there is one by now. What has come of a message does not wait for the rest."""
        try:
            self._send()
            ended = self._receive()
            for body in self._frames.read():
                if (result := self._hear(body, timeout)) is not _NOT_YET:
                    return result
        except GarbageError:
            self.stop()
            return Failure("died", "something other than an answer was written to the worker's connection")
        except OSError:
            ended = True
        if ended:
            return Failure("died", self._bury())
        if time.monotonic() < self.deadline:
            return _NOT_YET
        self.stop()
        return Failure("timeout", f"no result after {timeout if self._ready else _START_SECONDS} s")

    def ask_to_end(self) -> None:
        if self._life >= 0:
            with suppress(OSError):
                os.write(self._life, b"x")  # closing it does not do if a process that we forked has it as well
            os.close(self._life)
            self._life = -1

    def stop(self) -> int:
        """Kill the process and all it has started; the exit code."""
        if self._process is None:
            return 0
        self.ask_to_end()
        self.connection.close()
        self._unsent = memoryview(b"")
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # it was stopped, perhaps; its worker ends with it
            self._process.kill()
            code = self._process.wait()
        self._process = None
        return code

    def _send(self) -> None:
        """As much as can be sent without waiting."""
        while self.has_unsent:
            try:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
            except BlockingIOError:
                return

    def _receive(self) -> bool:
        """Take what has come; whether the other end is closed."""
        try:
            while data := self.connection.recv(2**16):
                self._frames.add(data)
        except BlockingIOError:
            return False
        except ConnectionError:  # it ended with a message unread; what it had said before still counts
            return True
        return True

    def _hear(self, body: bytes, timeout: float) -> Any:
        said, call, value = decode_answer(body)
        if said == READY:
            self._ready, self.pid = True, value
        elif said == BROKEN:
            self.stop()
            return value
        elif call == self._calls and said == BEGUN:
            self.begun = True
        elif call == self._calls and said == RESULT:
            return value
        else:  # an answer to an earlier call, from a process that it has forked
            return _NOT_YET
        self.deadline = time.monotonic() + timeout
        return _NOT_YET

    def _bury(self) -> str:
        """How a process ended that closed its connection."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS / 2)  # so that the exit code is its own rather than that of our signal
        code = self.stop()
        self.stopped = -code in STOP_SIGNALS
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _wait(workers: Sequence[_Worker] | dict[_Worker, int]) -> None:
    """Until one of them can be heard or spoken to, or the first deadline has come."""
    first = min((worker.deadline for worker in workers), default=0.0)
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.has_unsent else 0)
            selector.register(worker.connection, events)
        selector.select(max(0.0, first - time.monotonic()))
