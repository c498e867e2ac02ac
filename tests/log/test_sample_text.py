"""Samples as text: a line, a card, and one sample of each group."""

from __future__ import annotations

import doctest
from typing import Any

from rich.cells import cell_len

from rollgraph.log import samples
from rollgraph.log.samples import WIDTH, first_of_each_group, format_one_line, format_sample


def make_row(**changes: Any) -> dict[str, Any]:
    row = {
        "split": "train",
        "group": 0,
        "prompt": "93+56=",
        "columns": {"answer": 149},
        "completion": "149",
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "finish_reason": "stop",
        "tokens": 4,
    }
    return row | changes


def test_the_doctest_passes() -> None:
    assert doctest.testmod(samples).failed == 0


def test_a_summary_is_one_line_however_long_the_texts_are() -> None:
    assert format_one_line(make_row()) == "93+56= → 149 (1)"
    text = format_one_line(make_row(prompt="What\nis\t it? " * 20, completion="\x1b[31mred\n" * 20, reward=0.25))
    assert text.startswith("What is it? ")
    assert text.endswith("… (0.25)")
    assert text.isprintable()
    assert len(text) < WIDTH


def test_a_card_has_every_text_within_its_columns() -> None:
    long = "word " * 40
    row = make_row(completion=f"{long}\n\n{'x' * 200}\x1b", rewards={"exact": 1.0, "short": -0.5})
    lines = format_sample(row)
    assert max(map(len, lines)) == WIDTH
    assert lines[0].startswith("── reward 1 ─")
    assert lines[1] == "prompt      93+56="
    assert lines[2].startswith("completion  word word ")
    assert lines[-3:] == [
        "answer      149",
        "rewards     exact 1, short -0.5",
        "ended by    stop, after 4 tokens",
    ]
    assert sum(line.count("word") for line in lines) == 40
    assert sum(line.count("x") for line in lines[3:-3]) == 200
    assert all(line.isprintable() for line in lines)


def test_wide_characters_take_two_columns() -> None:
    row = make_row(prompt="あ" * 100, completion="word 宽宽 " * 20, columns={"a_column_with_a_long_name": 1})
    lines = format_sample(row)
    assert max(map(cell_len, lines)) == WIDTH
    assert sum(line.count("あ") for line in lines) == 100
    assert sum(line.count("宽宽") for line in lines) == 20
    assert "a_column_w… 1" in lines
    assert cell_len(format_one_line(row)) < WIDTH


def test_one_token_is_singular() -> None:
    assert format_sample(make_row(tokens=1))[-1].endswith("stop, after 1 token")


def test_the_first_sample_of_each_group_is_chosen() -> None:
    rows = [make_row(group=group, completion=str(index)) for group in (4, 2) for index in range(3)]
    assert first_of_each_group(rows) == [rows[0], rows[3]]
