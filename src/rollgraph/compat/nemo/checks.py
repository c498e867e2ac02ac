"""The checks that `plan` and `train` make before they need a model's folder, of a text that is about to be written."""

from __future__ import annotations

import re
from typing import NamedTuple

from rollgraph.config import ConfigError, check_scopes, parse_config

NAME = "translation"  # stands for the file in messages
PROBLEM = re.compile(rf"(?:{NAME}:\d+: )?(?P<text>(?P<key>[\w.]*).*)", re.DOTALL)


class Problem(NamedTuple):
    """For example `Problem("checkpoint.every", "checkpoint.every: expected whole number ≥ 1, got null")`."""

    key: str  # of ours
    text: str


def find_problems(text: str, ranks: int) -> list[Problem]:
    from rollgraph.run.inputs import make_algorithm  # takes torch

    try:
        config = parse_config(text, name=NAME)
        check_scopes(config, ranks)
        make_algorithm(config)
    except ConfigError as error:
        return [_read(problem) for problem in error.problems]
    except (ValueError, ImportError) as error:
        return [_read(str(error))]
    return []


def _read(problem: str) -> Problem:
    found = PROBLEM.match(problem)
    assert found is not None  # it takes any text
    return Problem(found["key"], found["text"])
