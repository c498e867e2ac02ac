"""Another set of weights in the model for as long as it scores: in place, so that captured graphs read them too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.compat.megatron.forward_hooks import hooks_paused
from rollgraph.compat.megatron.model_chunks import Model, list_chunks, list_hooked


@contextmanager
def reference_weights(model: Model, state_dict: Mapping[str, Any] | list[Mapping[str, Any]]) -> Iterator[None]:
    """`model` computes with `state_dict` inside, and with exactly what it had afterwards, exception or not.

    `state_dict` is what `model.state_dict()` gave, cloned, on any device; for a list of chunks, a list. Only frozen
    parameters may be the model's own. Parameters are gathered first and their hooks paused, so that no all-gather
    writes policy weights over the reference.
    """
    chunks = list_chunks(model)
    dicts = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
    if len(dicts) != len(chunks):
        raise ValueError(f"{len(dicts)} state dicts for {len(chunks)} model chunks")
    pairs = [pair for chunk, weights in zip(chunks, dicts, strict=True) for pair in match(chunk, weights)]
    hooked = list_hooked(model)
    with hooks_paused(hooked):
        for ddp in hooked:
            ddp.start_param_sync(force_sync=True)
        policy = [(target, target.detach().clone()) for target, _ in pairs]
        try:
            copy_all(pairs)
            yield
        finally:
            copy_all(policy)


@torch.no_grad()
def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)


def match(model: nn.Module, weights: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Each tensor of the model with the one to put there. All are checked before any is written."""
    own, given = (
        {name: value for name, value in values.items() if not name.endswith("_extra_state")}
        for values in (model.state_dict(), weights)
    )
    if own.keys() != given.keys():
        missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
        raise KeyError(f"the state dict lacks {missing or 'nothing'}, and the model {unknown or 'nothing'}")
    pairs = {name: (tensor, given[name]) for name, tensor in own.items() if isinstance(tensor, Tensor)}
    for name, pair in pairs.items():
        check(name, *pair)
    changing = list_memory([*model.parameters(), *(tensor for tensor, _ in pairs.values())])
    changing -= list_memory(parameter for parameter in model.parameters() if not parameter.requires_grad)
    if aliases := [name for name, (_, tensor) in pairs.items() if list_memory([tensor]) & changing]:
        raise ValueError(
            f"{aliases[0]} and {len(aliases) - 1} more of the state dict are the model's own memory, and change with "
            "it: clone() the tensors of model.state_dict() when the reference is taken"
        )
    return list(pairs.values())


def list_memory(tensors: Iterable[Tensor]) -> set[tuple[torch.device, int]]:
    """Where the storages of tensors begin; without those that have no memory."""
    return {(tensor.device, start) for tensor in tensors if (start := tensor.untyped_storage().data_ptr())}


def check(name: str, own: Tensor, given: Any) -> None:
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} is a {type(given).__name__} in the state dict, not a tensor")
    if type(own) not in (Tensor, nn.Parameter):
        raise TypeError(f"{name} is a {type(own).__name__}: only plain tensors can be swapped and put back exactly")
    if own.shape != given.shape or own.dtype != given.dtype:
        theirs = f"{tuple(given.shape)} {given.dtype}"
        raise ValueError(f"{name} is {tuple(own.shape)} {own.dtype} in the model and {theirs} in the state dict")
