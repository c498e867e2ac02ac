"""`make_graphed_callables` with Transformer Engine's arguments, for plain PyTorch modules, on rollgraph's graphs.

Owns what each of their arguments means here, and the refusal, by name, of what needs their FP8 modules. The graphs
are those of `rollgraph.graph`: its checks at replay, its tape where there is no GPU. Nothing of theirs is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from rollgraph.compat.capture_time_hooks import read_capture_time_hooks
from rollgraph.graph import CaptureError, GraphedCallable, GraphPool
from rollgraph.graph import make_graphed_callables as graph_callables
from rollgraph.graph.schedule import parse_order

_OLD_NAMES = {
    "fp8_enabled": "enabled",
    "fp8_calibrating": "calibrating",
    "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group",
    "fp8_weight_caching": "cache_quantized_params",
}
_FIRST_MICROBATCH = "is_first_microbatch"  # says when to quantise weights anew: nothing to do for a plain module


class GraphedForward:
    """Stands in for a module's forward, or for one microbatch of it; calls the graph as Transformer Engine's is called.

    A graph captured in eval mode has no backward and replays in any grad mode. `is_first_microbatch` is dropped where
    the graph was not captured with it.
    """

    def __init__(self, graph: GraphedCallable, module: nn.Module, keywords: Sequence[str]) -> None:
        self.graph = graph
        self._module = module
        self._training = module.training
        self._drops = _FIRST_MICROBATCH not in keywords

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._module.training is not self._training:
            return self.graph(*args, **kwargs)  # it runs the original, and counts that
        if self._drops and isinstance(kwargs.get(_FIRST_MICROBATCH), bool):
            del kwargs[_FIRST_MICROBATCH]
        if self._training or not self.graph.replays:
            return self.graph(*args, **kwargs)
        with torch.no_grad():
            return self.graph(*args, **kwargs)

    def install(self) -> None:
        """Take the place of the graph as the module's forward, and give the module a `reset`."""
        self._module.forward = self
        self._module.reset = partial(_reset, self)  # type: ignore[assignment]

    def reset(self) -> None:
        """Give the graph back; a module gets its own forward again."""
        if self._module.__dict__.get("forward") is self:
            self._module.forward = self.graph
            self._module.__dict__.pop("reset", None)
        self.graph.reset()

    def __reduce__(self) -> Any:
        return self.graph.__reduce__()  # a copy or pickle of the module gets its own, ungraphed forward


def _reset(forward: Any) -> None:
    """A module's `reset`; in a copy of the module, which has no graph, there is nothing to give back."""
    if isinstance(forward, GraphedForward):
        forward.reset()


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
    """Graph one module, or a tuple of them. What each argument does here is in docs/transformer_engine.md.

    Without `_order` the modules come back as themselves, with their forward replaced and a `reset`. With it, the
    result has a callable for each chunk, microbatch and layer, in that nesting, and modules stay as they are.
    `clone_param_grads_on_return` changes nothing: a gradient that somebody still holds is never overwritten.
    """
    single = not isinstance(modules, tuple)
    targets: tuple[Any, ...] = (modules,) if single else modules
    args = [sample_args] if single else list(sample_args)
    kwargs = _sample_kwargs(single, sample_kwargs, len(args))
    _refuse_fp8(
        len(targets),
        enabled=enabled, calibrating=calibrating, recipe=recipe, amax_reduction_group=amax_reduction_group,
        cache_quantized_params=cache_quantized_params, fp8_enabled=fp8_enabled, fp8_calibrating=fp8_calibrating,
        fp8_recipe=fp8_recipe, fp8_group=fp8_group, fp8_weight_caching=fp8_weight_caching,
    )  # fmt: skip
    if not targets:
        raise CaptureError("no modules: `modules` is empty")
    for index, target in enumerate(targets):
        _check_module(target, f"modules[{index}]")
    training = _training_mode(targets)
    _check_samples(len(targets), len(args), _order, _num_layers_per_chunk)
    _check_buffer_reuse(_reuse_graph_input_output_buffers, _order, training)
    hooks = read_capture_time_hooks(capture_time_hooks, len(targets))
    before, after = _once_around(len(targets), pre_warmup_hook, post_warmup_hook)
    with nullcontext() if training else torch.no_grad():
        made = graph_callables(
            targets,
            args,
            num_warmup_iters,
            allow_unused_input,
            _own_pool(pool),
            sample_kwargs=kwargs,
            order=_order,
            layers_per_chunk=_num_layers_per_chunk,
            reuse_buffers=_reuse_graph_input_output_buffers,
            retain_graph=retain_graph_in_backward,
            hooks=hooks,
            pre_warmup_hook=before,
            post_warmup_hook=after,
        )
    graphs: list[GraphedCallable] = list(made) if _order is not None else [vars(module)["forward"] for module in made]
    forwards = [GraphedForward(g, g.target, list(k)) for g, k in zip(graphs, kwargs, strict=True)]
    if _order is not None:
        return forwards[0] if single else tuple(forwards)
    for forward in forwards:
        forward.install()
    return modules


