"""Resolves OmegaConf's interpolations in a tree: `${a.b}` is the value of a key, `${mul:2,3}` calls a resolver.

Knows the resolvers that NeMo-RL registers, and `oc.env`. Limits what a few lines can expand to.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable
from typing import Any

from rollgraph.compat.omegaconf_yaml import NUMBER
from rollgraph.config import ConfigError
from rollgraph.config.yaml_tree import LARGEST_NUMBER, MOST_VALUES, Node

RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {  # those that NeMo-RL registers
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}
LONGEST_TEXT = 100_000  # characters that interpolations may produce in one value


class _Unresolved(Exception):
    """One interpolation cannot be resolved; the resolver adds the place and the key."""


class Resolver:
    """Replaces every `${...}` in a tree by its value, and collects those that have none."""

    def __init__(self, tree: Node) -> None:
        self.tree = tree
        self.open: list[str] = []  # keys being resolved, to detect cycles
        self.problems: list[str] = []
        self.known: dict[str, tuple[Any, int]] = {}  # key -> its value, computed once, and how many values it holds
        self.left = MOST_VALUES  # how many more values the whole tree may have

    def resolve_all(self) -> Node:
        tree = self.walk(self.tree, ())
        if self.problems:
            raise ConfigError(self.problems)
        return tree

    def walk(self, node: Node, path: tuple[str, ...]) -> Node:
        self.spend(node)
        if isinstance(node.value, dict):
            return node._replace(value={name: self.walk(inner, (*path, name)) for name, inner in node.value.items()})
        if isinstance(node.value, list):
            return node._replace(value=[self.walk(item, (*path, str(i))) for i, item in enumerate(node.value)])
        try:
            return node._replace(value=self.value_of(node, path))
        except _Unresolved as error:
            self.problems.append(f"{node.place}: {'.'.join(path)}: {error}")
            return node
        except RecursionError:
            self.problems.append(f"{node.place}: {'.'.join(path)}: interpolations are nested too deeply")
            return node

    def spend(self, node: Node, count: int = 1) -> None:
        self.left -= count
        if self.left < 0:
            too_many = f"{node.place}: interpolations stand for more than {MOST_VALUES} values"
            raise ConfigError([*self.problems, too_many])

    def value_of(self, node: Node, path: tuple[str, ...]) -> Any:
        if not isinstance(node.value, str) or "${" not in node.value:
            return node.value
        key = ".".join(path)
        if key in self.known:
            value, size = self.known[key]
            self.spend(node, size)
            return value
        self.refuse_cycle(key)
        self.open.append(key)
        left = self.left
        try:
            value = self.expand(node.value, path)
        finally:
            self.open.pop()
        self.known[key] = value, left - self.left
        return value

    def refuse_cycle(self, key: str) -> None:
        if key in self.open:
            raise _Unresolved(f"refers to itself: {' -> '.join([*self.open, key])}")

    def expand(self, text: str, path: tuple[str, ...]) -> Any:
        """A text that is a single interpolation becomes its value; in any other text, values are inserted."""
        parts: list[Any] = []
        rest = text
        start = rest.find("${")
        while start >= 0:
            end = _find_closing(rest, start)
            if start:
                parts.append(rest[:start])
            parts.append(self.interpolate(rest[start + 2 : end], path))
            rest = rest[end + 1 :]
            start = rest.find("${")
        if rest:
            parts.append(rest)
        if len(parts) == 1:
            return parts[0]
        whole = "".join(map(str, parts))
        if len(whole) > LONGEST_TEXT:
            raise _Unresolved(f"stands for a text of more than {LONGEST_TEXT} characters")
        return whole

    def interpolate(self, inside: str, path: tuple[str, ...]) -> Any:
        name, colon, arguments = inside.partition(":")
        if not colon or "${" in name:
            return self.look_up(str(self.expand(inside, path)).strip(), path)
        values = [self.read_argument(part, path) for part in _split_arguments(arguments)]
        if name.strip() == "oc.env":
            return _read_environment(*map(str, values))
        if name.strip() not in RESOLVERS:
            raise _Unresolved(f"${{{inside}}}: no resolver {name!r}; known are {', '.join(RESOLVERS)} and oc.env")
        try:
            return _compute(RESOLVERS[name.strip()], values)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise _Unresolved(f"${{{inside}}}: {error}") from None

    def read_argument(self, text: str, path: tuple[str, ...]) -> Any:
        if "${" in text:
            return self.expand(text.strip(), path)
        word = text.strip()
        if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"":
            return word[1:-1]
        if not NUMBER.fullmatch(word):
            return word
        if not re.fullmatch(r"[-+]?\d[\d_]*", word):
            return float(word)
        if len(word) > len(str(LARGEST_NUMBER)):
            raise _Unresolved(f"{word[:40]}... is larger than 2^63 - 1")
        return int(word)

    def look_up(self, reference: str, path: tuple[str, ...]) -> Any:
        """The value of a reference; leading dots make it relative to the key at `path`."""
        dots = len(reference) - len(reference.lstrip("."))
        names = re.findall(r"[^.\[\]]+", reference)
        if dots:
            names = [*path[:-dots], *names]
        node = self.tree
        for depth, name in enumerate(names):
            node = node._replace(value=self.value_of(node, tuple(names[:depth])))  # it may refer to a mapping itself
            if isinstance(node.value, dict) and name in node.value:
                node = node.value[name]
            elif isinstance(node.value, list) and name.isdecimal() and int(name) < len(node.value):
                node = node.value[int(name)]
            else:
                raise _Unresolved(f"${{{reference}}}: there is no key {'.'.join(names[: depth + 1])}")
        if isinstance(node.value, dict | list):
            self.refuse_cycle(".".join(names))
            return self.walk(node, tuple(names)).value
        return self.value_of(node, tuple(names))


def _compute(resolver: Callable[..., Any], values: list[Any]) -> Any:
    """Numbers only: a text times a number, or repeated products, could fill the memory."""
    for value in values:
        if not isinstance(value, int | float):
            raise ValueError(f"expected a number, got {value!r:.80}")
    result = resolver(*values)
    if type(result) is int and abs(result) > LARGEST_NUMBER:
        raise ValueError("is larger than 2^63 - 1")
    return result


def _find_closing(text: str, start: int) -> int:
    """Where the interpolation that begins at `start` ends."""
    depth = 0
    for place in range(start, len(text)):
        if text.startswith("${", place):
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if not depth:
                return place
    raise _Unresolved(f"{text!r}: an interpolation is not closed")


def _split_arguments(arguments: str) -> list[str]:
    """Split at the commas that are outside of any interpolation."""
    parts = [""]
    depth = 0
    for character in arguments:
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _read_environment(name: str, default: str | None = None) -> str:
    if name not in os.environ and default is None:
        raise _Unresolved(f"${{oc.env:{name}}}: the environment variable {name} is not set")
    return os.environ.get(name, default or "")
