"""Python functions on their way to reward workers, which are processes of their own.

A function of an importable module travels as its name. One that a worker cannot look up, because a script or a
notebook defines it, travels as its code if `cloudpickle` is installed. Where neither is possible, the error says why
and what to do instead.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from types import FunctionType
from typing import Any

from rollgraph.rl.paths import LoadError

_ADVICE = "move the function into a module that can be imported"


def pack(value: Any) -> bytes:
    """A function, with whatever belongs to it, as bytes that `pickle.loads` reads in a worker."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    problem = ""
    try:
        pickler.dump(value)
    except Exception as error:  # pickle raises errors of many classes, and so do objects of anybody's
        problem = f"it cannot be pickled ({type(error).__name__}: {error})"
    missing = pickler.modules_not_importable()
    if missing - {"__main__"}:
        modules = ", ".join(sorted(missing))
        raise _refusal(f"it is defined in the module {modules}, which they cannot import; {_ADVICE}")
    if missing:
        problem = "it is defined in a script or a notebook (__main__), which they do not import"
    if not problem:
        return buffer.getvalue()
    return _pack_code(value, problem)


def _pack_code(value: Any, problem: str) -> bytes:
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise _refusal(f"{problem}; pip install cloudpickle, {_ADVICE}") from None
    try:
        packed: bytes = cloudpickle.dumps(value)
    except Exception as error:
        reason = f"cloudpickle cannot pickle it and what it refers to ({type(error).__name__}: {error})"
        raise _refusal(f"{reason}; {_ADVICE}") from error
    return packed


def _refusal(detail: str) -> LoadError:
    return LoadError(f"cannot be sent to reward workers: {detail}", alternative=("workers", 0))


class _Pickler(pickle.Pickler):
    """Remembers the modules of all functions and classes that it met."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self._modules: set[str] = set()

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, FunctionType | type):
            self._modules.add(value.__module__ or "__main__")  # None: made by `exec`

    def modules_not_importable(self) -> set[str]:
        return {module for module in self._modules if not _is_importable(module)}


def _is_importable(module: str) -> bool:
    """Whether a process with our search path finds it. That it is loaded here proves nothing."""
    if module == "__main__":
        return False
    top = module.partition(".")[0]
    return any(finder.find_spec(top, None) is not None for finder in sys.meta_path)
