"""Errors about what a person gave to rollgraph, as fields rather than prose, and the nearest name to a misspelt one.

Code that raises knows its own parameters; code further up knows the name a person wrote, such as a configuration key.
So an error keeps the parameter apart from the rest of the sentence, and nobody has to search a message for it.
Importing this is instant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self


class UserError(Exception):
    """What a person gave cannot be used, and trying again would not help. For errors that are no ValueErrors."""


class InvalidInput(ValueError):
    """A value, a file or a row that cannot be used.

    >>> str(InvalidInput("must be at least 1, got 0", argument="max_turns"))
    'max_turns: must be at least 1, got 0'
    >>> str(InvalidInput("has no rows", place="data.jsonl"))
    'data.jsonl: has no rows'
    """

    def __init__(
        self,
        detail: str,
        *,
        argument: str | None = None,
        place: str | None = None,
        alternative: tuple[str, object] | None = None,
    ) -> None:
        self.detail = detail  # what is wrong, without the argument and the place
        self.argument = argument  # the parameter that is wrong, as the code calls it
        self.place = place  # where it is wrong: a file, a line of one (file:line), or an import path
        self.alternative = alternative  # another parameter, and the value of it that would accept this input
        parts = [part for part in (argument, place, detail) if part]
        message = ": ".join(parts)
        if alternative is not None:
            name, value = alternative
            message += f", or set {name}={value!r}"
        super().__init__(message)

    def renamed(self, rename: Callable[[str], str]) -> Self:
        """The same error with other names for parameters, such as the configuration keys that they come from."""
        argument = None if self.argument is None else rename(self.argument)
        alternative = None
        if self.alternative is not None:
            name, value = self.alternative
            alternative = (rename(name), value)
        return type(self)(self.detail, argument=argument, place=self.place, alternative=alternative)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like this one, or None if none is close; swapped letters are closer than others."""
    from difflib import SequenceMatcher

    best, best_score = None, (cutoff, False)
    for other in known:
        score = SequenceMatcher(None, other, name).ratio(), sorted(name) == sorted(other)
        if score > best_score or (best is None and score[0] >= cutoff):
            best, best_score = other, score
    return best


def suggest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about an unknown name: the nearest one that is known, or nothing."""
    near = nearest(name, known, cutoff)
    return "" if near is None else f"; did you mean {near!r}?"
