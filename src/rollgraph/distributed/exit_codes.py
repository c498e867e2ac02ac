"""How a command ends, as one number: what whoever started it does next depends on nothing else.

docs/restarts.md has the table: what each code means, and whether to start the same command again. Importing this is
instant.
"""

from __future__ import annotations

from enum import IntEnum
from json import JSONDecodeError

from rollgraph.errors import UserError


class ExitCode(IntEnum):
    """The exit codes of `rollgraph train`, `eval` and `export`."""

    FINISHED = 0
    FAILED = 1
    REFUSED = 2
    RANK_LOST = 75
    INTERRUPTED = 130
    TERMINATED = 143


def is_users(error: BaseException) -> bool:
    """Whether an error is about what a person gave, so that trying again would not help.

    A ValueError is, by the convention of this package, about an input; a missing package is one more thing to give.
    """
    is_garbage = isinstance(error, JSONDecodeError | UnicodeError)  # these are ValueErrors of Python, not ours
    return isinstance(error, UserError | ValueError | ImportError) and not is_garbage
