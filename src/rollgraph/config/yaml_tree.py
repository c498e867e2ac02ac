"""YAML as a tree of nodes that know where they stand, so that every later error can name its line.

Owns which words are numbers, how large a file may be, and how an override reaches into a tree. Nothing here knows which
keys there are. PyYAML is imported when a text is parsed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollgraph.config.problems import ConfigError, ConfigProblem
from rollgraph.files import DEEPEST, TOO_DEEP

MOST_VALUES = 30_000  # in one file: aliases and interpolations can multiply a few lines without end
MOST_DIGITS = 4300  # Python refuses to convert longer integers
LARGEST_NUMBER = 2**63 - 1


class Node(NamedTuple):
    """A value of the file, and where it stands: `run.yaml:3`, or `override 'steps=3'`."""

    value: Any  # None, bool, int, float, str, list[Node] or dict[str, Node]
    place: str


@dataclass
class Budget:
    """How many more values a file may have."""

    left: int = MOST_VALUES

    def spend(self, place: str, depth: int = 0) -> None:
        self.left -= 1
        if self.left < 0:
            detail = f"there are more than {MOST_VALUES} values, counting those that aliases repeat"
            raise ConfigError([ConfigProblem(detail, place=place)])
        if depth > DEEPEST:
            raise ConfigError([ConfigProblem(f"not YAML that can be used: {TOO_DEEP}", place=place)])


def compose(text: str, place: str) -> Node:
    """The tree of a text; `place` may contain {line}, which becomes the line of each node."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    def at(mark: Any) -> str:
        line = mark.line + 1 if mark else 1
        return place.replace("{line}", str(line))

    def fail(detail: str, mark: Any = None) -> ConfigError:
        return ConfigError([ConfigProblem(detail, place=at(mark))])

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return Node(None, at(None))
        composer = _Composer(at, yaml.ScalarNode, yaml.SequenceNode)
        tree = composer.convert(root)
    except yaml.MarkedYAMLError as error:
        raise fail(f"not YAML: {error.problem}", error.problem_mark) from None
    except yaml.YAMLError as error:
        raise fail(f"not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise fail(f"not YAML that can be used: {TOO_DEEP}") from None
    if composer.problems:
        raise ConfigError(composer.problems)
    return tree


class _Composer:
    """Turns PyYAML's nodes into ours and collects what is wrong on the way."""

    def __init__(self, at: Callable[[Any], str], scalar_kind: Any, sequence_kind: Any) -> None:
        self.problems: list[ConfigProblem] = []
        self._budget = Budget()
        self._at = at
        self._scalar_kind = scalar_kind  # classes of PyYAML, which is only imported when needed
        self._sequence_kind = sequence_kind

    def convert(self, node: Any, depth: int = 0) -> Node:
        here = self._at(node.start_mark)
        self._budget.spend(here, depth)
        if not re.fullmatch(r"tag:yaml\.org,2002:[a-z]+", node.tag):
            self.problems.append(ConfigProblem(f"the tag {node.tag} is not supported", place=here))
        if isinstance(node, self._scalar_kind):
            return Node(self._scalar(node, here), here)
        if isinstance(node, self._sequence_kind):
            return Node([self.convert(item, depth + 1) for item in node.value], here)
        found: dict[str, Node] = {}
        for key, value in node.value:
            # A value may start on a later line than its key, and people look for the key.
            key_place = self._at(key.start_mark)
            if not isinstance(key, self._scalar_kind):
                self.problems.append(ConfigProblem("a key must be text", place=key_place))
            elif key.value in found:
                self.problems.append(ConfigProblem("given twice", key.value, key_place))
            else:
                found[key.value] = self.convert(value, depth + 1)._replace(place=key_place)
        return Node(found, here)

    def _scalar(self, node: Any, here: str) -> Any:
        if node.style is not None:  # quoted
            return node.value
        try:
            return parse_word(node.value)
        except ValueError as error:
            self.problems.append(ConfigProblem(str(error), place=here))
            return None


def parse_word(text: str) -> Any:
    """The value of an unquoted word by YAML 1.2: unlike in PyYAML, 1e-6 is a number, and `no` and `on` are text."""
    if text in ("true", "false"):
        return text == "true"
    if text in ("", "~", "null"):
        return None
    if re.fullmatch(r"[-+]?[0-9][0-9_]*", text) and not text.endswith("_") and "__" not in text:
        if len(text) > MOST_DIGITS:
            raise ValueError(f"the number {text[:20]}... has more than {MOST_DIGITS} digits")
        return int(text)
    if re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text) and math.isfinite(float(text)):
        return float(text)
    return text


def reads_as_text(word: str) -> bool:
    """Whether the word means itself when it is not quoted."""
    try:
        return bool(parse_word(word) == word)
    except ValueError:
        return False


def put(tree: Node, names: Sequence[str], leaf: Node) -> Node:
    """The tree with `leaf` at this key; what stands in the way of it is replaced by a mapping."""
    if not names:
        return leaf
    inside: dict[str, Node] = {}
    place = leaf.place
    if isinstance(tree.value, dict):
        inside = tree.value
        place = tree.place
    below = put(inside.get(names[0], Node({}, leaf.place)), names[1:], leaf)
    return Node({**inside, names[0]: below}, place)


def strip_places(node: Node) -> Any:
    """The plain value: dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {name: strip_places(inner) for name, inner in node.value.items()}
    if isinstance(node.value, list):
        return [strip_places(inner) for inner in node.value]
    return node.value


def describe(node: Node) -> str:
    """A node as the end of a message: `got the text 'small'`."""
    if isinstance(node.value, str):
        return f"the text {shorten(repr(node.value))}"
    if isinstance(node.value, list):
        return f"a list of {len(node.value)}"
    if isinstance(node.value, dict):
        return "a mapping"
    return shorten(json.dumps(node.value))


def shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:100]}..."
