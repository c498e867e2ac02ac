"""Snapshots of a program at capture (module trees, addresses, names), and the search for references to an object."""

from __future__ import annotations

import enum
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from types import CellType, FrameType, FunctionType, GeneratorType
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.state.names import CapturedNames

# -- who refers to an object -----------------------------------------------------------------------
# An object does not know who refers to it. The garbage collector can list the containers that do; references missing
# from that list are local variables of running functions.

_CONTAINERS = (list, tuple, dict, set, CellType)
_DEPTH = 5  # how far to follow containers inside containers
_RUNTIME_MODULES = "rollgraph.graph."
_RUNTIME_FILES = str(Path(__file__).resolve().parents[2])


class _Owner(enum.Enum):
    PROGRAM = enum.auto()
    RUNTIME = enum.auto()
    CONTAINER = enum.auto()  # a plain container belongs to the owner of whatever refers to it


def referenced_by_program(objects: list[Any], ignore: Sequence[Any] = ()) -> set[int]:
    """Return the ids of the objects that something outside the runtime refers to.

    References from the lists in `ignore` do not count: they belong to the caller.
    """
    holders_of: dict[int, list[int]] = {}
    owners: dict[int, _Owner] = {}
    kept_alive: list[Any] = []  # holders stay alive, so that their ids stay valid
    ignored_ids = {id(objects), id(kept_alive), *map(id, ignore)}
    level = list(objects)
    for _ in range(_DEPTH):
        arguments = tuple(level)  # Python 3.13 also lists this tuple as a referrer, so we must know its id
        ignored_ids |= {id(level), id(arguments)}
        referrers = [
            h for h in gc.get_referrers(*arguments) if id(h) not in ignored_ids and not isinstance(h, FrameType)
        ]
        ignored_ids.add(id(referrers))
        children = set(map(id, level))
        level = []
        ignored_ids.add(id(level))
        for holder in referrers:
            for child in gc.get_referents(holder):
                if id(child) in children:
                    holders_of.setdefault(id(child), []).append(id(holder))
            if id(holder) not in owners:
                owners[id(holder)] = _owner_of(holder)
                if owners[id(holder)] is _Owner.CONTAINER:
                    level.append(holder)
        kept_alive += referrers
        if not level:
            break
    referenced: set[int] = set()
    for obj in objects:
        holders = holders_of.get(id(obj), ())
        if any(_belongs_to_program(holder, holders_of, owners, set()) for holder in holders):
            referenced.add(id(obj))
    return referenced


def _owner_of(holder: Any) -> _Owner:
    module: Any = type(holder).__module__
    if isinstance(holder, FunctionType):
        module = holder.__module__
    elif isinstance(holder, dict) and "__builtins__" in holder:
        module = holder.get("__name__")  # the globals of a module, or of a tape's program
    if isinstance(module, str) and module.startswith(_RUNTIME_MODULES):
        return _Owner.RUNTIME
    if isinstance(holder, GeneratorType) and holder.gi_code.co_filename.startswith(_RUNTIME_FILES):
        return _Owner.RUNTIME
    return _Owner.CONTAINER if isinstance(holder, _CONTAINERS) else _Owner.PROGRAM


def _belongs_to_program(
    holder: int, holders_of: dict[int, list[int]], owners: dict[int, _Owner], path: set[int]
) -> bool:
    if owners[holder] is not _Owner.CONTAINER:
        return owners[holder] is _Owner.PROGRAM
    above = holders_of.get(holder)
    if above is None:
        return True  # no container refers to it, so a running function does
    path = path | {holder}
    return any(_belongs_to_program(h, holders_of, owners, path) for h in above if h not in path)


class _Control:
    """An object with no references but those of the counting code."""


def referenced_by_locals(objects: list[Any]) -> set[int]:
    """Return the ids of the objects that a running function has in a local variable.

    They have more references than the garbage collector lists. Counting adds references, too; a control object in the
    same list shows how many.
    """
    baseline, *counts = _count_unlisted_references([_Control(), *objects])
    return {id(obj) for obj, count in zip(objects, counts, strict=True) if count > baseline}


