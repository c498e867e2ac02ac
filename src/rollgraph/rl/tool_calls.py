"""Parses the tool calls in a turn.

Two formats: that of Hermes and Qwen, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times in
a turn; and that of Llama 3, where the whole turn is `{"name": ..., "parameters": {...}}`, perhaps after
`<|python_tag|>`. A malformed call becomes an error message for the policy; nothing here raises.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from rollgraph.files import FileError, parse_json
from rollgraph.rl.data.rows import is_text

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class ToolCall:
    """A parsed call.

    >>> ToolCall("move", {"direction": "north"})
    """

    name: str
    arguments: dict[str, Any]
    error: str = ""  # why the call cannot be run, for the policy

    def to_message(self) -> dict[str, Any]:
        """The call as an entry of a message's `tool_calls`."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """A turn's text without its tool calls, and the calls."""
    matches = list(_HERMES.finditer(text))
    if matches:
        return _HERMES.sub("", text).strip(), [_read_hermes(match) for match in matches]
    stripped = text.strip()
    has_tag = stripped.startswith(_PYTHON_TAG)
    body = stripped.removeprefix(_PYTHON_TAG).strip()
    if has_tag or (body.startswith("{") and body.endswith("}")):
        call = _read_call(body)
        if has_tag or not call.error:
            return "", [call]
    return stripped, []


def _read_hermes(match: re.Match[str]) -> ToolCall:
    if not match[2]:
        return ToolCall("", {}, "the call is not closed with </tool_call>")
    return _read_call(match[1])


def _read_call(text: str) -> ToolCall:
    try:
        entry = parse_json(text, location="")
    except FileError as error:
        return ToolCall("", {}, f"the call {error.detail}")
    if not is_text(json.dumps(entry, ensure_ascii=False)):
        return ToolCall("", {}, "the call has half of a surrogate pair, which is not text")
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return ToolCall("", {}, 'a call is an object with a "name" and "arguments"')
    arguments = entry.get("arguments", entry.get("parameters"))
    if not isinstance(arguments, dict):
        return ToolCall(entry["name"], {}, 'the "arguments" of a call must be an object')
    return ToolCall(entry["name"], arguments)
