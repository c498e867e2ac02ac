"""Composes a YAML file as NeMo-RL does: it merges the chain of `defaults:`, then resolves interpolations.

Every value keeps its file and line. Needs neither OmegaConf nor Hydra.
"""

from __future__ import annotations

import os
from pathlib import Path

from rollgraph.compat.interpolation import Resolver
from rollgraph.compat.omegaconf_yaml import parse_tree
from rollgraph.config import ConfigError
from rollgraph.config.inheritance import Chain, merge_bases, read_text
from rollgraph.config.yaml_tree import Node, strip_places


def load_composed(path: str | os.PathLike[str]) -> Node:
    """The whole tree, with every interpolation replaced by its value."""
    tree = Resolver(_load(Path(path), Chain())).resolve_all()
    assert isinstance(tree.value, dict)
    return tree


def _load(path: Path, chain: Chain) -> Node:
    tree = parse_tree(read_text(path), path)
    if not isinstance(tree.value, dict):
        raise ConfigError([f"{tree.place}: expected keys, got {type(tree.value).__name__}"])
    return merge_bases(tree, path, chain, _load, _merge, lambda base: repr(strip_places(base)))


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
            merged[name] = _merge(merged.get(name, Node(None, node.place)), node)
    return Node(merged, top.place)
