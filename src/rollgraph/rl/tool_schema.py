"""The JSON schema of a Python function, from its signature and its docstring, as chat templates expect it.

The result is that of `transformers.utils.get_json_schema`. A docstring is in Google's style: what the function does,
then `Args:` with a line for each parameter, then perhaps `Returns:`.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rollgraph.rl.paths import LoadError

Schema = dict[str, Any]

_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean", types.NoneType: "null"}
_SECTION = re.compile(r"^\s*(Args|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_PARAMETER = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def make_schema(function: Callable[..., Any]) -> Schema:
    """What a policy is told about a function; every parameter needs a type and a description."""
    name = getattr(function, "__name__", None) or type(function).__name__
    description, described, returns = _read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise _wrong(name, "needs a docstring that tells the policy what it does")
    hints = get_type_hints(function)
    properties: Schema = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise _wrong(name, f"has the parameter {parameter.name!r}, which cannot be given by name")
        if parameter.name not in hints:
            raise _wrong(name, f"needs a type for its parameter {parameter.name!r}")
        if parameter.name not in described:
            raise _wrong(
                name, f"needs a description of its parameter {parameter.name!r} under `Args:` in its docstring"
            )
        properties[parameter.name] = _describe_type(hints[parameter.name], name, parameter.name)
        properties[parameter.name]["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: Schema = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    schema: Schema = {"name": name, "description": description, "parameters": parameters}
    if "return" in hints:
        with suppress(LoadError):  # whatever it is, the policy gets text
            schema["return"] = _describe_type(hints["return"], name, "return")
            if returns:
                schema["return"]["description"] = returns
    return {"type": "function", "function": schema}


def _describe_type(hint: Any, function: str, parameter: str) -> Schema:
    origin = get_origin(hint)
    if hint in _NAMES:
        return {"type": _NAMES[hint]}
    if hint is Any:
        return {}
    if origin is Literal:
        values = list(get_args(hint))
        kinds = sorted({_NAMES[type(value)] for value in values})
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}
    if origin in (Union, types.UnionType):
        return _describe_union(list(get_args(hint)), function, parameter)
    if hint is list or origin is list:
        items = [_describe_type(part, function, parameter) for part in get_args(hint)]
        return {"type": "array", **({"items": items[0]} if items else {})}
    if hint is dict or origin is dict:
        found = [_describe_type(part, function, parameter) for part in get_args(hint)[1:]]
        return {"type": "object", **({"additionalProperties": found[0]} if found else {})}
    detail = f"has a type for {parameter!r} that has no JSON schema ({hint!r}); give the schema yourself"
    raise _wrong(function, detail)


def _describe_union(parts: list[Any], function: str, parameter: str) -> Schema:
    found = [_describe_type(part, function, parameter) for part in parts if part is not types.NoneType]
    if len(found) == 1:
        schema = found[0]
    elif all(set(each) == {"type"} and isinstance(each["type"], str) for each in found):
        schema = {"type": sorted(each["type"] for each in found)}
    else:
        schema = {"anyOf": found}
    if types.NoneType in parts:
        schema = {**schema, "nullable": True}
    return schema


def _read_docstring(text: str) -> tuple[str, dict[str, str], str]:
    """What a function does, what its parameters are, and what it returns."""
    pieces = _SECTION.split(text)
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    described: dict[str, str] = {}
    name = ""
    lines = inspect.cleandoc(sections.get("Args", "")).splitlines()
    for line in lines:
        found = _PARAMETER.match(line)
        if found and not line.startswith(" "):
            name = found[1]
            described[name] = found[2].strip()
        elif name:
            described[name] = f"{described[name]} {line.strip()}".strip()
    returns = " ".join(sections.get("Returns", "").split())
    return pieces[0].strip(), described, returns


def _wrong(name: str, detail: str) -> LoadError:
    return LoadError(f"{name} {detail}", argument="tools")
