"""Reads YAML as NeMo-RL does with OmegaConf: values, interpolations, and the chain of `defaults:`.

`True` and `yes` are true, and `1e-8` is a number. A file whose aliases expand to too many values is refused. Needs
neither OmegaConf nor Hydra.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rollgraph.config import ConfigError
from rollgraph.config.merging import DefaultsChain, merge_bases, read_config_text
from rollgraph.config.yaml_tree import MAX_INTEGER, MAX_VALUES, Node, ValueBudget, strip_locations
from rollgraph.files import TOO_DEEP

# -- values ----------------------------------------------------------------------------------------

MERGE_TAG = "tag:yaml.org,2002:merge"
NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


def parse_tree(text: str, path: Path) -> Node:
    """The tree of a file's text; `path` is only used in locations."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    try:
        return _Parser(text, path).parse()
    except yaml.MarkedYAMLError as error:
        raise ConfigError([f"{_location(path, error.problem_mark)}: not YAML: {error.problem}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{_location(path)}: not YAML: {' '.join(str(error).split())}"]) from None
    except RecursionError:
        raise ConfigError([f"{_location(path)}: unusable YAML: {TOO_DEEP}"]) from None


def entries(node: Node) -> Iterable[tuple[str, Node]]:
    """The entries of a mapping, or of a list with names 0, 1, ...; none for a scalar."""
    if isinstance(node.value, dict):
        return node.value.items()
    if isinstance(node.value, list):
        return [(str(index), item) for index, item in enumerate(node.value)]
    return ()


def node_at(node: Node, path: tuple[str, ...]) -> Node:
    """The node at a path; if there is none, a null node at the location where the path ends."""
    for name in path:
        node = dict(entries(node)).get(name, Node(None, node.location))
    return node


def section_at(tree: Node, *path: str) -> dict[str, Any]:
    """A section as a plain dictionary; empty if there is none."""
    section = strip_locations(node_at(tree, path))
    return section if isinstance(section, dict) else {}


def _location(path: Path, mark: Any = None) -> str:
    line = mark.line + 1 if mark else 1
    return f"{path}:{line}"


class _Parser:
    def __init__(self, text: str, path: Path) -> None:
        import yaml

        budget = ValueBudget()

        class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
            def flatten_mapping(self, node: Any) -> None:
                """Expand `<<: *anchor`, and charge the budget: the result can be far larger than the file."""
                super().flatten_mapping(node)
                for _ in node.value:
                    budget.spend(_location(path, node.start_mark))

            def compose_mapping_node(self, anchor: Any) -> Any:
                """Refuse a key that is written twice, as OmegaConf does. A key from `<<` may be overridden."""
                node = super().compose_mapping_node(anchor)
                names = set()
                for key, _ in node.value:
                    if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE_TAG:
                        continue
                    if key.value in names:
                        raise ConfigError([f"{_location(path, key.start_mark)}: {key.value}: given twice"])
                    names.add(key.value)
                return node

        self.yaml = yaml
        self.path = path
        self.budget = budget
        self.loader = Loader(text)

    def parse(self) -> Node:
        root = self.loader.get_single_node()
        if root is None:  # an empty file
            return Node({}, _location(self.path))
        return self.convert(root)

    def convert(self, node: Any, depth: int = 0) -> Node:
        location = _location(self.path, node.start_mark)
        self.budget.spend(location, depth)
        if isinstance(node, self.yaml.ScalarNode):
            return Node(self.convert_scalar(node, location), location)
        if isinstance(node, self.yaml.SequenceNode):
            return Node([self.convert(item, depth + 1) for item in node.value], location)
        self.loader.flatten_mapping(node)
        children: dict[str, Node] = {}
        for key, value in node.value:
            key_location = _location(self.path, key.start_mark)
            if not isinstance(key, self.yaml.ScalarNode):
                raise ConfigError([f"{key_location}: a key must be text"])
            children[str(key.value)] = self.convert(value, depth + 1)._replace(location=key_location)
        return Node(children, location)

    def convert_scalar(self, node: Any, location: str) -> Any:
        is_unquoted_text = node.tag == "tag:yaml.org,2002:str" and node.style is None
        if is_unquoted_text and NUMBER.fullmatch(node.value):
            return float(node.value)  # PyYAML reads 1e-8 as text
        if node.tag.endswith((":timestamp", ":value")):
            return node.value
        try:
            value = self.loader.construct_object(node)
        except (KeyError, ValueError):  # `!!bool 3`, or a number with thousands of digits
            kind = node.tag.rpartition(":")[2]
            raise ConfigError([f"{location}: {node.value!r:.80} is not a valid {kind}"]) from None
        if type(value) is int and abs(value) > MAX_INTEGER:
            raise ConfigError([f"{location}: {node.value!r:.80} is larger than 2^63 - 1"])
        return value


# -- interpolations --------------------------------------------------------------------------------
# Besides these resolvers there is `oc.env`. A few lines of interpolations could expand to billions of values, so sizes
# are limited.

RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {  # those that NeMo-RL registers
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}
LONGEST_TEXT = 100_000  # characters that interpolations may produce in one value


class _Unresolved(Exception):
    """One interpolation cannot be resolved; `Resolver.walk` adds the location and the key."""


