"""What a graph's program was like at capture: its module trees, the addresses of their tensors, the names it reads."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.names import CapturedNames
from rollgraph.graph.sanitizer.referrers import held_by_locals, held_by_program

_Tree = dict[str, tuple[int, str]]  # path -> the module's id and type


class ProgramSnapshot:
    """What the program was like at capture. Each change since then is reported once."""

    def __init__(self, target: Any, called: Sequence[nn.Module], leaves: Iterable[Tensor]) -> None:
        self.names = CapturedNames(target, called)
        roots = _roots(target, called)
        self._trees = [(weakref.ref(root), _tree(root)) for root in roots]
        self._addresses = [(weakref.ref(root), _addresses(root)) for root in roots]
        self._watched = _held_outside_modules(roots, leaves)
        self._counts = [sys.getrefcount(ref()) for ref in self._watched]

    def tree_changes(self) -> Iterator[str]:
        for index, (ref, before) in enumerate(self._trees):
            root = ref()
            if root is None:
                continue
            now = _tree(root)
            if now != before:
                self._trees[index] = (ref, now)
                yield f"{type(root).__name__} since capture: {_spell_changes(before, now)}"

    def moved_tensors(self) -> Iterator[str]:
        for index, (ref, before) in enumerate(self._addresses):
            root = ref()
            if root is None:
                continue
            now = _addresses(root)
            self._addresses[index] = (ref, now)
            for name, address in now.items():
                if name in before and before[name] != address:
                    yield f"{type(root).__name__}.{name}"

    def orphans(self) -> list[Tensor]:
        """The tensors that the graph reads and the program no longer holds."""
        counts = [sys.getrefcount(ref()) for ref in self._watched]
        dropped = [now < before for now, before in zip(counts, self._counts, strict=True)]
        self._counts = list(map(min, counts, self._counts))
        # Only a tensor that lost a reference is worth the search for its holders.
        suspects = _alive(compress(self._watched, dropped))
        held = held_by_program(suspects) | held_by_locals(suspects)
        return [tensor for tensor in suspects if id(tensor) not in held]


def _roots(target: Any, called: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that were called and are part of no other called module."""
    if isinstance(target, nn.Module):
        return [target]
    children: set[int] = set()
    for module in called:
        children.update(id(child) for child in module.modules() if child is not module)
    return [module for module in called if id(module) not in children]


def _held_outside_modules(roots: Sequence[nn.Module], leaves: Iterable[Tensor]) -> list[weakref.ref[Tensor]]:
    """The leaves that belong to no module and that the program holds in some other way."""
    owned: set[int] = set()
    for root in roots:
        owned.update(map(id, root.parameters()))
        owned.update(map(id, root.buffers()))
    others = {id(leaf): leaf for leaf in leaves if id(leaf) not in owned}
    tensors = list(others.values())
    held = held_by_program(tensors, ignore=[others])
    return [weakref.ref(tensor) for tensor in tensors if id(tensor) in held]


def _alive(refs: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    """The tensors behind weak references. In a function of its own, so that no local of the caller's holds one."""
    tensors = []
    for ref in refs:
        tensor = ref()
        if tensor is not None:
            tensors.append(tensor)
    return tensors


def _tree(root: nn.Module) -> _Tree:
    return {name: (id(module), type(module).__name__) for name, module in root.named_modules() if name}


def _spell_changes(before: _Tree, now: _Tree) -> str:
    added = [f"{name} ({kind})" for name, (_, kind) in now.items() if before.get(name) != now[name]]
    removed = [f"{name} ({kind})" for name, (_, kind) in before.items() if name not in now]
    parts = []
    if added:
        parts.append(f"added {', '.join(added)}")
    if removed:
        parts.append(f"removed {', '.join(removed)}")
    return "; ".join(parts)


def _addresses(root: nn.Module) -> dict[str, int]:
    addresses: dict[str, int] = {}
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if tensor.layout is torch.strided:
            addresses[name] = tensor.data_ptr()
    return addresses


def spell_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
