"""Derives the CUDA graph and RNG settings that an RL worker should pass to Megatron from its config.

Workers copy single keys from their YAML into a TransformerConfig. If they forget one, training runs eagerly without an
error, or raises "RNG tracker does not support cudagraphs!". This module derives all settings together and refuses
contradictions.
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
    find_contradictions,
    read_impl,
    read_scopes,
    split_scopes,
)
from rollgraph.compat.megatron.repair import silence_megatron

CONFLICTING_KEYS = ("cpu_offloading", "recompute_granularity")  # keys that can conflict with graphs


class GraphSettingsError(ValueError):
    """The settings contradict each other, or this megatron-core cannot hold them."""


@dataclass(frozen=True)
class GraphOverrides:
    """All graph and RNG settings, also those that are off, so that they override those of a checkpoint or a recipe.

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

        That call, not the TransformerConfig, decides which tracker is used. Without Transformer Engine it silently
        falls back to Megatron's own tracker, which a graph can use only with `use_cudagraphable_rng`.
        """
        return {**self.rng, "use_cudagraphable_rng": self.transformer["cuda_graph_impl"] != "none"}

    def apply(self, config: Any, rng: Any = None) -> None:
        """Set them on a TransformerConfig (or a provider derived from it) and, if there is one, on an RNGConfig.

        Megatron does not check a constructed config again, and compares scopes as enum members, so a string would match
        nothing. So this converts scopes, runs Megatron's `__post_init__` on a copy, and sets the result. If the config
        has `cuda_graph_modules`, that is set instead of `cuda_graph_scope`. If a setting does not fit, nothing is
        changed. A provider that is finalized later (Megatron-Bridge's `finalize`) is checked then.
        """
        values = self._settings_for(config)
        key = _scope_key(config)
        assignments: list[tuple[Any, dict[str, Any]]] = [(config, values)]
        if rng is not None:
            assignments.append((rng, dict(self.rng)))
        for target, settings in assignments:
            missing = [name for name in settings if not hasattr(target, name)]
            if missing:
                raise GraphSettingsError(f"{type(target).__name__} has no {', '.join(missing)}")
        for flag in FLAGS:
            if hasattr(config, flag):
                values[flag] = False  # Megatron refuses it beside cuda_graph_impl
        values.update(_resolve(config, values, without_graphs={**values, "cuda_graph_impl": "none", key: []}))
        for target, settings in assignments:
            for name, value in settings.items():
                setattr(target, name, value)

    def _settings_for(self, config: Any) -> dict[str, Any]:
        """The settings under the names of the config's version of megatron-core."""
        values = dict(self.transformer)
        names = values.pop("cuda_graph_scope")
        key = _scope_key(config)
        if key == "cuda_graph_modules" and "full_iteration" in names:
            values["cuda_graph_impl"] = "full_iteration"
            names = []
        values[key] = _enum_members(names)
        return values


def graph_overrides(cfg: Any) -> GraphOverrides:
    """The settings of a config: a mapping, or an object with attributes such as parsed arguments.

    Looks in `cfg` itself, in `cfg.model` with `cfg.rng` beside it (Megatron-Bridge), and in `cfg.megatron_cfg` or
    `cfg.policy.megatron_cfg` (NeMo-RL). Reads `cuda_graph_impl`, `cuda_graph_scope` and `cuda_graph_modules`, the
    deprecated `enable_cuda_graph` and `external_cuda_graph`, `use_te_rng_tracker` and `inference_rng_tracker`, and
    `te_rng_tracker` and `inference_rng_tracker` of the RNG settings. With an implementation, the default is
    Transformer Engine's tracker. An unknown scope is passed through with a warning. Contradictory settings raise
    GraphSettingsError, which lists all contradictions.

    >>> overrides = graph_overrides(cfg["policy"])
    >>> overrides.apply(model_config, rng_config)
    """
    model, rng = _read_settings(cfg)
    conflicts = find_contradictions(model, rng)
    if conflicts:
        raise GraphSettingsError("; ".join(f"{key}: {text}" for key, text in conflicts))
    impl = read_impl(model)
    names = read_scopes(model)
    if impl == "full_iteration":
        impl = "local"
        names = ["full_iteration"]
    unknown = [name for name in names if name not in SCOPES]
    if unknown:
        warnings.warn(f"unknown graph scope {', '.join(unknown)}: passed through", stacklevel=2)
    for_transformer: dict[str, bool] = {}
    for_rng: dict[str, bool] = {}
    for model_key, rng_key in TRACKERS.items():
        enabled = model.get(model_key)
        if enabled is None:
            enabled = rng.get(rng_key)
        if enabled is None and model_key == "use_te_rng_tracker":
            enabled = impl != "none"
        for_transformer[model_key] = for_rng[rng_key] = bool(enabled)
    return GraphOverrides(
        transformer={"cuda_graph_impl": impl, "cuda_graph_scope": names, **for_transformer}, rng=for_rng
    )


def _read_settings(cfg: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The graph keys of the model and of the RNG settings, from wherever the config has them."""
    policy = _get(cfg, "policy")
    if policy is not None:
        cfg = policy
    model = cfg
    for name in ("model", "megatron_cfg"):  # the latter wins
        if _get(cfg, name) is not None:
            model = _get(cfg, name)
    model_settings = _values(model, (*GRAPH_KEYS, *TRACKERS, *CONFLICTING_KEYS))
    rng = _get(cfg, "rng")
    rng_settings = {} if rng is None else _values(rng, tuple(TRACKERS.values()))
    if _get(model, "te_rng_tracker") is not None:  # a flat config, like Megatron-LM's arguments
        rng_settings.setdefault("te_rng_tracker", _get(model, "te_rng_tracker"))
    return model_settings, rng_settings


def _values(part: Any, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: _get(part, name) for name in names}
    values = {name: value for name, value in values.items() if value is not None}
    if isinstance(part, Mapping):
        return values
    # An object has all defaults, so False, "none" and "full" say nothing. And a constructed TransformerConfig has both
    # a deprecated flag and the implementation that the flag means.
    values = {name: value for name, value in values.items() if value not in (False, "none", "full", [])}
    for flag, flag_impl in FLAGS.items():
        if values.get("cuda_graph_impl") == flag_impl:
            values.pop(flag, None)
    return values


def _get(part: Any, name: str) -> Any:
    return part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)


def _scope_key(config: Any) -> str:
    """The name of the scope key in the config's version of megatron-core."""
    old, new = SCOPE_KEYS
    return new if hasattr(config, new) else old


def _resolve(config: Any, values: dict[str, Any], without_graphs: dict[str, Any]) -> dict[str, Any]:
    """The values after Megatron's construction. Returns them unchanged if the config fails even without graphs."""
    try:
        return _construct(config, values)
    except Exception as error:
        try:
            _construct(config, without_graphs)
        except Exception:
            return values
        requested = []
        for name in GRAPH_KEYS:
            value = values.get(name)
            if name in SCOPE_KEYS and value:
                value = split_scopes(value)
            if value:
                requested.append(f"{name}: {value}")
        raise GraphSettingsError(f"{type(config).__name__} refuses {', '.join(requested)}: {error}") from error


def _construct(config: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Run Megatron's `__post_init__` on a copy. Lists are copied too, because it appends to some of them."""
    trial = copy.copy(config)
    for name, value in {**vars(config), **values}.items():
        setattr(trial, name, copy.copy(value) if isinstance(value, list | dict) else value)
    if hasattr(trial, "__post_init__"):
        with silence_megatron():
            trial.__post_init__()
    return {name: getattr(trial, name) for name in values}


def _enum_members(names: list[str]) -> list[Any]:
    from megatron.core.transformer import enums  # type: ignore[import-not-found, import-untyped, unused-ignore]

    scope_enum = getattr(enums, "CudaGraphModule", None) or enums.CudaGraphScope
    unknown = [name for name in names if name not in scope_enum.__members__]
    if unknown:
        valid_names = ", ".join(scope_enum.__members__)
        raise GraphSettingsError(
            f"the megatron-core installed here has no scope {', '.join(unknown)}; it has {valid_names}"
        )
    return [scope_enum[name] for name in names]
