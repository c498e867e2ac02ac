"""Calls in other processes that may raise, hang or die there without harm to this one.

Owns worker processes: started once, used again, killed with all they have started when a call takes too long, and gone
when the pool is closed or its process has ended, however it ended. They are programs of their own rather than forks
(the parent has threads and a CUDA context) or multiprocessing's children (which may have no children themselves and
would run the user's script again). Nothing here knows what is called.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, NoReturn

from rollgraph.rl.paths import load_object

_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rollgraph.rl.workers import serve
serve(int(sys.argv[2]))
"""
_START_SECONDS = 120.0  # for imports on a busy machine; a call's own time begins after it


class Failure(NamedTuple):
    """Why there is no result: `kind` is counted, `message` is for people."""

    kind: str
    message: str


def describe(error: BaseException) -> Failure:
    """An exception, and the line it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return Failure("raised", f"{type(error).__name__}: {error}{place}")


class WorkerPool:
    """Processes that each make a function by `factory(*arguments)`, a dotted path, and then call it for us."""

    def __init__(self, count: int, factory: str, arguments: tuple[Any, ...], *, timeout: float) -> None:
        self._timeout = timeout
        self._workers = [_Worker((factory, arguments)) for _ in range(count)]
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

        A process that died before it had begun a call did not die of it: such a call is given away once more.
        """
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        results: list[Any] = [None] * len(calls)
        waiting = deque(range(len(calls)))
        busy: dict[_Worker, int] = {}
        again: set[int] = set()

        def take(index: int, result: Any, begun: bool) -> None:
            if isinstance(result, Failure) and result.kind == "died" and not begun and index not in again:
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
                            take(index, failure, begun=False)
                        else:
                            busy[worker] = index
                first = min((worker.deadline for worker in busy), default=0.0)
                wait([worker.connection for worker in busy], max(0.0, first - time.monotonic()))
                for worker in list(busy):
                    if (result := worker.take(self._timeout)) is not _NOT_YET:
                        take(busy.pop(worker), result, worker.begun)
        finally:  # after Ctrl-C, a late answer must not be taken for that of the next call
            for worker in busy:
                worker.stop()
        return results

    def close(self) -> None:
        self._closed = True
        for worker in self._workers:
            worker.stop()


_NOT_YET = object()


class _Worker:
    """A place for one process; it is filled again when the process has gone."""

    def __init__(self, setup: tuple[str, tuple[Any, ...]]) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self.begun = False  # it said so of the call that it was given last
        self.deadline = 0.0
        self.connection: Connection[Any, Any]

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        self.connection, self._ready = Connection(ours.detach()), False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a group of its own: one signal ends it with all it has started
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        self.connection.send(self._setup)

    def wait_until_ready(self) -> None:
        self.deadline = time.monotonic() + _START_SECONDS
        wait([self.connection], _START_SECONDS)
        if (result := self.take(0.0)) is not _NOT_YET:
            raise RuntimeError(f"a worker process could not be started: {result.message}")

    def give(self, call: tuple[Any, ...], timeout: float) -> Failure | None:
        """Send a call, to a new process if need be; a Failure if that is not possible."""
        self.begun = False
        try:
            if self._process is None or self._process.poll() is not None:  # killed while idle, by the kernel perhaps
                self.stop()
                self.start()
            self.connection.send(call)
        except OSError as error:
            self.stop()
            return Failure("died", f"cannot be reached ({error})")
        self.deadline = time.monotonic() + (timeout if self._ready else _START_SECONDS)
        return None

    def take(self, timeout: float) -> Any:
        """The result or a Failure, if there is one by now."""
        try:
            if not self.connection.poll():
                if time.monotonic() < self.deadline:
                    return _NOT_YET
                self.stop()
                return Failure("timeout", f"no result after {timeout if self._ready else _START_SECONDS} s")
            result = self.connection.recv()
        except (EOFError, OSError):
            return Failure("died", self._bury())
        if self.begun:
            return result
        if isinstance(result, Failure):
            self.stop()
            return result
        self.begun, self._ready, self.deadline = self._ready, True, time.monotonic() + timeout
        return _NOT_YET

    def stop(self) -> int:
        """Kill the process and its children; the exit code."""
        if self._process is None:
            return 0
        self.connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code, self._process = self._process.wait(), None
        return code

    def _bury(self) -> str:
        """How a process ended that closed its connection."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # so that the exit code is its own rather than that of our signal
        code = self.stop()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def serve(descriptor: int) -> NoReturn:
    """A worker's life. Calls run in the main thread, which is where libraries with alarm signals want to be."""
    connection: Connection[Any, Any] = Connection(descriptor)
    factory, arguments = connection.recv()
    calls: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
    Thread(target=_receive, args=(connection, calls), daemon=True).start()  # first: a call may be on its way
    try:
        function: Callable[..., Any] = load_object(factory)(*arguments)
    except Exception as error:
        connection.send(describe(error))
        sys.exit(1)
    connection.send(None)  # ready
    while True:
        call = calls.get()
        connection.send(None)  # begun
        try:
            result = function(*call)
        except (Exception, SystemExit) as error:
            result = describe(error)
        connection.send(result)


def _receive(connection: Connection[Any, Any], calls: SimpleQueue[tuple[Any, ...]]) -> None:
    try:
        while True:
            calls.put(connection.recv())
    finally:  # the pool's process is gone, so nobody waits for a call that may never end
        os.killpg(0, signal.SIGKILL)
