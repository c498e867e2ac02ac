"""Megatron's config keys for CUDA graphs: their names, contradictions between them, and a linter for YAML files.

Checked against the TransformerConfig of megatron-core 0.16.1. Later versions rename `cuda_graph_scope` to
`cuda_graph_modules` and turn the scope `full_iteration` into an implementation; both spellings are understood. Imports
nothing of Megatron.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from rollgraph.compat.omegaconf_yaml import entries, load_composed, node_at, section_at
from rollgraph.config import ConfigError
from rollgraph.config.yaml_tree import Node, strip_locations

# -- keys and contradictions -----------------------------------------------------------------------

IMPLEMENTATIONS = ("none", "local", "transformer_engine", "full_iteration")
SCOPES = ("full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
FLAGS = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}  # deprecated -> implementation
SCOPE_KEYS = ("cuda_graph_scope", "cuda_graph_modules")
DETAIL_KEYS = ("cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph", "cuda_graph_warmup_steps")
TRACKERS = {  # key of the model -> key of the RNG settings
    "use_te_rng_tracker": "te_rng_tracker",
    "inference_rng_tracker": "inference_rng_tracker",
}
GRAPH_KEYS = (*FLAGS, "cuda_graph_impl", *SCOPE_KEYS, *DETAIL_KEYS)


class Contradiction(NamedTuple):
    key: str
    text: str


def read_impl(model: Mapping[str, Any]) -> str:
    """The implementation (one of IMPLEMENTATIONS, or unknown), from `cuda_graph_impl` or a deprecated flag."""
    impl = str(model.get("cuda_graph_impl") or "none")
    if impl == "none":
        for flag, flag_impl in FLAGS.items():
            if model.get(flag):
                return flag_impl
    return impl


def read_scopes(model: Mapping[str, Any]) -> list[str]:
    """The parts of a layer that are captured, from either scope key; empty means the whole layer."""
    for key in reversed(SCOPE_KEYS):
        if model.get(key) is not None:
            return split_scopes(model[key])
    return []


def split_scopes(value: Any) -> list[str]:
    """The scope names in `full`, `attn,mlp`, a list of names, or members of Megatron's enum."""
    parts: Sequence[Any]
    if isinstance(value, str):
        parts = value.split(",")
    elif isinstance(value, list | tuple):
        parts = value
    else:
        parts = [value]
    names = [str(getattr(part, "name", part)).strip() for part in parts]
    return [] if names in (["full"], [""]) else names


def find_contradictions(model: Mapping[str, Any], rng: Mapping[str, Any]) -> list[Contradiction]:
    """Contradictions between the keys of a model and of its RNG settings (`te_rng_tracker`, ...)."""
    impl = read_impl(model)
    names = read_scopes(model)
    return [
        *_check_implementation(model, impl),
        *_check_scopes(model, impl, names),
        *_check_trackers(model, rng, impl),
        *_check_other_features(model, impl, names),
    ]


def _check_implementation(model: Mapping[str, Any], impl: str) -> list[Contradiction]:
    enabled_flags = [flag for flag in FLAGS if model.get(flag)]
    problems = []
    if len(enabled_flags) == 2:
        problems.append(
            Contradiction(
                enabled_flags[1],
                f"{enabled_flags[0]} and {enabled_flags[1]} are both true: "
                f"{FLAGS[enabled_flags[0]]} or {FLAGS[enabled_flags[1]]}?",
            )
        )
    for flag in enabled_flags[:1]:
        explicit_impl = model.get("cuda_graph_impl")
        if explicit_impl is not None:
            problems.append(Contradiction(flag, f"{flag} means {FLAGS[flag]}, but cuda_graph_impl is {explicit_impl}"))
    if impl not in IMPLEMENTATIONS:
        words = ", ".join(IMPLEMENTATIONS)
        problems.append(Contradiction("cuda_graph_impl", f"there is no implementation {impl!r}; there are {words}"))
    return problems


