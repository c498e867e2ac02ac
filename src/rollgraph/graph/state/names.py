"""The names that a function reads, found in its bytecode, and the Python values behind them.

A graph freezes the Python values that were read during its capture. This file remembers each value with the line that
reads it, and tells which values changed since. It runs no code of the program: no property, no `__getitem__`.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rollgraph.graph.errors import Location, is_library

# -- names in bytecode -----------------------------------------------------------------------------
# Looks only at code objects, never at values.

_NO_PENDING_CONSTANT = object()
_ASSIGNMENTS = ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL")
_PADDING = ("CACHE", "PUSH_NULL", "PRECALL")  # instructions between the parts of an expression

Steps = tuple[tuple[str, Any], ...]  # a chain of ("attribute" or "item", key)


class NameChain(NamedTuple):
    """An expression such as `config.rates["actor"]`, as the bytecode reads it."""

    scope: str  # of the first name: "local", "cell" or "global"
    name: str
    steps: Steps
    line: int


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of the functions defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_codes(constant)


def assigned_names(code: CodeType) -> Iterator[str]:
    """The attributes and globals that a function assigns or deletes."""
    for inner in nested_codes(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in _ASSIGNMENTS:
                yield instruction.argval


def name_chains(code: CodeType) -> Iterator[NameChain]:
    """The chains of names that the code reads, each in its longest form."""
    root: NameChain | None = None
    steps: list[tuple[str, Any]] = []
    constant: Any = _NO_PENDING_CONSTANT
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        if instruction.positions is not None and instruction.positions.lineno is not None:
            line = instruction.positions.lineno
        if instruction.opname in _PADDING:
            continue
        if root is not None:
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                steps.append(("attribute", instruction.argval))
                continue
            if instruction.opname == "LOAD_CONST":
                constant = instruction.argval
                continue
            if _is_subscript(instruction) and constant is not _NO_PENDING_CONSTANT:
                steps.append(("item", constant))
                constant = _NO_PENDING_CONSTANT
                continue
            yield root._replace(steps=tuple(steps))
        loaded = _loaded_locals(instruction)
        yield from (NameChain("local", name, (), line) for name in loaded[:-1])
        root = NameChain("local", loaded[-1], (), line) if loaded else _chain_root(instruction, line)
        steps = []
        constant = _NO_PENDING_CONSTANT


def _is_subscript(instruction: dis.Instruction) -> bool:
    if instruction.opname == "BINARY_SUBSCR":
        return True
    return instruction.opname == "BINARY_OP" and instruction.argrepr == "[]"


def _loaded_locals(instruction: dis.Instruction) -> list[str]:
    """The local variables that the instruction loads. Since Python 3.13 one instruction may store or load two."""
    if "LOAD_FAST" not in instruction.opname:
        return []
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    stored = instruction.opname.count("STORE_FAST")
    return list(names[stored:])


def _chain_root(instruction: dis.Instruction, line: int) -> NameChain | None:
    """The start of a chain, if the instruction loads a name that is no local variable."""
    name = instruction.argval
    if instruction.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
        return NameChain("cell", name, (), line)
    if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return NameChain("global", name, (), line)
    return None


# -- values behind names ---------------------------------------------------------------------------

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
_MISSING = object()
_DEPTH = 4  # how many levels of calls to follow


@dataclass
class NameRead:
    """One name that a function reads: `steps` lead from the object `root` to the value."""

    name: str
    root: Any
    steps: Steps
    where: Location
    value: Any = None  # at capture
    reported: bool = False

    def current_value(self) -> Any:
        value = self.root
        for kind, key in self.steps:
            value = _take_step(value, kind, key)
            if value is _MISSING:
                break
        return value


class _ReadWalker(ABC):
    """Visits every name that a function reads, and follows it into other functions of the program."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    @abstractmethod
    def _visit(self, read: NameRead) -> None: ...

    def _walk(self, target: Any) -> None:
        for function, owner in _functions_behind(target):
            self._walk_function(function, owner, _DEPTH)

    def _walk_function(self, function: Any, owner: Any, depth: int) -> None:
        """`owner` is the object bound to the function's first argument, if any."""
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
                    self._follow(read.current_value(), depth)

    def _follow(self, value: Any, depth: int) -> None:
        """If the value is a function of the program, walk it, too."""
        if depth == 0 or not isinstance(value, _FUNCTIONS):
            return
        for function, owner in _functions_behind(value):
            if isinstance(function, FunctionType) and not is_library(function.__code__.co_filename):
                self._walk_function(function, owner, depth - 1)


