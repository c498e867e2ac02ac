"""A pool of worker processes, in which calls may raise, hang or crash without harm to this process.

Workers start once and serve many calls. A call that times out costs the worker, with every process it started. No
worker outlives the pool or the pool's process, even if that is killed. The pool does not know which function it calls.
`process.py` is the code inside a worker.

    run()              waits for its coroutine, in the caller's thread
    event loop         a thread of the pool; only it touches the pool's end of a connection, and it never blocks
    Worker.call()      a coroutine: waits for messages of its worker until the call's deadline, then kills
    supervisor         a process for each worker: waits for a byte or the end of its stop pipe, or the end of the worker
    worker             its main thread calls the function; another one receives calls and ends it with the connection

User code can write anything to a connection, or stop in the middle of a message, or leave a call unread. So the pool
unpickles nothing, and neither sends nor receives with a call that may block, as those of `multiprocessing.connection`.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from rollgraph.rl.rewards.calls import EventLoop, run_for
from rollgraph.rl.rewards.process import (
    STARTED,
    STOP_SIGNALS,
    Failure,
    ProtocolError,
    decode_message,
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
_MAX_BYTES = 2**32  # in one message


class WorkerHandle:
    """A slot for one worker process; if the process is gone, the next call starts another."""

    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None  # the supervisor
        self.pid = 0  # of the worker, which is the supervisor's child
        self._stop_fd = -1  # a pipe: writing to it or closing it ends the supervisor
        self._call_number = 0
        self.has_started = False  # the worker has started the latest call
        self.got_stop_signal = False  # the worker was killed by one of STOP_SIGNALS
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def start(self) -> Failure | None:
        """Start a process and wait until it has made its function."""
        try:
            await self._spawn()
        except OSError as error:
            return Failure("died", f"cannot be reached ({error})")
        self._call_number = 0
        self._writer.write(self._setup)
        answer = await self._answer(_START_SECONDS)
        if isinstance(answer, Failure):
            await self.stop()
            return answer
        self.pid = answer
        return None

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=_MAX_BYTES)
        stop_fd, self._stop_fd = os.pipe()
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
            self._writer.transport.abort()
            self._request_stop()  # there is no process; closes the descriptor
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
            os.close(stop_fd)

    async def call(self, call: tuple[Any, ...], timeout: float) -> Any:
        """The result, or a Failure. Starts a new process if necessary; the time-out begins after that."""
        self.has_started = False
        self.got_stop_signal = False
        if self._process is None or self._process.poll() is not None:  # killed while idle, perhaps by the OOM killer
            await self.stop()
            failure = await self.start()
            if failure is not None:
                return failure
        self._call_number += 1
        try:
            self._writer.write(pickle.dumps((self._call_number, call)))
        except Exception as error:  # a column holds an object that cannot be pickled
            return failure_of(error)
        return await self._answer(timeout)

    async def stop(self) -> int:
        """Kill the process and everything it started; returns the exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        self._request_stop()
        self._writer.transport.abort()
        code = await _wait_for_exit(process, _EXIT_SECONDS)
        if code is None:  # it may be stopped by SIGSTOP; its worker ends with it
            process.kill()
            code = process.wait()
        return code

    def _request_stop(self) -> None:
        if self._stop_fd >= 0:
            with suppress(OSError):
                # Closing is not enough if a fork of this process also holds the descriptor.
                os.write(self._stop_fd, b"x")
            os.close(self._stop_fd)
            self._stop_fd = -1

    async def _answer(self, timeout: float) -> Any:
        """The answer to the latest call; a Failure if the worker ends, or takes longer than `timeout` seconds."""
        try:
            deadline = time.monotonic() + timeout
            while (seconds := deadline - time.monotonic()) > 0:
                reading = await run_for(self._read_message(), seconds)
                if not reading.done():
                    break
                kind, call_number, value = reading.result()
                if call_number != self._call_number:  # of an earlier call, from a fork of the worker
                    continue
                if kind != STARTED:
                    return value
                self.has_started = True
                deadline = time.monotonic() + timeout
            await self.stop()
            return Failure("timeout", f"no result after {timeout} s")
        except ProtocolError:
            await self.stop()
            return Failure("died", "something other than an answer was written to the worker's connection")
        except (EOFError, OSError):
            return Failure("died", await self._describe_exit())
        except BaseException:  # after Ctrl-C, a late answer must not be mistaken for that of the next call
            await self.stop()
            raise

    async def _read_message(self) -> tuple[str, int, Any]:
        start = await self._reader.readexactly(1)
        if start != b"[":  # do not wait for the end of a line
            raise ProtocolError
        try:
            line = await self._reader.readuntil(b"\n")
        except asyncio.LimitOverrunError as error:
            raise ProtocolError from error
        return decode_message(start + line)

    async def _describe_exit(self) -> str:
        """How a process exited that closed its connection."""
        assert self._process is not None
        await _wait_for_exit(self._process, _EXIT_SECONDS / 2)  # so that the exit code is its own
        code = await self.stop()
        self.got_stop_signal = -code in STOP_SIGNALS
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


async def _wait_for_exit(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    """The exit code; None after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    return process.returncode


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
        self._loop = EventLoop()
        self._closed = False
        try:
            self._loop.run(self._start())
        except BaseException:
            self.close()
            raise

    async def _start(self) -> None:
        failures = await asyncio.gather(*(worker.start() for worker in self._workers))
        for failure in failures:
            if failure is not None:
                raise RuntimeError(f"a worker process could not be started: {failure.message}")

    def run(self, calls: Sequence[tuple[Any, ...]], timeouts: Sequence[float] | None = None) -> list[Any]:
        """The result of each call, in order; a Failure if it raised, timed out or crashed.

        `timeouts` has the seconds for each call; the default is the pool's time-out.
        """
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        results: list[Any] = self._loop.run(self._run(calls, timeouts or [self._timeout] * len(calls)))
        return results

    async def _run(self, calls: Sequence[tuple[Any, ...]], timeouts: Sequence[float]) -> list[Any]:
        results: list[Any] = [None] * len(calls)
        queued = iter(range(len(calls)))  # a worker that is free takes the next one

        async def serve(worker: WorkerHandle) -> None:
            for index in queued:
                results[index] = await worker.call(calls[index], timeouts[index])
                if _should_retry(worker, results[index]):
                    results[index] = await worker.call(calls[index], timeouts[index])

        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers:
                tasks.create_task(serve(worker))
        return results

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.run(self._stop())
            self._loop.close()

    async def _stop(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self._workers))


def _should_retry(worker: WorkerHandle, result: Any) -> bool:
    """Whether a worker died before it started its call, or of a stop signal: then the call is not to blame."""
    died = isinstance(result, Failure) and result.kind == "died"
    return died and (not worker.has_started or worker.got_stop_signal)
