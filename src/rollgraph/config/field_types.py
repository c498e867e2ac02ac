"""What a dataclass says about the keys of a file: types and limits, in words and as a JSON schema.

A field is `name: Annotated[type, "A sentence about it."] = default`. Nothing here knows which keys
there are: `keys.py` has them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

SYMBOLS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {  # by their names in a JSON schema
    "minimum": ("≥", operator.ge),
    "exclusiveMinimum": (">", operator.gt),
    "maximum": ("≤", operator.le),
    "exclusiveMaximum": ("<", operator.lt),
}
WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", Mapping: "mapping", NoneType: "null"}
JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", NoneType: "null"}


class Limit(NamedTuple):
    word: str
    bound: float

    def __str__(self) -> str:
        symbol, _ = SYMBOLS[self.word]
        bound = self.bound if isinstance(self.bound, int) else f"{self.bound:g}"
        return f"{symbol} {bound}"

    def holds(self, value: Any) -> bool:
        _, compare = SYMBOLS[self.word]
        return compare(value, self.bound)


COMMAS = "may be written as text with commas"
PATH = "is the path of a file or folder"


class Key(NamedTuple):
    name: str  # with dots, like rollout.temperature; reward.functions[].name inside a list
    kind: Any
    default: Any  # MISSING if a value is required
    text: str


@functools.cache
def hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def unwrap(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type inside an `Annotated`, and what it is annotated with."""
    if get_origin(kind) is not Annotated:
        return kind, ()
    return get_args(kind)[0], kind.__metadata__


def keys_of(kind: Any, prefix: str = "") -> Iterator[Key]:
    """Every key in the order of the sections, including the sections themselves."""
    hints = hints_of(kind)
    for item in fields(kind):
        name = prefix + item.name
        inner, notes = unwrap(hints[item.name])
        yield Key(name, hints[item.name], _default_of(item), notes[-1])
        inner_prefix = f"{name}[]." if get_origin(inner) is tuple else f"{name}."
        for section in (inner, *get_args(inner)):
            if is_dataclass(section):
                yield from keys_of(section, inner_prefix)


def _default_of(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return item.default


def spell(kind: Any) -> str:
    """A type in words: `whole number ≥ 1 or null`."""
    kind, notes = unwrap(kind)
    origin = get_origin(kind)
    args = get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(spell, args))
    if origin is tuple and args[-1] is Ellipsis:
        words = f"list of {spell(args[0])}"
    elif origin is tuple:
        words = f"list of {len(args)}: {spell(args[0])}"
    elif origin is Literal:
        words = " | ".join(args)
    else:
        words = WORDS.get(origin or kind, "section")
    limits = " and ".join(str(note) for note in notes if isinstance(note, Limit))
    return f"{words} {limits}" if limits else words


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type; that of a dataclass contains those of its fields."""
    kind, notes = unwrap(kind)
    origin = get_origin(kind)
    args = get_args(kind)
    if origin in (Union, UnionType):
        return {"anyOf": list(map(schema_of, args))}
    if isinstance(kind, type) and is_dataclass(kind):
        return _schema_of_section(kind)
    if origin is tuple:
        schema: dict[str, Any] = {"type": "array", "items": schema_of(args[0])}
        if args[-1] is not Ellipsis:
            schema |= {"minItems": len(args), "maxItems": len(args)}
        return {"anyOf": [schema, {"type": "string"}]} if COMMAS in notes else schema
    if origin is Literal:
        return {"enum": list(args)}
    limits = {note.word: note.bound for note in notes if isinstance(note, Limit)}
    return {"type": JSON_TYPES.get(kind, "object"), **limits}


def _schema_of_section(kind: Any) -> dict[str, Any]:
    # `required` is left out: a file need not give what its defaults or the overrides will.
    hints = hints_of(kind)
    properties = {}
    for item in fields(kind):
        _, notes = unwrap(hints[item.name])
        schema = schema_of(hints[item.name]) | {"description": notes[-1]}
        if item.default is not MISSING:
            schema["default"] = list(item.default) if isinstance(item.default, tuple) else item.default
        properties[item.name] = schema
    return {"type": "object", "additionalProperties": False, "properties": properties}
