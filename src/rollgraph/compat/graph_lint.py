"""What is wrong with the CUDA-graph keys of somebody's YAML: deprecated, contradictory, unknown, or without any effect.

Owns the remarks, each with its file and line; what the keys mean is in `graph_keys.py`. Reads configs of NeMo-RL,
Megatron-Bridge (`model:` and `rng:`) and flat ones; a section is wherever such a key stands.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollgraph.compat.composed_yaml import load_composed, plain
from rollgraph.compat.graph_keys import (
    DETAIL_KEYS,
    FLAGS,
    GRAPH_KEYS,
    SCOPE_KEYS,
    SCOPES,
    TRACKERS,
    contradictions,
    implementation,
    scopes,
    split_scopes,
)
from rollgraph.config import ConfigError
from rollgraph.config.yaml_tree import Node

KNOWN_KEYS = {*GRAPH_KEYS, *TRACKERS, *TRACKERS.values()}
NEMO_FORWARDS = ("cuda_graph_impl", "cuda_graph_modules", "cuda_graph_warmup_steps")  # the latter two since late
NEMO_HANDS = f"NeMo-RL hands {', '.join(NEMO_FORWARDS)} to Megatron, and not"
DENSE = {"attn", "mlp"}
ADVICE = {  # on what is contradictory, by its key
    "cuda_graph_impl": "write one of these",
    **dict.fromkeys(FLAGS, "keep one of them"),
    "te_rng_tracker": "set it to true, or capture nothing",
    **dict.fromkeys(("cpu_offloading", "recompute_granularity"), "turn one of them off"),
}


class LintKind(StrEnum):
    CONTRADICTORY = "contradictory"
    CAPTURES_NOTHING = "captures nothing"
    DEPRECATED = "deprecated"
    UNKNOWN = "unknown"
    NO_EFFECT = "no effect"


SERIOUS = (LintKind.CONTRADICTORY, LintKind.CAPTURES_NOTHING)  # the run fails, or is not what the file says


@dataclass(frozen=True)
class Remark:
    """For example `Remark(LintKind.DEPRECATED, "a.yaml:7", "policy.megatron_cfg.enable_cuda_graph", "...", "...")`."""

    kind: LintKind
    place: str  # file:line
    key: str
    text: str
    advice: str

    @property
    def serious(self) -> bool:
        return self.kind in SERIOUS


def lint_file(path: str | os.PathLike[str], known: Collection[str] | None = None) -> list[Remark]:
    """All remarks, by line of the file. `known` are the fields of the installed TransformerConfig, if there is one.

    ConfigError if nothing in the file is known here.
    """
    tree = load_composed(path)
    if not _keys(tree, "policy") and KNOWN_KEYS.isdisjoint(_names(tree)):
        wanted = "a config of NeMo-RL (with `policy`), or of Megatron with graph keys (such as cuda_graph_impl)"
        ours = "one of rollgraph's own is checked by `rollgraph config`"
        raise ConfigError([f"{path}: nothing in it is a setting that is known here: expected {wanted}; {ours}"])
    return lint(tree, known)


def lint(tree: Node, known: Collection[str] | None = None) -> list[Remark]:
    remarks: list[Remark] = []
    for section in _find_sections(tree, ()):
        remarks += _Section(tree, section, known).remarks()
    remarks += _generation(tree)
    return sorted(remarks, key=lambda remark: (_line(remark.place), remark.key))


def _line(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return file, int(line) if line.isdecimal() else 0


def _names(node: Node) -> Iterator[str]:
    """Of all keys, in every section."""
    for name, inner in _inside(node):
        yield name
        yield from _names(inner)


def _find_sections(node: Node, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    inside = dict(_inside(node))
    if path[-1:] != ("mcore_generation_config",) and any(key in inside for key in (*GRAPH_KEYS, *TRACKERS)):
        yield path
    for name, inner in inside.items():
        yield from _find_sections(inner, (*path, name))


class _Section:
    """One mapping with graph keys, and what around it matters."""

    def __init__(self, tree: Node, path: tuple[str, ...], known: Collection[str] | None) -> None:
        self.tree, self.path, self.known = tree, path, known
        self.node = _at(tree, path)
        self.model: dict[str, Any] = plain(self.node)
        self.rng = _keys(tree, *path[:-1], "rng")
        if "te_rng_tracker" in self.model:  # flat, as Megatron-LM's arguments are
            self.rng = {**self.rng, "te_rng_tracker": self.model["te_rng_tracker"]}
        self.in_nemo = path[-1:] == ("megatron_cfg",)
        if self.in_nemo and self.model.get("activation_checkpointing"):  # what NeMo-RL makes of it
            self.model = {"recompute_granularity": "full", **self.model}
        self.impl, self.lost = implementation(self.model), None
        if self.in_nemo and self.impl != "none":  # all else is about what reaches Megatron
            self.lost = self.model.pop(SCOPE_KEYS[0], None)
        self.scopes = scopes(self.model)

    def remark(self, kind: LintKind, key: str, text: str, advice: str) -> Remark:
        shown = "activation_checkpointing" if key == "recompute_granularity" and key not in self.node.value else key
        path, node = self.path, self.node
        if shown not in node.value and shown in self.rng:
            path = (*self.path[:-1], "rng")
            node = _at(self.tree, path)
        place = node.value[shown].place if shown in node.value else node.place
        return Remark(kind, place, ".".join((*path, shown)), text, advice)

    def remarks(self) -> Iterator[Remark]:
        for key, text in contradictions(self.model, self.rng):
            advice = ADVICE.get(key, "keep one of them, or make them agree")
            if key in SCOPE_KEYS and self.impl == "none":
                whole = "remove it; cuda_graph_impl: local captures whole layers"
                advice = whole if self.in_nemo else "give cuda_graph_impl, or remove it"
            yield self.remark(LintKind.CONTRADICTORY, key, text, advice)
        yield from self.deprecated()
        yield from self.unknown()
        yield from self.without_effect()
        if self.impl != "none" or self.scopes:
            yield from self.captures_nothing()

    def deprecated(self) -> Iterator[Remark]:
        for flag, means in FLAGS.items():
            if flag in self.model:
                word = ("local" if self.in_nemo else means) if self.model[flag] else "none"
                yield self.remark(LintKind.DEPRECATED, flag, f"{flag} is deprecated", f"write cuda_graph_impl: {word}")
        old, new = SCOPE_KEYS
        if old in self.model and (self.known is None or new in self.known):
            where = (
                "in later versions of megatron-core" if self.known is None else "in the megatron-core installed here"
            )
            yield self.remark(LintKind.DEPRECATED, old, f"{old} is called {new} {where}", f"rename it to {new} there")
        for key in SCOPE_KEYS:
            if self.model.get(key) in ("full", ["full"]):
                yield self.remark(LintKind.DEPRECATED, key, "the scope full is deprecated", f"write {key}: []")
        if "full_iteration" in self.scopes and not self.in_nemo and (self.known is None or new in self.known):
            yield self.remark(
                LintKind.DEPRECATED,
                new if new in self.model else old,
                "full_iteration is an implementation in versions that have cuda_graph_modules",
                "write cuda_graph_impl: full_iteration there, and no scope",
            )

    def unknown(self) -> Iterator[Remark]:
        old, new = SCOPE_KEYS
        key = new if self.model.get(new) is not None else old
        for name in self.scopes:
            if name not in (*SCOPES, "full"):
                advice = f"it is passed through; known here: {', '.join(SCOPES)}"
                yield self.remark(LintKind.UNKNOWN, key, f"unknown scope {name!r}", advice)
        if isinstance(self.model.get(old), str) and ", " in self.model[old]:
            text = "megatron-core 0.16.1 splits at commas and keeps the spaces: KeyError"
            yield self.remark(LintKind.UNKNOWN, old, text, "write a list, or no spaces")
        if self.known is not None:
            set_by_bridge = (new,) if self.in_nemo else ()  # under the name that the installed version has
            for key in (*GRAPH_KEYS, *TRACKERS):
                if key in self.model and key not in (*self.known, *FLAGS, *set_by_bridge):
                    advice = f"write {old} instead" if key == new else "remove it, or install the version that has it"
                    yield self.remark(LintKind.UNKNOWN, key, f"the megatron-core installed here has no {key}", advice)

    def without_effect(self) -> Iterator[Remark]:
        if self.lost is not None:
            whole = set(split_scopes(self.lost)) <= {*DENSE, "full_iteration"} or SCOPE_KEYS[1] in self.model
            advice = "remove it" if whole else f"call it {SCOPE_KEYS[1]}, or remove it"
            text = f"{NEMO_HANDS} {SCOPE_KEYS[0]}"
            if SCOPE_KEYS[1] not in self.model:
                text += "; without it, an implementation captures whole layers"
            yield self.remark(LintKind.NO_EFFECT, SCOPE_KEYS[0], text, advice)
        if self.model.get("cuda_graph_use_single_mempool") is not None:
            text = "megatron-core 0.16.1 has the field and never reads it"
            yield self.remark(LintKind.NO_EFFECT, "cuda_graph_use_single_mempool", text, "remove it")
        for key in DETAIL_KEYS[1:]:
            if key in self.model and self.impl == "none":
                yield self.remark(
                    LintKind.NO_EFFECT, key, "there is no implementation", "give cuda_graph_impl, or remove it"
                )
        for key in SCOPE_KEYS:
            if self.impl == "local" and key in self.model and DENSE & set(self.scopes):
                text = "the local implementation captures the whole dense layer, whether attn or mlp is named"
                advice = "leave the scope out" if self.in_nemo else "leave the scope out, or use transformer_engine"
                yield self.remark(LintKind.NO_EFFECT, key, text, advice)

    def captures_nothing(self) -> Iterator[Remark]:
        def nothing(key: str, text: str, advice: str) -> Remark:
            return self.remark(LintKind.CAPTURES_NOTHING, key, text, advice)

        key = next(key for key in GRAPH_KEYS if self.model.get(key))
        if self.path[-1:] == ("dtensor_cfg",):
            yield nothing(key, "DTensor workers capture no graphs", "use megatron_cfg, or remove it")
        elif self.scopes == ["mamba"]:
            text = "mamba captures Mamba layers alone: a model without them runs eagerly"
            yield nothing(next(key for key in SCOPE_KEYS if key in self.model), text, "name the layers there are")
        if not self.in_nemo:
            return
        if self.model.get("enabled") is False:
            yield nothing(key, "megatron_cfg.enabled is false", "enable it, or remove the graph keys")
            return
        if self.model.get("cuda_graph_impl") is None:
            for flag in filter(self.model.get, FLAGS):
                yield nothing(flag, f"{NEMO_HANDS} {flag}: training stays eager", "write cuda_graph_impl: local")
            return
        loops = {"transformer_engine": "TECudaGraphHelper", "full_iteration": "FullCudaGraphWrapper"}
        if loop := loops.get("full_iteration" if "full_iteration" in self.scopes else self.impl):
            text = f"only a training loop with {loop} captures; NeMo-RL's, in the versions known here, has none"
            advice = "use cuda_graph_impl: local" + (", and no scope" if self.scopes else "")
            yield nothing("cuda_graph_impl", text, advice)


def _generation(tree: Node) -> Iterator[Remark]:
    """Colocated generation can switch on only the graph managers that the training model was built with."""
    generation = _keys(tree, "policy", "generation")
    settings = _keys(tree, "policy", "generation", "mcore_generation_config")
    asked = implementation(settings) if "cuda_graph_impl" in settings else "none"
    together = _keys(tree, "policy", "generation", "colocated").get("enabled", True)
    built_without = implementation(_keys(tree, "policy", "megatron_cfg")) == "none"
    if generation.get("backend") == "megatron" and together and asked != "none" and built_without:
        path = ("policy", "generation", "mcore_generation_config", "cuda_graph_impl")
        yield Remark(
            LintKind.CAPTURES_NOTHING,
            _at(tree, path).place,
            ".".join(path),
            "toggle_cuda_graphs restores the managers that the model was built with, and without an implementation in "
            "megatron_cfg there are none: decoding runs eagerly",
            f"set policy.megatron_cfg.cuda_graph_impl: {asked}, or use a NeMo-RL that builds them for generation",
        )


def _keys(tree: Node, *path: str) -> dict[str, Any]:
    """Of a section; none where there is something else in its place."""
    found = plain(_at(tree, path))
    return found if isinstance(found, dict) else {}


def _at(node: Node, path: tuple[str, ...]) -> Node:
    for name in path:
        node = dict(_inside(node)).get(name, Node(None, node.place))
    return node


def _inside(node: Node) -> Iterable[tuple[str, Node]]:
    """The entries of a section, or of a list, which are called 0, 1, ..."""
    if isinstance(node.value, dict):
        return node.value.items()
    return [(str(i), item) for i, item in enumerate(node.value)] if isinstance(node.value, list) else ()
