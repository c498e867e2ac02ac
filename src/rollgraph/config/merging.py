"""Files that build on other files: a tree is merged over those of the files it names under `defaults`.

Decides the order of merging and detects cycles. Parsing and merging are passed in as functions, because configs of
other frameworks chain files in the same way but parse and merge them differently.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rollgraph import files
from rollgraph.config.fields import ConfigError, ConfigProblem
from rollgraph.config.yaml_tree import Node, describe_node, parse_yaml
from rollgraph.files import MAX_NESTING, FileError, MissingFile


@dataclass(frozen=True)
class DefaultsChain:
    """The chain of files that led to the current one, and the trees of all files read so far."""

    parents: tuple[Path, ...] = ()
    loaded: dict[Path, Node] = field(default_factory=dict)  # each file is read once


def load_tree(path: Path, text: str | None = None, chain: DefaultsChain | None = None) -> Node:
    """The tree of a file, merged over the files it names under `defaults`. `text` replaces the file's content."""
    if text is None:
        text = read_config_text(path)
    tree = parse_yaml(text, f"{path}:{{line}}")
    if tree.value is None:  # an empty file
        tree = Node({}, tree.location)
    if not isinstance(tree.value, dict):
        raise ConfigError([ConfigProblem(f"expected keys, got {describe_node(tree)}", location=tree.location)])
    return merge_bases(
        tree, path, chain or DefaultsChain(), lambda base, chain: load_tree(base, None, chain), merge, describe_node
    )


def read_config_text(path: Path) -> str:
    try:
        return files.read_text(path)
    except FileError as error:
        candidate = path / "config.yaml"  # of a run, or of a starter
        hint = f"; did you mean {candidate}?" if os.path.isfile(candidate) else ""
        raise ConfigError([ConfigProblem(error.detail + hint, location=error.location)]) from None


def merge_bases(
    tree: Node,
    path: Path,
    chain: DefaultsChain,
    load: Callable[[Path, DefaultsChain], Node],
    merge: Callable[[Node, Node], Node],
    describe_node: Callable[[Node], str],
) -> Node:
    """Merge the tree of a file over the trees of the files it names under `defaults`.

    `load` reads one of those files. `chain` has the files that led to this one.
    """
    bases = tree.value.pop("defaults", Node([], tree.location))
    inner = DefaultsChain((*chain.parents, path.resolve()), chain.loaded)
    merged = Node({}, tree.location)
    for base in bases.value if isinstance(bases.value, list) else [bases]:
        if not isinstance(base.value, str):
            detail = f"expected the path of a file, got {describe_node(base)}"
            raise ConfigError([ConfigProblem(detail, "defaults", base.location)])
        base_path = _check_base(path.parent / base.value, base.location, inner.parents)
        resolved = base_path.resolve()
        if resolved not in chain.loaded:
            chain.loaded[resolved] = load(base_path, inner)
        merged = merge(merged, chain.loaded[resolved])
    return merge(merged, tree)


def _check_base(base: Path, location: str, parents: tuple[Path, ...]) -> Path:
    """Check that a file named under `defaults` can be read and does not close a cycle."""

    def fail(detail: str) -> ConfigError:
        return ConfigError([ConfigProblem(detail, "defaults", location)])

    try:
        files.check_regular_file(base)
    except MissingFile:
        raise fail(f"there is no file {base}") from None
    except FileError as error:
        raise fail(str(error)) from None
    if base.resolve() in parents:
        names = " -> ".join(file.name for file in (*parents, base))
        raise fail(f"the files form a cycle: {names}")
    if len(parents) > MAX_NESTING:
        raise fail(f"more than {MAX_NESTING} files build on one another")
    return base


def merge(base: Node, top: Node) -> Node:
    """Merge mappings key by key. Anything else is replaced."""
    if not isinstance(base.value, dict) or not isinstance(top.value, dict):
        return top
    merged = dict(base.value)
    for name, node in top.value.items():
        merged[name] = merge(base.value[name], node) if name in base.value else node
    return Node(merged, top.location)