class CapturedNames(_ReadWalker):
    """The names that a function and its called modules read, with their values at capture."""

    def __init__(self, target: Any, called_modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self._reads: dict[tuple[int, Steps], NameRead] = {}
        self._walk(target)
        for module in called_modules:
            self._walk(module)

    def changed(self) -> Iterator[tuple[NameRead, Any]]:
        """The reads whose value changed, with the new value. Each is reported once."""
        for read in self._reads.values():
            now = read.current_value()
            if not read.reported and not _is_same(read.value, now):
                read.reported = True
                yield read, now

    def _visit(self, read: NameRead) -> None:
        value = read.current_value()
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
    """The dictionaries through which a function reaches the objects for which `matches` is true.

    `matching_steps` has an entry for each step of each path to such an object, without names that the function assigns.
    """

    def __init__(self, target: Any, matches: Callable[[Any], bool]) -> None:
        super().__init__()
        self._matches = matches
        self._steps: list[PathStep] = []
        self._walk(target)
        assigned: set[str] = set()
        for code, _ in self._seen:
            assigned.update(assigned_names(code))
        self.matching_steps = [step for step in self._steps if step[1] not in assigned]

    def _visit(self, read: NameRead) -> None:
        value = read.root
        path: list[PathStep] = []
        for kind, key in read.steps:
            container = _dictionary_of(value, kind, key)
            value = _take_step(value, kind, key)
            if value is _MISSING:
                break
            if container is not None:
                path.append((container, key, value, f"{read.name} (read at {read.where})"))
            if self._matches(value):
                self._steps += path
                path = []


def _resolve(
    chain: NameChain, function: FunctionType, owner: Any, first_argument: str | None, filename: str
) -> NameRead | None:
    """Find the object at which a chain starts: the owner of a method, a closure cell or the module's globals."""
    module = type(owner).__name__ if isinstance(owner, nn.Module) else ""
    where = Location(module, filename, chain.line)
    name = _expression(chain.name, chain.steps)
    if chain.scope == "local":
        return NameRead(name, owner, chain.steps, where) if chain.name == first_argument else None
    if chain.scope == "global":
        if chain.name not in function.__globals__:
            return None
        return NameRead(name, function.__globals__, (("item", chain.name), *chain.steps), where)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if chain.name not in cells:
        return None
    return NameRead(name, cells[chain.name], (("cell", None), *chain.steps), where)


def _functions_behind(target: Any) -> Iterator[tuple[Any, Any]]:
    """The Python functions behind a callable, each with the object bound to its first argument."""
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
    """The dictionary that holds the key of a step, or None if no dictionary does."""
    if kind == "item":
        return value if isinstance(value, dict) else None
    if kind != "attribute":
        return None
    for namespace in (*_module_slots(value), getattr(value, "__dict__", None)):
        if isinstance(namespace, dict) and key in namespace:
            return namespace
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
            return _MISSING
    if kind == "item":
        if not isinstance(value, (dict, list, tuple)):
            return _MISSING
        try:
            return value[key]
        except (KeyError, IndexError, TypeError):
            return _MISSING
    for slots in _module_slots(value):
        if key in slots:
            return slots[key]
    namespace = getattr(value, "__dict__", None)
    if isinstance(namespace, dict) and key in namespace:
        return namespace[key]
    class_attribute = inspect.getattr_static(value, key, _MISSING)
    if isinstance(class_attribute, FunctionType) and not isinstance(value, (type, ModuleType)):
        return MethodType(class_attribute, value)
    return _MISSING if hasattr(type(class_attribute), "__get__") else class_attribute


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


def _expression(name: str, steps: Steps) -> str:
    for kind, key in steps:
        name += f".{key}" if kind == "attribute" else f"[{key!r}]"
    return name
