"""Standard output is for what a command answers; whatever else is printed on the way goes to standard error."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def printing_to_stderr() -> Iterator[None]:
    """What others print meanwhile, from C too, is not the answer."""
    _flush(answers := sys.stdout)
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _flush(answers)  # somebody who has kept the stream may have written to it
        os.dup2(kept, 1)
        os.close(kept)


def _flush(stream: TextIO) -> None:
    """A stream, and those that C keeps."""
    stream.flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)