def _check_scopes(model: Mapping[str, Any], impl: str, names: list[str]) -> list[Contradiction]:
    keys = [key for key in SCOPE_KEYS if model.get(key) is not None]
    key = keys[-1] if keys else SCOPE_KEYS[0]
    problems = []
    if len(keys) == 2 and split_scopes(model[keys[0]]) != split_scopes(model[keys[1]]):
        problems.append(
            Contradiction(keys[0], f"{keys[0]} and {keys[1]} are two names of one setting and have two values")
        )
    if names and impl == "none":
        problems.append(
            Contradiction(key, f"a scope ({', '.join(names)}) without an implementation: nothing is captured")
        )
    if "full" in names:
        problems.append(Contradiction(key, "full means the whole layer and excludes other scopes"))
    if names and impl == "full_iteration" and names != ["full_iteration"]:
        problems.append(Contradiction(key, "with cuda_graph_impl: full_iteration there is nothing to choose"))
    if "full_iteration" in names and impl == "transformer_engine":
        problems.append(Contradiction(key, "full_iteration needs cuda_graph_impl: local"))
    if {"moe", "moe_router"} <= set(names) and impl != "none":
        problems.append(Contradiction(key, "moe includes moe_router: give one of them"))
    if "moe_preprocess" in names and "moe_router" not in names and impl == "transformer_engine":
        problems.append(Contradiction(key, "moe_preprocess needs moe_router as well"))
    return problems


def _check_trackers(model: Mapping[str, Any], rng: Mapping[str, Any], impl: str) -> list[Contradiction]:
    problems = []
    for model_key, rng_key in TRACKERS.items():
        values = {enabled for _, enabled in _read_tracker(model, rng, model_key)}
        if len(values) == 2:
            text = (
                f"{model_key} of the model and {rng_key} of the RNG settings disagree; the latter chooses the tracker"
            )
            problems.append(Contradiction(model_key, text))
    turned_off = [key for key, enabled in _read_tracker(model, rng, "use_te_rng_tracker") if not enabled]
    for_inference = any(enabled for _, enabled in _read_tracker(model, rng, "inference_rng_tracker"))
    if impl != "none" and turned_off and not for_inference:
        text = f"cuda_graph_impl: {impl} needs Transformer Engine's RNG tracker"
        if impl == "local":
            text += ' ("RNG tracker does not support cudagraphs!")'
        problems.append(Contradiction(turned_off[0], text))
    return problems


def _read_tracker(model: Mapping[str, Any], rng: Mapping[str, Any], model_key: str) -> list[tuple[str, bool]]:
    """The (key, value) pairs with which the model and the RNG settings turn a tracker on or off."""
    settings = []
    for section, key in ((model, model_key), (rng, TRACKERS[model_key])):
        if section.get(key) is not None:
            settings.append((key, bool(section[key])))
    return settings


def _check_other_features(model: Mapping[str, Any], impl: str, names: list[str]) -> list[Contradiction]:
    if impl == "none":
        return []
    problems = []
    if model.get("cpu_offloading"):
        problems.append(Contradiction("cpu_offloading", "CUDA graphs do not work with CPU offloading"))
    captures_whole_iteration = names == ["full_iteration"] or impl == "full_iteration"
    if model.get("recompute_granularity") == "full" and not captures_whole_iteration:
        text = "full recomputation works with full_iteration graphs only; use recompute_granularity: selective"
        problems.append(Contradiction("recompute_granularity", text))
    return problems


# -- remarks ---------------------------------------------------------------------------------------


class LintKind(StrEnum):
    CONTRADICTORY = "contradictory"
    CAPTURES_NOTHING = "captures nothing"
    DEPRECATED = "deprecated"
    UNKNOWN = "unknown"
    NO_EFFECT = "no effect"


SERIOUS = (LintKind.CONTRADICTORY, LintKind.CAPTURES_NOTHING)  # the run fails, or does something else than configured


@dataclass(frozen=True)
class Remark:
    """For example `Remark(LintKind.DEPRECATED, "a.yaml:7", "policy.megatron_cfg.enable_cuda_graph", "...", "...")`."""

    kind: LintKind
    place: str  # file:line; `doctor --json` prints these fields
    key: str
    text: str
    advice: str

    @property
    def is_serious(self) -> bool:
        return self.kind in SERIOUS


