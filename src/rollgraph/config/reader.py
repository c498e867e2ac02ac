"""Turns a YAML tree into dataclasses and reports all problems at once.

Checks each value against the type of its dataclass field. Works for any dataclass, not only `Config`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from rollgraph.config.fields import (
    COMMA_SEPARATED,
    IS_PATH,
    ConfigError,
    ConfigProblem,
    Limit,
    ObjectPath,
    describe_type,
    keys_of,
    split_annotated,
    type_hints_of,
)
from rollgraph.config.names import (
    ALGORITHM,
    OPTIONS,
    RENAMED,
    Counterpart,
    counterpart_of,
    counterpart_of_algorithm,
    option_keys,
)
from rollgraph.config.yaml_tree import (
    MAX_INTEGER,
    Node,
    describe_node,
    insert_leaf,
    parse_yaml,
    shorten,
    strip_locations,
)
from rollgraph.errors import nearest

T = TypeVar("T")
BrokenRule = tuple[str, str, str]  # rule name, key, message
_INVALID = object()


def read_tree(kind: type[T], tree: Node, overrides: Sequence[str], rules: Callable[[T], list[BrokenRule]]) -> T:
    """Convert a tree into a dataclass, then check it with `rules`, which lists the broken rules across keys."""
    reader = _ConfigReader(kind)
    for override in overrides:
        try:
            tree = _apply_override(tree, override)
        except ConfigError as error:
            reader.problems += error.problems
    config: T = reader.read_section(kind, tree, "")
    if not reader.problems:
        for rule, key, message in rules(config):
            reader.problems.append(ConfigProblem(message, key, reader.location_of(key), rule))
    if reader.problems:
        raise ConfigError(reader.problems)
    return config


def _apply_override(tree: Node, override: str) -> Node:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    location = f"override {shorten(repr(override))}"
    if not equals or not all(names):
        raise ConfigError([ConfigProblem("expected key=value", location=location)])
    return insert_leaf(tree, names, parse_yaml(text, location))


class _ConfigReader:
    """Turns nodes into dataclasses and collects the problems."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.problems: list[ConfigProblem] = []
        self.locations: dict[str, str] = {}

    def location_of(self, key: str) -> str:
        """File and line of a key, or of the innermost enclosing section that the file has."""
        while key not in self.locations:
            key = key.rpartition(".")[0]
        return self.locations[key]

    def read_section(self, kind: Any, node: Node, key: str) -> Any:
        self.locations[key] = node.location
        hints = type_hints_of(kind)
        prefix = f"{key}." if key else ""
        problems_before = len(self.problems)
        for name, inner in node.value.items():
            if name not in hints:
                self._report_unknown(prefix + name, inner, hints)
        values = {}
        for item in fields(kind):
            inner_kind, _ = split_annotated(hints[item.name])
            inner_key = prefix + item.name
            if item.name in node.value:
                values[item.name] = self.read(hints[item.name], node.value[item.name], inner_key)
            elif is_dataclass(inner_kind):
                values[item.name] = self.read_section(inner_kind, Node({}, node.location), inner_key)
            elif item.default is MISSING and item.default_factory is MISSING:
                self._report("required, but missing", inner_key, node)
        return kind(**values) if len(self.problems) == problems_before else _INVALID

    def read(self, kind: Any, node: Node, key: str) -> Any:
        self.locations[key] = node.location
        problems_before = len(self.problems)
        value = self._convert(kind, node, key)
        if value is _INVALID and len(self.problems) == problems_before:
            hint = _suggest_name(kind, node, key) or _limit_advice(kind, node.value)
            self._report(f"expected {describe_type(kind)}, got {describe_node(node)}{hint}", key, node)
        return value

    def _report(self, detail: str, key: str, node: Node) -> None:
        self.problems.append(ConfigProblem(detail, key, node.location))

    def _convert(self, kind: Any, node: Node, key: str) -> Any:
        """A node's value as this type, or `_INVALID`. The problem may or may not be reported already."""
        kind, metadata = split_annotated(kind)
        origin = get_origin(kind)
        args = get_args(kind)
        if origin in (Union, UnionType):
            return self._convert_union(args, node, key)
        if is_dataclass(kind):
            return self.read_section(kind, node, key) if isinstance(node.value, dict) else _INVALID
        if origin is tuple:
            return self._convert_list(args, metadata, node, key)
        if origin is Mapping:
            return self._convert_mapping(node, key) if isinstance(node.value, dict) else _INVALID
        if origin is Literal:
            return node.value if node.value in args else _INVALID
        return self._convert_scalar(kind, metadata, node, key)

    def _convert_union(self, kinds: tuple[Any, ...], node: Node, key: str) -> Any:
        """The value as the first of these types that accepts it."""
        if node.value is None:
            return None if NoneType in kinds else _INVALID
        converted = (self._convert(kind, node, key) for kind in kinds if kind is not NoneType)
        return next((value for value in converted if value is not _INVALID), _INVALID)

    def _convert_list(self, kinds: tuple[Any, ...], metadata: tuple[Any, ...], node: Node, key: str) -> Any:
        values = node.value
        if COMMA_SEPARATED in metadata and isinstance(values, str):
            values = [Node(part.strip(), node.location) for part in values.split(",")]
        if not isinstance(values, list):
            return _INVALID
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(values)
        elif len(values) != len(kinds):
            return _INVALID
        converted = []
        for index, (kind, value) in enumerate(zip(kinds, values, strict=True)):
            converted.append(self.read(kind, value, f"{key}[{index}]"))
        return tuple(converted)

    def _convert_mapping(self, node: Node, key: str) -> Any:
        """A mapping with arbitrary keys. We record their locations, because a rule may be about one of them."""
        for name, inner in node.value.items():
            self.locations[f"{key}.{name}"] = inner.location
        return strip_locations(node)

    def _convert_scalar(self, kind: Any, metadata: tuple[Any, ...], node: Node, key: str) -> Any:
        value = node.value
        if kind in (int, float) and type(value) is int and abs(value) > MAX_INTEGER:
            self._report(f"{describe_node(node)} is larger than 2^63 - 1", key, node)
            return _INVALID
        if kind is float and type(value) is int:
            value = float(value)
        if IS_PATH in metadata and isinstance(value, str) and "\0" in value:
            self._report(f"a path cannot hold a NUL character, got {describe_node(node)}", key, node)
            return _INVALID
        if type(value) is not kind and not (kind is str and isinstance(value, ObjectPath)):
            return _INVALID
        limits = (limit for limit in metadata if isinstance(limit, Limit))
        return value if all(limit.allows(value) for limit in limits) else _INVALID

    def _report_unknown(self, key: str, node: Node, names: Iterable[str]) -> None:
        """Report an unknown key with advice.

        If other frameworks have this key, or keys inside it, we report each of those with our counterpart. Otherwise we
        suggest a similar key. `names` are the keys of the section.
        """
        by_last_name: dict[str, str] = {}  # our keys by the part after the last dot; the first one with that part
        for our_key in keys_of(self.root):
            by_last_name.setdefault(our_key.name.rpartition(".")[2], our_key.name)
        counterparts = _counterparts(key, node, by_last_name)
        for inner_key, inner, counterpart in counterparts:
            self._report(f"unknown key; {counterpart}", inner_key, inner)
        if not counterparts:
            self._report(f"unknown key; {_suggest_key(key, names, by_last_name)}", key, node)


