"""A pool of worker processes, in which calls may raise, hang or crash without harm to this process.

Workers start once and serve many calls. A call that times out costs the worker, with every process it started. No
worker outlives the pool or the pool's process, even if that is killed. The pool does not know which function it calls.
`process.py` is the code inside a worker.
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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from rollgraph.rl.rewards.process import (
    READY,
    RESULT,
    START_FAILED,
    STARTED,
    STOP_SIGNALS,
    Failure,
    FrameBuffer,
    ProtocolError,
    decode_message,
    encode_frame,
    failure_of,
)

# -- a worker, seen from the pool ------------------------------------------------------------------
# A worker is a new program. It is not a fork, because the parent has threads and a CUDA context. It is not a child of
# multiprocessing, which may have no children itself and would run the user's script again.

# The standard library comes first on the path until our modules are imported, or a user's json.py would shadow it.
_PROGRAM = """\
import os, sys
path, library = sys.argv[3:], os.path.dirname(os.__file__)
sys.path[:] = [library, os.path.join(library, "lib-dynload"), *path]
from rollgraph.rl.rewards.process import main
main(int(sys.argv[1]), int(sys.argv[2]), path)
"""
_START_SECONDS = 120.0  # for imports on a busy machine; the time-out of a call begins after them
_EXIT_SECONDS = 20.0  # for a supervisor to kill all processes of its worker; it gives up sooner by itself
PENDING = object()  # in place of a result that is not there yet


class WorkerHandle:
    """A slot for one worker process; if the process is gone, the next call starts another."""

    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None  # the supervisor
        self.pid = 0  # of the worker, which is the supervisor's child
        self._stop_fd = -1  # a pipe: writing to it or closing it ends the supervisor
        self._is_ready = False
        self._call_number = 0
        self._frames = FrameBuffer()
        self._unsent = memoryview(b"")
        self.has_started = False  # the worker has started the latest call
        self.got_stop_signal = False  # the worker was killed by one of STOP_SIGNALS
        self.deadline = 0.0
        self._timeout = _START_SECONDS  # of the latest call
        self.connection: socket.socket

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        stop_fd, self._stop_fd = os.pipe()
        ours.setblocking(False)
        self.connection = ours
        self._is_ready = False
        self._frames = FrameBuffer()
        path = [str(entry) for entry in sys.path]
        program = [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), str(stop_fd), *path]
        # Blocked until the worker has installed its handlers: a scheduler can signal all processes of a job any time.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._process = subprocess.Popen(
                program,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), stop_fd],
                start_new_session=True,  # so that Ctrl-C in a terminal does not reach it
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        except BaseException:
            ours.close()
            self.request_stop()  # there is no process yet; closes the descriptor
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
            os.close(stop_fd)
        self._unsent = memoryview(encode_frame(self._setup))

    def wait_until_ready(self) -> None:
        self.deadline = time.monotonic() + _START_SECONDS
        while not self._is_ready:
            wait_for_any([self])
            result = self.poll_result()
            if result is not PENDING:
                raise RuntimeError(f"a worker process could not be started: {result.message}")

    @property
    def has_unsent(self) -> bool:
        return len(self._unsent) > 0

    def send_call(self, call: tuple[Any, ...], timeout: float) -> Failure | None:
        """Send a call, starting a new process if necessary; returns a Failure if that is not possible.

        The time-out starts when the worker is ready for the call.
        """
        self._timeout = timeout
        self.has_started = False
        self.got_stop_signal = False
        self._call_number += 1
        try:
            message = encode_frame(pickle.dumps((self._call_number, call)))
        except Exception as error:  # a column holds an object that cannot be pickled
            return failure_of(error)
        try:
            if (
                self._process is None or self._process.poll() is not None
            ):  # killed while idle, perhaps by the OOM killer
                self.stop()
                self.start()
            self._unsent = memoryview(bytes(self._unsent) + message)
            self._send()
        except OSError as error:
            self.stop()
            return Failure("died", f"cannot be reached ({error})")
        self.deadline = time.monotonic() + (timeout if self._is_ready else _START_SECONDS)
        return None

    def poll_result(self) -> Any:
        """The result, a Failure, or PENDING; does not block."""
        try:
            self._send()
            has_exited = self._receive()
            for body in self._frames.read():
                result = self._handle_message(body)
                if result is not PENDING:
                    return result
        except ProtocolError:
            self.stop()
            return Failure("died", "something other than an answer was written to the worker's connection")
        except OSError:
            has_exited = True
        if has_exited:
            return Failure("died", self._describe_exit())
        if time.monotonic() < self.deadline:
            return PENDING
        self.stop()
        return Failure("timeout", f"no result after {self._timeout if self._is_ready else _START_SECONDS} s")

    def request_stop(self) -> None:
        if self._stop_fd >= 0:
            with suppress(OSError):
                os.write(
                    self._stop_fd, b"x"
                )  # closing is not enough if a fork of this process also holds the descriptor
            os.close(self._stop_fd)
            self._stop_fd = -1

    def stop(self) -> int:
        """Kill the process and everything it started; returns the exit code."""
        if self._process is None:
            return 0
        self.request_stop()
        self.connection.close()
        self._unsent = memoryview(b"")
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:  # it may be stopped by SIGSTOP; its worker ends with it
            self._process.kill()
            code = self._process.wait()
        self._process = None
        return code

    def _send(self) -> None:
        """Send as much as possible without blocking."""
        while self.has_unsent:
            try:
                sent = self.connection.send(self._unsent)
            except BlockingIOError:
                return
            self._unsent = self._unsent[sent:]

    def _receive(self) -> bool:
        """Receive without blocking; returns whether the other end is closed."""
        try:
            while data := self.connection.recv(2**16):
                self._frames.add(data)
        except BlockingIOError:
            return False
        except ConnectionError:  # it exited without reading a message; what it sent before still counts
            return True
        return True

    def _handle_message(self, body: bytes) -> Any:
        kind, call_number, value = decode_message(body)
        if kind == READY:
            self._is_ready = True
            self.pid = value
        elif kind == START_FAILED:
            self.stop()
            return value
        elif call_number == self._call_number and kind == STARTED:
            self.has_started = True
        elif call_number == self._call_number and kind == RESULT:
            return value
        else:  # the answer to an earlier call, from a fork of the worker
            return PENDING
        self.deadline = time.monotonic() + self._timeout
        return PENDING

    def _describe_exit(self) -> str:
        """How a process exited that closed its connection."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS / 2)  # so that the exit code is its own and not that of our signal
        code = self.stop()
        self.got_stop_signal = -code in STOP_SIGNALS
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


