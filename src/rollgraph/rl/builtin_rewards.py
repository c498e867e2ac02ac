"""Rewards that are there by name. Each is a factory: options from the config in, a function in TRL's signature out.

Where a row has no answer (None) the reward is None, that is none; an answer that cannot be read raises.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from rollgraph.errors import InvalidInput
from rollgraph.rl.paths import import_extra

Function = Callable[..., list[float | None]]


def exact_match(column: str = "answer", extract: str | None = None, ignore_case: bool = False) -> Function:
    """1 if the completion is the answer, stripped; with `extract`, the last match of that pattern (its group 1)."""
    pattern = None if extract is None else _compile(extract, argument="extract")

    def normalise(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    def compare(completion: str, answer: str) -> bool:
        if pattern is not None:
            found = list(pattern.finditer(completion))
            if not found:
                return False
            completion = found[-1][1 if pattern.groups else 0] or ""
        return normalise(completion) == normalise(answer)

    return _against(column, compare)


def numeric_match(column: str = "answer", tolerance: float = 1e-6) -> Function:
    """1 if the last number in the completion is the last one in the answer, as far as `tolerance` (relative above 1).

    Reads 1,234.5, 6.02e23, 3/4 and \\frac{3}{4}.
    """
    if not 0 <= tolerance < math.inf:
        raise InvalidInput(f"expected a finite number that is not negative, got {tolerance}", argument="tolerance")

    def compare(completion: str, answer: str) -> bool:
        wanted, found = last_number(answer), last_number(completion)
        if wanted is None:
            raise ValueError(f"the answer {answer!r:.80} has no number")
        return found is not None and abs(found - wanted) <= tolerance * max(1.0, abs(wanted))

    return _against(column, compare)


def math_verify(column: str = "answer") -> Function:
    """1 if the completion's final expression equals the answer's, as the library math-verify sees it."""
    library = import_extra("math_verify", extra="math")

    def compare(completion: str, answer: str) -> bool:
        wanted = library.parse(answer) or library.parse(f"${answer}$")
        if not wanted:
            raise ValueError(f"math-verify finds no expression in the answer {answer!r:.80}")
        return bool(library.verify(wanted, library.parse(completion)))

    return _against(column, compare)


def regex_format(pattern: str) -> Function:
    """1 if the pattern is found; `.` matches line ends as well, ^ and $ are the ends of the completion."""
    compiled = _compile(pattern, argument="pattern")

    def score(completions: list[str]) -> list[float | None]:
        return [float(compiled.search(text) is not None) for text in completions]

    return score


def length(limit: int | None = None, free: int = 0, target: int | None = None) -> Function:
    """A penalty of 0 to -1 by the number of tokens that were sampled.

    With `limit`: 0 up to `free` tokens, then falling evenly to -1 at `limit`. With `target`: 0 there, -1 when that
    many tokens away from it or more.
    """
    if (limit is None) == (target is None):
        raise InvalidInput("the reward `length` takes either a limit or a target")
    if limit is not None and not 0 <= free < limit:
        raise InvalidInput(f"must be at least 0 and less than limit={limit}, got {free}", argument="free")
    if target is not None and target < 1:
        raise InvalidInput(f"must be at least 1, got {target}", argument="target")

    def penalty(count: int) -> float:
        if target is not None:
            return -min(1.0, abs(count - target) / target)
        assert limit is not None
        return -min(1.0, max(0.0, (count - free) / (limit - free)))

    def score(completions: list[str], completion_ids: list[list[int]]) -> list[float | None]:
        return [penalty(len(ids)) for ids in completion_ids]

    return score


BUILT_IN: dict[str, Callable[..., Function]] = {
    factory.__name__: factory for factory in (exact_match, numeric_match, math_verify, regex_format, length)
}

# A sign belongs to the number unless it stands between two: 5-3 has a 3, and -3 is -3.
_PLAIN = r"(?:(?<![\w.)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_FRACTION = rf"(?P<sign>-?)\\[dt]?frac\{{(?P<top>{_PLAIN})\}}\{{(?P<bottom>{_PLAIN})\}}"
_NUMBER = re.compile(rf"{_FRACTION}|(?P<over>{_PLAIN})(?:\s*/\s*(?P<under>{_PLAIN}))?")


def last_number(text: str) -> float | None:
    found = list(_NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")))
    if not found:
        return None
    number = found[-1]
    above = _read(number["top"] or number["over"])
    below = _read(number["bottom"] or number["under"] or "1")
    value = above / below if below else math.nan
    return None if not math.isfinite(value) else -value if number["sign"] else value


def _read(digits: str) -> float:
    return float(digits.replace(",", ""))


def _against(column: str, compare: Callable[[str, str], bool]) -> Function:
    def score(completions: list[str], **columns: Any) -> list[float | None]:
        answers = columns[column]
        return [None if a is None else float(compare(c, str(a))) for c, a in zip(completions, answers, strict=True)]

    return score


def _compile(pattern: str, argument: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise InvalidInput(f"{pattern!r} is not a regular expression: {error}", argument=argument) from error
