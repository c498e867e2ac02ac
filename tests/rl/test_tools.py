"""Tools: their schemas, compared with those of transformers, and how calls are read and answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgraph.rl.paths import LoadError
from rollgraph.rl.tool_calls import ToolCall, parse_tool_calls
from rollgraph.rl.tools import ToolBox, make_schema, result_message


def add(a: int, b: float = 0.5) -> float:
    """Add two numbers.

    Long additions are fine too.

    Args:
        a: the first
        b: the second, which may
            be a fraction

    Returns:
        The sum.
    """
    return a + b


def search(
    words: list[str],
    limits: dict[str, int],
    order: Literal["new", "old"],
    place: str | None = None,
    number: int | float = 1,
    anything: list[list[int]] | None = None,
    plain: list | None = None,  # type: ignore[type-arg]
) -> list[dict[str, Any]]:
    """Search.

    Args:
        words: to look for
        limits: by kind: most results
        order: which first
        place: where
        number: how many
        anything: any: thing
        plain: a list
    """
    return []


class Box:
    def open(self, key: bool) -> str:
        """Open it.

        Args:
            key: whether there is a key
        """
        return str(key)


@pytest.mark.parametrize("function", [add, search, Box().open])
def test_schemas_equal_those_of_transformers(function: Callable[..., Any]) -> None:
    from transformers.utils import get_json_schema

    assert make_schema(function) == get_json_schema(function)


def no_docstring(a: int) -> int:
    return a


def no_type(a):  # type: ignore[no-untyped-def]
    """Do."""


def no_description(a: int) -> None:
    """Do."""


def odd_type(a: set[int]) -> None:
    """Do.

    Args:
        a: some
    """


def many(*a: int) -> None:
    """Do."""


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([no_docstring], "tools: no_docstring needs a docstring"),
        ([no_type], "tools: no_type needs a type for its parameter 'a'"),
        ([no_description], "tools: no_description needs a description of its parameter 'a' under `Args:`"),
        ([odd_type], r"tools: odd_type has a type for 'a' that has no JSON schema \(set\[int\]\)"),
        ([many], "tools: many has the parameter 'a', which cannot be given by name"),
        ([add, add], "tools: two tools are called 'add'"),
        ([{"name": "add"}], "tools: .* is neither a function nor a schema"),
        (["nowhere_at_all:add"], "there is no module 'nowhere_at_all'"),
        ("file.py:add", "tools: expected a list of tools"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(tools: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        ToolBox(tools)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text {", "just text {", []),
        ('{"answer": 4}', '{"answer": 4}', []),
        (
            'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
            "so",
            [ToolCall("add", {"a": 1}), ToolCall("f", {})],
        ),
        ('{"name": "add", "parameters": {"a": 1}}', "", [ToolCall("add", {"a": 1})]),
        ('<|python_tag|>{"name": "add", "parameters": {}}', "", [ToolCall("add", {})]),
    ],
)
def test_calls_are_read(text: str, content: str, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call>{'name': 1}</tool_call>", "the call is not JSON: Expecting property name"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "the call cannot be read: lists and objects are nested more"),
        (
            '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}</tool_call>",
            "the call cannot be read: lists and objects are nested more",  # code that walks messages is recursive
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
            "the call has half of a surrogate pair",
        ),
        ("<tool_call>[]</tool_call>", 'a call is an object with a "name"'),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', 'the "arguments" of a call must be an object'),
        ('<tool_call>{"name": "add", "arguments": {}}', "the call is not closed with </tool_call>"),
        ("<|python_tag|>print(1)", "the call is not JSON"),
        ('<tool_call>{"name": "sum", "arguments": {}}</tool_call>', "there is no tool 'sum' (there is: add, box)"),
        ('<tool_call>{"name": "ad", "arguments": {}}</tool_call>', "there is no tool 'ad'; did you mean 'add'?"),
        ('<tool_call>{"name": "add", "arguments": {"c": 1}}</tool_call>', "add: missing a required argument: 'a'"),
    ],
)
def test_calls_that_cannot_be_run_are_errors_for_the_policy(text: str, message: str) -> None:
    _, (call,) = parse_tool_calls(text)
    answer = ToolBox([add, {"type": "function", "function": {"name": "box"}}]).find(call)
    assert isinstance(answer, str)
    assert answer.startswith(f"error: {message}")


def test_a_tool_that_is_only_a_schema_is_left_to_the_reply() -> None:
    tools = ToolBox([add, {"type": "function", "function": {"name": "box"}}])
    assert tools.has_schema_only_tool
    assert tools.find(ToolCall("box", {"any": 1})) is None
    assert tools.find(ToolCall("add", {"a": 1})) is add


pieces = st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "add"', ', "arguments": {}}', "<|python_tag|>", "x"])


@given(st.lists(pieces | st.text(max_size=3)).map("".join))
def test_any_text_is_read(text: str) -> None:
    content, calls = parse_tool_calls(text)
    assert "<tool_call>" not in content or "</tool_call>" not in content
    for call in calls:
        assert ToolBox([add]).find(call) is not None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", "text"),
        (None, "null"),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}'),
        ({1, 2}, "{1, 2}"),
        ("a\ud800", "a?"),
        ("x" * 21, "x" * 20 + "... (1 more characters)"),
    ],
)
def test_results_become_messages(value: Any, expected: str) -> None:
    assert result_message("f", value, 20) == {"role": "tool", "name": "f", "content": expected}
