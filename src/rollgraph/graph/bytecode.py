"""Which names a function's bytecode reads and assigns. Looks at code objects only: no value is touched."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

_NO_CONSTANT = object()
_ASSIGNMENTS = ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL")
_PADDING = ("CACHE", "PUSH_NULL", "PRECALL")  # instructions between the parts of an expression

Steps = tuple[tuple[str, Any], ...]  # ("attribute" or "item", key), one after the other


class NameChain(NamedTuple):
    """An expression such as `config.rates["actor"]`, as the bytecode reads it."""

    scope: str  # of the first name: "local", "cell" or "global"
    name: str
    steps: Steps
    line: int


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions defined inside it."""
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
    constant: Any = _NO_CONSTANT
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
            if _is_subscript(instruction) and constant is not _NO_CONSTANT:
                steps.append(("item", constant))
                constant = _NO_CONSTANT
                continue
            yield root._replace(steps=tuple(steps))
        loaded = _loaded_locals(instruction)
        yield from (NameChain("local", name, (), line) for name in loaded[:-1])
        root = NameChain("local", loaded[-1], (), line) if loaded else _chain_root(instruction, line)
        steps = []
        constant = _NO_CONSTANT


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
