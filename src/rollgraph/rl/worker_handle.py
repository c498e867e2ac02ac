"""One worker process from the outside: start it, give it a call, take the result, stop it.

A worker is a program of its own rather than a fork, because the parent has threads and a CUDA context, and rather than
a child of multiprocessing, which may have no children itself and would run the user's script again.
`worker_keeper.py` kills it with everything it has started.
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
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rollgraph.rl.worker_messages import (
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
)

# The standard library comes first until our own modules are imported, or a json.py of the user's would be taken for it.
_PROGRAM = """\
import os, sys
path, library = sys.argv[3:], os.path.dirname(os.__file__)
sys.path[:] = [library, os.path.join(library, "lib-dynload"), *path]
from rollgraph.rl.worker_keeper import main
main(int(sys.argv[1]), int(sys.argv[2]), path)
"""
_START_SECONDS = 120.0  # for imports on a busy machine; the time of a call begins after them
_END_SECONDS = 20.0  # for a keeper to kill what it keeps; it gives up sooner by itself
NOT_YET = object()  # there is no result so far


class WorkerHandle:
    """A place for one worker process; when the process is gone, the next call starts another."""

    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None  # the keeper
        self.pid = 0  # of the keeper's child, which makes the calls
        self._life = -1  # the keeper ends when this is written to or closed
        self._ready = False
        self._calls = 0
        self._frames = Frames()
        self._unsent = memoryview(b"")
        self.begun = False  # whether the worker has begun the latest call
        self.stopped = False  # whether it ended by a signal that asks to stop
        self.deadline = 0.0
        self._timeout = _START_SECONDS  # of the latest call
        self.connection: socket.socket

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        life, self._life = os.pipe()
        ours.setblocking(False)
        self.connection = ours
        self._ready = False
        self._frames = Frames()
        path = [str(entry) for entry in sys.path]
        program = [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), str(life), *path]
        # Blocked until the worker has its handlers: a signal to all processes of a job can come at any moment.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._process = subprocess.Popen(
                program,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), life],
                start_new_session=True,  # so that Ctrl-C in a terminal does not reach it
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        except BaseException:
            ours.close()
            self.ask_to_end()  # closes the descriptor; there is no process to ask
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
            os.close(life)
        self._unsent = memoryview(frame(self._setup))

    def wait_until_ready(self) -> None:
        self.deadline = time.monotonic() + _START_SECONDS
        while not self._ready:
            wait_for_any([self])
            result = self.take()
            if result is not NOT_YET:
                raise RuntimeError(f"a worker process could not be started: {result.message}")

    @property
    def has_unsent(self) -> bool:
        return len(self._unsent) > 0

    def give(self, call: tuple[Any, ...], timeout: float) -> Failure | None:
        """Send a call, to a new process if necessary; returns a Failure if that is not possible.

        It may take `timeout` seconds from the moment the worker is ready for it.
        """
        self._timeout = timeout
        self.begun = False
        self.stopped = False
        self._calls += 1
        try:
            message = frame(pickle.dumps((self._calls, call)))
        except Exception as error:  # a column holds an object that cannot be pickled
            return describe(error)
        try:
            if self._process is None or self._process.poll() is not None:  # killed while idle, perhaps by the kernel
                self.stop()
                self.start()
            self._unsent = memoryview(bytes(self._unsent) + message)
            self._send()
        except OSError as error:
            self.stop()
            return Failure("died", f"cannot be reached ({error})")
        self.deadline = time.monotonic() + (timeout if self._ready else _START_SECONDS)
        return None

    def take(self) -> Any:
        """The result, a Failure, or NOT_YET; never waits for the rest of a message."""
        try:
            self._send()
            ended = self._receive()
            for body in self._frames.read():
                result = self._hear(body)
                if result is not NOT_YET:
                    return result
        except GarbageError:
            self.stop()
            return Failure("died", "something other than an answer was written to the worker's connection")
        except OSError:
            ended = True
        if ended:
            return Failure("died", self._describe_end())
        if time.monotonic() < self.deadline:
            return NOT_YET
        self.stop()
        return Failure("timeout", f"no result after {self._timeout if self._ready else _START_SECONDS} s")

    def ask_to_end(self) -> None:
        if self._life >= 0:
            with suppress(OSError):
                os.write(self._life, b"x")  # closing is not enough if a fork of ours holds the descriptor as well
            os.close(self._life)
            self._life = -1

    def stop(self) -> int:
        """Kill the process and everything it started; returns the exit code."""
        if self._process is None:
            return 0
        self.ask_to_end()
        self.connection.close()
        self._unsent = memoryview(b"")
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # it may have been stopped (SIGSTOP); its worker ends with it
            self._process.kill()
            code = self._process.wait()
        self._process = None
        return code

    def _send(self) -> None:
        """Send as much as is possible without waiting."""
        while self.has_unsent:
            try:
                sent = self.connection.send(self._unsent)
            except BlockingIOError:
                return
            self._unsent = self._unsent[sent:]

    def _receive(self) -> bool:
        """Take what has arrived; returns whether the other end is closed."""
        try:
            while data := self.connection.recv(2**16):
                self._frames.add(data)
        except BlockingIOError:
            return False
        except ConnectionError:  # it ended with a message unread; what it said before still counts
            return True
        return True

    def _hear(self, body: bytes) -> Any:
        said, call, value = decode_answer(body)
        if said == READY:
            self._ready = True
            self.pid = value
        elif said == BROKEN:
            self.stop()
            return value
        elif call == self._calls and said == BEGUN:
            self.begun = True
        elif call == self._calls and said == RESULT:
            return value
        else:  # an answer to an earlier call, from a process that it forked
            return NOT_YET
        self.deadline = time.monotonic() + self._timeout
        return NOT_YET

    def _describe_end(self) -> str:
        """How a process ended that closed its connection."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS / 2)  # so that the exit code is its own rather than that of our signal
        code = self.stop()
        self.stopped = -code in STOP_SIGNALS
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def wait_for_any(workers: Iterable[WorkerHandle]) -> None:
    """Wait until one of the workers can be read from or written to, or until the first deadline."""
    first_deadline = min((worker.deadline for worker in workers), default=0.0)
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            events = selectors.EVENT_READ
            if worker.has_unsent:
                events |= selectors.EVENT_WRITE
            selector.register(worker.connection, events)
        selector.select(max(0.0, first_deadline - time.monotonic()))
