"""What a pool and its workers say to each other: frames on a socket, answers as JSON, and failures.

Imports only the standard library, because a worker imports this before it has the user's search path.
"""

from __future__ import annotations

import json
import signal
import struct
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Workers start with these blocked, until they have handlers of their own.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
READY, BROKEN, BEGUN, RESULT = "ready", "broken", "begun", "result"  # what a worker says
_HEADER = struct.Struct(">4sQ")
_MARK = b"call"
_MOST_BYTES = 2**32  # in one message
_PACKAGE = Path(__file__).parents[1]


class Failure(NamedTuple):
    """Why there is no result: `kind` is counted, `message` is for people."""

    kind: str
    message: str


class GarbageError(Exception):
    """The bytes on the connection are not a message: a call has written to it."""


def describe(error: BaseException) -> Failure:
    """The failure of a call that raised, with the line the exception came from."""
    try:
        text = str(error)
    except Exception:  # the exception class may be anybody's
        text = "(it cannot be shown)"
    return Failure("raised", f"{type(error).__name__}: {text}{line_of(error)}")


def line_of(error: BaseException) -> str:
    """The line an exception came from, in brackets, for the end of a message; empty if it is one of rollgraph's own."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or Path(frames[-1].filename).is_relative_to(_PACKAGE):
        return ""
    return f" ({frames[-1].filename}:{frames[-1].lineno})"


def show(value: Any) -> str:
    """The first characters of a value, whatever it is."""
    try:
        return repr(value)[:80]
    except Exception:  # an integer of 5,000 digits, or an object of anybody's class
        return f"a {type(value).__name__} that cannot be shown"


def frame(body: bytes) -> bytes:
    return _HEADER.pack(_MARK, len(body)) + body


class Frames:
    """Reassembles messages from the bytes that have arrived."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> None:
        self._buffer += data

    def read(self) -> Iterator[bytes]:
        """The messages that are complete; raises GarbageError if something else has arrived."""
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
    """A framed answer. It is JSON rather than pickle, because the process that trains reads what a worker sends."""
    return frame(json.dumps([said, call, _to_json(value)]).encode())


def decode_answer(body: bytes) -> tuple[str, int, Any]:
    try:
        said, call, value = json.loads(body, object_hook=lambda entry: Failure(*entry["failure"]))
    except Exception as error:  # of any kind, including a RecursionError
        raise GarbageError from error
    return said, call, value


def _to_json(value: Any) -> Any:
    if isinstance(value, Failure):
        return {"failure": list(value)}
    if isinstance(value, list):
        return [_to_json(inner) for inner in value]
    return value
