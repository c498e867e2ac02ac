"""The code inside a worker process: messages, calls, and the supervisor that kills everything the worker started.

Imports only the standard library and files that import nothing else either, so that a worker starts at once.
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
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO, NamedTuple, NoReturn

from rollgraph.errors import user_line
from rollgraph.log.streams import survive_closed_terminal
from rollgraph.rl.paths import load_object

# -- messages between a pool and its workers -------------------------------------------------------
# To a worker: pickles, one after the other; first (factory, arguments), then a (number, arguments) for each call.
# From a worker: lines of JSON, [kind, number of the call, value]. Making the function is call 0, with the worker's PID
# as its result. A worker imports this file before it has the user's search path.

# Blocked in a new worker until it has installed handlers.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STARTED, RESULT = "begun", "result"  # kinds of messages from a worker
_PACKAGE = Path(__file__).parents[2]


class Failure(NamedTuple):
    """Why a call has no result: `kind` is counted, `message` is shown.

    >>> Failure("timeout", "no result after 30.0 s")
    """

    kind: str
    message: str


class ProtocolError(Exception):
    """The bytes on the connection are not a message: user code has written to it."""


def failure_of(error: BaseException) -> Failure:
    """The failure of a call that raised, with the line of user code that raised."""
    try:
        text = str(error)
    except Exception:  # of a user's exception class
        text = "(it cannot be shown)"
    return Failure("raised", f"{type(error).__name__}: {text}{line_suffix(error)}")


def line_suffix(error: BaseException) -> str:
    """The line an exception came from, in brackets, for the end of a message; empty for a line of rollgraph.

    If user code called a library that raised, it is the line of the call.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename.startswith("<") or Path(frames[-1].filename).is_relative_to(_PACKAGE):
        return ""
    return f" ({user_line(error) or f'{frames[-1].filename}:{frames[-1].lineno}'})"


def short_repr(value: Any) -> str:
    """At most 80 characters of a value's repr; never raises."""
    try:
        return repr(value)[:80]
    except Exception:  # an integer of 5,000 digits, or an object of a user's class
        return f"a {type(value).__name__} that cannot be shown"


def encode_message(kind: str, call_number: int, value: Any = None) -> bytes:
    """A message to the pool. JSON rather than pickle: the training process must not unpickle a worker's data."""
    return json.dumps([kind, call_number, _to_json(value)]).encode() + b"\n"


def decode_message(line: bytes) -> tuple[str, int, Any]:
    try:
        kind, call_number, value = json.loads(line, object_hook=lambda entry: Failure(*entry["failure"]))
    except Exception as error:  # including RecursionError
        raise ProtocolError from error
    return kind, call_number, value


def _to_json(value: Any) -> Any:
    if isinstance(value, Failure):
        return {"failure": list(value)}
    if isinstance(value, list):
        return [_to_json(inner) for inner in value]
    return value


# -- calls -----------------------------------------------------------------------------------------
# A worker survives SIGTERM, SIGINT and SIGHUP, which a scheduler or a terminal sends to all processes of a job: the
# pool's process decides whether the job ends, and the supervisor kills the worker. Until the pool's first message has
# arrived, only the standard library is imported.

Calls = SimpleQueue[tuple[int, tuple[Any, ...]]]  # (number of the call, arguments)


