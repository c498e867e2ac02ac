"""The inside of a worker: it makes a function, then calls it for the pool again and again.

A worker does not end on SIGTERM or SIGINT, which a scheduler sends to all processes of a job: the pool's process
decides whether the job ends, and the keeper (worker_keeper.py) ends the worker. Only the standard library is imported
before the pool's first message has arrived.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, NoReturn

from rollgraph.rl.paths import load_object
from rollgraph.rl.worker_messages import BEGUN, BROKEN, READY, RESULT, STOP_SIGNALS, Frames, describe, encode_answer

Calls = SimpleQueue[tuple[int, tuple[Any, ...]]]  # the number of each call and its arguments


def serve(descriptor: int, path: list[str]) -> NoReturn:
    """Make a function and call it, in the main thread because some libraries set alarm signals."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # programs that a call starts do not get it
    signals = _outlive_stop_signals()
    os.register_at_fork(  # a forked process does not get it either, and must not miss a signal while it starts
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS),
        after_in_child=lambda: _detach_from_pool(connection),
    )
    with suppress(AttributeError):  # there is no stdout if the pool's process has none
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    messages = _receive(connection)
    factory, arguments = pickle.loads(next(messages))
    calls: Calls = SimpleQueue()
    Thread(target=_queue, args=(messages, calls), daemon=True).start()  # first, because a call may be on its way
    function = _make_function(connection, factory, arguments, path)
    connection.sendall(encode_answer(READY, 0, os.getpid()))
    while True:
        number, call = calls.get()
        result: Any = None
        for _ in range(2):
            connection.sendall(encode_answer(BEGUN, number))
            signals.clear()
            result = _call(function, call)
            if not signals:  # otherwise, programs that the call started may have died of the signal: try again
                break
        connection.sendall(_encode_result(number, result))


def _make_function(
    connection: socket.socket, factory: str, arguments: tuple[Any, ...], path: list[str]
) -> Callable[..., Any]:
    try:
        make = load_object(factory)
        sys.path[:] = path  # from here on, imports find what the pool's process would find
        function: Callable[..., Any] = make(*arguments)
        return function
    except BaseException as error:  # SystemExit as well: the module of a reward is a program
        connection.sendall(encode_answer(BROKEN, 0, describe(error)))
        os._exit(1)


def _call(function: Callable[..., Any], call: tuple[Any, ...]) -> Any:
    pid = os.getpid()
    try:
        return function(*call)
    except BaseException as error:  # also SystemExit, and the panics of libraries written in Rust
        return describe(error)
    finally:
        leave_if_forked(pid)


def leave_if_forked(pid: int) -> None:
    """Exit if this is a fork of the process that made a call, in which the call has returned as well."""
    if os.getpid() != pid:
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(0)


def _encode_result(number: int, result: Any) -> bytes:
    try:
        return encode_answer(RESULT, number, result)
    except Exception as error:  # JSON cannot hold it
        return encode_answer(RESULT, number, describe(error))


def _receive(connection: socket.socket) -> Iterator[bytes]:
    frames = Frames()
    while data := connection.recv(2**16):
        frames.add(data)
        yield from frames.read()


def _queue(messages: Iterator[bytes], calls: Calls) -> None:
    try:
        for message in messages:
            calls.put(pickle.loads(message))
    finally:  # the pool's process is gone, so nobody waits for the call that is running
        os._exit(0)


def _outlive_stop_signals() -> list[int]:
    """A list to which stop signals are appended. Handlers are used, because programs would inherit SIG_IGN."""
    received: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: received.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return received


def _detach_from_pool(connection: socket.socket) -> None:
    """In a process that a call has forked: send the pool nothing, and end on a signal like any other process."""
    connection.close()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
