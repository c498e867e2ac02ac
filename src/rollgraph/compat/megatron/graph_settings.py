"""The graph and RNG settings that an RL worker should put into Megatron, from whatever its config says.

Workers copy single keys from their YAML into a TransformerConfig, and what they forget is silently eager, or trips
"RNG tracker does not support cudagraphs!". This derives all of them together, and refuses what cannot be meant.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollgraph.compat.graph_keys import (
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
from rollgraph.compat.megatron.probe_objects import quietly

SURROUNDINGS = ("cpu_offloading", "recompute_granularity")  # what a graph does not go with


class GraphSettingsError(ValueError):
    """The settings contradict each other, or this megatron-core cannot hold them."""


@dataclass(frozen=True)
class GraphOverrides:
    """What to set, True and False alike, so that nothing is left over from a checkpoint or a recipe.

    For `{"enable_cuda_graph": True, "cuda_graph_scope": "attn"}`:

        transformer = {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"],
                       "use_te_rng_tracker": True, "inference_rng_tracker": False}
        rng = {"te_rng_tracker": True, "inference_rng_tracker": False}
    """

    transformer: Mapping[str, Any]  # keyword arguments of TransformerConfig, in the spelling of megatron-core 0.16.1
    rng: Mapping[str, bool]  # attributes of Megatron-Bridge's RNGConfig

    @property
    def seed_arguments(self) -> dict[str, bool]:
        """For `model_parallel_cuda_manual_seed(seed, **overrides.seed_arguments)`.

        That call, not the TransformerConfig, decides which tracker there is. Without Transformer Engine it silently
        falls back on Megatron's own, which a graph can use only with `use_cudagraphable_rng`.
        """
        return {**self.rng, "use_cudagraphable_rng": self.transformer["cuda_graph_impl"] != "none"}

    def apply(self, config: Any, rng: Any = None) -> None:
        """Set them on a TransformerConfig (or a provider derived from it) and, if given, on an RNGConfig.

        A finished config is not checked again by Megatron, and compares scopes as enum members: a text would match
        nothing, silently. So they are converted here, a copy goes through Megatron's own construction, and what that
        makes of the settings is set. Where the config has `cuda_graph_modules`, that is set instead of
        `cuda_graph_scope`. Nothing is changed if something does not fit. A provider that is finished later
        (Megatron-Bridge's `finalize`) is checked then.
        """
        values = dict(self.transformer)
        names = values.pop("cuda_graph_scope")
        key = SCOPE_KEYS[hasattr(config, "cuda_graph_modules")]
        if key == "cuda_graph_modules" and "full_iteration" in names:
            values["cuda_graph_impl"], names = "full_iteration", []
        values[key] = _members(names)
        targets = [(config, values)] if rng is None else [(config, values), (rng, dict(self.rng))]
        for target, wanted in targets:
            if missing := [name for name in wanted if not hasattr(target, name)]:
                raise GraphSettingsError(f"{type(target).__name__} has no {', '.join(missing)}")
        values |= {flag: False for flag in FLAGS if hasattr(config, flag)}  # beside cuda_graph_impl they are refused
        values.update(_settle(config, values, without_graphs={**values, "cuda_graph_impl": "none", key: []}))
        for target, wanted in targets:
            for name, value in wanted.items():
                setattr(target, name, value)


def graph_overrides(cfg: Any) -> GraphOverrides:
    """The settings of a config: a mapping, or an object with attributes such as parsed arguments.

    Looked for in `cfg` itself, in `cfg.model` with `cfg.rng` beside it (Megatron-Bridge), and in `cfg.megatron_cfg`
    or `cfg.policy.megatron_cfg` (NeMo-RL). Understood are `cuda_graph_impl`, `cuda_graph_scope` and
    `cuda_graph_modules`, the deprecated `enable_cuda_graph` and `external_cuda_graph`, `use_te_rng_tracker`,
    `inference_rng_tracker`, and of the RNG settings `te_rng_tracker` and `inference_rng_tracker`. With an
    implementation, Transformer Engine's tracker is used unless something says otherwise. A scope nobody here knows is
    passed through with a warning. Contradictory settings raise GraphSettingsError with all that is wrong.

    >>> overrides = graph_overrides(cfg["policy"])
    >>> overrides.apply(model_config, rng_config)
    """
    model, rng = _read(cfg)
    if wrong := contradictions(model, rng):
        raise GraphSettingsError("; ".join(f"{key}: {text}" for key, text in wrong))
    impl, names = implementation(model), scopes(model)
    if impl == "full_iteration":
        impl, names = "local", ["full_iteration"]
    if unknown := [name for name in names if name not in SCOPES]:
        warnings.warn(f"unknown graph scope {', '.join(unknown)}: passed through", stacklevel=2)
    trackers = {name: _tracker(model, rng, name) for name in TRACKERS}
    if trackers["use_te_rng_tracker"] is None:
        trackers["use_te_rng_tracker"] = impl != "none"
    found = {name: bool(value) for name, value in trackers.items()}
    return GraphOverrides(
        transformer={"cuda_graph_impl": impl, "cuda_graph_scope": names, **found},
        rng={theirs: found[ours] for ours, theirs in TRACKERS.items()},
    )


def _tracker(model: Mapping[str, Any], rng: Mapping[str, Any], name: str) -> bool | None:
    said = model.get(name)
    return said if said is not None else rng.get(TRACKERS[name])


def _read(cfg: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    policy = _get(cfg, "policy")
    cfg = cfg if policy is None else policy
    model = next((part for name in ("megatron_cfg", "model") if (part := _get(cfg, name)) is not None), cfg)
    rng = _get(cfg, "rng")
    found = _values(model, (*GRAPH_KEYS, *TRACKERS, *SURROUNDINGS))
    random = {} if rng is None else _values(rng, tuple(TRACKERS.values()))
    if _get(model, "te_rng_tracker") is not None:  # flat, as Megatron-LM's arguments are
        random.setdefault("te_rng_tracker", _get(model, "te_rng_tracker"))
    return found, random


def _values(part: Any, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: value for name in names if (value := _get(part, name)) is not None}
    if isinstance(part, Mapping):
        return values
    # An object has all its defaults, so False, "none" and "full" say nothing; and a finished TransformerConfig has
    # both the deprecated flag and the implementation it stood for.
    values = {name: value for name, value in values.items() if value not in (False, "none", "full", [])}
    impl = values.get("cuda_graph_impl")
    return {name: value for name, value in values.items() if not (name in FLAGS and FLAGS[name] == impl)}


def _get(part: Any, name: str) -> Any:
    return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)


def _settle(config: Any, values: dict[str, Any], without_graphs: dict[str, Any]) -> dict[str, Any]:
    """What Megatron makes of the values. A config that it refuses for another reason than graphs is not judged here."""
    try:
        return _construct(config, values)
    except Exception as error:
        try:
            _construct(config, without_graphs)
        except Exception:
            return values
        said = {name: split_scopes(value) if name in SCOPE_KEYS else value for name, value in values.items()}
        wanted = ", ".join(f"{name}: {said[name]}" for name in GRAPH_KEYS if said.get(name))
        raise GraphSettingsError(f"{type(config).__name__} refuses {wanted}: {error}") from error


def _construct(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """On a copy, with lists of its own: construction appends to some."""
    trial = copy.copy(config)
    for name, value in {**vars(config), **values}.items():
        setattr(trial, name, copy.copy(value) if isinstance(value, list | dict) else value)
    if hasattr(trial, "__post_init__"):
        with quietly():
            trial.__post_init__()
    return {name: getattr(trial, name) for name in values}


def _members(names: list[str]) -> list[Any]:
    from megatron.core.transformer import enums  # type: ignore[import-not-found, import-untyped, unused-ignore]

    kind = getattr(enums, "CudaGraphModule", None) or enums.CudaGraphScope
    if unknown := [name for name in names if name not in kind.__members__]:
        known = ", ".join(kind.__members__)
        raise GraphSettingsError(f"the megatron-core installed here has no scope {', '.join(unknown)}; it has {known}")
    return [kind[name] for name in names]
