"""Keeps standard output for the answer of a command; everything else that is printed goes to standard error."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import TextIO


def print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Send what others print, from C as well, to standard error."""
    _flush(answers := sys.stdout)
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _flush(answers)  # code that kept the stream may have written to it
        os.dup2(kept, 1)
        os.close(kept)


def _flush(stream: TextIO) -> None:
    """Flush a stream, and the streams of C."""
    stream.flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)
