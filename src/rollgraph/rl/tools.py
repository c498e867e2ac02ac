"""Tools: functions that a policy may call, or schemas of tools that the environment's own reply runs.

Owns what a policy is told about tools, and that no call can do more harm than fail: an unknown name, arguments that do
not fit and a tool that raises all give a result that begins with `error:`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Self

from rollgraph.errors import suggest
from rollgraph.rl.paths import LoadError, load_object
from rollgraph.rl.tool_calls import ToolCall
from rollgraph.rl.tool_schema import make_schema

Tool = Callable[..., Any] | Mapping[str, Any] | str  # a function, a JSON schema, or the import path of either


class ToolBox:
    """The tools of an environment, by name; `schemas` are for the chat template."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        if isinstance(tools, str | Mapping):
            raise LoadError(f"expected a list of tools, got {tools!r:.80}", argument="tools")
        self.schemas: list[dict[str, Any]] = []
        self._functions: dict[str, Callable[..., Any] | None] = {}  # None: the environment's reply runs it
        for tool in tools:
            self._add(load_object(tool) if isinstance(tool, str) else tool)

    def _add(self, tool: Any) -> None:
        if callable(tool):
            schema = make_schema(tool)
        elif isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) and "name" in tool["function"]:
            schema = dict(tool)
        else:
            detail = 'is neither a function nor a schema {"type": "function", "function": {"name": ..., ...}}'
            raise LoadError(f"{tool!r:.80} {detail}", argument="tools")
        name = schema["function"]["name"]
        if name in self._functions:
            raise LoadError(f"two tools are called {name!r}", argument="tools")
        self.schemas.append(schema)
        self._functions[name] = tool if callable(tool) else None

    def __bool__(self) -> bool:
        return bool(self.schemas)

    @property
    def has_schemas_only(self) -> bool:
        """Whether some tool is not a function."""
        return None in self._functions.values()

    @classmethod
    def of_methods(cls, owner: type, names: Sequence[str]) -> Self:
        """These methods of a class, whose instances `find` is given."""
        methods: list[Tool] = []
        for name in names:
            function = getattr(owner, name, None)
            if not inspect.isfunction(function):
                near = suggest(name, dir(owner))
                raise LoadError(f"{owner.__name__} has no method {name!r}{near}", argument="episode")
            methods.append(MethodType(function, owner))  # so that nobody is told about `self`
        return cls(methods)

    def find(self, call: ToolCall, owner: Any = None) -> Callable[..., Any] | str | None:
        """The function to call, or the text to answer with; None if the environment's reply runs this tool.

        If the tools are methods, it is the one of `owner`.
        """
        if call.error:
            return f"error: {call.error}"
        if call.name not in self._functions:
            known = ", ".join(self._functions)
            return f"error: there is no tool {call.name!r}{suggest(call.name, self._functions)} (there is: {known})"
        function = self._functions[call.name]
        if function is None:
            return None
        try:
            inspect.signature(function).bind(**call.arguments)
        except TypeError as error:
            return f"error: {call.name}: {error}"
        if owner is not None:
            function = getattr(owner, call.name)
        return function


def write_result(name: str, value: Any, most: int) -> dict[str, Any]:
    """The message with a tool's result: text as it is, anything else as JSON, at most so many characters."""
    text = value
    if not isinstance(value, str):
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = str(value)
    text = text.encode("utf-8", "replace").decode()  # half of a surrogate pair has no tokens
    if len(text) > most:
        text = f"{text[:most]}... ({len(text) - most} more characters)"
    return {"role": "tool", "name": name, "content": text}
