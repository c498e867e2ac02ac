"""Who holds an object: the program, or only the runtime. Read off the garbage collector, upwards."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import CellType, FrameType, FunctionType, GeneratorType
from typing import Any

_CONTAINERS = (list, tuple, dict, set, CellType)
_DEPTH = 5  # containers inside containers


def held_by_program(things: list[Any], ignore: Sequence[Any] = ()) -> set[int]:
    """The ids of those that something outside this package holds; `ignore` are lists of the caller's own."""
    holders_of: dict[int, list[int]] = {}
    verdicts: dict[int, bool | None] = {}  # program, runtime, or (None) as whoever holds the container
    keep: list[Any] = []  # so that ids stay valid
    ours = {id(things), id(keep), *map(id, ignore)}
    level = list(things)
    for _ in range(_DEPTH):
        ours.add(id(level))
        found = [h for h in gc.get_referrers(*level) if id(h) not in ours and not isinstance(h, FrameType)]
        ours.add(id(found))
        children = set(map(id, level))
        for holder in found:
            for child in gc.get_referents(holder):
                if id(child) in children:
                    holders_of.setdefault(id(child), []).append(id(holder))
        level = [h for h in found if id(h) not in verdicts and _verdict(h) is None]
        verdicts.update((id(h), _verdict(h)) for h in found)
        keep += found
        if not level:
            break
    return {
        id(t) for t in things if any(_is_programs(h, holders_of, verdicts, set()) for h in holders_of.get(id(t), ()))
    }


def _verdict(holder: Any) -> bool | None:
    module = holder.__module__ if isinstance(holder, FunctionType) else type(holder).__module__
    if isinstance(module, str) and module.startswith("rollgraph.graph."):
        return False
    if isinstance(holder, dict) and "replay" in holder and "__builtins__" in holder:
        return False  # the names of a tape's program
    if isinstance(holder, GeneratorType) and holder.gi_code.co_filename.startswith(_HERE):
        return False
    return None if isinstance(holder, _CONTAINERS) else True


_HERE = __file__.rpartition("graph")[0]


def _is_programs(
    holder: int, holders_of: dict[int, list[int]], verdicts: dict[int, bool | None], path: set[int]
) -> bool:
    verdict = verdicts[holder]
    if verdict is not None:
        return verdict
    above = holders_of.get(holder)
    if above is None:
        return True  # a container that only a running function has
    return any(_is_programs(h, holders_of, verdicts, path | {holder}) for h in above if h not in path | {holder})
