"""Sets attributes of other packages' modules, all or none, and restores them. Knows nothing about Megatron."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

ABSENT: Any = object()


class CannotRepair(RuntimeError):
    """The internals that a repair needs are missing. Nothing was changed."""


@dataclass(frozen=True)
class Patch:
    """`owner.name = value`, or `owner[name] = value` if the owner is a dictionary.

    With `everywhere`, modules that imported the old value by name get the new one, too.
    """

    owner: Any  # a module, a class or a dictionary
    name: str
    value: Any
    everywhere: bool = False


@dataclass(frozen=True)
class Installed:
    patch: Patch
    before: Any  # ABSENT if the attribute is new

    def stands(self) -> bool:
        return read_raw(self.patch.owner, self.patch.name) is self.patch.value


def install(patches: list[Patch]) -> list[Installed]:
    done: list[Installed] = []
    try:
        for patch in patches:
            entry = Installed(patch, read_raw(patch.owner, patch.name))
            write_raw(patch.owner, patch.name, patch.value)
            done.append(entry)
            if patch.everywhere:
                rebind(entry.before, patch.value)
    except BaseException:
        put_back(done)
        raise
    return done


def uninstall(installed: list[Installed]) -> None:
    replaced = find_replaced(installed)
    if replaced:
        raise RuntimeError(f"cannot undo: {replaced}")
    put_back(installed)


def find_replaced(installed: list[Installed]) -> str:
    """A sentence that names the patches which other code has replaced; empty if there are none."""
    names = [f"{spell(entry.patch.owner)}.{entry.patch.name}" for entry in installed if not entry.stands()]
    return f"{', '.join(names)} was replaced since" if names else ""


def put_back(installed: list[Installed]) -> None:
    for entry in reversed(installed):
        write_raw(entry.patch.owner, entry.patch.name, entry.before)
        if entry.patch.everywhere:
            rebind(entry.patch.value, entry.before)


def rebind(old: Any, new: Any) -> None:
    """Follow `from module import function`, whose copies of the name a patch of the module alone would miss."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            names = [name for name, value in list(vars(module).items()) if value is old]
            vars(module).update(dict.fromkeys(names, new))


def read_raw(owner: Any, name: str) -> Any:
    """The stored value, without binding: for a class, the classmethod object rather than the bound method."""
    stored = owner if isinstance(owner, dict) else vars(owner)
    return stored.get(name, ABSENT)


def write_raw(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        if value is ABSENT:
            owner.pop(name, None)
        else:
            owner[name] = value
    elif value is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def need(owner: Any, *names: str) -> None:
    for name in names:
        if not hasattr(owner, name):
            raise CannotRepair(f"{spell(owner)} has no {name}")


def need_parameters(function: Callable[..., Any], *names: str) -> None:
    found = tuple(inspect.signature(function).parameters)
    if found != names:
        raise CannotRepair(f"{spell(function)} takes ({', '.join(found)}), not ({', '.join(names)})")


def need_names(function: Callable[..., Any], *names: str) -> None:
    """Require attributes of objects that do not exist yet, by looking at the code that sets or reads them."""
    missing = [name for name in names if name not in function.__code__.co_names]
    if missing:
        raise CannotRepair(f"{spell(function)} does not mention {', '.join(missing)}")


def spell(thing: Any) -> str:
    if isinstance(thing, ModuleType):
        return thing.__name__
    if isinstance(thing, type) or callable(thing):
        return f"{thing.__module__}.{thing.__qualname__}"
    return type(thing).__name__


def closure_values(function: Any) -> list[Any]:
    """The values that a function closes over; empty for anything that is not a function."""
    values = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # the cell is still empty
            values.append(cell.cell_contents)
    return values


@contextmanager
def swapped(owner: Any, **values: Any) -> Iterator[None]:
    """Set the owner's attributes inside the context."""
    with kept(owner, *values):
        for name, value in values.items():
            write_raw(owner, name, value)
        yield


@contextmanager
def kept(owner: Any, *names: str) -> Iterator[None]:
    """Restore these attributes afterwards, and remove those that did not exist before."""
    before = {name: read_raw(owner, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not ABSENT or read_raw(owner, name) is not ABSENT:
                write_raw(owner, name, value)