def run_worker(descriptor: int, path: list[str]) -> NoReturn:
    """Make the function and serve calls, in the main thread because some libraries set alarm signals."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # child programs of a call do not get it
    received_signals = _record_stop_signals()
    os.register_at_fork(  # forks do not get it either, and must not miss a signal while they start
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS),
        after_in_child=lambda: _detach_from_pool(connection),
    )
    with suppress(AttributeError):  # there is no stdout if the pool's process has none
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stack = ExitStack()
    stack.enter_context(survive_closed_terminal())  # for the output of calls, until the process ends
    messages = open(descriptor, "rb", closefd=False)  # noqa: SIM115 (the connection owns the descriptor)
    factory, arguments = pickle.load(messages)
    calls: Calls = SimpleQueue()
    # Before the function is made, because the pool may close the connection any time.
    Thread(target=_enqueue_calls, args=(messages, calls), daemon=True).start()
    function = _make_function(connection, factory, arguments, path)
    connection.sendall(encode_message(RESULT, 0, os.getpid()))
    while True:
        call_number, call = calls.get()
        result: Any = None
        for _ in range(2):
            connection.sendall(encode_message(STARTED, call_number))
            received_signals.clear()
            result = _call(function, call)
            if not received_signals:  # after a signal, child programs of the call may have died of it: try again
                break
        connection.sendall(_encode_result(call_number, result))


def _make_function(
    connection: socket.socket, factory: str, arguments: tuple[Any, ...], path: list[str]
) -> Callable[..., Any]:
    try:
        make = load_object(factory)
        sys.path[:] = path  # from here on, imports see the search path of the pool's process
        function: Callable[..., Any] = make(*arguments)
        return function
    except BaseException as error:  # including SystemExit: a user's module is a program
        connection.sendall(encode_message(RESULT, 0, failure_of(error)))
        os._exit(1)


def _call(function: Callable[..., Any], call: tuple[Any, ...]) -> Any:
    pid = os.getpid()
    try:
        return function(*call)
    except BaseException as error:  # including SystemExit and panics of Rust libraries
        return failure_of(error)
    finally:
        exit_if_forked(pid)


def exit_if_forked(pid: int) -> None:
    """Exit if this process is a fork that a call made, and the call has returned in it too."""
    if os.getpid() != pid:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(0)


def _encode_result(call_number: int, result: Any) -> bytes:
    try:
        return encode_message(RESULT, call_number, result)
    except Exception as error:  # not JSON types
        return encode_message(RESULT, call_number, failure_of(error))


def _enqueue_calls(messages: BinaryIO, calls: Calls) -> None:
    try:
        while True:
            calls.put(pickle.load(messages))
    finally:  # the pool's process is gone, so nobody waits for the running call
        os._exit(0)


def _record_stop_signals() -> list[int]:
    """Append stop signals to the returned list. Handlers, because child programs would inherit SIG_IGN."""
    received: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: received.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return received


def _detach_from_pool(connection: socket.socket) -> None:
    """In a fork that a call made: close the connection to the pool, and restore default signal handling."""
    connection.close()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


# -- the supervisor --------------------------------------------------------------------------------
# The parent of the worker. When the pool tells it to stop, or the pool's process is gone, it kills every process that
# the worker started, even those that left the worker's process group or lost their parent, and exits.

_KILL_SECONDS = 10.0  # for killed processes to disappear
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(connection: int, stop_fd: int, path: list[str]) -> NoReturn:
    """Fork a worker and supervise it. `connection` is the worker's; `stop_fd` becomes readable to stop."""
    with suppress(OSError):
        os.dup2(2, 1)  # prints of calls go to stderr: they are no output of the running command
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # descendants that lose their parent become our children
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(stop_fd)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it was gone before the line above
            os._exit(1)
        os.setpgid(0, 0)
        run_worker(connection, path)
    os.close(connection)
    with suppress(OSError):
        os.setpgid(worker, worker)
    _exit_like_worker(_supervise(worker, stop_fd))


def _supervise(worker: int, stop_fd: int) -> int:
    """Wait until the worker or the pool ends, then kill all processes; returns the worker's wait status."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_read, False)
    os.set_blocking(wakeup_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, because an ignored signal does not wake poll
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    events = select.poll()
    events.register(stop_fd, select.POLLIN)
    events.register(wakeup_read, select.POLLIN)
    while (status := _reap_children(worker)) is None:
        if any(descriptor == stop_fd for descriptor, _ in events.poll()):
            break
        with suppress(BlockingIOError):
            os.read(wakeup_read, 4096)
    return _kill_all(worker, status)


def _reap_children(worker: int) -> int | None:
    """Reap all children that have exited; returns the worker's status if it is one of them."""
    worker_status = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == worker:
                worker_status = status
            if pid == 0:
                break
    return worker_status


def _kill_all(worker: int, status: int | None) -> int:
    """Kill until no child is left: children of a killed process become ours, and are killed in turn."""
    deadline = time.monotonic() + _KILL_SECONDS
    with suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    while time.monotonic() < deadline:
        for child in _find_children():
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
        try:
            pid, exit_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == worker:
            status = exit_status
        if pid == 0:
            time.sleep(0.002)
    return status or 0


def _find_children() -> list[int]:
    parent_pid = str(os.getpid())
    children = []
    with suppress(OSError):  # without /proc, killing the process group has to suffice
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError, IndexError), open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                ppid = fields[1].decode()
                if ppid == parent_pid:
                    children.append(int(entry))
    return children


def _exit_like_worker(status: int) -> NoReturn:
    """Exit with the worker's exit code or signal, so that the pool can report it."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file, the worker's, is enough
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        with suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    """Call prctl, which only Linux has; elsewhere, a process that left the worker's group outlives it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
