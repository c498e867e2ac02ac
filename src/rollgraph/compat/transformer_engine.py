"""Transformer Engine's `make_graphed_callables` for plain PyTorch modules, with rollgraph's graphs.

Transformer Engine need not be installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from rollgraph.graph import CaptureError, GraphedCallable, GraphHooks, GraphPool
from rollgraph.graph import make_graphed_callables as graph_callables
from rollgraph.graph.schedule import parse_order

# -- the callable that replaces a module's forward -------------------------------------------------

FIRST_MICROBATCH = "is_first_microbatch"  # tells FP8 modules to requantize their weights; plain modules ignore it


class GraphedForward:
    """Replaces a module's forward, or one microbatch of it, with the calling convention of Transformer Engine.

    A graph captured in eval mode has no backward and replays in any grad mode. `is_first_microbatch` is dropped if
    the graph was captured without it.
    """

    def __init__(self, graph: GraphedCallable, module: nn.Module, keywords: Sequence[str]) -> None:
        self.graph = graph
        self._module = module
        self._training = module.training
        self._drops_first_microbatch = FIRST_MICROBATCH not in keywords

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._module.training is not self._training:
            return self.graph(*args, **kwargs)  # runs the original forward, and counts the call as eager
        if self._drops_first_microbatch and isinstance(kwargs.get(FIRST_MICROBATCH), bool):
            del kwargs[FIRST_MICROBATCH]
        if self._training or not self.graph.replays:
            return self.graph(*args, **kwargs)
        with torch.no_grad():
            return self.graph(*args, **kwargs)

    def install(self) -> None:
        """Become the module's forward, in place of the graph, and give the module a `reset`."""
        self._module.forward = self
        self._module.reset = partial(_reset, self)  # type: ignore[assignment]

    def reset(self) -> None:
        """Free the graph and, if it is installed, restore the module's own forward."""
        if self._module.__dict__.get("forward") is self:
            self._module.forward = self.graph
            self._module.__dict__.pop("reset", None)
        self.graph.reset()

    def __reduce__(self) -> Any:
        return self.graph.__reduce__()  # a copy or pickle of the module has the eager forward


def _reset(forward: Any) -> None:
    """The `reset` of a module. A copy of the module has no graph, so there is nothing to free."""
    if isinstance(forward, GraphedForward):
        forward.reset()


# -- checks of arguments ---------------------------------------------------------------------------

OLD_NAMES = {
    "fp8_enabled": "enabled",
    "fp8_calibrating": "calibrating",
    "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group",
    "fp8_weight_caching": "cache_quantized_params",
}
FP8_ARGUMENTS = (  # arguments that turn FP8 on, each followed by its old name
    "enabled",
    "fp8_enabled",
    "calibrating",
    "fp8_calibrating",
    "cache_quantized_params",
    "fp8_weight_caching",
)


