"""The remarks on one section with CUDA-graph keys, each with its file and line.

Knows which keys NeMo-RL passes on to Megatron; what the keys mean is in `graph_keys.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

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
from rollgraph.compat.graph_remarks import LintKind, Remark
from rollgraph.compat.omegaconf_yaml import node_at, section_at
from rollgraph.config.yaml_tree import Node, strip_places

NEMO_PASSES_ON = ("cuda_graph_impl", "cuda_graph_modules", "cuda_graph_warmup_steps")  # the latter two only lately
NEMO_DROPS = f"NeMo-RL passes {', '.join(NEMO_PASSES_ON)} on to Megatron, but not"
LOOPS = {"transformer_engine": "TECudaGraphHelper", "full_iteration": "FullCudaGraphWrapper"}  # what captures these
DENSE = {"attn", "mlp"}
ADVICE = {  # on contradictions, by key
    "cuda_graph_impl": "write one of these",
    **dict.fromkeys(FLAGS, "keep one of them"),
    "te_rng_tracker": "set it to true, or capture nothing",
    **dict.fromkeys(("cpu_offloading", "recompute_granularity"), "turn one of them off"),
}


class GraphSection:
    """One mapping with graph keys, and the parts of the file around it that matter.

    `known` are the fields of the installed TransformerConfig, or None where megatron-core is not installed.
    """

    def __init__(self, tree: Node, path: tuple[str, ...], known: Collection[str] | None) -> None:
        self.tree = tree
        self.path = path
        self.known = known
        self.node = node_at(tree, path)
        self.model: dict[str, Any] = strip_places(self.node)
        self.rng = section_at(tree, *path[:-1], "rng")
        if "te_rng_tracker" in self.model:  # a flat file, like Megatron-LM's arguments
            self.rng = {**self.rng, "te_rng_tracker": self.model["te_rng_tracker"]}
        self.in_nemo = path[-1:] == ("megatron_cfg",)
        if self.in_nemo and self.model.get("activation_checkpointing"):  # NeMo-RL turns it into this
            self.model = {"recompute_granularity": "full", **self.model}
        self.impl = implementation(self.model)
        self.dropped_scope = None
        if self.in_nemo and self.impl != "none":  # the other remarks are about what reaches Megatron
            self.dropped_scope = self.model.pop(SCOPE_KEYS[0], None)
        self.scopes = scopes(self.model)

    @property
    def has_later_names(self) -> bool:
        """Whether the installed megatron-core says `cuda_graph_modules`; assumed where none is installed."""
        return self.known is None or SCOPE_KEYS[1] in self.known

    def remark(self, kind: LintKind, key: str, text: str, advice: str) -> Remark:
        if key == "recompute_granularity" and key not in self.node.value:
            key = "activation_checkpointing"
        path = self.path
        node = self.node
        if key not in node.value and key in self.rng:
            path = (*self.path[:-1], "rng")
            node = node_at(self.tree, path)
        place = node.value[key].place if key in node.value else node.place
        return Remark(kind, place, ".".join((*path, key)), text, advice)

    def remarks(self) -> Iterator[Remark]:
        yield from self.contradictory()
        yield from self.deprecated()
        yield from self.unknown_scopes()
        yield from self.unknown_keys()
        yield from self.without_effect()
        if self.impl != "none" or self.scopes:
            yield from self.captures_nothing()

    def contradictory(self) -> Iterator[Remark]:
        for key, text in contradictions(self.model, self.rng):
            advice = ADVICE.get(key, "keep one of them, or make them agree")
            if key in SCOPE_KEYS and self.impl == "none":
                advice = "give cuda_graph_impl, or remove it"
                if self.in_nemo:
                    advice = "remove it; cuda_graph_impl: local captures whole layers"
            yield self.remark(LintKind.CONTRADICTORY, key, text, advice)

    def deprecated(self) -> Iterator[Remark]:
        for flag, means in FLAGS.items():
            if flag in self.model:
                word = "none"
                if self.model[flag]:
                    word = "local" if self.in_nemo else means
                yield self.remark(LintKind.DEPRECATED, flag, f"{flag} is deprecated", f"write cuda_graph_impl: {word}")
        old, new = SCOPE_KEYS
        if old in self.model and self.has_later_names:
            where = "in the megatron-core installed here"
            if self.known is None:
                where = "in later versions of megatron-core"
            yield self.remark(LintKind.DEPRECATED, old, f"{old} is called {new} {where}", f"rename it to {new} there")
        for key in SCOPE_KEYS:
            if self.model.get(key) in ("full", ["full"]):
                yield self.remark(LintKind.DEPRECATED, key, "the scope full is deprecated", f"write {key}: []")
        if "full_iteration" in self.scopes and not self.in_nemo and self.has_later_names:
            yield self.remark(
                LintKind.DEPRECATED,
                new if new in self.model else old,
                "full_iteration is an implementation in versions that have cuda_graph_modules",
                "write cuda_graph_impl: full_iteration there, and no scope",
            )

    def unknown_scopes(self) -> Iterator[Remark]:
        old, new = SCOPE_KEYS
        key = new if self.model.get(new) is not None else old
        for name in self.scopes:
            if name not in (*SCOPES, "full"):
                advice = f"it is passed through; known here: {', '.join(SCOPES)}"
                yield self.remark(LintKind.UNKNOWN, key, f"unknown scope {name!r}", advice)
        if isinstance(self.model.get(old), str) and ", " in self.model[old]:
            text = "megatron-core 0.16.1 splits at commas and keeps the spaces, which raises a KeyError"
            yield self.remark(LintKind.UNKNOWN, old, text, "write a list, or no spaces")

    def unknown_keys(self) -> Iterator[Remark]:
        if self.known is None:
            return
        old, new = SCOPE_KEYS
        accepted = {*self.known, *FLAGS}
        if self.in_nemo:
            accepted.add(new)  # NeMo-RL sets it under the name that the installed version has
        for key in (*GRAPH_KEYS, *TRACKERS):
            if key in self.model and key not in accepted:
                advice = f"write {old} instead" if key == new else "remove it, or install the version that has it"
                yield self.remark(LintKind.UNKNOWN, key, f"the megatron-core installed here has no {key}", advice)

    def without_effect(self) -> Iterator[Remark]:
        if self.dropped_scope is not None:
            yield self.about_dropped_scope()
        if self.model.get("cuda_graph_use_single_mempool") is not None:
            text = "megatron-core 0.16.1 has the field and never reads it"
            yield self.remark(LintKind.NO_EFFECT, "cuda_graph_use_single_mempool", text, "remove it")
        for key in DETAIL_KEYS[1:]:
            if key in self.model and self.impl == "none":
                text = "there is no implementation"
                yield self.remark(LintKind.NO_EFFECT, key, text, "give cuda_graph_impl, or remove it")
        for key in SCOPE_KEYS:
            if self.impl == "local" and key in self.model and DENSE & set(self.scopes):
                text = "the local implementation captures the whole dense layer, whether attn or mlp is named"
                advice = "leave the scope out"
                if not self.in_nemo:
                    advice += ", or use transformer_engine"
                yield self.remark(LintKind.NO_EFFECT, key, text, advice)

    def about_dropped_scope(self) -> Remark:
        old, new = SCOPE_KEYS
        text = f"{NEMO_DROPS} {old}"
        if new not in self.model:
            text += "; without it, an implementation captures whole layers"
        asks_for_layers = set(split_scopes(self.dropped_scope)) <= {*DENSE, "full_iteration"}
        advice = f"call it {new}, or remove it"
        if asks_for_layers or new in self.model:
            advice = "remove it"
        return self.remark(LintKind.NO_EFFECT, old, text, advice)

    def captures_nothing(self) -> Iterator[Remark]:
        kind = LintKind.CAPTURES_NOTHING
        key = next(key for key in GRAPH_KEYS if self.model.get(key))
        if self.path[-1:] == ("dtensor_cfg",):
            yield self.remark(kind, key, "DTensor workers capture no graphs", "use megatron_cfg, or remove it")
        elif self.scopes == ["mamba"]:
            text = "mamba captures only Mamba layers: a model without them runs eagerly"
            scope_key = next(key for key in SCOPE_KEYS if key in self.model)
            yield self.remark(kind, scope_key, text, "name the layers that the model has")
        if self.in_nemo:
            yield from self.captures_nothing_in_nemo(key)

    def captures_nothing_in_nemo(self, key: str) -> Iterator[Remark]:
        kind = LintKind.CAPTURES_NOTHING
        if self.model.get("enabled") is False:
            yield self.remark(kind, key, "megatron_cfg.enabled is false", "enable it, or remove the graph keys")
            return
        if self.model.get("cuda_graph_impl") is None:
            for flag in filter(self.model.get, FLAGS):
                text = f"{NEMO_DROPS} {flag}: training stays eager"
                yield self.remark(kind, flag, text, "write cuda_graph_impl: local")
            return
        loop = LOOPS.get("full_iteration" if "full_iteration" in self.scopes else self.impl)
        if loop:
            text = f"only a training loop with {loop} captures; NeMo-RL's has none in the versions known here"
            advice = "use cuda_graph_impl: local"
            if self.scopes:
                advice += ", and no scope"
            yield self.remark(kind, "cuda_graph_impl", text, advice)
