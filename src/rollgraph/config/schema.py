"""What a dataclass says of the keys of a file: types with their limits, in words and as a JSON schema.

A field is `name: Annotated[type, "one line about it"] = default`. Nothing here knows which keys there are.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

SYMBOLS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {  # by their names in a JSON schema
    "minimum": ("≥", operator.ge),
    "exclusiveMinimum": (">", operator.gt),
    "maximum": ("≤", operator.le),
    "exclusiveMaximum": ("<", operator.lt),
}


class Limit(NamedTuple):
    word: str
    bound: float

    def __str__(self) -> str:
        bound = self.bound if isinstance(self.bound, int) else f"{self.bound:g}"
        return f"{SYMBOLS[self.word][0]} {bound}"

    def holds(self, value: Any) -> bool:
        return SYMBOLS[self.word][1](value, self.bound)


COMMAS = "may be written as text with commas"
PATH = "is the path of a file or folder"


@functools.cache
def hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def unwrap(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind, getattr(kind, "__metadata__", ())


class Key(NamedTuple):
    name: str  # with dots, like rollout.temperature; reward.functions[].name inside a list
    kind: Any
    default: Any  # MISSING where a value is required
    text: str


def keys_of(kind: Any, before: str = "") -> Iterator[Key]:
    """Every key in the order of the sections, sections and their keys included."""
    hints = hints_of(kind)
    for item in fields(kind):
        hint, name = hints[item.name], before + item.name
        inner, notes = unwrap(hint)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        yield Key(name, hint, default, notes[-1])
        args = [inner, *get_args(inner)]
        for section in (arg for arg in args if is_dataclass(arg)):
            yield from keys_of(section, name + ("[]." if get_origin(inner) is tuple else "."))


def spell(kind: Any) -> str:
    """A type in words: `whole number ≥ 1 or null`."""
    kind, notes = unwrap(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return f"{spell(args[0])} or null"
    if origin is tuple:
        words = f"list of {spell(args[0])}" if args[-1] is Ellipsis else f"list of {len(args)}: {spell(args[0])}"
    elif origin is Literal:
        words = " | ".join(args)
    else:
        named = {int: "whole number", float: "number", bool: "true or false", str: "text", Mapping: "mapping"}
        words = named.get(origin or kind, "section")
    limits = " and ".join(str(note) for note in notes if isinstance(note, Limit))
    return f"{words} {limits}" if limits else words


def schema_of(kind: Any) -> dict[str, Any]:
    """Of a type, with those of a dataclass's fields inside."""
    kind, notes = unwrap(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return {"anyOf": [schema_of(args[0]), {"type": "null"}]}
    if isinstance(kind, type) and is_dataclass(kind):
        hints = hints_of(kind)
        # `required` is left out: a file may leave to its defaults or to overrides what it does not say.
        properties = {}
        for item in fields(kind):
            properties[item.name] = schema_of(hints[item.name]) | {"description": unwrap(hints[item.name])[1][-1]}
            if item.default is not MISSING:
                properties[item.name]["default"] = list(item.default) if type(item.default) is tuple else item.default
        return {"type": "object", "additionalProperties": False, "properties": properties}
    if origin is tuple:
        schema: dict[str, Any] = {"type": "array", "items": schema_of(args[0])}
        if args[-1] is not Ellipsis:
            schema |= {"minItems": len(args), "maxItems": len(args)}
        return {"anyOf": [schema, {"type": "string"}]} if COMMAS in notes else schema
    if origin is Literal:
        return {"enum": list(args)}
    word = {int: "integer", float: "number", bool: "boolean", str: "string"}.get(kind, "object")
    return {"type": word, **{note.word: note.bound for note in notes if isinstance(note, Limit)}}