def refuse_fp8(module_count: int, arguments: dict[str, Any]) -> None:
    """Refuse arguments that turn FP8 on. A recipe or a group alone is ignored, as in Transformer Engine."""
    for old, new in OLD_NAMES.items():
        if arguments[old] is not None and arguments[new] is not None:
            raise CaptureError(f"{old} is the old name of {new}: pass one of them")
    for name in ("enabled", "fp8_enabled"):
        value = arguments[name]
        if isinstance(value, (tuple, list)):
            if len(value) != module_count:
                raise CaptureError(f"{name} has {len(value)} values for {module_count} modules")
            arguments[name] = value if any(value) else False
    for name in FP8_ARGUMENTS:
        if arguments[name]:
            raise CaptureError(
                f"{name}={arguments[name]!r} needs Transformer Engine's FP8 modules and their state; "
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


def _check_submodule(module: nn.Module, where: str) -> None:
    kind = type(module)
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "transformer_engine":
            raise CaptureError(
                f"{where} is a {kind.__name__} of {base.__module__}, which keeps FP8 state between calls; rollgraph "
                "graphs plain PyTorch modules"
            )
    delays_wgrad = getattr(module, "need_backward_dw", None)
    if callable(delays_wgrad) and delays_wgrad():
        raise CaptureError(
            f"{where} ({kind.__name__}) computes weight gradients in backward_dw(), which no graph would hold"
        )


def check_samples(module_count: int, sample_count: int, order: Any, layers_per_chunk: Any) -> None:
    """Require one sample per module and, with an order, one per module and microbatch."""
    if order is None:
        if layers_per_chunk is not None:
            raise CaptureError("_num_layers_per_chunk assigns modules to the chunks of `_order`: pass both or neither")
        if sample_count != module_count:
            raise CaptureError(f"{sample_count} sample_args for {module_count} modules")
        return
    schedule = parse_order(order, module_count, layers_per_chunk)
    if sample_count != schedule.entries:
        raise CaptureError(
            f"{sample_count} sample_args, but {module_count} modules and {schedule.microbatches} microbatches need "
            f"{schedule.entries}: one for each module and microbatch"
        )


def check_buffer_reuse(reuse: bool, order: Any, training: bool) -> None:
    if reuse and order is None:
        raise CaptureError("_reuse_graph_input_output_buffers needs `_order`, which says when a buffer is free")
    if reuse and not training:
        raise CaptureError(
            "_reuse_graph_input_output_buffers needs modules in training mode: buffers are freed by a backward"
        )


def check_pool(pool: Any) -> GraphPool:
    """Refuse a pool that is not rollgraph's, because replays of foreign graphs in its memory would go unnoticed."""
    if pool is None:
        return GraphPool()
    if isinstance(pool, GraphPool):
        return pool
    raise CaptureError(
        f"pool={pool!r} is not a rollgraph pool, so rollgraph could not tell whose memory a replay overwrites: pass a "
        "rollgraph.graph.GraphPool() to share memory between calls, or None"
    )


def read_sample_kwargs(is_single: bool, sample_kwargs: Any, sample_count: int) -> list[dict[str, Any]]:
    if sample_kwargs is None:
        return [{} for _ in range(sample_count)]
    kwargs = [sample_kwargs] if is_single else list(sample_kwargs)
    if len(kwargs) != sample_count:
        raise CaptureError(f"{sample_count} sample_args, but {len(kwargs)} sample_kwargs")
    return kwargs


# -- `capture_time_hooks` --------------------------------------------------------------------------
# There are two spellings of the kinds. In both, each module has a dictionary of kinds, and each kind a dictionary
# (id -> hook) or a list. A hook is called like PyTorch's module hooks, or with fewer arguments if it takes fewer.
# Gradients are replaced by empty tuples, because a hook that kept one would pin a graph's memory. (Transformer Engine
# passes uninitialized memory there in warm-up and capture.)

Hook = Callable[..., Any]

_KINDS = {
    "forward_pre_hooks": "pre_forward",
    "forward_hooks": "post_forward",
    "backward_pre_hooks": "pre_backward",
    "backward_hooks": "post_backward",
    "forward_pre": "pre_forward",
    "forward": "post_forward",
    "pre_backward": "pre_backward",
    "backward": "post_backward",
}
_WITH_KWARGS = ("forward_pre_hooks_with_kwargs", "forward_hooks_with_kwargs")
# For each kind: number of arguments that a hook takes -> indices of the graph hook's arguments that it gets.
_INDICES_BY_COUNT: dict[str, dict[int, tuple[int, ...]]] = {
    "pre_forward": {1: (0,), 2: (0, 1), 3: (0, 1, 2)},  # module, args, kwargs
    "post_forward": {1: (0,), 2: (0, 1), 3: (0, 1, 3), 4: (0, 1, 2, 3)},  # module, args, kwargs, output
    "pre_backward": {1: (0,), 2: (0, 1)},  # module, ()
    "post_backward": {1: (0,), 2: (0, 1), 3: (0, 1, 2)},  # module, (), ()
}
_GRADIENTS = ((), ())
# The number of arguments in the first spelling; one more if the hook's id is listed as taking keyword arguments.
_DEFAULT_COUNTS = {"forward_pre_hooks": 2, "forward_hooks": 3, "backward_pre_hooks": 2, "backward_hooks": 3}


def read_capture_time_hooks(hooks: Any, module_count: int) -> list[GraphHooks | None] | None:
    """One `GraphHooks` per module. They run in warm-up and capture, and never at replay."""
    if hooks is None:
        return None
    if not isinstance(hooks, (list, tuple)):
        raise CaptureError(
            f"capture_time_hooks is a {type(hooks).__name__}; expected a list with one entry for each module"
        )
    if len(hooks) != module_count:
        raise CaptureError(f"{len(hooks)} capture_time_hooks for {module_count} modules: pass one for each, or None")
    return [_read_entry(entry, f"capture_time_hooks[{index}]") for index, entry in enumerate(hooks)]


def _read_entry(entry: Any, path: str) -> GraphHooks | None:
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise CaptureError(f"{path} is a {type(entry).__name__}; expected a dictionary of kinds, or None")
    hooks_by_kind: dict[str, Any] = {}
    key_of_kind: dict[str, str] = {}
    for key, hooks in entry.items():
        if key in _WITH_KWARGS:
            continue
        kind = _KINDS.get(key)
        if kind is None:
            raise CaptureError(f"{path} has {key!r}; the kinds are {', '.join((*_KINDS, *_WITH_KWARGS))}")
        if kind in key_of_kind:
            raise CaptureError(f"{path} has {key!r} and {key_of_kind[kind]!r}, which are two names of the same kind")
        key_of_kind[kind] = key
        with_kwargs = _read_with_kwargs(entry, key, path)
        hooks_path = f"{path}[{key!r}]"
        hooks_by_kind[kind] = []
        for name, hook in _list_hooks(hooks, hooks_path):
            default_count = _DEFAULT_COUNTS.get(key, 1) + (name in with_kwargs)
            hooks_by_kind[kind].append(_adapt_hook(hook, kind, hooks_path, default_count))
    return GraphHooks(**hooks_by_kind)


def _read_with_kwargs(entry: Mapping[str, Any], key: str, path: str) -> Collection[Any]:
    """The ids of the hooks that take keyword arguments; PyTorch keeps them as the keys of a dictionary."""
    name = f"{key}_with_kwargs"
    ids = entry.get(name) or ()
    if not isinstance(ids, (Mapping, set, frozenset, list, tuple)):
        raise CaptureError(f"{path}[{name!r}] is a {type(ids).__name__}; expected a dictionary with the ids of hooks")
    return ids


def _list_hooks(hooks: Any, path: str) -> Iterable[tuple[Any, Any]]:
    if hooks is None:
        return ()
    if isinstance(hooks, Mapping):
        return hooks.items()
    if isinstance(hooks, (list, tuple)):
        return enumerate(hooks)
    what = "one function" if callable(hooks) else f"a {type(hooks).__name__}"
    raise CaptureError(f"{path} is {what}; expected a dictionary of hooks by id, or a list of hooks")


def _adapt_hook(hook: Any, kind: str, path: str, default_count: int) -> Hook:
    if not callable(hook):
        raise CaptureError(f"{path} has a {type(hook).__name__} where a hook should be")
    name = getattr(hook, "__qualname__", repr(hook))
    count = _count_arguments(hook, default_count)
    indices_by_count = _INDICES_BY_COUNT[kind]
    if count == 0:
        raise CaptureError(f"{path}: hook {name} takes no argument; a hook is called with its module")
    if count not in indices_by_count:
        limit = f"{len(indices_by_count)} arguments at most"
        raise CaptureError(f"{path}: hook {name} needs {count} arguments; a {kind} hook is called with {limit}")
    indices = indices_by_count[count]

    def call(*arguments: Any) -> Any:
        available = (*arguments, *_GRADIENTS)
        return hook(*[available[index] for index in indices])

    call.__qualname__ = name  # so that errors name the user's hook
    return call


def _count_arguments(hook: Hook, default_count: int) -> int:
    """The number of positional arguments for a hook: the default if the hook accepts it, otherwise what it requires."""
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return default_count
    try:
        signature.bind(*range(default_count))
    except TypeError:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional_parameters = [
            parameter for parameter in signature.parameters.values() if parameter.kind in positional
        ]
        required = sum(parameter.default is parameter.empty for parameter in positional_parameters)
        return required or len(positional_parameters[:1])
    return default_count


# -- `make_graphed_callables` ----------------------------------------------------------------------
# The graphs are those of `rollgraph.graph`, with its checks at replay and, without a GPU, its tape.


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
    """Graph one module or a tuple of modules; docs/transformer_engine.md describes what each argument does here.

    Without `_order`, returns the modules themselves, with their forward replaced and a `reset` added. With `_order`,
    returns a callable for each chunk, microbatch and layer, in that order, and leaves the modules unchanged.
    `clone_param_grads_on_return` has no effect: a gradient that is still referenced is never overwritten.
    """
    is_single = not isinstance(modules, tuple)
    targets: tuple[Any, ...] = (modules,) if is_single else modules
    args = [sample_args] if is_single else list(sample_args)
    kwargs = read_sample_kwargs(is_single, sample_kwargs, len(args))
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
    before, after = _run_once_around_all(len(targets), pre_warmup_hook, post_warmup_hook)
    with nullcontext() if training else torch.no_grad():
        graphed = graph_callables(
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
        forwards = _wrap_graphs(list(graphed), kwargs)
        return forwards[0] if is_single else tuple(forwards)
    for forward in _wrap_graphs([vars(module)["forward"] for module in graphed], kwargs):
        forward.install()
    return modules


def _wrap_graphs(graphs: list[GraphedCallable], kwargs: list[dict[str, Any]]) -> list[GraphedForward]:
    return [GraphedForward(graph, graph.target, list(names)) for graph, names in zip(graphs, kwargs, strict=True)]


def _run_once_around_all(
    module_count: int, before: Callable[[], Any] | None, after: Callable[[], Any] | None
) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    """Per-module hooks that run Transformer Engine's warm-up hooks once, around the warm-up of all modules."""
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
        if finished == module_count and after is not None:
            after()

    return first, last
