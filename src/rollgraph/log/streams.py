"""Standard streams: they survive a closed terminal, and a command can keep standard output for its result alone."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

# -- surviving a closed terminal -------------------------------------------------------------------
# A write to a closed terminal fails with EIO. At that moment a run saves a checkpoint, and it may even be told to
# continue without a terminal. So printing must not fail, not even in user code. Imports only the standard library.

STANDARD_ERROR = 2


class _Terminal(io.FileIO):
    """The file descriptor of a terminal. Once the terminal is closed, output is discarded."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self.fileno())
        os.close(devnull)
        return memoryview(data).nbytes


@contextmanager
def survive_closed_terminal() -> Iterator[None]:
    """Inside, printing to a closed terminal does not raise."""
    original = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_make_surviving, original)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(BrokenPipeError, ValueError):  # somebody else flushes it again, or it is closed
                stream.flush()
        sys.stdout, sys.stderr = original


def _make_surviving(stream: TextIO) -> TextIO:
    """Wrap the stream of a terminal. Any other stream, or one that is wrapped already, is returned as it is."""
    if not isinstance(stream, io.TextIOWrapper) or not stream.isatty():
        return stream
    if isinstance(getattr(stream.buffer, "raw", None), _Terminal):
        return stream
    stream.flush()
    terminal = _Terminal(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(terminal),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def write_to_stderr(text: str) -> None:
    """Write to standard error directly, past all buffers. Does nothing if it is closed."""
    with suppress(OSError):
        os.write(STANDARD_ERROR, text.encode())


# -- standard output for the result alone ----------------------------------------------------------


def note_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def redirect_stdout_to_stderr() -> Iterator[None]:
    """Inside, everything that is printed goes to standard error, also from C code."""
    _flush(stdout := sys.stdout)
    saved_descriptor = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _flush(stdout)  # code that holds the stream may have written to it
        os.dup2(saved_descriptor, 1)
        os.close(saved_descriptor)


def _flush(stream: TextIO) -> None:
    """Flush a Python stream and the streams of C."""
    stream.flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


# -- the command to type next ----------------------------------------------------------------------


def command_line(program: str, *words: object) -> str:
    """A command that works when it is pasted into the same shell: `rollgraph ...` or `pip ...`.

    If this process was not started as `rollgraph`, it is `PYTHON -m rollgraph ...`.
    """
    is_on_path = Path(sys.argv[0]).name == "rollgraph" and shutil.which(program)
    start = [program] if is_on_path else [sys.executable, "-m", program]
    return shlex.join([*start, *map(str, words)])
