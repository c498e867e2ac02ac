"""Tool calls in what a policy writes.

Two spellings are read: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes and Qwen, any number of
times in a turn; and Llama 3's, where a whole turn is `{"name": ..., "parameters": {...}}`, perhaps after
`<|python_tag|>`. A call that cannot be read becomes an error that the policy is told; nothing here raises.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from rollgraph.files import FileError, parse_json
from rollgraph.rl.rows import is_text

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]
    error: str = ""  # why it cannot be run; the policy is told

    def to_message(self) -> dict[str, Any]:
        """The call as messages have it."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def parse_turn(text: str) -> tuple[str, list[ToolCall]]:
    """What a turn says beside its tool calls, and these calls."""
    found = list(_HERMES.finditer(text))
    if found:
        return _HERMES.sub("", text).strip(), [_read_hermes(match) for match in found]
    stripped = text.strip()
    tagged = stripped.startswith(_PYTHON_TAG)
    body = stripped.removeprefix(_PYTHON_TAG).strip()
    if tagged or (body.startswith("{") and body.endswith("}")):
        call = _read_call(body)
        if tagged or not call.error:
            return "", [call]
    return stripped, []


def _read_hermes(match: re.Match[str]) -> ToolCall:
    if not match[2]:
        return ToolCall("", {}, "the call is not closed with </tool_call>")
    return _read_call(match[1])


def _read_call(text: str) -> ToolCall:
    try:
        entry = parse_json(text, place="")
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
