"""Data: valid files, and an order of prompts that depends on neither ranks nor interruptions."""

from __future__ import annotations

import datetime
import json
import re
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgraph.rl.data.prompts import PromptData, split
from rollgraph.rl.data.rows import DataError, Row, load_rows, make_rows
from rollgraph.tokenizer import ByteTokenizer, Tokenizer, TokenizerFiles

TOKENIZER = ByteTokenizer()


def rows_of(count: int) -> list[Row]:
    return make_rows({"prompt": f"number {i}", "answer": i} for i in range(count))


def ids_of(data: PromptData, steps: int) -> list[list[int]]:
    return [[prompt.id for prompt in data.next_prompts()] for _ in range(steps)]


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "data.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


sizes = st.integers(1, 12)
seeds = st.integers(0, 2**70)


@given(rows=sizes, per_step=sizes, epochs=st.integers(1, 3), seed=seeds, shuffle=st.booleans())
def test_every_epoch_has_every_prompt_once(rows: int, per_step: int, epochs: int, seed: int, shuffle: bool) -> None:
    data = PromptData(rows_of(rows), TOKENIZER, prompts_per_step=per_step, seed=seed, shuffle=shuffle)
    stream = [i for step in ids_of(data, -(-rows * epochs // per_step)) for i in step]
    for epoch in range(epochs):
        order = stream[epoch * rows : (epoch + 1) * rows]
        assert sorted(order) == list(range(rows))
        assert shuffle or order == sorted(order)


@given(rows=sizes, per_step=sizes, ranks=st.integers(1, 5), seed=seeds, steps=st.integers(1, 4))
def test_the_shares_of_all_ranks_equal_one_rank(rows: int, per_step: int, ranks: int, seed: int, steps: int) -> None:
    per_step = max(per_step, ranks)
    one = PromptData(rows_of(rows), TOKENIZER, prompts_per_step=per_step, seed=seed)
    several = [
        PromptData(rows_of(rows), TOKENIZER, prompts_per_step=per_step, seed=seed, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    for _ in range(steps):
        shares = [data.next_prompts() for data in several]
        assert [prompt for share in shares for prompt in share] == one.next_prompts()
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert all(shares)


@given(rows=sizes, seed=seeds, before=st.integers(0, 5), after=st.integers(1, 5), old=st.integers(1, 4), data=st.data())
def test_resuming_does_not_change_the_order(
    rows: int, seed: int, before: int, after: int, old: int, data: st.DataObject
) -> None:
    new = data.draw(st.integers(1, 4), label="ranks after the resume")
    uninterrupted = PromptData(rows_of(rows), TOKENIZER, prompts_per_step=4, seed=seed)
    expected = ids_of(uninterrupted, before + after)
    saved = PromptData(rows_of(rows), TOKENIZER, prompts_per_step=4, seed=seed, rank=old - 1, ranks=old)
    ids_of(saved, before)
    state = json.loads(json.dumps(saved.state()))
    resumed = []
    for rank in range(new):
        resumed.append(PromptData(rows_of(rows), TOKENIZER, prompts_per_step=4, seed=seed, rank=rank, ranks=new))
        resumed[-1].load_state(state)
    assert [[i for part in step for i in part] for step in zip(*(ids_of(r, after) for r in resumed), strict=True)] == (
        expected[before:]
    )
    assert all(part.state() == uninterrupted.state() for part in resumed)


@pytest.mark.parametrize("changed", [{"prompt": "another", "answer": 3}, {"prompt": "number 3", "answer": 4}])
def test_a_state_is_refused_if_the_content_changed(changed: dict[str, Any]) -> None:
    data = PromptData(rows_of(8), TOKENIZER, prompts_per_step=2, seed=1)
    data.next_prompts()
    rows = rows_of(8)
    rows[3] = make_rows([changed])[0]
    changed_data = PromptData(rows, TOKENIZER, prompts_per_step=2, seed=1)
    with pytest.raises(DataError, match="row: its rows are not those of the saved state"):
        changed_data.load_state(data.state())
    assert changed_data.state()["cursor"] == 0
    same_data = PromptData(rows_of(8), TOKENIZER, prompts_per_step=2, seed=1)
    same_data.load_state(json.loads(json.dumps(data.state())))
    assert same_data.state() == data.state()


def test_the_order_is_pinned_and_differs_by_seed_and_epoch() -> None:
    """A run may be resumed with another version of numpy, so the order itself is part of the format."""
    data = PromptData(rows_of(8), TOKENIZER, prompts_per_step=8, seed=1)
    other_seed = PromptData(rows_of(8), TOKENIZER, prompts_per_step=8, seed=2)
    first, second = ids_of(data, 2)
    assert first == [5, 3, 1, 0, 7, 4, 6, 2]
    assert len({tuple(first), tuple(second), tuple(ids_of(other_seed, 1)[0])}) == 3


def test_a_state_of_other_data_is_refused() -> None:
    data = PromptData(rows_of(8), TOKENIZER, prompts_per_step=2, seed=1)
    state = data.state()
    for change, message in [
        ({"seed": 2}, "seed: is 1 here but 2"),
        ({"rows": 9}, "rows: is 8 here but 9"),
        ({"shuffle": False}, "shuffle: is True"),
        ({"cursor": "3"}, "cursor: .* got '3'"),
        ({"cursor": -1}, "cursor: .* got -1"),
    ]:
        with pytest.raises(DataError, match=message):
            data.load_state(state | change)
    with pytest.raises(DataError, match="rows: is 8 here but None"):
        data.load_state({})
    assert data.state() == state


def test_a_row_has_text_or_a_chat_and_columns(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(
        tmp_path,
        "\ufeff" + json.dumps({"prompt": "1+1=", "answer": 2}),
        "",
        json.dumps({"messages": messages, "source": {"book": 1}}),
    )
    rows = load_rows(path)
    assert [row.location for row in rows] == [f"{path}:1", f"{path}:3"]
    plain, chat = PromptData(rows, TOKENIZER, prompts_per_step=2, seed=0, shuffle=False).next_prompts()
    assert (plain.id, plain.text, plain.tokens, plain.columns) == (0, "1+1=", tuple(b"1+1="), {"answer": 2})
    assert chat.text == TOKENIZER.render_chat(messages)
    assert list(chat.tokens) == TOKENIZER.encode_chat(messages)
    assert chat.columns == {"source": {"book": 1}}
    assert (plain.messages, chat.messages) == (None, messages)
    data = PromptData(rows, TOKENIZER, prompts_per_step=2, seed=0, shuffle=False, chat=True)
    wrapped, same = data.next_prompts()
    assert wrapped.text == TOKENIZER.render_chat([{"role": "user", "content": "1+1="}])
    assert wrapped.tokens[0] == TOKENIZER.bos_id
    assert wrapped.messages is None  # the row has text, so its rewards get text
    assert same == chat
    assert data.columns == {"answer", "source"}


def test_a_prompt_may_be_a_list_of_messages_as_in_trl() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    under_either_name = make_rows([{"prompt": messages}, {"messages": messages}])
    first, second = PromptData(under_either_name, TOKENIZER, prompts_per_step=2, seed=0, shuffle=False).next_prompts()
    assert first.text == second.text == TOKENIZER.render_chat(messages)
    assert first.messages == second.messages == messages
    first.messages.clear()
    assert under_either_name[0].prompt == messages


BAD_LINES: list[tuple[str | bytes, str]] = [
    ('{"prompt": "a"', "Expecting"),
    (b'{"prompt": "\xff"}', "utf-8"),
    ("[1]", "expected an object with a 'prompt', got a list"),
    ('{"question": "a"}', "expected either 'prompt' or 'messages', got 'question'"),
    ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "got both"),
    ('{"prompt": 5}', "'prompt' must be text or a list of messages, got 5"),
    ('{"prompt": null}', "'prompt' must be text or a list of messages, got None"),
    ('{"prompt": ""}', "'prompt' must be text or a list of messages, got ''"),
    ('{"prompt": "\\ud800"}', "must be text"),
    ('{"prompt": []}', "'prompt' must be a list of {role, content}"),
    ('{"messages": []}', "'messages' must be a list"),
    ('{"messages": [{"role": "user"}]}', "'messages' must be a list"),
    ('{"messages": [{"role": "user", "content": 1}]}', "both text"),
    ('{"prompt": "a", "prompt": "b"}', "duplicate key 'prompt'"),
    ('{"prompt": "a", "completions": 1}', "the column 'completions' has the name of an argument"),
    (
        '{"prompt": "a", "x": ' + "[" * 101 + "]" * 101 + "}",
        "cannot be read: lists and objects are nested more than 100 levels deep",
    ),
    (
        '{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
        "cannot be read: lists and objects are nested more than 100 levels deep",
    ),
    ('{"prompt": "a"}'.encode("utf-16"), "utf-8"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_reported_with_its_number(tmp_path: Path, line: str | bytes, message: str) -> None:
    path = write(tmp_path, '{"prompt": "fine"}', line)
    with pytest.raises(DataError, match=message) as caught:
        load_rows(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_a_byte_order_mark_and_many_lists_side_by_side_are_accepted(tmp_path: Path) -> None:
    wide = {"prompt": "b", "x": [[]] * 500}
    first, second = load_rows(write(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}', json.dumps(wide)))
    assert first.prompt == "a"
    assert second.columns == {"x": [[]] * 500}


def test_changing_the_columns_of_a_prompt_does_not_change_the_data() -> None:
    rows = make_rows([{"prompt": "a", "facts": {"list": [1]}}])
    data = PromptData(rows, TOKENIZER, prompts_per_step=2, seed=0)
    for prompt in data.next_prompts():
        prompt.columns["facts"]["list"].append(2)
    assert [prompt.columns for prompt in data.next_prompts()] == [{"facts": {"list": [1]}}] * 2


def test_a_prompt_that_cannot_be_encoded_is_reported_or_dropped(tmp_path: Path) -> None:
    model = {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0], ["b", -2.0]], "byte_fallback": False}
    tokenizer = Tokenizer(TokenizerFiles(json.dumps({"added_tokens": [], "model": model})))
    path = write(tmp_path, '{"prompt": "ab"}', '{"prompt": "xyz"}', '{"prompt": "ba"}')
    options: dict[str, Any] = {"prompts_per_step": 1, "seed": 0, "shuffle": False, "max_prompt_tokens": 4}
    with pytest.raises(DataError, match=r"cannot encode 'xyz': .*unk_id.*too_long='drop'") as caught:
        PromptData(load_rows(path), tokenizer, **options)
    assert str(caught.value).startswith(f"{path}:2: ")
    data = PromptData(load_rows(path), tokenizer, too_long="drop", **options)
    assert data.dropped == 1
    assert ids_of(data, 3) == [[0], [2], [0]]
    with pytest.raises(DataError, match=r"row:1: all 1 prompts are dropped, the first because: cannot encode 'xyz'"):
        PromptData(make_rows([{"prompt": "xyz"}]), tokenizer, too_long="drop", **options)


def test_rows_encoded_in_chunks_equal_rows_encoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgraph.rl.data.prompts.ENCODE_CHUNK", 3)
    rows = make_rows([{"prompt": "x" * (1 + i % 5)} for i in range(8)])
    done: list[tuple[int, int]] = []
    options: dict[str, Any] = {"prompts_per_step": 8, "seed": 0, "shuffle": False}
    measured = PromptData(rows, TOKENIZER, max_prompt_tokens=9, on_progress=lambda *part: done.append(part), **options)
    assert measured.next_prompts() == PromptData(rows, TOKENIZER, **options).next_prompts()
    assert (measured.longest_prompt, done) == (5, [(0, 8), (3, 8), (6, 8)])


def test_files_that_are_not_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no rows"):
        load_rows(write(tmp_path, "", "  "))
    with pytest.raises(DataError, match="no such file"):
        load_rows(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match=r"expected a \.jsonl file"):
        load_rows(tmp_path / "data.csv")


def test_a_prompt_that_is_too_long_is_reported_or_dropped(tmp_path: Path) -> None:
    path = write(tmp_path, *(json.dumps({"prompt": "x" * length}) for length in (3, 9, 4, 5)))
    rows = load_rows(path)
    options: dict[str, Any] = {"prompts_per_step": 1, "seed": 0, "shuffle": False}
    with pytest.raises(
        DataError, match=r"max_prompt_tokens: .*: the prompt has 9 tokens, and the limit is 4"
    ) as caught:
        PromptData(rows, TOKENIZER, max_prompt_tokens=4, **options)
    assert caught.value.location == f"{path}:2"
    data = PromptData(rows, TOKENIZER, max_prompt_tokens=4, too_long="drop", **options)
    assert (len(data), data.dropped) == (2, 2)
    assert ids_of(data, 4) == [[0], [2], [0], [2]]
    with pytest.raises(DataError, match="all 4 prompts are dropped"):
        PromptData(rows, TOKENIZER, max_prompt_tokens=2, too_long="drop", **options)


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        PromptData([], TOKENIZER, prompts_per_step=1, seed=0)
    with pytest.raises(ValueError, match="each of 3 ranks needs at least one"):
        PromptData(rows_of(5), TOKENIZER, prompts_per_step=2, seed=0, ranks=3)
    with pytest.raises(ValueError, match="rank: must be at least 0 and less than ranks=2, got 2"):
        PromptData(rows_of(5), TOKENIZER, prompts_per_step=2, seed=0, rank=2, ranks=2)
    rows = make_rows([{"messages": [{"role": "nobody", "content": "a"}]}], name="mine")
    TOKENIZER.save(tmp_path)
    config = {"chat_template": "{{ raise_exception('no such role') }}"}
    strict = ByteTokenizer(replace(TokenizerFiles.read(tmp_path), config=config))
    with pytest.raises(DataError, match="mine:1: chat template, line 1: no such role"):
        PromptData(rows, strict, prompts_per_step=2, seed=0)


@given(count=st.integers(1, 30), held_out=st.integers(0, 29) | st.floats(0, 0.9), seed=seeds)
def test_a_split_holds_out_each_row_at_most_once(count: int, held_out: int | float, seed: int) -> None:
    rows = rows_of(count)
    expected = held_out if isinstance(held_out, int) else max(1, round(held_out * count)) if held_out else 0
    if expected >= count:
        with pytest.raises(DataError, match="leaves none"):
            split(rows, held_out, seed)
        return
    train, held = split(rows, held_out, seed)
    assert len(held) == expected
    assert sorted(train + held, key=rows.index) == rows  # each row on one side
    assert train == sorted(train, key=rows.index)
    assert (train, held) == split(rows, held_out, seed)


def test_columns_are_converted_to_json() -> None:
    """They are sent to other ranks and saved in checkpoints."""
    day, clock = datetime.date(2024, 2, 29), datetime.time(12, 30)
    entry = {
        "prompt": "a",
        "times": [day, clock, datetime.datetime.combine(day, clock), datetime.timedelta(minutes=1)],
        "price": {"net": Decimal("12.50"), "rate": np.float32(0.25)},
        "numpy": (np.int64(3), np.bool_(True), np.arange(2), np.datetime64("2024-02-29T12:30:00", "ns")),
        "plain": [None, 1, 0.5, True, "x"],
    }
    (row,) = make_rows([entry])
    assert row.columns == {
        "times": ["2024-02-29", "12:30:00", "2024-02-29T12:30:00", 60.0],
        "price": {"net": "12.50", "rate": 0.25},
        "numpy": [3, True, [0, 1], "2024-02-29T12:30:00.000000000"],
        "plain": [None, 1, 0.5, True, "x"],
    }
    assert json.loads(json.dumps(row.columns)) == row.columns


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"PNG", "mine:2: the column 'image' holds bytes (b'PNG'); convert it to text or numbers, or leave it out"),
        ({"bytes": b"PNG"}, "mine:2: the column 'image.bytes' holds bytes"),
        ([{1: 2}], "mine:2: the column 'image' holds dict"),
        ({1, 2}, "mine:2: the column 'image' holds set"),
    ],
)
def test_columns_that_json_cannot_hold_are_refused(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        make_rows([{"prompt": "a"}, {"prompt": "b", "image": value}], name="mine")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "data.parquet").touch()
    with pytest.raises(ImportError, match=r"pip install 'rollgraph\[parquet\]'"):
        load_rows(tmp_path / "data.parquet")


def test_parquet_rows_are_read(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "data.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        load_rows(path)
    entries = [{"prompt": "a", "messages": None}, {"prompt": None, "messages": [{"role": "user", "content": "b"}]}]
    parquet.write_table(arrow.Table.from_pylist(entries), path)
    assert [row.prompt for row in load_rows(path)] == ["a", [{"role": "user", "content": "b"}]]


def test_parquet_and_json_lines_hold_the_same_data(tmp_path: Path) -> None:
    """Rows, columns of every kind and fingerprints are the same, also with several row groups."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    entries = [{"prompt": f"{i}+1=", "answer": i + 1, "tags": ["a", str(i)], "more": {"x": i / 4}} for i in range(50)]
    parquet.write_table(arrow.Table.from_pylist(entries), tmp_path / "data.parquet", row_group_size=7)
    both = load_rows(tmp_path / "data.parquet"), load_rows(write(tmp_path, *map(json.dumps, entries)))
    assert [(row.prompt, row.columns) for row in both[0]] == [(row.prompt, row.columns) for row in both[1]]
    assert both[0][41].location.endswith("data.parquet:42")
    states = [PromptData(rows, TOKENIZER, prompts_per_step=4, seed=1).state() for rows in both]
    assert states[0] == states[1]
