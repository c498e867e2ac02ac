"""Built-in rewards. Each is a factory that takes options from the config and returns a function with TRL's signature.

If a row has no answer (None), the function returns no reward for it (None). An answer that cannot be parsed raises.
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
    """1 if the completion equals the answer, ignoring surrounding whitespace.

    With `extract`, the last match of that pattern is compared, or group 1 of it if the pattern has groups.
    """
    pattern = None if extract is None else _compile(extract, argument="extract")

    def normalise(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    def compare(completion: str, answer: str) -> bool:
        if pattern is not None:
            matches = list(pattern.finditer(completion))
            if not matches:
                return False
            group = 1 if pattern.groups else 0
            completion = matches[-1][group] or ""
        return normalise(completion) == normalise(answer)

    return _compare_with_column(column, compare)


def numeric_match(column: str = "answer", tolerance: float = 1e-6) -> Function:
    """1 if the last numbers of completion and answer differ by at most `tolerance` (relative for answers above 1).

    It parses 1,234.5, 6.02e23, 3/4 and \\frac{3}{4}.
    """
    if not 0 <= tolerance < math.inf:
        raise InvalidInput(f"expected a finite number that is not negative, got {tolerance}", argument="tolerance")

    def compare(completion: str, answer: str) -> bool:
        expected = last_number(answer)
        if expected is None:
            raise ValueError(f"the answer {answer!r:.80} has no number")
        number = last_number(completion)
        return number is not None and abs(number - expected) <= tolerance * max(1.0, abs(expected))

    return _compare_with_column(column, compare)


def math_verify(column: str = "answer") -> Function:
    """1 if the library math-verify finds the final expressions of completion and answer equal."""
    library = import_extra("math_verify", extra="math")

    def compare(completion: str, answer: str) -> bool:
        expected = library.parse(answer) or library.parse(f"${answer}$")
        if not expected:
            raise ValueError(f"math-verify finds no expression in the answer {answer!r:.80}")
        return bool(library.verify(expected, library.parse(completion)))

    return _compare_with_column(column, compare)


def regex_format(pattern: str) -> Function:
    """1 if the pattern matches anywhere; `.` also matches newlines, and ^ and $ are the ends of the completion."""
    compiled = _compile(pattern, argument="pattern")

    def score(completions: list[str]) -> list[float | None]:
        return [float(compiled.search(text) is not None) for text in completions]

    return score


def length(limit: int | None = None, free: int = 0, target: int | None = None) -> Function:
    """A penalty from 0 to -1 by the number of sampled tokens.

    With `limit`: 0 up to `free` tokens, then falling linearly to -1 at `limit`. With `target`: 0 at `target` tokens,
    and -1 at a distance of `target` or more.
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
PENALTIES = frozenset({"length"})  # rewards that are at most 0; the others are at most 1

# A sign belongs to the number unless it stands between two numbers: 5-3 ends with 3, but -3 is -3.
_PLAIN = r"(?:(?<![\w.)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_FRACTION = rf"(?P<sign>-?)\\[dt]?frac\{{(?P<top>{_PLAIN})\}}\{{(?P<bottom>{_PLAIN})\}}"
_NUMBER = re.compile(rf"{_FRACTION}|(?P<over>{_PLAIN})(?:\s*/\s*(?P<under>{_PLAIN}))?")


def last_number(text: str) -> float | None:
    """The last number or fraction in a text; None if there is none, or if it is not finite."""
    matches = list(_NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")))
    if not matches:
        return None
    match = matches[-1]
    numerator = _to_float(match["top"] or match["over"])
    denominator = _to_float(match["bottom"] or match["under"] or "1")
    value = numerator / denominator if denominator else math.nan
    if not math.isfinite(value):
        return None
    return -value if match["sign"] else value


def _to_float(digits: str) -> float:
    return float(digits.replace(",", ""))


def _compare_with_column(column: str, compare: Callable[[str, str], bool]) -> Function:
    """A reward of 1 or 0: whether `compare` holds for the completion and its answer in `column`."""

    def score(completions: list[str], **columns: Any) -> list[float | None]:
        scores: list[float | None] = []
        for completion, answer in zip(completions, columns[column], strict=True):
            scores.append(None if answer is None else float(compare(completion, str(answer))))
        return scores

    return score


def _compile(pattern: str, argument: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise InvalidInput(f"{pattern!r} is not a regular expression: {error}", argument=argument) from error
