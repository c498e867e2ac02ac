"""`make_graphed_callables` with Transformer Engine's signature. Owns the translation of its arguments.

The graphs are those of `rollgraph.graph`, with its checks at replay and its tape where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from rollgraph.compat.transformer_engine.argument_checks import (
    check_buffer_reuse,
    check_modules,
    check_pool,
    check_samples,
    read_sample_kwargs,
    refuse_fp8,
)
from rollgraph.compat.transformer_engine.capture_time_hooks import read_capture_time_hooks
from rollgraph.compat.transformer_engine.graphed_forward import GraphedForward
from rollgraph.graph import GraphedCallable, GraphPool
from rollgraph.graph import make_graphed_callables as graph_callables


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: bool | tuple[bool, ...] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | tuple[bool, ...] | None = None,
    calibrating: bool | None = None,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: Sequence[int] | None = None,
    _num_layers_per_chunk: int | Sequence[int] | None = None,
    pool: GraphPool | None = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: Sequence[Any] | None = None,
) -> Any:
    """Graph one module, or a tuple of them; docs/transformer_engine.md says what each argument does here.

    Without `_order`, returns the modules themselves, with their forward replaced and a `reset` added. With it, returns
    a callable for each chunk, microbatch and layer, in that nesting, and leaves the modules unchanged.
    `clone_param_grads_on_return` has no effect: a gradient that is still referenced is never overwritten.
    """
    single = not isinstance(modules, tuple)
    targets: tuple[Any, ...] = (modules,) if single else modules
    args = [sample_args] if single else list(sample_args)
    kwargs = read_sample_kwargs(single, sample_kwargs, len(args))
    fp8_arguments = {
        "enabled": enabled,
        "calibrating": calibrating,
        "recipe": recipe,
        "amax_reduction_group": amax_reduction_group,
        "cache_quantized_params": cache_quantized_params,
        "fp8_enabled": fp8_enabled,
        "fp8_calibrating": fp8_calibrating,
        "fp8_recipe": fp8_recipe,
        "fp8_group": fp8_group,
        "fp8_weight_caching": fp8_weight_caching,
    }
    refuse_fp8(len(targets), fp8_arguments)
    check_modules(targets)
    training: bool = targets[0].training
    check_samples(len(targets), len(args), _order, _num_layers_per_chunk)
    check_buffer_reuse(_reuse_graph_input_output_buffers, _order, training)
    hooks = read_capture_time_hooks(capture_time_hooks, len(targets))
    before, after = _once_around(len(targets), pre_warmup_hook, post_warmup_hook)
    with nullcontext() if training else torch.no_grad():
        made = graph_callables(
            targets,
            args,
            num_warmup_iters,
            allow_unused_input,
            check_pool(pool),
            sample_kwargs=kwargs,
            order=_order,
            layers_per_chunk=_num_layers_per_chunk,
            reuse_buffers=_reuse_graph_input_output_buffers,
            retain_graph=retain_graph_in_backward,
            hooks=hooks,
            pre_warmup_hook=before,
            post_warmup_hook=after,
        )
    if _order is not None:
        forwards = _wrap(list(made), kwargs)
        return forwards[0] if single else tuple(forwards)
    for forward in _wrap([vars(module)["forward"] for module in made], kwargs):
        forward.install()
    return modules


def _wrap(graphs: list[GraphedCallable], kwargs: list[dict[str, Any]]) -> list[GraphedForward]:
    return [GraphedForward(graph, graph.target, list(names)) for graph, names in zip(graphs, kwargs, strict=True)]


def _once_around(
    modules: int, before: Callable[[], Any] | None, after: Callable[[], Any] | None
) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    """Transformer Engine's warm-up hooks run once around all of warm-up; a graph's run around each module's."""
    started = 0
    finished = 0

    def first(module: Any) -> None:
        nonlocal started
        started += 1
        if started == 1 and before is not None:
            before()

    def last(module: Any) -> None:
        nonlocal finished
        finished += 1
        if finished == modules and after is not None:
            after()

    return first, last
