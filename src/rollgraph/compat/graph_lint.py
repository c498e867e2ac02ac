"""Finds mistakes in the CUDA-graph keys of a YAML file: deprecated, contradictory, unknown, or without effect.

Reads configs of NeMo-RL and Megatron-Bridge (`model:` and `rng:`) and flat ones; any mapping with such a key is a
section. The remarks on one section are in `graph_section.py`, and what the keys mean is in `graph_keys.py`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

from rollgraph.compat.composed_yaml import load_composed
from rollgraph.compat.graph_keys import GRAPH_KEYS, TRACKERS, implementation
from rollgraph.compat.graph_remarks import LintKind, Remark
from rollgraph.compat.graph_section import GraphSection
from rollgraph.compat.omegaconf_yaml import entries, node_at, section_at
from rollgraph.config import ConfigError
from rollgraph.config.yaml_tree import Node

KNOWN_KEYS = {*GRAPH_KEYS, *TRACKERS, *TRACKERS.values()}
GENERATION = ("policy", "generation")
ENGINE = "mcore_generation_config"  # graph keys in here belong to generation


def lint_file(path: str | os.PathLike[str], known: Collection[str] | None = None) -> list[Remark]:
    """All remarks on a file, in line order. `known` are the fields of the installed TransformerConfig, if any.

    Raises ConfigError if the file has no key that is known here.
    """
    tree = load_composed(path)
    if not section_at(tree, "policy") and KNOWN_KEYS.isdisjoint(_all_names(tree)):
        wanted = "a config of NeMo-RL (with `policy`), or of Megatron with graph keys (such as cuda_graph_impl)"
        ours = "`rollgraph config` checks rollgraph's own files"
        raise ConfigError([f"{path}: no known setting in this file: expected {wanted}; {ours}"])
    return lint(tree, known)


def lint(tree: Node, known: Collection[str] | None = None) -> list[Remark]:
    remarks: list[Remark] = []
    for section in _find_sections(tree, ()):
        remarks += GraphSection(tree, section, known).remarks()
    remarks += _check_generation(tree)
    return sorted(remarks, key=lambda remark: (_file_and_line(remark.place), remark.key))


def _file_and_line(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return file, int(line) if line.isdecimal() else 0


def _all_names(node: Node) -> Iterator[str]:
    """The names of all keys, in every section."""
    for name, inner in entries(node):
        yield name
        yield from _all_names(inner)


def _find_sections(node: Node, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    inside = dict(entries(node))
    has_graph_keys = any(key in inside for key in (*GRAPH_KEYS, *TRACKERS))
    if has_graph_keys and path[-1:] != (ENGINE,):
        yield path
    for name, inner in inside.items():
        yield from _find_sections(inner, (*path, name))


def _check_generation(tree: Node) -> Iterator[Remark]:
    """Colocated generation can only switch on the graph managers that the training model was built with."""
    if section_at(tree, *GENERATION).get("backend") != "megatron":
        return
    if not section_at(tree, *GENERATION, "colocated").get("enabled", True):
        return
    settings = section_at(tree, *GENERATION, ENGINE)
    asked = implementation(settings) if "cuda_graph_impl" in settings else "none"
    built_with = implementation(section_at(tree, "policy", "megatron_cfg"))
    if asked != "none" and built_with == "none":
        path = (*GENERATION, ENGINE, "cuda_graph_impl")
        yield Remark(
            LintKind.CAPTURES_NOTHING,
            node_at(tree, path).place,
            ".".join(path),
            "toggle_cuda_graphs restores the graph managers that the model was built with; without an implementation "
            "in megatron_cfg there are none, and decoding runs eagerly",
            f"set policy.megatron_cfg.cuda_graph_impl: {asked}, or use a NeMo-RL that builds them for generation",
        )