# -- remarks on one section ------------------------------------------------------------------------

NEMO_PASSES_ON = ("cuda_graph_impl", "cuda_graph_modules", "cuda_graph_warmup_steps")  # the latter two only lately
NEMO_DROPS = f"NeMo-RL passes {', '.join(NEMO_PASSES_ON)} on to Megatron, but not"
CAPTURING_LOOPS = {  # implementation -> class that the training loop must use to capture
    "transformer_engine": "TECudaGraphHelper",
    "full_iteration": "FullCudaGraphWrapper",
}
DENSE_SCOPES = {"attn", "mlp"}
ADVICE = {  # key of a contradiction -> advice
    "cuda_graph_impl": "write one of these",
    **dict.fromkeys(FLAGS, "keep one of them"),
    "te_rng_tracker": "set it to true, or capture nothing",
    **dict.fromkeys(("cpu_offloading", "recompute_granularity"), "turn one of them off"),
}


class GraphSection:
    """One mapping with graph keys, and the settings around it that its meaning depends on.

    `known_fields` are those of the installed TransformerConfig, or None where megatron-core is not installed.
    """

    def __init__(self, tree: Node, path: tuple[str, ...], known_fields: Collection[str] | None) -> None:
        self.tree = tree
        self.path = path
        self.known_fields = known_fields
        self.node = node_at(tree, path)
        self.model: dict[str, Any] = strip_locations(self.node)
        self.rng = section_at(tree, *path[:-1], "rng")
        if "te_rng_tracker" in self.model:  # a flat file, like Megatron-LM's arguments
            self.rng = {**self.rng, "te_rng_tracker": self.model["te_rng_tracker"]}
        self.in_nemo = path[-1:] == ("megatron_cfg",)
        if self.in_nemo and self.model.get("activation_checkpointing"):  # NeMo-RL translates it to this key
            self.model = {"recompute_granularity": "full", **self.model}
        self.impl = read_impl(self.model)
        self.dropped_scope = None
        if self.in_nemo and self.impl != "none":  # the other remarks are about what reaches Megatron
            self.dropped_scope = self.model.pop(SCOPE_KEYS[0], None)
        self.scopes = read_scopes(self.model)

    @property
    def has_later_names(self) -> bool:
        """Whether the installed megatron-core has `cuda_graph_modules`; True if none is installed."""
        return self.known_fields is None or SCOPE_KEYS[1] in self.known_fields

    def remark(self, kind: LintKind, key: str, text: str, advice: str) -> Remark:
        if key == "recompute_granularity" and key not in self.node.value:
            key = "activation_checkpointing"
        path = self.path
        node = self.node
        if key not in node.value and key in self.rng:
            path = (*self.path[:-1], "rng")
            node = node_at(self.tree, path)
        location = node.value[key].location if key in node.value else node.location
        return Remark(kind, location, ".".join((*path, key)), text, advice)

    def remarks(self) -> Iterator[Remark]:
        yield from self.lint_contradictions()
        yield from self.lint_deprecated()
        yield from self.lint_unknown_scopes()
        yield from self.lint_unknown_keys()
        yield from self.lint_no_effect()
        if self.impl != "none" or self.scopes:
            yield from self.lint_captures_nothing()

    def lint_contradictions(self) -> Iterator[Remark]:
        for key, text in find_contradictions(self.model, self.rng):
            advice = ADVICE.get(key, "keep one of them, or make them agree")
            if key in SCOPE_KEYS and self.impl == "none":
                advice = "give cuda_graph_impl, or remove it"
                if self.in_nemo:
                    advice = "remove it; cuda_graph_impl: local captures whole layers"
            yield self.remark(LintKind.CONTRADICTORY, key, text, advice)

    def lint_deprecated(self) -> Iterator[Remark]:
        for flag, flag_impl in FLAGS.items():
            if flag in self.model:
                replacement = "none"
                if self.model[flag]:
                    replacement = "local" if self.in_nemo else flag_impl
                yield self.remark(
                    LintKind.DEPRECATED, flag, f"{flag} is deprecated", f"write cuda_graph_impl: {replacement}"
                )
        old, new = SCOPE_KEYS
        if old in self.model and self.has_later_names:
            where = "in the megatron-core installed here"
            if self.known_fields is None:
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

    def lint_unknown_scopes(self) -> Iterator[Remark]:
        old, new = SCOPE_KEYS
        key = new if self.model.get(new) is not None else old
        for name in self.scopes:
            if name not in (*SCOPES, "full"):  # "full" has remarks of its own
                advice = f"another version of megatron-core may have it; known here: {', '.join(SCOPES)}"
                yield self.remark(LintKind.UNKNOWN, key, f"unknown scope {name!r}", advice)
        if isinstance(self.model.get(old), str) and ", " in self.model[old]:
            text = "megatron-core 0.16.1 splits at commas and keeps the spaces, which raises a KeyError"
            yield self.remark(LintKind.UNKNOWN, old, text, "write a list, or no spaces")

    def lint_unknown_keys(self) -> Iterator[Remark]:
        if self.known_fields is None:
            return
        old, new = SCOPE_KEYS
        accepted = {*self.known_fields, *FLAGS}
        if self.in_nemo:
            accepted.add(new)  # NeMo-RL sets it under the name that the installed version has
        for key in (*GRAPH_KEYS, *TRACKERS):
            if key in self.model and key not in accepted:
                advice = f"write {old} instead" if key == new else "remove it, or install the version that has it"
                yield self.remark(LintKind.UNKNOWN, key, f"the megatron-core installed here has no {key}", advice)

    def lint_no_effect(self) -> Iterator[Remark]:
        if self.dropped_scope is not None:
            yield self.remark_dropped_scope()
        if self.model.get("cuda_graph_use_single_mempool") is not None:
            text = "megatron-core 0.16.1 has the field and never reads it"
            yield self.remark(LintKind.NO_EFFECT, "cuda_graph_use_single_mempool", text, "remove it")
        for key in DETAIL_KEYS[1:]:
            if key in self.model and self.impl == "none":
                text = "there is no implementation"
                yield self.remark(LintKind.NO_EFFECT, key, text, "give cuda_graph_impl, or remove it")
        for key in SCOPE_KEYS:
            if self.impl == "local" and key in self.model and DENSE_SCOPES & set(self.scopes):
                text = "the local implementation captures the whole dense layer, whether attn or mlp is named"
                advice = "leave the scope out"
                if not self.in_nemo:
                    advice += ", or use transformer_engine"
                yield self.remark(LintKind.NO_EFFECT, key, text, advice)

    def remark_dropped_scope(self) -> Remark:
        old, new = SCOPE_KEYS
        text = f"{NEMO_DROPS} {old}"
        if new not in self.model:
            text += "; without it, an implementation captures whole layers"
        asks_for_layers = set(split_scopes(self.dropped_scope)) <= {*DENSE_SCOPES, "full_iteration"}
        advice = f"call it {new}, or remove it"
        if asks_for_layers or new in self.model:
            advice = "remove it"
        return self.remark(LintKind.NO_EFFECT, old, text, advice)

    def lint_captures_nothing(self) -> Iterator[Remark]:
        kind = LintKind.CAPTURES_NOTHING
        key = next(key for key in GRAPH_KEYS if self.model.get(key))
        if self.path[-1:] == ("dtensor_cfg",):
            yield self.remark(kind, key, "DTensor workers capture no graphs", "use megatron_cfg, or remove it")
        elif self.scopes == ["mamba"]:
            text = "mamba captures only Mamba layers: a model without them runs eagerly"
            scope_key = next(key for key in SCOPE_KEYS if key in self.model)
            yield self.remark(kind, scope_key, text, "name the layers that the model has")
        if self.in_nemo:
            yield from self.lint_captures_nothing_in_nemo(key)

    def lint_captures_nothing_in_nemo(self, key: str) -> Iterator[Remark]:
        kind = LintKind.CAPTURES_NOTHING
        if self.model.get("enabled") is False:
            yield self.remark(kind, key, "megatron_cfg.enabled is false", "enable it, or remove the graph keys")
            return
        if self.model.get("cuda_graph_impl") is None:
            for flag in filter(self.model.get, FLAGS):
                text = f"{NEMO_DROPS} {flag}: training stays eager"
                yield self.remark(kind, flag, text, "write cuda_graph_impl: local")
            return
        loop = CAPTURING_LOOPS.get("full_iteration" if "full_iteration" in self.scopes else self.impl)
        if loop:
            text = f"only a training loop with {loop} captures; NeMo-RL's has none in the versions known here"
            advice = "use cuda_graph_impl: local"
            if self.scopes:
                advice += ", and no scope"
            yield self.remark(kind, "cuda_graph_impl", text, advice)