def _counterparts(key: str, node: Node, our_names: Collection[str]) -> list[tuple[str, Node, Counterpart]]:
    """(key, node, counterpart) for this key and all keys inside it that another framework has."""
    counterpart = counterpart_of(key, our_names)
    counterparts = [] if counterpart is None else [(key, node, counterpart)]
    if isinstance(node.value, dict):
        for name, inner in node.value.items():
            counterparts += _counterparts(f"{key}.{name}", inner, our_names)
    return counterparts


def _suggest_key(key: str, names: Iterable[str], by_last_name: Mapping[str, str]) -> str:
    """A key of the same name in another section, else the nearest name in this section, else the nearest anywhere."""
    if key in RENAMED:
        return f"it is {RENAMED[key]} now"
    name = key.rpartition(".")[2]
    if name in by_last_name:
        return f"did you mean {by_last_name[name]}?"
    if f"{OPTIONS}{name}" in option_keys():
        return f"did you mean {OPTIONS}{name}?"
    near = nearest(name, names)
    if near is not None:
        return f"did you mean {key.removesuffix(name)}{near}?"
    near = nearest(name, by_last_name, cutoff=0.8)
    if near is not None:
        return f"did you mean {by_last_name[near]}?"
    return f"expected one of {', '.join(names)}"


def _suggest_name(kind: Any, node: Node, key: str) -> str:
    """A hint for a value that should be the name inside a section, such as `algorithm: dapo`."""
    kind, _ = split_annotated(kind)
    has_name = is_dataclass(kind) and any(item.name == "name" for item in fields(kind))
    if not (has_name and isinstance(node.value, str)):
        return ""
    counterpart = counterpart_of_algorithm(node.value) if key == ALGORITHM else None
    remark = f" {node.value} {counterpart.answer()}" if counterpart else ""
    return f"; did you mean {key}.name?{remark}"


def _limit_advice(kind: Any, value: Any) -> str:
    """The advice of the limits that a number violates."""
    _, metadata = split_annotated(kind)
    if type(value) not in (int, float):
        return ""
    violated = (limit for limit in metadata if isinstance(limit, Limit) and not limit.allows(value))
    return "".join(f"; {limit.advice}" for limit in violated if limit.advice)
