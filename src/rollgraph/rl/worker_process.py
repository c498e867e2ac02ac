"""The life of a worker: what runs in the processes that workers.py starts, and what the two say to each other.

A worker is two processes. The keeper has no code but ours: it ends when it is told to or when the pool's process has
gone, and takes everything with it that the worker ever started, also what left the worker's group or lost its parent.
The worker, its child, makes calls. It is not ended by SIGTERM or SIGINT, which a scheduler sends to all processes of a
job: whether the job ends is decided by the pool's process. Owns the frames on the connection. Nothing here imports
more than the standard library before the pool's first message has come.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, NoReturn

from rollgraph.rl.paths import load_object

# Programs inherit the blocked ones from the pool's process until they have handlers of their own.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
READY, BROKEN, BEGUN, RESULT = "ready", "broken", "begun", "result"  # what a worker says
_HEADER = struct.Struct(">4sQ")
_MARK = b"call"
_MOST_BYTES = 2**32  # of a message
_END_SECONDS = 10.0  # for processes that were killed to be gone
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Failure(NamedTuple):
    """Why there is no result: `kind` is counted, `message` is for people."""

    kind: str
    message: str


class GarbageError(Exception):
    """Bytes on the connection that are no message: a call has written to it."""


def describe(error: BaseException) -> Failure:
    """An exception, and the line it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    try:
        said = str(error)
    except Exception:  # an exception can be of anybody's making
        said = "(it cannot be shown)"
    return Failure("raised", f"{type(error).__name__}: {said}{place}")


def show(value: Any) -> str:
    """The first characters of a value, whatever it is."""
    try:
        return repr(value)[:80]
    except Exception:  # an integer of 5,000 digits, or an object of anybody's making
        return f"a {type(value).__name__} that cannot be shown"


def leave_if_forked(pid: int) -> None:
    """End a process in which a call has returned that was made in another one: it has forked."""
    if os.getpid() != pid:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(0)


# -- messages --------------------------------------------------------------------------------------


def frame(body: bytes) -> bytes:
    return _HEADER.pack(_MARK, len(body)) + body


class Frames:
    """Puts messages together from what has arrived of them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        self._buffer += data

    def read(self) -> Iterator[bytes]:
        """Those that are whole; GarbageError where something else has come."""
        while self._buffer:
            if not _MARK.startswith(bytes(self._buffer[: len(_MARK)])):
                raise GarbageError
            if len(self._buffer) < _HEADER.size:
                return
            length = _HEADER.unpack_from(self._buffer)[1]
            if length > _MOST_BYTES:
                raise GarbageError
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield body


def encode_answer(said: str, call: int, value: Any = None) -> bytes:
    """JSON rather than pickle: what a worker sends is read by the process that trains."""
    return frame(json.dumps([said, call, _to_json(value)]).encode())


def decode_answer(body: bytes) -> tuple[str, int, Any]:
    try:
        said, call, value = json.loads(body, object_hook=lambda entry: Failure(*entry["failure"]))
    except Exception as error:  # of any kind: it may be nested too deeply as well
        raise GarbageError from error
    return said, call, value


def _to_json(value: Any) -> Any:
    if isinstance(value, Failure):
        return {"failure": list(value)}
    return [_to_json(inner) for inner in value] if isinstance(value, list) else value


# -- the keeper ------------------------------------------------------------------------------------


def main(connection: int, life: int, path: list[str]) -> NoReturn:
    """Become a keeper with its worker. `connection` is the worker's; `life` is readable when the keeper has to end."""
    with suppress(OSError):
        os.dup2(2, 1)  # what calls print is not the answer of the command that runs
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # who loses its parent below becomes the keeper's child
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(life)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it had gone before that could be said
            os._exit(1)
        os.setpgid(0, 0)
        serve(connection, path)
    os.close(connection)
    with suppress(OSError):
        os.setpgid(worker, worker)
    _leave(_keep(worker, life))


def _keep(worker: int, life: int) -> int:
    """Wait for the end of one or the other; the worker's wait status."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    woken, wakes = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # not ignored, so that it wakes
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
    """The status of the worker if it has ended; that of others, which have become children, is nobody's matter."""
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
    """Kill until nobody is left: children of who was killed become the keeper's, and are killed in their turn."""
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
    mine = str(os.getpid())
    found = []
    with suppress(OSError):  # a system without /proc: the group has been killed
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError, IndexError), open(f"/proc/{entry}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[1].decode() == mine:
                    found.append(int(entry))
    return found


def _leave(status: int) -> NoReturn:
    """End as the worker did, so that the pool can say how."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file, the worker's, is enough
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        with suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    """Linux alone has it; elsewhere, a process that left the worker's group outlives it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# -- the worker ------------------------------------------------------------------------------------


def serve(descriptor: int, path: list[str]) -> NoReturn:
    """Make a function and call it. Calls run in the main thread, where libraries with alarm signals want to be."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # programs that a call starts do not have it
    signalled = _outlive_stop_signals()
    os.register_at_fork(  # nor do processes that it forks, to which a signal may come before they are ready for it
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS),
        after_in_child=lambda: _be_forked(connection),
    )
    with suppress(AttributeError):  # there is none if the pool's process has none
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    messages = _receive(connection)
    factory, arguments = pickle.loads(next(messages))
    calls: SimpleQueue[tuple[int, tuple[Any, ...]]] = SimpleQueue()
    Thread(target=_queue, args=(messages, calls), daemon=True).start()  # first: a call may be on its way
    try:
        make = load_object(factory)
        sys.path[:] = path  # from here on what is imported is found where the pool's process would find it
        function: Callable[..., Any] = make(*arguments)
    except BaseException as error:  # SystemExit as well: the module of a reward is a program
        connection.sendall(encode_answer(BROKEN, 0, describe(error)))
        os._exit(1)
    connection.sendall(encode_answer(READY, 0, os.getpid()))
    while True:
        number, call = calls.get()
        result: Any = None
        for _ in range(2):
            connection.sendall(encode_answer(BEGUN, number))
            signalled.clear()
            result = _call(function, call)
            if not signalled:  # or else what it had started may have died of that signal, and it is called again
                break
        connection.sendall(_encode_result(number, result))


def _call(function: Callable[..., Any], call: tuple[Any, ...]) -> Any:
    pid = os.getpid()
    try:
        return function(*call)
    except BaseException as error:  # SystemExit, and the panics of libraries in Rust
        return describe(error)
    finally:
        leave_if_forked(pid)


def _encode_result(number: int, result: Any) -> bytes:
    try:
        return encode_answer(RESULT, number, result)
    except Exception as error:  # no JSON
        return encode_answer(RESULT, number, describe(error))


def _receive(connection: socket.socket) -> Iterator[bytes]:
    frames = Frames()
    while data := connection.recv(2**16):
        frames.add(data)
        yield from frames.read()


def _queue(messages: Iterator[bytes], calls: SimpleQueue[tuple[int, tuple[Any, ...]]]) -> None:
    try:
        for message in messages:
            calls.put(pickle.loads(message))
    finally:  # the pool's process is gone, so nobody waits for a call that may never end
        os._exit(0)


def _outlive_stop_signals() -> list[int]:
    """Signals that came are put into the list. Handlers rather than SIG_IGN, which programs would inherit."""
    came: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: came.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return came


def _be_forked(connection: socket.socket) -> None:
    """In a process that a call has forked: it says nothing to the pool, and can be ended like any other."""
    connection.close()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
