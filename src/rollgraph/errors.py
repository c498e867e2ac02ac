"""Errors about user input, suggestions for misspelt names, and the line of user code that raised an error.

The code that raises knows its parameter; its callers know the name that the user wrote, such as a configuration key. So
an error stores the parameter separately, and callers can rename it without parsing the message. User code is all code
outside rollgraph, the standard library and installed packages. Importing this is instant.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple, Self

_ROLLGRAPH = f"{Path(__file__).parent}{os.sep}"
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")  # of other environments


class UserError(Exception):
    """The input cannot be used, and trying again would not help. For errors that are not ValueErrors."""


class MachineError(Exception):
    """The machine or another process failed, for example a full disk or a lost rank. Trying again may help."""


class InvalidInput(ValueError):
    """A value, a file or a row that cannot be used.

    >>> str(InvalidInput("must be at least 1, got 0", argument="max_turns"))
    'max_turns: must be at least 1, got 0'
    >>> str(InvalidInput("has no rows", location="data.jsonl"))
    'data.jsonl: has no rows'
    """

    def __init__(
        self,
        detail: str,
        *,
        argument: str | None = None,
        location: str | None = None,
        alternative: tuple[str, object] | None = None,
    ) -> None:
        self.detail = detail  # the problem, without argument and location
        self.argument = argument  # the name of the bad parameter in the code
        self.location = location  # a file, a line of it (file:line), or an import path
        self.alternative = alternative  # another parameter, with a value that would accept this input
        parts = [part for part in (argument, location, detail) if part]
        message = ": ".join(parts)
        if alternative is not None:
            name, value = alternative
            message += f", or set {name}={value!r}"
        super().__init__(message)

    def renamed(self, rename: Callable[[str], str]) -> Self:
        """The same error with renamed parameters, such as the configuration keys behind them."""
        argument = None if self.argument is None else rename(self.argument)
        alternative = None
        if self.alternative is not None:
            name, value = self.alternative
            alternative = (rename(name), value)
        return type(self)(self.detail, argument=argument, location=self.location, alternative=alternative)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar known name, or None if none is close. Swapped letters count as closer than others."""
    from difflib import SequenceMatcher

    best, best_score = None, (cutoff, False)
    for candidate in known:
        score = SequenceMatcher(None, candidate, name).ratio(), sorted(name) == sorted(candidate)
        if score > best_score or (best is None and score[0] >= cutoff):
            best, best_score = candidate, score
    return best


def suggest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about an unknown name: the nearest known name, or nothing."""
    suggestion = nearest(name, known, cutoff)
    return "" if suggestion is None else f"; did you mean {suggestion!r}?"


class UserLine(NamedTuple):
    """A line of user code.

    >>> UserLine("my_algorithm.py", 12, "MyAlgorithm.advantages")
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def user_line(error: BaseException | None) -> UserLine | None:
    """The innermost line of user code in a traceback; None if rollgraph code lies inside it."""
    frames = list(walk_tb(error.__traceback__)) if error is not None else []
    for frame, line in reversed(frames):
        code = frame.f_code
        if code.co_filename.startswith(_ROLLGRAPH):
            return None
        if not _is_installed(code.co_filename):
            return UserLine(code.co_filename, line, code.co_qualname.partition(".<locals>")[0])
    return None


def name_function(function: Callable[..., Any]) -> str:
    """The name of a function with its definition, for messages: `MyAlgorithm.advantages (my_algorithm.py:12)`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name: str = getattr(function, "__qualname__", repr(function))
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _is_installed(file: str) -> bool:
    """Whether a file belongs to the standard library or an installed package, or is no file, like `<frozen os>`."""
    return file.startswith(("<", *_LIBRARIES)) or any(part in file for part in _INSTALLED)
