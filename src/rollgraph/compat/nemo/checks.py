"""The checks that `plan` and `train` make before they need a model's folder, of a text that is about to be written."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from rollgraph.config import ConfigError, check_scopes, parse_config
from rollgraph.errors import InvalidInput

NAME = "translation"  # stands for the file in messages


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
        return [Problem(problem.key.partition("[")[0], str(replace(problem, place=""))) for problem in error.problems]
    except InvalidInput as error:
        return [Problem(error.argument or "", str(error))]
    except (ValueError, ImportError) as error:
        return [Problem("", str(error))]
    return []