# -- what is refused -------------------------------------------------------------------------------


def _refuse_fp8(modules: int, **given: Any) -> None:
    """Refuse what asks for FP8. A recipe or a group without it is ignored, as theirs are."""
    for old, new in _OLD_NAMES.items():
        if given[old] is not None and given[new] is not None:
            raise CaptureError(f"{old} is the old name of {new}: pass one of them")
    for name in ("enabled", "fp8_enabled"):
        value = given[name]
        if isinstance(value, (tuple, list)):
            if len(value) != modules:
                raise CaptureError(f"{name} has {len(value)} values for {modules} modules")
            given[name] = value if any(value) else False
    for name in ("enabled", "calibrating", "cache_quantized_params"):
        for spelling in (name, next(old for old, new in _OLD_NAMES.items() if new == name)):
            if given[spelling]:
                raise CaptureError(
                    f"{spelling}={given[spelling]!r} needs Transformer Engine's FP8 modules and their state; "
                    "rollgraph graphs plain PyTorch modules"
                )


def _check_module(target: Any, where: str) -> None:
    if not isinstance(target, nn.Module):
        raise CaptureError(
            f"{where} is a {type(target).__name__}, not a module (several modules are passed as a tuple); "
            "rollgraph.graph.make_graphed_callables takes functions too"
        )
    name = type(target).__name__
    if isinstance(target.__dict__.get("forward"), (GraphedForward, GraphedCallable)):
        raise CaptureError(f"{where} ({name}) is graphed already: `reset()` it first")
    if target._forward_pre_hooks or target._forward_hooks or target._backward_pre_hooks or target._backward_hooks:
        raise CaptureError(
            f"{where} ({name}) has hooks, which a graph of it would not run: register them afterwards, or pass what "
            "must run around its capture as capture_time_hooks"
        )
    for path, module in target.named_modules():
        place, kind = f"{where}.{path}" if path else where, type(module)
        theirs = next((c for c in kind.__mro__ if c.__module__.partition(".")[0] == "transformer_engine"), None)
        if theirs is not None:
            raise CaptureError(
                f"{place} is a {kind.__name__} of {theirs.__module__}, which keeps FP8 state between calls; rollgraph "
                "graphs plain PyTorch modules"
            )
        delays = getattr(module, "need_backward_dw", None)
        if callable(delays) and delays():
            raise CaptureError(f"{place} ({kind.__name__}) leaves weight gradients to backward_dw(): no graph holds it")


def _training_mode(targets: Sequence[nn.Module]) -> bool:
    training = targets[0].training
    for index, target in enumerate(targets):
        if target.training is not training:
            raise CaptureError(
                f"modules[0] has training={training} and modules[{index}] not: all or none of them must be in training"
            )
    return training


def _check_samples(modules: int, samples: int, order: Any, layers_per_chunk: Any) -> None:
    """One sample for each module and, with an order, for each of its microbatches."""
    if order is None:
        if layers_per_chunk is not None:
            raise CaptureError("_num_layers_per_chunk says how `_order` deals modules to chunks: pass both or neither")
        if samples != modules:
            raise CaptureError(f"{samples} sample_args for {modules} modules")
        return
    schedule = parse_order(order, modules, layers_per_chunk)
    if samples != schedule.entries:
        raise CaptureError(
            f"{samples} sample_args, but {modules} modules and {schedule.microbatches} microbatches make "
            f"{schedule.entries}: one for each module and microbatch"
        )


def _check_buffer_reuse(reuse: bool, order: Any, training: bool) -> None:
    if reuse and order is None:
        raise CaptureError("_reuse_graph_input_output_buffers needs `_order`, which says what is alive when")
    if reuse and not training:
        raise CaptureError("_reuse_graph_input_output_buffers needs modules in training mode: their backward frees")


def _own_pool(pool: Any) -> GraphPool:
    """Graphs of a foreign pool would share memory with graphs whose replays nobody here can see."""
    if pool is None or isinstance(pool, GraphPool):
        return pool or GraphPool()
    raise CaptureError(
        f"pool={pool!r} is not a pool of rollgraph's, so nothing could tell whose memory a replay overwrites: pass a "
        "rollgraph.graph.GraphPool() to share memory between calls, or None"
    )


# -- what is translated ----------------------------------------------------------------------------


def _sample_kwargs(single: bool, given: Any, samples: int) -> list[dict[str, Any]]:
    if given is None:
        return [{} for _ in range(samples)]
    kwargs = [given] if single else list(given)
    if len(kwargs) != samples:
        raise CaptureError(f"{samples} sample_args, but {len(kwargs)} sample_kwargs")
    return kwargs


def _once_around(
    modules: int, before: Callable[[], Any] | None, after: Callable[[], Any] | None
) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    """Their warm-up hooks run once around all of the warm-up; a graph's run around each module's."""
    started = finished = 0

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
