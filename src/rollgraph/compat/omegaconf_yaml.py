"""Reads YAML as OmegaConf does, into nodes that keep their file and line.

`True` and `yes` are true, and `1e-8` is a number. A file whose aliases expand to too many values is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollgraph.config import ConfigError
from rollgraph.config.yaml_tree import LARGEST_NUMBER, Budget, Node, strip_places
from rollgraph.files import TOO_DEEP

NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


def parse_tree(text: str, path: Path) -> Node:
    """The nodes of a file's text; `path` is only used to name places."""
    import yaml  # type: ignore[import-untyped, unused-ignore]

    try:
        return _Parser(text, path).parse()
    except yaml.MarkedYAMLError as error:
        raise ConfigError([f"{_place(path, error.problem_mark)}: not YAML: {error.problem}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{_place(path)}: not YAML: {' '.join(str(error).split())}"]) from None
    except RecursionError:
        raise ConfigError([f"{_place(path)}: not YAML that can be used: {TOO_DEEP}"]) from None


def entries(node: Node) -> Iterable[tuple[str, Node]]:
    """The entries of a mapping, or of a list, where they are named 0, 1, ...; none for a scalar."""
    if isinstance(node.value, dict):
        return node.value.items()
    if isinstance(node.value, list):
        return [(str(index), item) for index, item in enumerate(node.value)]
    return ()


def node_at(node: Node, path: tuple[str, ...]) -> Node:
    """The node at a path, or a null node at the place where the path ends early."""
    for name in path:
        node = dict(entries(node)).get(name, Node(None, node.place))
    return node


def section_at(tree: Node, *path: str) -> dict[str, Any]:
    """The plain keys of a section; empty where there is none."""
    found = strip_places(node_at(tree, path))
    return found if isinstance(found, dict) else {}


def _place(path: Path, mark: Any = None) -> str:
    line = mark.line + 1 if mark else 1
    return f"{path}:{line}"


class _Parser:
    def __init__(self, text: str, path: Path) -> None:
        import yaml

        budget = Budget()

        class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
            def flatten_mapping(self, node: Any) -> None:
                """Expand `<<: *anchor`, and charge for the result, which can be far larger than the file."""
                super().flatten_mapping(node)
                for _ in node.value:
                    budget.spend(_place(path, node.start_mark))

        self.yaml = yaml
        self.path = path
        self.budget = budget
        self.loader = Loader(text)

    def parse(self) -> Node:
        root = self.loader.get_single_node()
        if root is None:  # an empty file
            return Node({}, _place(self.path))
        return self.convert(root)

    def convert(self, node: Any, depth: int = 0) -> Node:
        here = _place(self.path, node.start_mark)
        self.budget.spend(here, depth)
        if isinstance(node, self.yaml.ScalarNode):
            return Node(self.convert_scalar(node, here), here)
        if isinstance(node, self.yaml.SequenceNode):
            return Node([self.convert(item, depth + 1) for item in node.value], here)
        self.loader.flatten_mapping(node)
        found: dict[str, Node] = {}
        for key, value in node.value:
            place = _place(self.path, key.start_mark)
            if not isinstance(key, self.yaml.ScalarNode):
                raise ConfigError([f"{place}: a key must be text"])
            name = str(key.value)
            if name in found:
                raise ConfigError([f"{place}: {name}: given twice"])
            found[name] = self.convert(value, depth + 1)._replace(place=place)
        return Node(found, here)

    def convert_scalar(self, node: Any, here: str) -> Any:
        is_unquoted_text = node.tag == "tag:yaml.org,2002:str" and node.style is None
        if is_unquoted_text and NUMBER.fullmatch(node.value):
            return float(node.value)  # PyYAML reads 1e-8 as text
        if node.tag.endswith((":timestamp", ":value")):
            return node.value
        try:
            value = self.loader.construct_object(node)
        except (KeyError, ValueError):  # `!!bool 3`, or a number with thousands of digits
            raise ConfigError([f"{here}: {node.value!r:.80} is no {node.tag.rpartition(':')[2]}"]) from None
        if type(value) is int and abs(value) > LARGEST_NUMBER:
            raise ConfigError([f"{here}: {node.value!r:.80} is larger than 2^63 - 1"])
        return value
