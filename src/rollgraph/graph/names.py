"""The names a function reads: closures, globals, attributes and items, found in its code.

A graph holds the Python values that were read while it was captured. This file remembers them, with
the line that reads each, and says which have changed since. It runs no code of the program.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rollgraph.graph.errors import Location, is_library

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_ABSENT = object()
_DEPTH = 4  # functions called by functions


@dataclass
class Read:
    """One name in one function: `root` is the object it starts at, `steps` the attributes and items from there."""

    name: str
    root: Any
    steps: tuple[tuple[str, Any], ...]
    where: Location
    value: Any = None
    told: bool = False

    def now(self) -> Any:
        value = self.root
        for kind, key in self.steps:
            value = _step(value, kind, key)
            if value is _ABSENT:
                break
        return value


class Names:
    """What a function and the modules it called read, as it was at capture."""

    def __init__(self, target: Any, called: Iterable[nn.Module]) -> None:
        self._reads: dict[tuple[int, tuple[Any, ...]], Read] = {}
        self._seen: set[Any] = set()
        for function, owner in _functions(target):
            self._follow(function, owner, _DEPTH)
        for module in called:
            for function, owner in _functions(module):
                self._follow(function, owner, _DEPTH)

    def changed(self) -> Iterator[tuple[Read, Any]]:
        """The reads that would give another value now, with that value; each is told once."""
        for read in self._reads.values():
            now = read.now()
            if not read.told and not _same(read.value, now):
                read.told = True
                yield read, now

    def _follow(self, function: Any, owner: Any, depth: int) -> None:
        if not isinstance(function, FunctionType) or (function.__code__, id(owner)) in self._seen:
            return
        self._seen.add((function.__code__, id(owner)))
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        module = type(owner).__name__ if isinstance(owner, nn.Module) else ""
        for code in _codes(function.__code__):
            first = code.co_varnames[0] if code is function.__code__ and code.co_argcount else None
            for kind, name, steps, line in _chains(code):
                where = Location(module, code.co_filename, line)
                if kind == "local" and name == first and owner is not None:
                    self._note(Read(_spell(name, steps), owner, steps, where), depth)
                elif kind == "cell" and name in closure:
                    self._note(Read(_spell(name, steps), closure[name], (("cell", None), *steps), where), depth)
                elif kind == "global" and name in function.__globals__:
                    start = ("item", name)
                    self._note(Read(_spell(name, steps), function.__globals__, (start, *steps), where), depth)

    def _note(self, read: Read, depth: int) -> None:
        """Keep what ends in a value, and go on into what ends in a function of the program."""
        value = read.now()
        if isinstance(value, (FunctionType, MethodType, functools.partial)):
            for function, owner in _functions(value):
                if depth and isinstance(function, FunctionType) and not is_library(function.__code__.co_filename):
                    self._follow(function, owner, depth - 1)
            return
        if read.steps[-1:] == (("attribute", "training"),):
            return  # the graph itself checks it, and the slots of modules
        named = isinstance(value, (Tensor, nn.Module)) and not isinstance(read.root, nn.Module)
        if named or _is_plain(value):
            read.value = value
            self._reads.setdefault((id(read.root), read.steps), read)


class Paths(Names):
    """The dictionaries through which a function reaches the things that are `wanted`.

    `found` has (dictionary, key, value, name) for each step of each way to one of them. What the function assigns
    itself is left out.
    """

    def __init__(self, target: Any, wanted: Callable[[Any], bool]) -> None:
        self._wanted = wanted
        self._steps: list[tuple[dict[Any, Any], Any, Any, str]] = []
        super().__init__(target, ())
        assigned = {name for code, _ in self._seen for name in _assigned(code)}
        self.found = [step for step in self._steps if step[1] not in assigned]

    def _note(self, read: Read, depth: int) -> None:
        value, way = read.root, list[tuple[dict[Any, Any], Any, Any, str]]()
        for kind, key in read.steps:
            container, value = _dictionary(value, kind, key), _step(value, kind, key)
            if value is _ABSENT:
                break
            if container is not None:
                way.append((container, key, value, f"{read.name} (read at {read.where})"))
            if self._wanted(value):
                self._steps += way
                way = []
        super()._note(read, depth)


def _dictionary(value: Any, kind: str, key: Any) -> dict[Any, Any] | None:
    """The dictionary that a step looks into, or None if it is none."""
    if kind == "item":
        return value if isinstance(value, dict) else None
    slots = (value._parameters, value._buffers, value._modules) if isinstance(value, nn.Module) else ()
    holders = [held for held in (*slots, getattr(value, "__dict__", None)) if isinstance(held, dict) and key in held]
    return holders[0] if holders and kind == "attribute" else None


def _assigned(code: CodeType) -> Iterator[str]:
    for inner in _codes(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL"):
                yield instruction.argval


def _functions(target: Any) -> Iterator[tuple[Any, Any]]:
    """The Python functions behind a callable, each with the object its first argument is."""
    target = _bare(target)
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


def _bare(target: Any) -> Any:
    while isinstance(target, functools.partial):
        target = target.func
    return target


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


_Chain = tuple[str, str, tuple[tuple[str, Any], ...], int]


def _chains(code: CodeType) -> Iterator[_Chain]:
    """`name.attribute["item"]` as they are read in the code, longest form first."""
    root: tuple[str, str, int] | None = None
    steps: list[tuple[str, Any]] = []
    constant: Any = _ABSENT
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        if instruction.positions is not None and instruction.positions.lineno is not None:
            line = instruction.positions.lineno
        name = instruction.opname
        if root is not None and name in ("LOAD_ATTR", "LOAD_METHOD"):
            steps.append(("attribute", instruction.argval))
            continue
        if root is not None and name == "LOAD_CONST":
            constant = instruction.argval
            continue
        subscript = name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]")
        if root is not None and subscript and constant is not _ABSENT:
            steps.append(("item", constant))
            constant = _ABSENT
            continue
        if name in ("CACHE", "PUSH_NULL", "PRECALL"):
            continue
        if root is not None:
            yield root[0], root[1], tuple(steps), root[2]
        root, steps, constant = None, [], _ABSENT
        if name.startswith("LOAD_FAST") and isinstance(instruction.argval, str):
            root = ("local", instruction.argval, line)
        elif name in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            root = ("cell", instruction.argval, line)
        elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
            root = ("global", instruction.argval, line)


def _step(value: Any, kind: str, key: Any) -> Any:
    """One step along a chain, without running a property or a `__getitem__` of the program."""
    if kind == "cell":
        try:
            return value.cell_contents
        except ValueError:  # empty
            return _ABSENT
    if kind == "item":
        try:
            return value[key] if isinstance(value, (dict, list, tuple)) else _ABSENT
        except (KeyError, IndexError, TypeError):
            return _ABSENT
    if isinstance(value, nn.Module):
        for slots in (value._parameters, value._buffers, value._modules):
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
    """A value whose comparison runs no code of the program."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or isinstance(value, enum.Enum)


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new) or not _is_plain(old) or isinstance(old, enum.Enum):
        return False
    return repr(old) == repr(new)  # NaN is NaN here, and 0.0 is not -0.0


def _spell(name: str, steps: tuple[tuple[str, Any], ...]) -> str:
    return name + "".join(f".{key}" if kind == "attribute" else f"[{key!r}]" for kind, key in steps)
