"""What the program of a graph was like at capture: its modules, their memory and hooks, and the names it reads."""

from __future__ import annotations

import gc
import linecache
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.errors import Location
from rollgraph.graph.names import Names
from rollgraph.graph.sanitizer.referrers import held_by_program
from rollgraph.graph.slots import code_of

_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks")
_OUR_LOCALS = 5  # references to a tensor that the check for it makes itself
_DECORATORS = 20  # lines of them that a function may have
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class ProgramSnapshot:
    """The module tree, the addresses and the names of a graph's program, as they were at capture."""

    def __init__(self, target: Any, called: Sequence[nn.Module], read: Iterable[Tensor]) -> None:
        self.names = Names(target, called)
        children = {id(child) for module in called for child in module.modules() if child is not module}
        roots = [target] if isinstance(target, nn.Module) else [m for m in called if id(m) not in children]
        self._trees = [(weakref.ref(root), _tree(root)) for root in roots]
        self._addresses = [(weakref.ref(root), _addresses(root)) for root in roots]
        owned = {id(t) for root in roots for t in (*root.parameters(), *root.buffers())}
        others = [t for t in read if id(t) not in owned]
        kept = held_by_program(others) if others else set()
        self._held = [weakref.ref(t) for t in {id(t): t for t in others if id(t) in kept}.values()]
        del others
        self._holders = [sys.getrefcount(ref()) for ref in self._held]

    def tree_changes(self) -> Iterator[str]:
        for index, (ref, before) in enumerate(self._trees):
            root = ref()
            if root is None or (now := _tree(root)) == before:
                continue
            self._trees[index] = (ref, now)
            added = [f"{name} ({kind})" for name, (_, kind) in now.items() if before.get(name) != now[name]]
            removed = [f"{name} ({kind})" for name, (_, kind) in before.items() if name not in now]
            parts = [f"added {', '.join(added)}"] * bool(added) + [f"removed {', '.join(removed)}"] * bool(removed)
            yield f"{type(root).__name__} since capture: {'; '.join(parts)}"

    def moved(self) -> Iterator[str]:
        for index, (ref, before) in enumerate(self._addresses):
            root = ref()
            if root is None or (now := _addresses(root)) == before:
                continue
            self._addresses[index] = (ref, now)
            for name, address in now.items():
                if name in before and before[name] != address:
                    yield f"{type(root).__name__}.{name}"

    def orphans(self) -> list[Tensor]:
        """What the graph reads and the program has let go of."""
        counts = [sys.getrefcount(ref()) for ref in self._held]
        fewer = [ref() for ref, now, before in zip(self._held, counts, self._holders, strict=True) if now < before]
        self._holders = list(map(min, counts, self._holders))
        gone = [t for t in fewer if t is not None]
        kept = held_by_program(gone, ignore=[fewer]) if gone else set()
        return [t for t in gone if id(t) not in kept and not _is_in_a_local(t)]


def _is_in_a_local(tensor: Tensor) -> bool:
    """More references than the garbage collector shows: a running function has it."""
    shown = sum(referent is tensor for holder in gc.get_referrers(tensor) for referent in gc.get_referents(holder))
    return sys.getrefcount(tensor) > shown + _OUR_LOCALS


def _tree(root: nn.Module) -> dict[str, tuple[int, str]]:
    return {name: (id(module), type(module).__name__) for name, module in root.named_modules() if name}


def _addresses(root: nn.Module) -> dict[str, int]:
    named = [*root.named_parameters(), *root.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in named if tensor.layout is torch.strided}


def hooks_inside(around: Any, called: Sequence[nn.Module], read: Iterable[Tensor]) -> Iterator[tuple[str, str, Any]]:
    """(place, kind, function) of the hooks that a capture ran and a replay does not; those of `around` it does."""
    paths = {id(m): name for root in reversed(called) for name, m in root.named_modules() if name}  # outermost last
    for module in called:
        for kind in _MODULE_HOOKS if module is not around else ():
            for hook in vars(module).get(kind, {}).values():
                yield paths.get(id(module)) or type(module).__name__, kind.strip("_").removesuffix("s"), hook
    for kind in _GLOBAL_HOOKS:
        for hook in getattr(torch.nn.modules.module, kind).values():
            yield "every module", kind.strip("_").removesuffix("s"), hook
    if around is None:
        names = {id(p): name for root in reversed(called) for name, p in root.named_parameters()}
        for leaf in read:
            for kind in _TENSOR_HOOKS if leaf.requires_grad else ():
                for hook in (getattr(leaf, kind, None) or {}).values():
                    yield names.get(id(leaf), "a tensor"), "tensor hook", hook


def definition_of(hook: Any, path: str) -> Location:
    code = code_of(hook)
    if code is None:
        return Location(path, "", 0)
    return Location(path, code.co_filename, _line_of_def(code))


def _line_of_def(code: CodeType) -> int:
    """Behind the decorators, with which a function's code begins."""
    for line in range(code.co_firstlineno, code.co_firstlineno + _DECORATORS):
        text = linecache.getline(code.co_filename, line).split()
        if "def" in text[:2]:
            return line
    return code.co_firstlineno


def short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
