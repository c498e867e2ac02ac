"""Hooks that a capture ran and a replay will not: on modules inside the graph, on all modules, and on tensors."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rollgraph.graph.errors import Location
from rollgraph.graph.slots import code_of

_MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_DECORATORS = 20  # lines of decorators that a function may have


class HookSite(NamedTuple):
    owner: str  # path of the module or parameter
    kind: str
    function: Any

    def is_among(self, recorded_code: set[CodeType]) -> bool:
        return code_of(self.function) in recorded_code

    def __str__(self) -> str:
        return f"{self.kind} {getattr(self.function, '__qualname__', self.function)!s}"

    def definition(self) -> Location:
        return definition_of(self.function, self.owner)


def hooks_run_at_capture(
    graphed: nn.Module | None, called: Sequence[nn.Module], leaves: Iterable[Tensor]
) -> Iterator[HookSite]:
    """The hooks on the called modules and on the leaves they read. Those on the graphed module itself run at replay."""
    yield from _module_hooks(graphed, called)
    for attribute in _GLOBAL_HOOKS:
        for hook in getattr(torch.nn.modules.module, attribute).values():
            yield HookSite("every module", _kind_of(attribute), hook)
    if graphed is None:
        yield from _tensor_hooks(called, leaves)


def _module_hooks(graphed: nn.Module | None, called: Sequence[nn.Module]) -> Iterator[HookSite]:
    paths: dict[int, str] = {}
    for root in reversed(called):  # the outermost module comes last, and gives the longest path
        paths.update((id(module), name) for name, module in root.named_modules() if name)
    for module in called:
        if module is graphed:
            continue
        owner = paths.get(id(module)) or type(module).__name__
        for attribute in _MODULE_HOOKS:
            for hook in vars(module).get(attribute, {}).values():
                yield HookSite(owner, _kind_of(attribute), hook)


def _tensor_hooks(called: Sequence[nn.Module], leaves: Iterable[Tensor]) -> Iterator[HookSite]:
    names: dict[int, str] = {}
    for root in reversed(called):
        names.update((id(parameter), name) for name, parameter in root.named_parameters())
    for leaf in leaves:
        if not leaf.requires_grad:
            continue
        for attribute in _TENSOR_HOOKS:
            for hook in (getattr(leaf, attribute, None) or {}).values():
                yield HookSite(names.get(id(leaf), "a tensor"), "tensor hook", hook)


def _kind_of(attribute: str) -> str:
    return attribute.strip("_").removesuffix("s")


def definition_of(function: Any, owner: str) -> Location:
    """The line of a function's `def`."""
    code = code_of(function)
    if code is None:
        return Location(owner, "", 0)
    return Location(owner, code.co_filename, _line_of_def(code))


def _line_of_def(code: CodeType) -> int:
    """A function's code begins at its first decorator; its `def` comes after the last."""
    for line in range(code.co_firstlineno, code.co_firstlineno + _DECORATORS):
        words = linecache.getline(code.co_filename, line).split()
        if "def" in words[:2]:
            return line
    return code.co_firstlineno
