"""The Python values behind the names that a function reads: closures, globals, attributes and items.

A graph holds the Python values that were read while it was captured. This file remembers those values with the line
that reads each, and tells which have changed since. It runs no code of the program: no property, no `__getitem__`.
"""

from __future__ import annotations

import enum
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.bytecode import NameChain, Steps, assigned_names, name_chains, nested_codes
from rollgraph.graph.errors import Location, is_library

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_ABSENT = object()
_DEPTH = 4  # how far to follow functions that call functions


@dataclass
class Read:
    """One name that one function reads: `root` is the object it starts at, `steps` lead from there to the value."""

    name: str
    root: Any
    steps: Steps
    where: Location
    value: Any = None  # at capture
    reported: bool = False

    def now(self) -> Any:
        value = self.root
        for kind, key in self.steps:
            value = _take_step(value, kind, key)
            if value is _ABSENT:
                break
        return value


class _ReadWalker(ABC):
    """Visits every name that a function reads, and those of the program's functions that it reads."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    @abstractmethod
    def _visit(self, read: Read) -> None: ...

    def _walk(self, target: Any) -> None:
        for function, owner in _functions_behind(target):
            self._walk_function(function, owner, _DEPTH)

    def _walk_function(self, function: Any, owner: Any, depth: int) -> None:
        """`owner` is the object that the function's first argument is bound to, if any."""
        if not isinstance(function, FunctionType) or (function.__code__, id(owner)) in self._seen:
            return
        self._seen.add((function.__code__, id(owner)))
        for code in nested_codes(function.__code__):
            has_owner = owner is not None and code is function.__code__ and code.co_argcount > 0
            first_argument = code.co_varnames[0] if has_owner else None
            for chain in name_chains(code):
                read = _resolve(chain, function, owner, first_argument, code.co_filename)
                if read is not None:
                    self._visit(read)
                    self._follow(read.now(), depth)

    def _follow(self, value: Any, depth: int) -> None:
        """Go on into a value that is a function of the program."""
        if depth == 0 or not isinstance(value, _FUNCTIONS):
            return
        for function, owner in _functions_behind(value):
            if isinstance(function, FunctionType) and not is_library(function.__code__.co_filename):
                self._walk_function(function, owner, depth - 1)


class CapturedNames(_ReadWalker):
    """The names that a function and the modules it called read, with the values they had at capture."""

    def __init__(self, target: Any, called: Iterable[nn.Module]) -> None:
        super().__init__()
        self._reads: dict[tuple[int, Steps], Read] = {}
        self._walk(target)
        for module in called:
            self._walk(module)

    def changed(self) -> Iterator[tuple[Read, Any]]:
        """The reads that would give another value now, with that value. Each is reported once."""
        for read in self._reads.values():
            now = read.now()
            if not read.reported and not _is_same(read.value, now):
                read.reported = True
                yield read, now

    def _visit(self, read: Read) -> None:
        value = read.now()
        if isinstance(value, _FUNCTIONS):
            return
        if read.steps[-1:] == (("attribute", "training"),):
            return  # the graph checks the training mode itself
        is_named_object = isinstance(value, (Tensor, nn.Module)) and not isinstance(read.root, nn.Module)
        if is_named_object or _is_plain(value):
            read.value = value
            self._reads.setdefault((id(read.root), read.steps), read)


PathStep = tuple[dict[Any, Any], Any, Any, str]  # dictionary, key, value, name


class Paths(_ReadWalker):
    """The dictionaries through which a function reaches the objects that are `wanted`.

    `found` has an entry for each step of each path to such an object. Names that the function assigns itself are
    left out.
    """

    def __init__(self, target: Any, wanted: Callable[[Any], bool]) -> None:
        super().__init__()
        self._wanted = wanted
        self._steps: list[PathStep] = []
        self._walk(target)
        assigned: set[str] = set()
        for code, _ in self._seen:
            assigned.update(assigned_names(code))
        self.found = [step for step in self._steps if step[1] not in assigned]

    def _visit(self, read: Read) -> None:
        value = read.root
        path: list[PathStep] = []
        for kind, key in read.steps:
            container = _dictionary_of(value, kind, key)
            value = _take_step(value, kind, key)
            if value is _ABSENT:
                break
            if container is not None:
                path.append((container, key, value, f"{read.name} (read at {read.where})"))
            if self._wanted(value):
                self._steps += path
                path = []


def _resolve(
    chain: NameChain, function: FunctionType, owner: Any, first_argument: str | None, filename: str
) -> Read | None:
    """The object a chain starts at: the owner of a method, a closure's cell or the module's globals."""
    module = type(owner).__name__ if isinstance(owner, nn.Module) else ""
    where = Location(module, filename, chain.line)
    name = _spell(chain.name, chain.steps)
    if chain.scope == "local":
        return Read(name, owner, chain.steps, where) if chain.name == first_argument else None
    if chain.scope == "global":
        if chain.name not in function.__globals__:
            return None
        return Read(name, function.__globals__, (("item", chain.name), *chain.steps), where)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if chain.name not in cells:
        return None
    return Read(name, cells[chain.name], (("cell", None), *chain.steps), where)


def _functions_behind(target: Any) -> Iterator[tuple[Any, Any]]:
    """The Python functions behind a callable, each with the object that its first argument is bound to."""
    while isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, MethodType):
        yield target.__func__, target.__self__
    elif isinstance(target, nn.Module):
        yield inspect.unwrap(type(target).forward), target
    elif isinstance(target, FunctionType):
        unwrapped = inspect.unwrap(target)
        yield target, None
        if unwrapped is not target:
            yield unwrapped, None
    elif "__call__" in vars(type(target)):
        yield type(target).__call__, target


def _dictionary_of(value: Any, kind: str, key: Any) -> dict[Any, Any] | None:
    """The dictionary in which a step finds its key, or None if it finds it elsewhere."""
    if kind == "item":
        return value if isinstance(value, dict) else None
    if kind != "attribute":
        return None
    for held in (*_module_slots(value), getattr(value, "__dict__", None)):
        if isinstance(held, dict) and key in held:
            return held
    return None


def _module_slots(value: Any) -> tuple[dict[str, Any], ...]:
    if isinstance(value, nn.Module):
        return value._parameters, value._buffers, value._modules
    return ()


def _take_step(value: Any, kind: str, key: Any) -> Any:
    """One step along a chain, without running a property or a `__getitem__` of the program."""
    if kind == "cell":
        try:
            return value.cell_contents
        except ValueError:  # the cell is empty
            return _ABSENT
    if kind == "item":
        if not isinstance(value, (dict, list, tuple)):
            return _ABSENT
        try:
            return value[key]
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    for slots in _module_slots(value):
        if key in slots:
            return slots[key]
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict) and key in held:
        return held[key]
    of_class = inspect.getattr_static(value, key, _ABSENT)
    if isinstance(of_class, FunctionType) and not isinstance(value, (type, ModuleType)):
        return MethodType(of_class, value)
    return _ABSENT if hasattr(type(of_class), "__get__") else of_class


def _is_plain(value: Any) -> bool:
    """Whether comparing the value runs no code of the program."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or isinstance(value, enum.Enum)


def _is_same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new) or not _is_plain(old) or isinstance(old, enum.Enum):
        return False
    return repr(old) == repr(new)  # NaN equals NaN here, and 0.0 differs from -0.0


def _spell(name: str, steps: Steps) -> str:
    for kind, key in steps:
        name += f".{key}" if kind == "attribute" else f"[{key!r}]"
    return name
