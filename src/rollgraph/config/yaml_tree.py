"""YAML as a tree of nodes with line numbers: parsing, overriding a value, and printing.

Decides which words are numbers, how large a file may be, and how an override changes a tree. Knows no keys. PyYAML is
imported only when a text is parsed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rollgraph.config.fields import ConfigError, ConfigProblem
from rollgraph.files import MAX_NESTING, TOO_DEEP

# -- parsing, and overrides ------------------------------------------------------------------------

MAX_VALUES = 30_000  # in one file: aliases and interpolations can multiply a few lines without end
MAX_DIGITS = 4300  # Python refuses to convert longer integers
MAX_INTEGER = 2**63 - 1


class Node(NamedTuple):
    """A value and its location: `run.yaml:3`, or `override 'steps=3'`."""

    value: Any  # None, bool, int, float, str, list[Node] or dict[str, Node]
    location: str


@dataclass
class ValueBudget:
    """Counts the values of a file, up to a limit."""

    remaining: int = MAX_VALUES

    def spend(self, location: str, depth: int = 0) -> None:
        self.remaining -= 1
        if self.remaining < 0:
            detail = f"there are more than {MAX_VALUES} values, counting those that aliases repeat"
            raise ConfigError([ConfigProblem(detail, location=location)])
        if depth > MAX_NESTING:
            raise ConfigError([ConfigProblem(f"unusable YAML: {TOO_DEEP}", location=location)])


def parse_yaml(text: str, location: str) -> Node:
    """Parse YAML. `location` may contain {line}, which becomes the line of each node."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    def at(mark: Any) -> str:
        line = mark.line + 1 if mark else 1
        return location.replace("{line}", str(line))

    def fail(detail: str, mark: Any = None) -> ConfigError:
        return ConfigError([ConfigProblem(detail, location=at(mark))])

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return Node(None, at(None))
        converter = _NodeConverter(at, yaml.ScalarNode, yaml.SequenceNode)
        tree = converter.convert(root)
    except yaml.MarkedYAMLError as error:
        raise fail(f"not YAML: {error.problem}", error.problem_mark) from None
    except yaml.YAMLError as error:
        raise fail(f"not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise fail(f"unusable YAML: {TOO_DEEP}") from None
    if converter.problems:
        raise ConfigError(converter.problems)
    return tree


class _NodeConverter:
    """Turns PyYAML's nodes into ours and collects the problems."""

    def __init__(self, at: Callable[[Any], str], scalar_kind: Any, sequence_kind: Any) -> None:
        self.problems: list[ConfigProblem] = []
        self._budget = ValueBudget()
        self._at = at
        self._scalar_kind = scalar_kind  # PyYAML's classes are passed in, because PyYAML is imported only when needed
        self._sequence_kind = sequence_kind

    def convert(self, node: Any, depth: int = 0) -> Node:
        location = self._at(node.start_mark)
        self._budget.spend(location, depth)
        if not re.fullmatch(r"tag:yaml\.org,2002:[a-z]+", node.tag):
            self.problems.append(ConfigProblem(f"the tag {node.tag} is not supported", location=location))
        if isinstance(node, self._scalar_kind):
            return Node(self._scalar(node, location), location)
        if isinstance(node, self._sequence_kind):
            return Node([self.convert(item, depth + 1) for item in node.value], location)
        mapping: dict[str, Node] = {}
        for key, value in node.value:
            # A value may start on a later line than its key. People look for the key.
            key_location = self._at(key.start_mark)
            if not isinstance(key, self._scalar_kind):
                self.problems.append(ConfigProblem("a key must be text", location=key_location))
            elif key.value in mapping:
                self.problems.append(ConfigProblem("given twice", key.value, key_location))
            else:
                mapping[key.value] = self.convert(value, depth + 1)._replace(location=key_location)
        return Node(mapping, location)

    def _scalar(self, node: Any, location: str) -> Any:
        if node.style is not None:  # quoted
            return node.value
        try:
            return parse_scalar(node.value)
        except ValueError as error:
            self.problems.append(ConfigProblem(str(error), location=location))
            return None


def parse_scalar(text: str) -> Any:
    """The value of an unquoted word in YAML 1.2. Unlike in PyYAML, 1e-6 is a number, and `no` and `on` are text."""
    if text in ("true", "false"):
        return text == "true"
    if text in ("", "~", "null"):
        return None
    if re.fullmatch(r"[-+]?[0-9][0-9_]*", text) and not text.endswith("_") and "__" not in text:
        if len(text) > MAX_DIGITS:
            raise ValueError(f"the number {text[:20]}... has more than {MAX_DIGITS} digits")
        return int(text)
    if re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text) and math.isfinite(float(text)):
        return float(text)
    return text


def reads_as_text(word: str) -> bool:
    """Whether an unquoted word is read as text, and not as a number, a boolean or null."""
    try:
        return bool(parse_scalar(word) == word)
    except ValueError:
        return False


def insert_leaf(tree: Node, names: Sequence[str], leaf: Node) -> Node:
    """A copy of the tree with `leaf` at this key. A scalar or list on the way is replaced by a mapping."""
    if not names:
        return leaf
    children: dict[str, Node] = {}
    location = leaf.location
    if isinstance(tree.value, dict):
        children = tree.value
        location = tree.location
    child = insert_leaf(children.get(names[0], Node({}, leaf.location)), names[1:], leaf)
    return Node({**children, names[0]: child}, location)


def strip_locations(node: Node) -> Any:
    """A node as plain dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {name: strip_locations(inner) for name, inner in node.value.items()}
    if isinstance(node.value, list):
        return [strip_locations(inner) for inner in node.value]
    return node.value


def describe_node(node: Node) -> str:
    """A node for the end of a message, such as `the text 'small'` in `got the text 'small'`."""
    if isinstance(node.value, str):
        return f"the text {shorten(repr(node.value))}"
    if isinstance(node.value, list):
        return f"a list of {len(node.value)}"
    if isinstance(node.value, dict):
        return "a mapping"
    return shorten(json.dumps(node.value))


def shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:100]}..."


# -- writing a configuration -----------------------------------------------------------------------


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as dicts, lists, strings and numbers, ready for JSON or YAML."""
    return {name: _plain(value) for name, value in asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, str) else value


def to_yaml(config: Any) -> str:
    """The resolved configuration as YAML. Reading it gives an equal configuration."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, unused-ignore]
        def represent_text(self, text: str) -> Any:
            style = None
            if not reads_as_text(text):
                style = "'"  # otherwise it would be read as a number
            if not text.isprintable():
                style = '"'  # the only style that keeps every kind of line break
            return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, Dumper.represent_text)
    return str(yaml.dump(to_dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120))
