"""A YAML file as NeMo-RL composes it: the chain of `defaults:`, then interpolations.

Every value keeps its file and line. Follows OmegaConf where its rules differ from ours: `True` and `yes` are true,
`1e-8` is a number, `${a.b}` refers to another key, `${mul:2,3}` calls a resolver. Neither OmegaConf nor Hydra is
needed.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollgraph.config import ConfigError
from rollgraph.config.inheritance import Chain, merge_bases, read_text
from rollgraph.config.yaml_tree import LARGEST_NUMBER, MOST_VALUES, Budget, Node
from rollgraph.files import TOO_DEEP

RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {  # those that NeMo-RL registers
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}
LONGEST_TEXT = 100_000  # that interpolations make
NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


def load_composed(path: str | os.PathLike[str]) -> Node:
    """The whole tree, with every interpolation replaced by what it stands for."""
    tree = _Resolver(_load(Path(path), Chain())).resolve_all()
    assert isinstance(tree.value, dict)
    return tree


def plain(node: Node) -> Any:
    """The value without places."""
    if isinstance(node.value, dict):
        return {name: plain(inner) for name, inner in node.value.items()}
    return [plain(inner) for inner in node.value] if isinstance(node.value, list) else node.value


# Files


def _load(path: Path, chain: Chain) -> Node:
    tree = _parse(read_text(path), path)
    if not isinstance(tree.value, dict):
        raise ConfigError([f"{tree.place}: expected keys, got {type(tree.value).__name__}"])
    return merge_bases(tree, path, chain, _load, _merge, lambda base: repr(plain(base)))


def _parse(text: str, path: Path) -> Node:
    import yaml  # type: ignore[import-untyped, unused-ignore]

    budget = Budget()

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        def flatten_mapping(self, node: Any) -> None:
            """Put in the place of `<<: *anchor` what it stands for, which can be far more than the file has."""
            super().flatten_mapping(node)
            for _ in node.value:
                budget.spend(at(node.start_mark))

    def at(mark: Any) -> str:
        return f"{path}:{mark.line + 1 if mark else 1}"

    def convert(node: Any, depth: int = 0) -> Node:
        here = at(node.start_mark)
        budget.spend(here, depth)
        if isinstance(node, yaml.ScalarNode):
            return Node(scalar(node, here), here)
        if isinstance(node, yaml.SequenceNode):
            return Node([convert(item, depth + 1) for item in node.value], here)
        loader.flatten_mapping(node)
        found: dict[str, Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError([f"{at(key.start_mark)}: a key must be text"])
            name = str(key.value)
            if name in found:
                raise ConfigError([f"{at(key.start_mark)}: {name}: given twice"])
            found[name] = convert(value, depth + 1)._replace(place=at(key.start_mark))
        return Node(found, here)

    def scalar(node: Any, here: str) -> Any:
        if node.tag == "tag:yaml.org,2002:str" and node.style is None and NUMBER.fullmatch(node.value):
            return float(node.value)  # PyYAML takes 1e-8 for a text
        if node.tag.endswith((":timestamp", ":value")):
            return node.value
        try:
            value = loader.construct_object(node)
        except (KeyError, ValueError):  # `!!bool 3`, or thousands of digits
            raise ConfigError([f"{here}: {node.value!r:.80} is no {node.tag.rpartition(':')[2]}"]) from None
        if type(value) is int and abs(value) > LARGEST_NUMBER:
            raise ConfigError([f"{here}: {node.value!r:.80} is larger than 2^63 - 1"])
        return value

    try:
        loader = Loader(text)
        root = loader.get_single_node()
        return Node({}, at(None)) if root is None else convert(root)
    except yaml.MarkedYAMLError as error:
        raise ConfigError([f"{at(error.problem_mark)}: not YAML: {error.problem}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{at(None)}: not YAML: {' '.join(str(error).split())}"]) from None
    except RecursionError:
        raise ConfigError([f"{at(None)}: not YAML that can be used: {TOO_DEEP}"]) from None


def _merge(base: Node, top: Node) -> Node:
    """Mappings key by key, anything else is replaced; so is a mapping that says `_override_: true`."""
    if not isinstance(top.value, dict):
        return top
    inside = {name: node for name, node in top.value.items() if name != "_override_"}
    replaces = "_override_" in top.value and bool(top.value["_override_"].value)
    below = base.value if isinstance(base.value, dict) and not replaces else {}
    both = {name: _merge(below.get(name, Node(None, node.place)), node) for name, node in inside.items()}
    return Node({**below, **both}, top.place)


# Interpolations


class _Unresolved(Exception):
    pass


class _Resolver:
    """Replaces `${...}` by what it stands for, in place, and collects what it cannot."""

    def __init__(self, tree: Node) -> None:
        self.tree = tree
        self.open: list[str] = []  # keys being resolved, to find circles
        self.problems: list[str] = []
        self.known: dict[str, tuple[Any, int]] = {}  # what keys stand for, computed once, and how many values that is
        self.left = MOST_VALUES  # that the whole tree may still have

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
            self.problems.append(f"{node.place}: {'.'.join(path)}: interpolations stand for one another too deeply")
            return node

    def spend(self, node: Node, count: int = 1) -> None:
        self.left -= count
        if self.left < 0:
            raise ConfigError(
                [*self.problems, f"{node.place}: interpolations stand for more than {MOST_VALUES} values"]
            )

    def value_of(self, node: Node, path: tuple[str, ...]) -> Any:
        if not isinstance(node.value, str) or "${" not in node.value:
            return node.value
        key = ".".join(path)
        if key in self.known:
            value, size = self.known[key]
            self.spend(node, size)
            return value
        if key in self.open:
            raise _Unresolved(f"refers to itself: {' -> '.join([*self.open, key])}")
        self.open.append(key)
        left = self.left
        try:
            value = self.expand(node.value, path)
        finally:
            self.open.pop()
        self.known[key] = value, left - self.left
        return value

    def expand(self, text: str, path: tuple[str, ...]) -> Any:
        """A text that is one interpolation is its value; one among other text is put into it."""
        parts: list[Any] = []
        rest = text
        while (start := rest.find("${")) >= 0:
            end = _closing(rest, start)
            if start:
                parts.append(rest[:start])
            parts.append(self.interpolate(rest[start + 2 : end], path))
            rest = rest[end + 1 :]
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
        values = [self.argument(part, path) for part in _split(arguments)]
        if name.strip() == "oc.env":
            return _environment(*map(str, values))
        if name.strip() not in RESOLVERS:
            raise _Unresolved(f"${{{inside}}}: no resolver {name!r}; known are {', '.join(RESOLVERS)} and oc.env")
        try:
            return _computed(RESOLVERS[name.strip()], values)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise _Unresolved(f"${{{inside}}}: {error}") from None

    def argument(self, text: str, path: tuple[str, ...]) -> Any:
        if "${" in text:
            return self.expand(text.strip(), path)
        word = text.strip()
        if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"":
            return word[1:-1]
        if not NUMBER.fullmatch(word):
            return word
        whole = re.fullmatch(r"[-+]?\d[\d_]*", word)
        if whole and len(word) > len(str(LARGEST_NUMBER)):
            raise _Unresolved(f"{word[:40]}... is larger than 2^63 - 1")
        return int(word) if whole else float(word)

    def look_up(self, reference: str, path: tuple[str, ...]) -> Any:
        dots = len(reference) - len(reference.lstrip("."))
        names = [*(path[:-dots] if dots else ()), *re.findall(r"[^.\[\]]+", reference)]
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
            if ".".join(names) in self.open:
                raise _Unresolved(f"refers to itself: {' -> '.join([*self.open, '.'.join(names)])}")
            return self.walk(node, tuple(names)).value
        return self.value_of(node, tuple(names))


def _computed(resolver: Callable[..., Any], values: list[Any]) -> Any:
    """Of numbers: a text times a number, or a number times itself over and over, would fill the memory."""
    for value in values:
        if not isinstance(value, int | float):
            raise ValueError(f"expected a number, got {value!r:.80}")
    result = resolver(*values)
    if type(result) is int and abs(result) > LARGEST_NUMBER:
        raise ValueError("is larger than 2^63 - 1")
    return result


def _closing(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        if text.startswith("${", place):
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if not depth:
                return place
    raise _Unresolved(f"{text!r}: an interpolation has no end")


def _split(arguments: str) -> list[str]:
    """At commas that are in no interpolation."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character == "{") - (character == "}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _environment(name: str, default: str | None = None) -> str:
    if name not in os.environ and default is None:
        raise _Unresolved(f"${{oc.env:{name}}}: the environment has no {name}")
    return os.environ.get(name, default or "")
