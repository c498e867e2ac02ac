"""A tree of YAML becomes dataclasses, and everything that is wrong with it is reported at once.

Owns how the values of a tree are checked against the types of a dataclass, whatever its keys are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from rollgraph.config.field_types import COMMAS, PATH, Limit, hints_of, keys_of, spell, unwrap
from rollgraph.config.problems import ConfigError, ConfigProblem
from rollgraph.config.yaml_tree import LARGEST_NUMBER, Node, compose, describe, put, shorten, strip_places
from rollgraph.errors import nearest

T = TypeVar("T")
BrokenRule = tuple[str, str, str]  # the rule's name, the key, and what is wrong
_WRONG = object()


def read_tree(kind: type[T], tree: Node, overrides: Sequence[str], rules: Callable[[T], list[BrokenRule]]) -> T:
    """The dataclass of a tree; `rules` lists every broken rule that involves several keys."""
    reader = _Reader(kind)
    for override in overrides:
        try:
            tree = _apply_override(tree, override)
        except ConfigError as error:
            reader.problems += error.problems
    config: T = reader.section(kind, tree, "")
    if not reader.problems:
        for rule, key, wrong in rules(config):
            reader.problems.append(ConfigProblem(wrong, key, reader.place(key), rule))
    if reader.problems:
        raise ConfigError(reader.problems)
    return config


def _apply_override(tree: Node, override: str) -> Node:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    place = f"override {shorten(repr(override))}"
    if not equals or not all(names):
        raise ConfigError([ConfigProblem("expected key=value", place=place)])
    return put(tree, names, compose(text, place))


class _Reader:
    """Turns nodes into dataclasses and collects what is wrong on the way."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.problems: list[ConfigProblem] = []
        self.places: dict[str, str] = {}

    def place(self, key: str) -> str:
        """Where a key stands, or the nearest section around it that the file has."""
        while key not in self.places:
            key = key.rpartition(".")[0]
        return self.places[key]

    def section(self, kind: Any, node: Node, key: str) -> Any:
        self.places[key] = node.place
        hints = hints_of(kind)
        prefix = f"{key}." if key else ""
        before = len(self.problems)
        for name, inner in node.value.items():
            if name not in hints:
                detail = f"unknown key; {self._suggest_key(name, prefix, hints)}"
                self._report(detail, prefix + name, inner)
        values = {}
        for item in fields(kind):
            inner_kind, _ = unwrap(hints[item.name])
            inner_key = prefix + item.name
            if item.name in node.value:
                values[item.name] = self.read(hints[item.name], node.value[item.name], inner_key)
            elif is_dataclass(inner_kind):
                values[item.name] = self.section(inner_kind, Node({}, node.place), inner_key)
            elif item.default is MISSING and item.default_factory is MISSING:
                self._report("required, but missing", inner_key, node)
        return kind(**values) if len(self.problems) == before else _WRONG

    def read(self, kind: Any, node: Node, key: str) -> Any:
        self.places[key] = node.place
        before = len(self.problems)
        value = self._convert(kind, node, key)
        if value is _WRONG and len(self.problems) == before:
            self._report(f"expected {spell(kind)}, got {describe(node)}{_suggest_name(kind, node, key)}", key, node)
        return value

    def _report(self, detail: str, key: str, node: Node) -> None:
        self.problems.append(ConfigProblem(detail, key, node.place))

    def _convert(self, kind: Any, node: Node, key: str) -> Any:
        """The value of a node as this type; `_WRONG` if it is not one, reported already or not."""
        kind, notes = unwrap(kind)
        origin = get_origin(kind)
        args = get_args(kind)
        if origin in (Union, UnionType):
            return self._convert_any(args, node, key)
        if is_dataclass(kind):
            return self.section(kind, node, key) if isinstance(node.value, dict) else _WRONG
        if origin is tuple:
            return self._convert_list(args, notes, node, key)
        if origin is Mapping:
            return self._convert_mapping(node, key) if isinstance(node.value, dict) else _WRONG
        if origin is Literal:
            return node.value if node.value in args else _WRONG
        return self._convert_scalar(kind, notes, node, key)

    def _convert_any(self, kinds: tuple[Any, ...], node: Node, key: str) -> Any:
        """The value as the first of these types that it is a value of."""
        if node.value is None:
            return None if NoneType in kinds else _WRONG
        converted = (self._convert(kind, node, key) for kind in kinds if kind is not NoneType)
        return next((value for value in converted if value is not _WRONG), _WRONG)

    def _convert_list(self, kinds: tuple[Any, ...], notes: tuple[Any, ...], node: Node, key: str) -> Any:
        values = node.value
        if COMMAS in notes and isinstance(values, str):
            values = [Node(part.strip(), node.place) for part in values.split(",")]
        if not isinstance(values, list):
            return _WRONG
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(values)
        elif len(values) != len(kinds):
            return _WRONG
        read = []
        for index, (kind, value) in enumerate(zip(kinds, values, strict=True)):
            read.append(self.read(kind, value, f"{key}[{index}]"))
        return tuple(read)

    def _convert_mapping(self, node: Node, key: str) -> Any:
        """A mapping with any keys. Their places are kept, because a rule may be about one of them."""
        for name, inner in node.value.items():
            self.places[f"{key}.{name}"] = inner.place
        return strip_places(node)

    def _convert_scalar(self, kind: Any, notes: tuple[Any, ...], node: Node, key: str) -> Any:
        value = node.value
        if kind in (int, float) and type(value) is int and abs(value) > LARGEST_NUMBER:
            self._report(f"{describe(node)} is larger than 2^63 - 1", key, node)
            return _WRONG
        if kind is float and type(value) is int:
            value = float(value)
        if PATH in notes and isinstance(value, str) and "\0" in value:
            self._report(f"a path cannot hold a NUL character, got {describe(node)}", key, node)
            return _WRONG
        if type(value) is not kind:
            return _WRONG
        limits = (note for note in notes if isinstance(note, Limit))
        return value if all(limit.holds(value) for limit in limits) else _WRONG

    def _suggest_key(self, name: str, prefix: str, names: Iterable[str]) -> str:
        """The nearest key of this section, else the nearest of all sections, else what the section has."""
        near = nearest(name, names)
        if near is not None:
            return f"did you mean {prefix}{near}?"
        by_last_name: dict[str, str] = {}
        for key in keys_of(self.root):
            by_last_name.setdefault(key.name.rpartition(".")[2], key.name)
        near = nearest(name, by_last_name, cutoff=0.8)
        if near is not None:
            return f"did you mean {by_last_name[near]}?"
        return f"expected one of {', '.join(names)}"


def _suggest_name(kind: Any, node: Node, key: str) -> str:
    """What to write in place of `algorithm: dapo`, where a section has a name."""
    kind, _ = unwrap(kind)
    has_name = is_dataclass(kind) and any(item.name == "name" for item in fields(kind))
    return f"; did you mean {key}.name?" if has_name and isinstance(node.value, str) else ""
