"""Standard output is for what a command answers; whatever else is printed on the way goes to standard error."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def printing_to_stderr() -> Iterator[None]:
    """What others print meanwhile, from C too, is not the answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
