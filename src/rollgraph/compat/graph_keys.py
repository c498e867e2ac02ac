"""The family's keys for CUDA graphs, current and deprecated: what they are called, and when they contradict each other.

Checked against the TransformerConfig of megatron-core 0.16.1. Later versions call `cuda_graph_scope`
`cuda_graph_modules`, and what was the scope `full_iteration` is an implementation there; both are understood.
Imports nothing of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

IMPLEMENTATIONS = ("none", "local", "transformer_engine", "full_iteration")
SCOPES = ("full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
FLAGS = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}  # deprecated: what true stands for
SCOPE_KEYS = ("cuda_graph_scope", "cuda_graph_modules")
DETAIL_KEYS = ("cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph", "cuda_graph_warmup_steps")
TRACKERS = {"use_te_rng_tracker": "te_rng_tracker", "inference_rng_tracker": "inference_rng_tracker"}  # model: RNG
GRAPH_KEYS = (*FLAGS, "cuda_graph_impl", *SCOPE_KEYS, *DETAIL_KEYS)


class Contradiction(NamedTuple):
    key: str
    text: str


def implementation(model: Mapping[str, Any]) -> str:
    """none, local, transformer_engine or full_iteration, from whichever key says it."""
    said = str(model.get("cuda_graph_impl") or "none")
    flags = [means for flag, means in FLAGS.items() if model.get(flag)]
    return flags[0] if said == "none" and flags else said


def scopes(model: Mapping[str, Any]) -> list[str]:
    """What is captured of a layer, from whichever key says it; empty is the whole layer."""
    for key in reversed(SCOPE_KEYS):
        if model.get(key) is not None:
            return split_scopes(model[key])
    return []


def split_scopes(value: Any) -> list[str]:
    """`full`, `attn,mlp`, a list of such words, or members of Megatron's enum."""
    parts: Sequence[Any] = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        parts = [parts]
    names = [str(getattr(part, "name", part)).strip() for part in parts]
    return [] if names in (["full"], [""]) else names


def contradictions(model: Mapping[str, Any], rng: Mapping[str, Any]) -> list[Contradiction]:
    """What cannot be meant together, among the keys of a model and of its random numbers (`te_rng_tracker`, ...)."""
    impl, names = implementation(model), scopes(model)
    return [
        *_implementations(model, impl),
        *_scopes(model, impl, names),
        *_trackers(model, rng, impl),
        *_surroundings(model, impl, names),
    ]


def _implementations(model: Mapping[str, Any], impl: str) -> list[Contradiction]:
    on = [flag for flag in FLAGS if model.get(flag)]
    found = []
    if len(on) == 2:
        found.append(Contradiction(on[1], f"{on[0]} and {on[1]} are both true: {FLAGS[on[0]]} or {FLAGS[on[1]]}?"))
    for flag in on[:1]:
        said = model.get("cuda_graph_impl")
        if said is not None:
            found.append(Contradiction(flag, f"{flag} means {FLAGS[flag]}, beside cuda_graph_impl: {said}"))
    if impl not in IMPLEMENTATIONS:
        words = ", ".join(IMPLEMENTATIONS)
        found.append(Contradiction("cuda_graph_impl", f"there is no implementation {impl!r}; there are {words}"))
    return found


def _scopes(model: Mapping[str, Any], impl: str, names: list[str]) -> list[Contradiction]:
    keys = [key for key in SCOPE_KEYS if model.get(key) is not None]
    key = keys[-1] if keys else SCOPE_KEYS[0]
    found = []
    if len(keys) == 2 and split_scopes(model[keys[0]]) != split_scopes(model[keys[1]]):
        found.append(Contradiction(keys[0], f"{keys[0]} and {keys[1]} are one setting with two values"))
    if names and impl == "none":
        found.append(Contradiction(key, f"a scope ({', '.join(names)}) without an implementation: nothing is captured"))
    if "full" in names:
        found.append(Contradiction(key, "full is the whole layer and cannot stand beside other scopes"))
    if names and impl == "full_iteration" and names != ["full_iteration"]:
        found.append(Contradiction(key, "with cuda_graph_impl: full_iteration there is nothing to choose"))
    if "full_iteration" in names and impl == "transformer_engine":
        found.append(Contradiction(key, "full_iteration needs cuda_graph_impl: local"))
    if {"moe", "moe_router"} <= set(names) and impl != "none":
        found.append(Contradiction(key, "moe holds moe_router: give one of them"))
    if "moe_preprocess" in names and "moe_router" not in names and impl == "transformer_engine":
        found.append(Contradiction(key, "moe_preprocess needs moe_router beside it"))
    return found


def _trackers(model: Mapping[str, Any], rng: Mapping[str, Any], impl: str) -> list[Contradiction]:
    found = []
    for ours, theirs in TRACKERS.items():
        said = {bool(part[key]) for part, key in ((model, ours), (rng, theirs)) if part.get(key) is not None}
        if len(said) == 2:
            text = f"{ours} of the model and {theirs} of the RNG settings disagree; the latter chooses the tracker"
            found.append(Contradiction(ours, text))
    said_no = [key for part, key in _places(model, rng, "use_te_rng_tracker") if not part[key]]
    inference = any(part[key] for part, key in _places(model, rng, "inference_rng_tracker"))
    if impl != "none" and said_no and not inference:
        text = f"cuda_graph_impl: {impl} needs Transformer Engine's RNG tracker"
        if impl == "local":
            text += ' ("RNG tracker does not support cudagraphs!")'
        found.append(Contradiction(said_no[0], text))
    return found


def _places(model: Mapping[str, Any], rng: Mapping[str, Any], tracker: str) -> list[tuple[Mapping[str, Any], str]]:
    both = ((model, tracker), (rng, TRACKERS[tracker]))
    return [(part, key) for part, key in both if part.get(key) is not None]


def _surroundings(model: Mapping[str, Any], impl: str, names: list[str]) -> list[Contradiction]:
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
