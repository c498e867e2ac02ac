"""Files that build on other files: what `defaults` names is read first, and later files win.

Owns the order of merging and the checks against cycles. How a file is parsed and how two trees are merged is passed in,
because other YAML dialects follow the same chain of files with rules of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rollgraph import files
from rollgraph.config.problems import ConfigError, ConfigProblem
from rollgraph.config.yaml_tree import Node, compose, describe
from rollgraph.files import DEEPEST, FileError, MissingFile


@dataclass(frozen=True)
class Chain:
    """The files that led to the one being read, and the trees of all files read so far."""

    above: tuple[Path, ...] = ()
    loaded: dict[Path, Node] = field(default_factory=dict)  # a file that is named often is read once


def load_tree(path: Path, text: str | None = None, chain: Chain | None = None) -> Node:
    """The tree of a file, or of a text in its place, merged over the files it names under `defaults`."""
    if text is None:
        text = read_text(path)
    tree = compose(text, f"{path}:{{line}}")
    if tree.value is None:  # an empty file
        tree = Node({}, tree.place)
    if not isinstance(tree.value, dict):
        raise ConfigError([ConfigProblem(f"expected keys, got {describe(tree)}", place=tree.place)])
    return merge_bases(
        tree, path, chain or Chain(), lambda other, chain: load_tree(other, None, chain), merge, describe
    )


def read_text(path: Path) -> str:
    try:
        return files.read_text(path)
    except FileError as error:
        inside = path / "config.yaml"  # of a run, or of a starter
        hint = f"; did you mean {inside}?" if os.path.isfile(inside) else ""
        raise ConfigError([ConfigProblem(error.detail + hint, place=error.place)]) from None


def merge_bases(
    tree: Node,
    path: Path,
    chain: Chain,
    load: Callable[[Path, Chain], Node],
    merge: Callable[[Node, Node], Node],
    describe: Callable[[Node], str],
) -> Node:
    """Merge the tree of a file over those of the files it names under `defaults`.

    `load` reads such a file, and `chain` holds the files that led to this one.
    """
    bases = tree.value.pop("defaults", Node([], tree.place))
    inner = Chain((*chain.above, path.resolve()), chain.loaded)
    merged = Node({}, tree.place)
    for base in bases.value if isinstance(bases.value, list) else [bases]:
        if not isinstance(base.value, str):
            detail = f"expected the path of a file, got {describe(base)}"
            raise ConfigError([ConfigProblem(detail, "defaults", base.place)])
        other = _find_base(path.parent / base.value, base.place, inner.above)
        resolved = other.resolve()
        if resolved not in chain.loaded:
            chain.loaded[resolved] = load(other, inner)
        merged = merge(merged, chain.loaded[resolved])
    return merge(merged, tree)


def _find_base(other: Path, place: str, above: tuple[Path, ...]) -> Path:
    """Check that a file named under `defaults` can be read and is none of the files that led to it."""

    def fail(detail: str) -> ConfigError:
        return ConfigError([ConfigProblem(detail, "defaults", place)])

    try:
        files.regular_file(other)
    except MissingFile:
        raise fail(f"there is no file {other}") from None
    except FileError as error:
        raise fail(str(error)) from None
    if other.resolve() in above:
        names = " -> ".join(step.name for step in (*above, other))
        raise fail(f"the files form a cycle: {names}")
    if len(above) > DEEPEST:
        raise fail(f"more than {DEEPEST} files build on one another")
    return other


def merge(base: Node, top: Node) -> Node:
    """Merge mappings key by key; anything else is replaced."""
    if not isinstance(base.value, dict) or not isinstance(top.value, dict):
        return top
    merged = dict(base.value)
    for name, node in top.value.items():
        merged[name] = merge(base.value[name], node) if name in base.value else node
    return Node(merged, top.place)