class Resolver:
    """Replaces every `${...}` in a tree by its value, and collects those that cannot be resolved."""

    def __init__(self, tree: Node) -> None:
        self.tree = tree
        self.in_progress: list[str] = []  # keys that are being resolved, to detect cycles
        self.problems: list[str] = []
        self.resolved: dict[str, tuple[Any, int]] = {}  # key -> its value, and the number of values in it
        self.values_left = MAX_VALUES  # how many more values the tree may have

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
            self.problems.append(f"{node.location}: {'.'.join(path)}: {error}")
            return node
        except RecursionError:
            self.problems.append(f"{node.location}: {'.'.join(path)}: interpolations are nested too deeply")
            return node

    def spend(self, node: Node, count: int = 1) -> None:
        self.values_left -= count
        if self.values_left < 0:
            too_many = f"{node.location}: interpolations stand for more than {MAX_VALUES} values"
            raise ConfigError([*self.problems, too_many])

    def value_of(self, node: Node, path: tuple[str, ...]) -> Any:
        if not isinstance(node.value, str) or "${" not in node.value:
            return node.value
        key = ".".join(path)
        if key in self.resolved:
            value, size = self.resolved[key]
            self.spend(node, size)
            return value
        self.refuse_cycle(key)
        self.in_progress.append(key)
        left_before = self.values_left
        try:
            value = self.expand(node.value, path)
        finally:
            self.in_progress.pop()
        self.resolved[key] = value, left_before - self.values_left
        return value

    def refuse_cycle(self, key: str) -> None:
        if key in self.in_progress:
            raise _Unresolved(f"refers to itself: {' -> '.join([*self.in_progress, key])}")

    def expand(self, text: str, path: tuple[str, ...]) -> Any:
        """If the text is one interpolation, its value, of any type; otherwise the text with all of them filled in."""
        parts: list[Any] = []
        remaining = text
        start = remaining.find("${")
        while start >= 0:
            end = _find_closing(remaining, start)
            if start:
                parts.append(remaining[:start])
            parts.append(self.interpolate(remaining[start + 2 : end], path))
            remaining = remaining[end + 1 :]
            start = remaining.find("${")
        if remaining:
            parts.append(remaining)
        if len(parts) == 1:
            return parts[0]
        joined = "".join(map(str, parts))
        if len(joined) > LONGEST_TEXT:
            raise _Unresolved(f"stands for a text of more than {LONGEST_TEXT} characters")
        return joined

    def interpolate(self, expression: str, path: tuple[str, ...]) -> Any:
        name, colon, arguments = expression.partition(":")
        if not colon or "${" in name:
            return self.look_up(str(self.expand(expression, path)).strip(), path)
        values = [self.read_argument(part, path) for part in _split_arguments(arguments)]
        if name.strip() == "oc.env":
            return _read_environment(*map(str, values))
        if name.strip() not in RESOLVERS:
            raise _Unresolved(f"${{{expression}}}: no resolver {name!r}; known are {', '.join(RESOLVERS)} and oc.env")
        try:
            return _compute(RESOLVERS[name.strip()], values)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise _Unresolved(f"${{{expression}}}: {error}") from None

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
        if len(word) > len(str(MAX_INTEGER)):
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
            node = node._replace(
                value=self.value_of(node, tuple(names[:depth]))
            )  # may itself be an interpolation that refers to a mapping
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
    """Apply a resolver to numbers only: a text times a number, or repeated products, could fill the memory."""
    for value in values:
        if not isinstance(value, int | float):
            raise ValueError(f"expected a number, got {value!r:.80}")
    result = resolver(*values)
    if type(result) is int and abs(result) > MAX_INTEGER:
        raise ValueError("is larger than 2^63 - 1")
    return result


def _find_closing(text: str, start: int) -> int:
    """The index of the `}` that closes the interpolation at `start`."""
    depth = 0
    for position in range(start, len(text)):
        if text.startswith("${", position):
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if not depth:
                return position
    raise _Unresolved(f"{text!r}: an interpolation is not closed")


def _split_arguments(arguments: str) -> list[str]:
    """Split at commas outside of nested interpolations."""
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


# -- files with `defaults` -------------------------------------------------------------------------
# Every value keeps its file and line.


def load_composed(path: str | os.PathLike[str]) -> Node:
    """The tree of a file merged over its defaults, with every interpolation resolved."""
    tree = Resolver(_load(Path(path), DefaultsChain())).resolve_all()
    assert isinstance(tree.value, dict)
    return tree


def _load(path: Path, chain: DefaultsChain) -> Node:
    tree = parse_tree(read_config_text(path), path)
    if not isinstance(tree.value, dict):
        raise ConfigError([f"{tree.location}: expected keys, got {type(tree.value).__name__}"])
    return merge_bases(tree, path, chain, _load, _merge, lambda base: repr(strip_locations(base)))


def _merge(base: Node, top: Node) -> Node:
    """Merge mappings key by key and replace anything else, including a mapping with `_override_: true`."""
    if not isinstance(top.value, dict):
        return top
    replaces = "_override_" in top.value and bool(top.value["_override_"].value)
    merged = {}
    if isinstance(base.value, dict) and not replaces:
        merged = dict(base.value)
    for name, node in top.value.items():
        if name != "_override_":
            merged[name] = _merge(merged.get(name, Node(None, node.location)), node)
    return Node(merged, top.location)
