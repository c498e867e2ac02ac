"""Checks the arguments of Transformer Engine's `make_graphed_callables`, and refuses by name what needs FP8 modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from rollgraph.compat.transformer_engine.graphed_forward import GraphedForward
from rollgraph.graph import CaptureError, GraphedCallable, GraphPool
from rollgraph.graph.schedule import parse_order

OLD_NAMES = {
    "fp8_enabled": "enabled",
    "fp8_calibrating": "calibrating",
    "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group",
    "fp8_weight_caching": "cache_quantized_params",
}
ASKS_FOR_FP8 = (  # each argument that turns FP8 on, after its current name
    "enabled",
    "fp8_enabled",
    "calibrating",
    "fp8_calibrating",
    "cache_quantized_params",
    "fp8_weight_caching",
)


def refuse_fp8(modules: int, given: dict[str, Any]) -> None:
    """Refuse arguments that ask for FP8. A recipe or a group alone is ignored, as Transformer Engine does."""
    for old, new in OLD_NAMES.items():
        if given[old] is not None and given[new] is not None:
            raise CaptureError(f"{old} is the old name of {new}: pass one of them")
    for name in ("enabled", "fp8_enabled"):
        value = given[name]
        if isinstance(value, (tuple, list)):
            if len(value) != modules:
                raise CaptureError(f"{name} has {len(value)} values for {modules} modules")
            given[name] = value if any(value) else False
    for name in ASKS_FOR_FP8:
        if given[name]:
            raise CaptureError(
                f"{name}={given[name]!r} needs Transformer Engine's FP8 modules and their state; "
                "rollgraph graphs plain PyTorch modules"
            )


def check_modules(targets: Sequence[Any]) -> None:
    if not targets:
        raise CaptureError("no modules: `modules` is empty")
    for index, target in enumerate(targets):
        _check_module(target, f"modules[{index}]")
    training = targets[0].training
    for index, target in enumerate(targets):
        if target.training is not training:
            raise CaptureError(
                f"modules[0] has training={training}, but modules[{index}] does not: all modules must be in one mode"
            )


def _check_module(target: Any, where: str) -> None:
    if not isinstance(target, nn.Module):
        raise CaptureError(
            f"{where} is a {type(target).__name__}, not a module (pass several modules as a tuple); "
            "rollgraph.graph.make_graphed_callables also takes functions"
        )
    name = type(target).__name__
    if isinstance(target.__dict__.get("forward"), (GraphedForward, GraphedCallable)):
        raise CaptureError(f"{where} ({name}) is graphed already: `reset()` it first")
    if target._forward_pre_hooks or target._forward_hooks or target._backward_pre_hooks or target._backward_hooks:
        raise CaptureError(
            f"{where} ({name}) has hooks, which its graph would not run: register them after graphing, or pass the "
            "hooks that must run around capture as capture_time_hooks"
        )
    for path, module in target.named_modules():
        _check_submodule(module, f"{where}.{path}" if path else where)


def _check_submodule(module: nn.Module, place: str) -> None:
    kind = type(module)
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "transformer_engine":
            raise CaptureError(
                f"{place} is a {kind.__name__} of {base.__module__}, which keeps FP8 state between calls; rollgraph "
                "graphs plain PyTorch modules"
            )
    delays = getattr(module, "need_backward_dw", None)
    if callable(delays) and delays():
        raise CaptureError(
            f"{place} ({kind.__name__}) computes weight gradients in backward_dw(), which no graph would hold"
        )


def check_samples(modules: int, samples: int, order: Any, layers_per_chunk: Any) -> None:
    """Require one sample for each module and, with an order, for each of its microbatches."""
    if order is None:
        if layers_per_chunk is not None:
            raise CaptureError("_num_layers_per_chunk assigns modules to the chunks of `_order`: pass both or neither")
        if samples != modules:
            raise CaptureError(f"{samples} sample_args for {modules} modules")
        return
    schedule = parse_order(order, modules, layers_per_chunk)
    if samples != schedule.entries:
        raise CaptureError(
            f"{samples} sample_args, but {modules} modules and {schedule.microbatches} microbatches need "
            f"{schedule.entries}: one for each module and microbatch"
        )


def check_buffer_reuse(reuse: bool, order: Any, training: bool) -> None:
    if reuse and order is None:
        raise CaptureError("_reuse_graph_input_output_buffers needs `_order`, which says which passes are open when")
    if reuse and not training:
        raise CaptureError(
            "_reuse_graph_input_output_buffers needs modules in training mode: a buffer is free after a backward"
        )


def check_pool(pool: Any) -> GraphPool:
    """Refuse a foreign pool: rollgraph cannot see the replays of other graphs that share its memory."""
    if pool is None:
        return GraphPool()
    if isinstance(pool, GraphPool):
        return pool
    raise CaptureError(
        f"pool={pool!r} is not a rollgraph pool, so rollgraph could not tell whose memory a replay overwrites: pass a "
        "rollgraph.graph.GraphPool() to share memory between calls, or None"
    )


def read_sample_kwargs(single: bool, given: Any, samples: int) -> list[dict[str, Any]]:
    if given is None:
        return [{} for _ in range(samples)]
    kwargs = [given] if single else list(given)
    if len(kwargs) != samples:
        raise CaptureError(f"{samples} sample_args, but {len(kwargs)} sample_kwargs")
    return kwargs
