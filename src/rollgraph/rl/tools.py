"""Tools: functions that a policy may call, and their JSON schemas.

Owns what a policy is told about tools. A bad call can only fail: an unknown name, wrong arguments and a tool that
raises all give a result that begins with `error:`.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MethodType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from rollgraph.errors import suggest
from rollgraph.rl.paths import LoadError, load_object
from rollgraph.rl.tool_calls import ToolCall

# -- the schema of a function ----------------------------------------------------------------------
# Equal to that of `transformers.utils.get_json_schema`. Docstrings are in Google style: a description, `Args:` with a
# line for each parameter, and perhaps `Returns:`.

Schema = dict[str, Any]

_JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", types.NoneType: "null"}
_SECTION = re.compile(r"^\s*(Args|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_PARAMETER = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def make_schema(function: Callable[..., Any]) -> Schema:
    """The JSON schema of a function; every parameter needs a type and a description."""
    name = getattr(function, "__name__", None) or type(function).__name__
    description, parameter_docs, return_doc = _read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise _tool_error(name, "needs a docstring that tells the policy what it does")
    hints = get_type_hints(function)
    properties: Schema = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise _tool_error(name, f"has the parameter {parameter.name!r}, which cannot be given by name")
        if parameter.name not in hints:
            raise _tool_error(name, f"needs a type for its parameter {parameter.name!r}")
        if parameter.name not in parameter_docs:
            raise _tool_error(
                name, f"needs a description of its parameter {parameter.name!r} under `Args:` in its docstring"
            )
        properties[parameter.name] = _describe_type(hints[parameter.name], name, parameter.name)
        properties[parameter.name]["description"] = parameter_docs[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: Schema = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    schema: Schema = {"name": name, "description": description, "parameters": parameters}
    if "return" in hints:
        with suppress(LoadError):  # any type will do: the policy gets text
            schema["return"] = _describe_type(hints["return"], name, "return")
            if return_doc:
                schema["return"]["description"] = return_doc
    return {"type": "function", "function": schema}


def _describe_type(hint: Any, function: str, parameter: str) -> Schema:
    origin = get_origin(hint)
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if hint is Any:
        return {}
    if origin is Literal:
        values = list(get_args(hint))
        kinds = sorted({_JSON_TYPES[type(value)] for value in values})
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}
    if origin in (Union, types.UnionType):
        return _describe_union(list(get_args(hint)), function, parameter)
    if hint is list or origin is list:
        items = [_describe_type(part, function, parameter) for part in get_args(hint)]
        return {"type": "array", **({"items": items[0]} if items else {})}
    if hint is dict or origin is dict:
        value_schemas = [_describe_type(part, function, parameter) for part in get_args(hint)[1:]]
        return {"type": "object", **({"additionalProperties": value_schemas[0]} if value_schemas else {})}
    detail = f"has a type for {parameter!r} that has no JSON schema ({hint!r}); give the schema yourself"
    raise _tool_error(function, detail)


def _describe_union(parts: list[Any], function: str, parameter: str) -> Schema:
    schemas = [_describe_type(part, function, parameter) for part in parts if part is not types.NoneType]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(set(entry) == {"type"} and isinstance(entry["type"], str) for entry in schemas):
        schema = {"type": sorted(entry["type"] for entry in schemas)}
    else:
        schema = {"anyOf": schemas}
    if types.NoneType in parts:
        schema = {**schema, "nullable": True}
    return schema


def _read_docstring(text: str) -> tuple[str, dict[str, str], str]:
    """The descriptions of a function, of its parameters by name, and of its result."""
    parts = _SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    parameter_docs: dict[str, str] = {}
    name = ""
    lines = inspect.cleandoc(sections.get("Args", "")).splitlines()
    for line in lines:
        match = _PARAMETER.match(line)
        if match and not line.startswith(" "):
            name = match[1]
            parameter_docs[name] = match[2].strip()
        elif name:
            parameter_docs[name] = f"{parameter_docs[name]} {line.strip()}".strip()
    returns = " ".join(sections.get("Returns", "").split())
    return parts[0].strip(), parameter_docs, returns


def _tool_error(name: str, detail: str) -> LoadError:
    return LoadError(f"{name} {detail}", argument="tools")


# -- tools -----------------------------------------------------------------------------------------

Tool = Callable[..., Any] | Mapping[str, Any] | str  # a function, a JSON schema, or the import path of either


class ToolBox:
    """The tools of an environment, by name; `schemas` are for the chat template."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        if isinstance(tools, str | Mapping):
            raise LoadError(f"expected a list of tools, got {tools!r:.80}", argument="tools")
        self.schemas: list[dict[str, Any]] = []
        self._functions: dict[str, Callable[..., Any] | None] = {}  # None: the environment's `reply` runs it
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
    def has_schema_only_tool(self) -> bool:
        """Whether some tool is not a function."""
        return None in self._functions.values()

    @classmethod
    def of_methods(cls, episode_class: type, names: Sequence[str]) -> Self:
        """The tools for methods of a class; pass an instance to `find`."""
        methods: list[Tool] = []
        for name in names:
            function = getattr(episode_class, name, None)
            if not inspect.isfunction(function):
                hint = suggest(name, dir(episode_class))
                raise LoadError(f"{episode_class.__name__} has no method {name!r}{hint}", argument="episode")
            methods.append(MethodType(function, episode_class))  # bound, so that `self` is not in the schema
        return cls(methods)

    def find(self, call: ToolCall, instance: Any = None) -> Callable[..., Any] | str | None:
        """The function to call, or an error text for the policy; None if the environment's `reply` runs this tool.

        If the tools are methods, the function is bound to `instance`.
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
        if instance is not None:
            function = getattr(instance, call.name)
        return function


def result_message(name: str, value: Any, max_characters: int) -> dict[str, Any]:
    """The message with a tool's result: text unchanged, anything else as JSON, cut to `max_characters`."""
    text = value
    if not isinstance(value, str):
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = str(value)
    text = text.encode("utf-8", "replace").decode()  # half of a surrogate pair has no tokens
    if len(text) > max_characters:
        text = f"{text[:max_characters]}... ({len(text) - max_characters} more characters)"
    return {"role": "tool", "name": name, "content": text}