# -- the pool --------------------------------------------------------------------------------------


class Pool(Protocol):
    """Processes that make calls for us, on this machine or on others."""

    def run(self, calls: Sequence[tuple[Any, ...]], timeouts: Sequence[float] | None = None) -> list[Any]: ...
    def close(self) -> None: ...


class PoolFactory(Protocol):
    """`WorkerPool`, or a function with the same arguments."""

    def __call__(self, count: int, factory: str, arguments: tuple[Any, ...], *, timeout: float) -> Pool: ...


class WorkerPool:
    """Processes that each make a function with `factory(*arguments)` and then call it for us.

    `factory` is an import path. Results must be JSON types; a Failure, also inside a list, stays a Failure.
    """

    def __init__(self, count: int, factory: str, arguments: tuple[Any, ...], *, timeout: float) -> None:
        self._timeout = timeout
        setup = pickle.dumps((factory, arguments))
        self._workers = [WorkerHandle(setup) for _ in range(count)]
        self._closed = False
        try:
            for worker in self._workers:  # start all of them before waiting for any
                worker.start()
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def run(self, calls: Sequence[tuple[Any, ...]], timeouts: Sequence[float] | None = None) -> list[Any]:
        """The result of each call, in order; a Failure if it raised, timed out or crashed.

        `timeouts` has the seconds for each call; the default is the pool's time-out.
        """
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        results: list[Any] = [None] * len(calls)
        queued = deque(range(len(calls)))
        busy: dict[WorkerHandle, int] = {}
        retried: set[int] = set()

        def finish(worker: WorkerHandle, index: int, result: Any) -> None:
            if _should_retry(worker, result) and index not in retried:
                retried.add(index)
                queued.appendleft(index)
            else:
                results[index] = result

        try:
            while queued or busy:
                for worker in self._workers:
                    if queued and worker not in busy:
                        index = queued.popleft()
                        failure = worker.send_call(calls[index], timeouts[index] if timeouts else self._timeout)
                        if failure is None:
                            busy[worker] = index
                        else:
                            finish(worker, index, failure)
                wait_for_any(busy)
                for worker in list(busy):
                    result = worker.poll_result()
                    if result is not PENDING:
                        finish(worker, busy.pop(worker), result)
        finally:  # after Ctrl-C, a late answer must not be mistaken for that of the next call
            for worker in busy:
                worker.stop()
        return results

    def close(self) -> None:
        self._closed = True
        for worker in self._workers:
            worker.request_stop()  # all of them before waiting for any
        for worker in self._workers:
            worker.stop()


def _should_retry(worker: WorkerHandle, result: Any) -> bool:
    """Whether a worker died before it started its call, or of a stop signal: then the call is not to blame."""
    died = isinstance(result, Failure) and result.kind == "died"
    return died and (not worker.has_started or worker.got_stop_signal)