# -- remarks on a file -----------------------------------------------------------------------------
# Reads configs of NeMo-RL, Megatron-Bridge (`model:` and `rng:`) and flat ones. Any mapping with a graph key is a
# section.

KNOWN_KEYS = {*GRAPH_KEYS, *TRACKERS, *TRACKERS.values()}
GENERATION = ("policy", "generation")
ENGINE = "mcore_generation_config"  # graph keys in this section are those of generation


def lint_file(path: str | os.PathLike[str], known_fields: Collection[str] | None = None) -> list[Remark]:
    """All remarks on a file, in line order. `known_fields` are the fields of the installed TransformerConfig, if any.

    Raises ConfigError if the file has no graph key and no section `policy`.
    """
    tree = load_composed(path)
    if not section_at(tree, "policy") and KNOWN_KEYS.isdisjoint(_all_names(tree)):
        expected = "a config of NeMo-RL (with `policy`), or of Megatron with graph keys (such as cuda_graph_impl)"
        hint = "`rollgraph config` checks rollgraph's own files"
        raise ConfigError([f"{path}: no known setting in this file: expected {expected}; {hint}"])
    return lint(tree, known_fields)


def lint(tree: Node, known_fields: Collection[str] | None = None) -> list[Remark]:
    remarks: list[Remark] = []
    for section in _find_sections(tree, ()):
        remarks += GraphSection(tree, section, known_fields).remarks()
    remarks += _check_generation(tree)
    return sorted(remarks, key=lambda remark: (_file_and_line(remark.place), remark.key))


