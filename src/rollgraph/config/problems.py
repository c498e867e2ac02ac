"""What is wrong with a configuration, as fields: where, which key, what, and by which rule.

Nothing here knows how a file is read or which keys there are: `reader.py` finds the problems and suggests keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ConfigProblem:
    """
    >>> str(ConfigProblem("expected whole number ≥ 1, got 0", key="steps", place="run.yaml:3"))
    'run.yaml:3: steps: expected whole number ≥ 1, got 0'
    """

    detail: str
    key: str = ""  # with dots, like rollout.temperature; empty if the problem is not about one key
    place: str = ""  # `run.yaml:3`, or `override 'steps=3'`; empty if only the resolved configuration is known
    rule: str = ""  # the name of a rule across several keys, if one is broken

    def __str__(self) -> str:
        message = ": ".join(part for part in (self.place, self.key, self.detail) if part)
        return f"{message} [{self.rule}]" if self.rule else message


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line for each problem."""

    def __init__(self, problems: Sequence[ConfigProblem | str]) -> None:
        self.problems: tuple[ConfigProblem, ...] = tuple(
            ConfigProblem(problem) if isinstance(problem, str) else problem for problem in problems
        )
        super().__init__("\n".join(map(str, self.problems)))