def _count_unlisted_references(objects: list[Any]) -> list[int]:
    counts = []
    for obj in objects:
        listed = 0
        for holder in gc.get_referrers(obj):
            listed += sum(referent is obj for referent in gc.get_referents(holder))
        counts.append(sys.getrefcount(obj) - listed)
    return counts


# -- the snapshot ----------------------------------------------------------------------------------

_Tree = dict[str, tuple[int, str]]  # path -> the module's id and type


class ProgramSnapshot:
    """The state of the program at capture. Each change since then is reported once."""

    def __init__(self, target: Any, called_modules: Sequence[nn.Module], leaves: Iterable[Tensor]) -> None:
        self.names = CapturedNames(target, called_modules)
        roots = _roots(target, called_modules)
        self._trees = [(weakref.ref(root), _tree(root)) for root in roots]
        self._addresses = [(weakref.ref(root), _addresses(root)) for root in roots]
        self._last_addresses = [addresses for _, addresses in self._addresses]
        self._watched = _leaves_outside_modules(roots, leaves)
        self._counts = [sys.getrefcount(ref()) for ref in self._watched]

    def tree_changes(self) -> Iterator[str]:
        for index, (ref, before) in enumerate(self._trees):
            root = ref()
            if root is None:
                continue
            now = _tree(root)
            if now != before:
                self._trees[index] = (ref, now)
                yield f"{type(root).__name__} since capture: {_describe_changes(before, now)}"

    def moved_tensors(self) -> Iterator[str]:
        """Names of parameters and buffers that are not where they were at capture. Each move is yielded once."""
        for index, (ref, captured) in enumerate(self._addresses):
            root = ref()
            if root is None:
                continue
            last, addresses = self._last_addresses[index], _addresses(root)
            self._last_addresses[index] = addresses
            for name, address in addresses.items():
                if name in captured and address not in (captured[name], last.get(name)):
                    yield f"{type(root).__name__}.{name}"

    def orphans(self) -> list[Tensor]:
        """The tensors that the graph reads and the program no longer refers to."""
        counts = [sys.getrefcount(ref()) for ref in self._watched]
        dropped = [now < before for now, before in zip(counts, self._counts, strict=True)]
        self._counts = list(map(min, counts, self._counts))
        # The search is expensive, so we only do it for tensors that lost a reference.
        suspects = _alive(compress(self._watched, dropped))
        referenced = referenced_by_program(suspects) | referenced_by_locals(suspects)
        return [tensor for tensor in suspects if id(tensor) not in referenced]


def _roots(target: Any, called_modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The called modules that are part of no other called module."""
    if isinstance(target, nn.Module):
        return [target]
    children: set[int] = set()
    for module in called_modules:
        children.update(id(child) for child in module.modules() if child is not module)
    return [module for module in called_modules if id(module) not in children]


def _leaves_outside_modules(roots: Sequence[nn.Module], leaves: Iterable[Tensor]) -> list[weakref.ref[Tensor]]:
    """The leaves that belong to no module but that the program refers to in another way."""
    module_tensor_ids: set[int] = set()
    for root in roots:
        module_tensor_ids.update(map(id, root.parameters()))
        module_tensor_ids.update(map(id, root.buffers()))
    outside = {id(leaf): leaf for leaf in leaves if id(leaf) not in module_tensor_ids}
    tensors = list(outside.values())
    referenced = referenced_by_program(tensors, ignore=[outside])
    return [weakref.ref(tensor) for tensor in tensors if id(tensor) in referenced]


def _alive(refs: Iterable[weakref.ref[Tensor]]) -> list[Tensor]:
    """The tensors behind weak references. A separate function, so that no local of the caller refers to one."""
    tensors = []
    for ref in refs:
        tensor = ref()
        if tensor is not None:
            tensors.append(tensor)
    return tensors


def _tree(root: nn.Module) -> _Tree:
    return {name: (id(module), type(module).__name__) for name, module in root.named_modules() if name}


def _describe_changes(before: _Tree, now: _Tree) -> str:
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


def describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
