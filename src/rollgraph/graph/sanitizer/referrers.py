"""Who holds an object: the program, or only the graph runtime.

This is the one question that the sanitizer answers with a search. An object does not know who refers to it; only the
garbage collector can list the containers that do, and what those do not explain is in a running function's locals.
"""

from __future__ import annotations

import enum
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CellType, FrameType, FunctionType, GeneratorType
from typing import Any

_CONTAINERS = (list, tuple, dict, set, CellType)
_DEPTH = 5  # how far to follow containers inside containers
_RUNTIME_MODULES = "rollgraph.graph."
_RUNTIME_FILES = str(Path(__file__).resolve().parents[2])


class _Owner(enum.Enum):
    PROGRAM = enum.auto()
    RUNTIME = enum.auto()
    HOLDER = enum.auto()  # a plain container belongs to whoever holds it


def held_by_program(things: list[Any], ignore: Sequence[Any] = ()) -> set[int]:
    """Return the ids of the things that something outside the runtime holds.

    `ignore` are lists of the caller's own that hold them too.
    """
    holders_of: dict[int, list[int]] = {}
    owners: dict[int, _Owner] = {}
    keep: list[Any] = []  # holders stay alive, so that their ids stay valid
    own_lists = {id(things), id(keep), *map(id, ignore)}
    level = list(things)
    for _ in range(_DEPTH):
        arguments = tuple(level)  # Python 3.13 lists the tuple that is passed, so it must be known
        own_lists |= {id(level), id(arguments)}
        found = [h for h in gc.get_referrers(*arguments) if id(h) not in own_lists and not isinstance(h, FrameType)]
        own_lists.add(id(found))
        children = set(map(id, level))
        level = []
        own_lists.add(id(level))
        for holder in found:
            for child in gc.get_referents(holder):
                if id(child) in children:
                    holders_of.setdefault(id(child), []).append(id(holder))
            if id(holder) not in owners:
                owners[id(holder)] = _owner_of(holder)
                if owners[id(holder)] is _Owner.HOLDER:
                    level.append(holder)
        keep += found
        if not level:
            break
    held: set[int] = set()
    for thing in things:
        holders = holders_of.get(id(thing), ())
        if any(_is_the_programs(holder, holders_of, owners, set()) for holder in holders):
            held.add(id(thing))
    return held


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
    return _Owner.HOLDER if isinstance(holder, _CONTAINERS) else _Owner.PROGRAM


def _is_the_programs(holder: int, holders_of: dict[int, list[int]], owners: dict[int, _Owner], path: set[int]) -> bool:
    if owners[holder] is not _Owner.HOLDER:
        return owners[holder] is _Owner.PROGRAM
    above = holders_of.get(holder)
    if above is None:
        return True  # no container holds it, so a running function does
    path = path | {holder}
    return any(_is_the_programs(h, holders_of, owners, path) for h in above if h not in path)


class _Control:
    """An object that nothing holds but the count itself."""


def held_by_locals(things: list[Any]) -> set[int]:
    """Return the ids of the things that a running function has in a local variable.

    They have more references than the garbage collector lists. Counting makes references of its own; a control object
    in the same list shows how many.
    """
    own, *counts = _unlisted_references([_Control(), *things])
    return {id(thing) for thing, count in zip(things, counts, strict=True) if count > own}


def _unlisted_references(things: list[Any]) -> list[int]:
    counts = []
    for thing in things:
        listed = 0
        for holder in gc.get_referrers(thing):
            listed += sum(referent is thing for referent in gc.get_referents(holder))
        counts.append(sys.getrefcount(thing) - listed)
    return counts
