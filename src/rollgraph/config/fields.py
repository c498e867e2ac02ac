"""Types and limits of configuration keys, in words and as a JSON schema, and the errors that name a key."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

from rollgraph.errors import InvalidInput

# -- types and limits of a dataclass ---------------------------------------------------------------
# A field is `name: Annotated[type, "A sentence about it."] = default`. The keys themselves are in `keys.py`.

LIMIT_SYMBOLS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {  # by JSON schema keyword
    "minimum": ("≥", operator.ge),
    "exclusiveMinimum": (">", operator.gt),
    "maximum": ("≤", operator.le),
    "exclusiveMaximum": ("<", operator.lt),
}
TYPE_NAMES = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Mapping: "mapping",
    NoneType: "null",
}
JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", NoneType: "null"}


class Limit(NamedTuple):
    keyword: str
    bound: float
    advice: str = ""  # shown with a value outside this limit

    def __str__(self) -> str:
        symbol, _ = LIMIT_SYMBOLS[self.keyword]
        bound = self.bound if isinstance(self.bound, int) else f"{self.bound:g}"
        return f"{symbol} {bound}"

    def allows(self, value: Any) -> bool:
        _, compare = LIMIT_SYMBOLS[self.keyword]
        return compare(value, self.bound)


COMMA_SEPARATED = "may be written as text with commas"
IS_PATH = "is the path of a file or folder"


class Key(NamedTuple):
    name: str  # with dots, like rollout.temperature; reward.functions[].name inside a list
    kind: Any
    default: Any  # MISSING if a value is required
    text: str


@functools.cache
def type_hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def split_annotated(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type inside an `Annotated`, and its metadata."""
    if get_origin(kind) is not Annotated:
        return kind, ()
    return get_args(kind)[0], kind.__metadata__


@functools.cache
def keys_of(kind: Any, prefix: str = "") -> tuple[Key, ...]:
    """Every key of a dataclass in the order of its fields, sections included."""
    keys: list[Key] = []
    hints = type_hints_of(kind)
    for item in fields(kind):
        name = prefix + item.name
        inner, notes = split_annotated(hints[item.name])
        keys.append(Key(name, hints[item.name], _default_of(item), notes[-1]))
        inner_prefix = f"{name}[]." if get_origin(inner) is tuple else f"{name}."
        for section in (inner, *get_args(inner)):
            if isinstance(section, type) and is_dataclass(section):
                keys += keys_of(section, inner_prefix)
    return tuple(keys)


def _default_of(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return item.default


def describe_type(kind: Any) -> str:
    """A type in words: `whole number ≥ 1 or null`."""
    kind, notes = split_annotated(kind)
    origin = get_origin(kind)
    args = get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(describe_type, args))
    if origin is tuple and args[-1] is Ellipsis:
        words = f"list of {describe_type(args[0])}"
    elif origin is tuple:
        words = f"list of {len(args)}: {describe_type(args[0])}"
    elif origin is Literal:
        words = " | ".join(args)
    else:
        words = TYPE_NAMES.get(origin or kind, "section")
    limits = " and ".join(str(note) for note in notes if isinstance(note, Limit))
    return f"{words} {limits}" if limits else words


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type. A dataclass becomes an object with a property for each field."""
    kind, notes = split_annotated(kind)
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
        return {"anyOf": [schema, {"type": "string"}]} if COMMA_SEPARATED in notes else schema
    if origin is Literal:
        return {"enum": list(args)}
    limits = {note.keyword: note.bound for note in notes if isinstance(note, Limit)}
    return {"type": JSON_TYPES.get(kind, "object"), **limits}


def _schema_of_section(kind: Any) -> dict[str, Any]:
    # No `required`: the files under `defaults` or the overrides may set a key that this file does not.
    hints = type_hints_of(kind)
    properties = {}
    for item in fields(kind):
        _, notes = split_annotated(hints[item.name])
        schema = schema_of(hints[item.name]) | {"description": notes[-1]}
        if item.default is not MISSING:
            schema["default"] = list(item.default) if isinstance(item.default, tuple) else item.default
        properties[item.name] = schema
    return {"type": "object", "additionalProperties": False, "properties": properties}


# -- object path -----------------------------------------------------------------------------------
# A Python program may pass a class or a function where a YAML file has an import path.


class ObjectPath(str):
    """An import path that also holds its object: `ObjectPath(Maze)` equals "my_game:Maze".

    It prints, compares and pickles as plain text, so a copy in a file or in another process is only the path.
    """

    target: Any

    def __new__(cls, target: Callable[..., Any]) -> Self:
        path = super().__new__(cls, import_path_of(target))
        path.target = target
        return path

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def import_path_of(target: Callable[..., Any]) -> str:
    """The import path of a function or a class, such as `my_game:Maze`."""
    definition = unwrap_callable(target)
    return f"{definition.__module__}:{definition.__qualname__}"


def unwrap_callable(target: Any) -> Any:
    """The function inside a partial, or the class of a callable object; both have a name that can be imported."""
    while isinstance(target, partial):
        target = target.func
    return target if inspect.isroutine(target) or isinstance(target, type) else type(target)


# -- problems --------------------------------------------------------------------------------------
# Only the records. `reader.py` finds the problems and suggests keys.


@dataclass(frozen=True)
class ConfigProblem:
    """One thing that is wrong with a configuration.

    >>> str(ConfigProblem("expected whole number ≥ 1, got 0", key="steps", location="run.yaml:3"))
    'run.yaml:3: steps: expected whole number ≥ 1, got 0'
    """

    detail: str
    key: str = ""  # with dots, like rollout.temperature; empty if the problem is not about one key
    location: str = ""  # `run.yaml:3`, or `override 'steps=3'`; empty if only the resolved configuration is known
    rule: str = ""  # name of the broken rule, for a problem that involves several keys

    def __str__(self) -> str:
        message = ": ".join(part for part in (self.location, self.key, self.detail) if part)
        return f"{message} [{self.rule}]" if self.rule else message


class ConfigError(ValueError):
    """All problems of a configuration, one line each."""

    def __init__(self, problems: Sequence[ConfigProblem | str]) -> None:
        self.problems: tuple[ConfigProblem, ...] = tuple(
            ConfigProblem(problem) if isinstance(problem, str) else problem for problem in problems
        )
        super().__init__("\n".join(map(str, self.problems)))


# -- errors in terms of configuration keys ---------------------------------------------------------


@contextmanager
def name_key_in_errors(section: str) -> Iterator[None]:
    """Errors raised inside name a configuration key.

    An InvalidInput about an argument names `section.argument`. Any other error names the section.
    """
    key = section.removesuffix(".options")
    try:
        yield
    except ConfigError:
        raise
    except InvalidInput as error:
        renamed = error.renamed(lambda argument: f"{section}.{argument}")
        if renamed.argument is None:
            renamed = type(error)(
                renamed.detail, argument=key, location=renamed.location, alternative=renamed.alternative
            )
        raise renamed from error
    except ImportError as error:
        raise ImportError(f"{key}: {error}", name=error.name) from error
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
