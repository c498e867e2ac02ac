"""Context managers for Megatron training loops: reference weights swapped in place, and a train() that can repeat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.compat.megatron.forward_hooks import (
    Model,
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    has_hooks,
    list_chunks,
    list_hooked_ddps,
    pause_hooks,
    preserve_hooks,
)
from rollgraph.compat.megatron.repair import patch_attributes, preserve_attributes

# -- reference weights -----------------------------------------------------------------------------


@contextmanager
def reference_weights(model: Model, state_dict: Mapping[str, Any] | list[Mapping[str, Any]]) -> Iterator[None]:
    """Run `model` with the weights of `state_dict` inside; afterwards, exception or not, restore its exact weights.

    `state_dict` is a clone of an earlier `model.state_dict()`, on any device, or a list of them for a list of chunks.
    Only frozen parameters may share the model's memory. Parameters are gathered first and their hooks paused, so that
    no all-gather overwrites the reference with policy weights.
    """
    chunks = list_chunks(model)
    dicts = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
    if len(dicts) != len(chunks):
        raise ValueError(f"{len(dicts)} state dicts for {len(chunks)} model chunks")
    pairs = [pair for chunk, weights in zip(chunks, dicts, strict=True) for pair in match_tensors(chunk, weights)]
    hooked = list_hooked_ddps(model)
    with pause_hooks(hooked):
        for ddp in hooked:
            ddp.start_param_sync(force_sync=True)
        policy = [(target, target.detach().clone()) for target, _ in pairs]
        try:
            copy_pairs(pairs)
            yield
        finally:
            copy_pairs(policy)


@torch.no_grad()
def copy_pairs(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)


def match_tensors(model: nn.Module, weights: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a model's tensor and its replacement. All are checked before the first is written."""
    model_tensors = without_extra_state(model.state_dict())
    reference_tensors = without_extra_state(weights)
    if model_tensors.keys() != reference_tensors.keys():
        missing = sorted(model_tensors.keys() - reference_tensors.keys())
        unknown = sorted(reference_tensors.keys() - model_tensors.keys())
        raise KeyError(f"the state dict lacks {missing or 'nothing'}, and the model {unknown or 'nothing'}")
    pairs = {
        name: (tensor, reference_tensors[name]) for name, tensor in model_tensors.items() if isinstance(tensor, Tensor)
    }
    for name, pair in pairs.items():
        check_swappable(name, *pair)
    refuse_aliases(model, pairs)
    return list(pairs.values())


def without_extra_state(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in weights.items() if not name.endswith("_extra_state")}


def refuse_aliases(model: nn.Module, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Refuse reference tensors that share memory with weights that training changes."""
    changing = list_storages([*model.parameters(), *(tensor for tensor, _ in pairs.values())])
    changing -= list_storages(parameter for parameter in model.parameters() if not parameter.requires_grad)
    aliases = [name for name, (_, tensor) in pairs.items() if list_storages([tensor]) & changing]
    if aliases:
        raise ValueError(
            f"{aliases[0]} and {len(aliases) - 1} more of the state dict are the model's own memory, and change with "
            "it: clone() the tensors of model.state_dict() when you take the reference"
        )


def list_storages(tensors: Iterable[Tensor]) -> set[tuple[torch.device, int]]:
    """The device and address of each tensor's storage, except for empty ones."""
    starts = ((tensor.device, tensor.untyped_storage().data_ptr()) for tensor in tensors)
    return {(device, start) for device, start in starts if start}


def check_swappable(name: str, target: Tensor, source: Any) -> None:
    if not isinstance(source, Tensor):
        raise TypeError(f"{name} is a {type(source).__name__} in the state dict, not a tensor")
    if type(target) not in (Tensor, nn.Parameter):
        raise TypeError(f"{name} is a {type(target).__name__}: only plain tensors can be swapped and restored exactly")
    if target.shape != source.shape or target.dtype != source.dtype:
        source_type = f"{tuple(source.shape)} {source.dtype}"
        raise ValueError(
            f"{name} is {tuple(target.shape)} {target.dtype} in the model and {source_type} in the state dict"
        )


# -- a repeatable train() --------------------------------------------------------------------------

CONFIG_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")

NOT_GATHERED = (
    "rollgraph: hooks are off, as before train(), and the parameters are not gathered: call the DDP's "
    "start_param_sync(force_sync=True) on all ranks before the model is used again"
)


@contextmanager
def repeatable_train(model: Model, config: Any) -> Iterator[None]:
    """Reset the functions in `config` that train() expects to be None; afterwards, restore config and hooks.

    Inside, hooks can be enabled and disabled in any order, with or without `repair()`; only a subclass of DDP that
    overrides these methods needs it. Hooks that train() leaves behind are removed and the parameters gathered. After an
    exception nothing is gathered, because other ranks may not take part, and a note on the exception says so.
    """
    with (
        preserve_hooks(list_hooked_ddps(model)) as hooked,
        preserve_attributes(config, *CONFIG_FUNCTIONS),
        ExitStack() as guards,
    ):
        had_hooks = {ddp for ddp in hooked if has_hooks(ddp)}
        for ddp in hooked:
            guards.enter_context(patch_hook_methods(ddp))
        for name in CONFIG_FUNCTIONS:
            if hasattr(config, name):
                setattr(config, name, None)
        try:
            yield
        except BaseException as error:
            if any(has_hooks(ddp) for ddp in hooked if ddp not in had_hooks):
                error.add_note(NOT_GATHERED)
            raise
        for ddp in hooked:
            if ddp not in had_hooks and has_hooks(ddp):
                ddp.disable_forward_pre_hook()


def patch_hook_methods(ddp: Any) -> AbstractContextManager[None]:
    """Override the hook methods of this DDP object, unless its class overrides them itself."""
    from megatron.core.distributed import DistributedDataParallel as DDP

    methods = {
        "enable_forward_pre_hook": enable_forward_pre_hook,
        "disable_forward_pre_hook": disable_forward_pre_hook,
    }
    overrides = {}
    for name, method in methods.items():
        if getattr(type(ddp), name) is getattr(DDP, name):
            overrides[name] = MethodType(method, ddp)
    return patch_attributes(ddp, **overrides)
