"""Megatron's keys for CUDA graphs, current and deprecated: their names, and when they contradict each other.

Checked against the TransformerConfig of megatron-core 0.16.1. Later versions rename `cuda_graph_scope` to
`cuda_graph_modules` and turn the scope `full_iteration` into an implementation; both spellings are understood.
Imports nothing of Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

IMPLEMENTATIONS = ("none", "local", "transformer_engine", "full_iteration")
SCOPES = ("full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
FLAGS = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}  # deprecated -> what true means
SCOPE_KEYS = ("cuda_graph_scope", "cuda_graph_modules")
DETAIL_KEYS = ("cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph", "cuda_graph_warmup_steps")
TRACKERS = {  # the model's key -> that of the RNG settings
    "use_te_rng_tracker": "te_rng_tracker",
    "inference_rng_tracker": "inference_rng_tracker",
}
GRAPH_KEYS = (*FLAGS, "cuda_graph_impl", *SCOPE_KEYS, *DETAIL_KEYS)


class Contradiction(NamedTuple):
    key: str
    text: str


def implementation(model: Mapping[str, Any]) -> str:
    """none, local, transformer_engine or full_iteration, from the current key or a deprecated flag."""
    given = str(model.get("cuda_graph_impl") or "none")
    if given == "none":
        for flag, means in FLAGS.items():
            if model.get(flag):
                return means
    return given


def scopes(model: Mapping[str, Any]) -> list[str]:
    """Which parts of a layer are captured, from either scope key; empty means the whole layer."""
    for key in reversed(SCOPE_KEYS):
        if model.get(key) is not None:
            return split_scopes(model[key])
    return []


def split_scopes(value: Any) -> list[str]:
    """The names in `full`, in `attn,mlp`, in a list of such words, or in members of Megatron's enum."""
    parts: Sequence[Any]
    if isinstance(value, str):
        parts = value.split(",")
    elif isinstance(value, list | tuple):
        parts = value
    else:
        parts = [value]
    names = [str(getattr(part, "name", part)).strip() for part in parts]
    return [] if names in (["full"], [""]) else names


def contradictions(model: Mapping[str, Any], rng: Mapping[str, Any]) -> list[Contradiction]:
    """Keys of a model and of its RNG settings (`te_rng_tracker`, ...) that cannot all be meant."""
    impl = implementation(model)
    names = scopes(model)
    return [
        *_check_implementation(model, impl),
        *_check_scopes(model, impl, names),
        *_check_trackers(model, rng, impl),
        *_check_surroundings(model, impl, names),
    ]


def _check_implementation(model: Mapping[str, Any], impl: str) -> list[Contradiction]:
    on = [flag for flag in FLAGS if model.get(flag)]
    found = []
    if len(on) == 2:
        found.append(Contradiction(on[1], f"{on[0]} and {on[1]} are both true: {FLAGS[on[0]]} or {FLAGS[on[1]]}?"))
    for flag in on[:1]:
        given = model.get("cuda_graph_impl")
        if given is not None:
            found.append(Contradiction(flag, f"{flag} means {FLAGS[flag]}, beside cuda_graph_impl: {given}"))
    if impl not in IMPLEMENTATIONS:
        words = ", ".join(IMPLEMENTATIONS)
        found.append(Contradiction("cuda_graph_impl", f"there is no implementation {impl!r}; there are {words}"))
    return found


def _check_scopes(model: Mapping[str, Any], impl: str, names: list[str]) -> list[Contradiction]:
    keys = [key for key in SCOPE_KEYS if model.get(key) is not None]
    key = keys[-1] if keys else SCOPE_KEYS[0]
    found = []
    if len(keys) == 2 and split_scopes(model[keys[0]]) != split_scopes(model[keys[1]]):
        found.append(
            Contradiction(keys[0], f"{keys[0]} and {keys[1]} are two names of one setting and have two values")
        )
    if names and impl == "none":
        found.append(Contradiction(key, f"a scope ({', '.join(names)}) without an implementation: nothing is captured"))
    if "full" in names:
        found.append(Contradiction(key, "full means the whole layer and excludes other scopes"))
    if names and impl == "full_iteration" and names != ["full_iteration"]:
        found.append(Contradiction(key, "with cuda_graph_impl: full_iteration there is nothing to choose"))
    if "full_iteration" in names and impl == "transformer_engine":
        found.append(Contradiction(key, "full_iteration needs cuda_graph_impl: local"))
    if {"moe", "moe_router"} <= set(names) and impl != "none":
        found.append(Contradiction(key, "moe includes moe_router: give one of them"))
    if "moe_preprocess" in names and "moe_router" not in names and impl == "transformer_engine":
        found.append(Contradiction(key, "moe_preprocess needs moe_router as well"))
    return found


def _check_trackers(model: Mapping[str, Any], rng: Mapping[str, Any], impl: str) -> list[Contradiction]:
    found = []
    for model_key, rng_key in TRACKERS.items():
        values = {on for _, on in _read_tracker(model, rng, model_key)}
        if len(values) == 2:
            text = (
                f"{model_key} of the model and {rng_key} of the RNG settings disagree; the latter chooses the tracker"
            )
            found.append(Contradiction(model_key, text))
    turned_off = [key for key, on in _read_tracker(model, rng, "use_te_rng_tracker") if not on]
    for_inference = any(on for _, on in _read_tracker(model, rng, "inference_rng_tracker"))
    if impl != "none" and turned_off and not for_inference:
        text = f"cuda_graph_impl: {impl} needs Transformer Engine's RNG tracker"
        if impl == "local":
            text += ' ("RNG tracker does not support cudagraphs!")'
        found.append(Contradiction(turned_off[0], text))
    return found


def _read_tracker(model: Mapping[str, Any], rng: Mapping[str, Any], model_key: str) -> list[tuple[str, bool]]:
    """Whether a tracker is used, according to the model and to the RNG settings, as far as they say so."""
    given = []
    for section, key in ((model, model_key), (rng, TRACKERS[model_key])):
        if section.get(key) is not None:
            given.append((key, bool(section[key])))
    return given


def _check_surroundings(model: Mapping[str, Any], impl: str, names: list[str]) -> list[Contradiction]:
    if impl == "none":
        return []
    found = []
    if model.get("cpu_offloading"):
        found.append(Contradiction("cpu_offloading", "CUDA graphs do not work with CPU offloading"))
    whole = names == ["full_iteration"] or impl == "full_iteration"
    if model.get("recompute_granularity") == "full" and not whole:
        text = "full recomputation works with full_iteration graphs only; use recompute_granularity: selective"
        found.append(Contradiction("recompute_granularity", text))
    return found
