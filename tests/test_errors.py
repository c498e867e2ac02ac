"""Errors with fields, suggestions for names, and the line of user code that an exception came from."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable

import pytest

from rollgraph.config import parse_config
from rollgraph.errors import InvalidInput, UserLine, name_function, nearest, suggest, user_line
from rollgraph.rl.data.rows import DataError
from rollgraph.rl.rewards.process import line_suffix
from tests.graph.marked_lines import line_of as line_with

ERROR = DataError(
    "the limit is 4; raise it", argument="size", location="data.jsonl:2", alternative=("too_long", "drop")
)


def test_a_message_has_argument_location_and_detail() -> None:
    assert str(ERROR) == "size: data.jsonl:2: the limit is 4; raise it, or set too_long='drop'"
    assert str(InvalidInput("has no rows", location="data.jsonl")) == "data.jsonl: has no rows"
    assert str(InvalidInput("must be at least 1, got 0", argument="rows")) == "rows: must be at least 1, got 0"


def test_arguments_can_be_renamed() -> None:
    renamed = ERROR.renamed(lambda name: f"data.{name}")
    assert type(renamed) is DataError
    assert str(renamed) == "data.size: data.jsonl:2: the limit is 4; raise it, or set data.too_long='drop'"
    assert str(InvalidInput("is empty").renamed(str.upper)) == "is empty"


def test_errors_with_fields_can_be_pickled() -> None:
    copy = pickle.loads(pickle.dumps(ERROR))
    assert (type(copy), str(copy)) == (DataError, str(ERROR))
    assert vars(copy) == vars(ERROR)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("gpro", ["rloo", "grpo"], "grpo"),
        ("weigth", ["width", "weight"], "weight"),
        ("xyzzy", ["seed", "steps"], None),
        ("seed", [], None),
    ],
)
def test_the_nearest_name_is_suggested(name: str, known: list[str], expected: str | None) -> None:
    assert nearest(name, known) == expected
    assert suggest(name, known) == (f"; did you mean {expected!r}?" if expected else "")


def test_transposed_letters_win_a_tie() -> None:
    assert nearest("gpro", ["gspo", "grpo"], cutoff=0.3) == "grpo"


# the line of user code


def reads_json() -> None:
    json.loads("{")  # here: raised by a library


def asks_rollgraph() -> None:
    parse_config("steps: many")


def in_a_comprehension() -> list[float]:
    return [1 / number for number in (1, 0)]


def catch(function: Callable[[], object]) -> Exception:
    with pytest.raises((ValueError, ZeroDivisionError)) as error:
        function()
    assert isinstance(error.value, Exception)
    return error.value


def test_the_line_that_called_a_library_is_named() -> None:
    error = catch(reads_json)
    location = line_with("raised by a library", __file__)
    assert user_line(error) == UserLine(__file__, int(location.rpartition(":")[2]), "reads_json")
    assert line_suffix(error) == f" ({location})"


def test_the_function_around_a_comprehension_is_named() -> None:
    line = user_line(catch(in_a_comprehension))
    assert line is not None
    assert line.function == "in_a_comprehension"


def test_an_error_raised_by_rollgraph_has_no_line() -> None:
    assert user_line(catch(asks_rollgraph)) is None
    assert line_suffix(catch(asks_rollgraph)) == ""
    assert user_line(None) is None
    assert user_line(ValueError("never raised")) is None


def test_a_function_is_named_with_its_location() -> None:
    code = reads_json.__code__
    assert name_function(reads_json) == f"reads_json ({__file__}:{code.co_firstlineno})"
    assert name_function(len) == "len"