def _file_and_line(location: str) -> tuple[str, int]:
    file, _, line = location.rpartition(":")
    return file, int(line) if line.isdecimal() else 0


def _all_names(node: Node) -> Iterator[str]:
    """The names of all keys at every level."""
    for name, inner in entries(node):
        yield name
        yield from _all_names(inner)


def _find_sections(node: Node, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    entries_by_name = dict(entries(node))
    has_graph_keys = any(key in entries_by_name for key in (*GRAPH_KEYS, *TRACKERS))
    if has_graph_keys and path[-1:] != (ENGINE,):
        yield path
    for name, inner in entries_by_name.items():
        yield from _find_sections(inner, (*path, name))


def _check_generation(tree: Node) -> Iterator[Remark]:
    """Colocated generation can only switch on the graph managers that the training model was built with."""
    if section_at(tree, *GENERATION).get("backend") != "megatron":
        return
    if not section_at(tree, *GENERATION, "colocated").get("enabled", True):
        return
    settings = section_at(tree, *GENERATION, ENGINE)
    generation_impl = read_impl(settings) if "cuda_graph_impl" in settings else "none"
    training_impl = read_impl(section_at(tree, "policy", "megatron_cfg"))
    if generation_impl != "none" and training_impl == "none":
        path = (*GENERATION, ENGINE, "cuda_graph_impl")
        yield Remark(
            LintKind.CAPTURES_NOTHING,
            node_at(tree, path).location,
            ".".join(path),
            "toggle_cuda_graphs restores the graph managers that the model was built with; without an implementation "
            "in megatron_cfg there are none, and decoding runs eagerly",
            f"set policy.megatron_cfg.cuda_graph_impl: {generation_impl}, "
            "or use a NeMo-RL that builds them for generation",
        )
