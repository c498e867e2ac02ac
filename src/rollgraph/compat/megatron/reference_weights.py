"""Swaps another set of weights into the model while it scores, in place, so that captured graphs read them too."""

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
    """Run `model` with the weights of `state_dict` inside; afterwards, exception or not, it has exactly its own again.

    `state_dict` is a clone of an earlier `model.state_dict()`, on any device, or a list of them for a list of chunks.
    Only frozen parameters may share the model's memory. Parameters are gathered first and their hooks paused, so that
    no all-gather overwrites the reference with policy weights.
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
    """Each tensor of the model with the one that replaces it. All are checked before any is written."""
    own = without_extra_state(model.state_dict())
    given = without_extra_state(weights)
    if own.keys() != given.keys():
        missing = sorted(own.keys() - given.keys())
        unknown = sorted(given.keys() - own.keys())
        raise KeyError(f"the state dict lacks {missing or 'nothing'}, and the model {unknown or 'nothing'}")
    pairs = {name: (tensor, given[name]) for name, tensor in own.items() if isinstance(tensor, Tensor)}
    for name, pair in pairs.items():
        check(name, *pair)
    refuse_aliases(model, pairs)
    return list(pairs.values())


def without_extra_state(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in weights.items() if not name.endswith("_extra_state")}


def refuse_aliases(model: nn.Module, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Refuse reference tensors that share memory with what training changes."""
    changing = list_memory([*model.parameters(), *(tensor for tensor, _ in pairs.values())])
    changing -= list_memory(parameter for parameter in model.parameters() if not parameter.requires_grad)
    aliases = [name for name, (_, tensor) in pairs.items() if list_memory([tensor]) & changing]
    if aliases:
        raise ValueError(
            f"{aliases[0]} and {len(aliases) - 1} more of the state dict are the model's own memory, and change with "
            "it: clone() the tensors of model.state_dict() when you take the reference"
        )


def list_memory(tensors: Iterable[Tensor]) -> set[tuple[torch.device, int]]:
    """Where the storages of tensors begin, except for empty ones."""
    starts = ((tensor.device, tensor.untyped_storage().data_ptr()) for tensor in tensors)
    return {(device, start) for device, start in starts if start}


def check(name: str, own: Tensor, given: Any) -> None:
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} is a {type(given).__name__} in the state dict, not a tensor")
    if type(own) not in (Tensor, nn.Parameter):
        raise TypeError(f"{name} is a {type(own).__name__}: only plain tensors can be swapped and restored exactly")
    if own.shape != given.shape or own.dtype != given.dtype:
        theirs = f"{tuple(given.shape)} {given.dtype}"
        raise ValueError(f"{name} is {tuple(own.shape)} {own.dtype} in the model and {theirs} in the state dict")
