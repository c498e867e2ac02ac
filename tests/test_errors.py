"""Errors with fields: how a message is composed, how an argument gets another name, and the nearest known name."""

from __future__ import annotations

import pickle

import pytest

from rollgraph.errors import InvalidInput, nearest, suggest
from rollgraph.rl.data import DataError

ERROR = DataError("the limit is 4; raise it", argument="size", place="data.jsonl:2", alternative=("too_long", "drop"))


def test_a_message_has_the_argument_the_place_and_the_detail() -> None:
    assert str(ERROR) == "size: data.jsonl:2: the limit is 4; raise it, or set too_long='drop'"
    assert str(InvalidInput("has no rows", place="data.jsonl")) == "data.jsonl: has no rows"
    assert str(InvalidInput("must be at least 1, got 0", argument="rows")) == "rows: must be at least 1, got 0"


def test_arguments_can_be_renamed() -> None:
    renamed = ERROR.renamed(lambda name: f"data.{name}")
    assert type(renamed) is DataError
    assert str(renamed) == "data.size: data.jsonl:2: the limit is 4; raise it, or set data.too_long='drop'"
    assert str(InvalidInput("is empty").renamed(str.upper)) == "is empty"


def test_fields_travel_to_other_processes() -> None:
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
def test_the_nearest_name(name: str, known: list[str], expected: str | None) -> None:
    assert nearest(name, known) == expected
    assert suggest(name, known) == (f"; did you mean {expected!r}?" if expected else "")


def test_swapped_letters_win_a_tie() -> None:
    assert nearest("gpro", ["gspo", "grpo"], cutoff=0.3) == "grpo"
