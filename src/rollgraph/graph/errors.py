"""What can go wrong with a graph, and where in the user's program it did.

Owns the exception hierarchy and the search for the user's line. Every error is raised with
parameters, gradients and RNG as they were before the call that raised it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = (_PACKAGE + os.sep, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_MODULE_CALLS = ("_call_impl", "_wrapped_call_impl", "forward")


@dataclass(frozen=True)
class Location:
    """A place in the user's program, e.g. `layers.0.mlp (model.py:31)`."""

    module: str  # path in the module tree, "" outside any module
    file: str
    line: int

    def __str__(self) -> str:
        parts = [f"module {self.module}"] * bool(self.module) + [f"{self.file}:{self.line}"] * bool(self.file)
        return ", ".join(parts) or "a place outside your program"


class GraphError(RuntimeError):
    """Base of everything raised by `rollgraph.graph`."""

    def __init__(self, message: str = "", where: Location | None = None, *, frozen_value: bool = False) -> None:
        super().__init__(message)
        self.where = where  # the user's line, if it is not the one that was running
        self.frozen_value = frozen_value  # a Python value that the graph froze at capture has changed since


class CaptureError(GraphError):
    """The function cannot be captured; the process is as it was before the attempt."""


class WarmupError(CaptureError):
    """The function raised in a warm-up run, before anything was recorded: it fails without any graph."""


class HostReadError(CaptureError):
    """The function reads a device value on the host, which a replay would never do again."""

    def __init__(self, message: str = "", where: Location | None = None, *, operation: str = "") -> None:
        super().__init__(message, where)
        self.operation = operation  # the operation that reads


class GeneratorError(CaptureError):
    """Random numbers come from a generator, or from a state of one, that a replay cannot follow."""


class StateError(CaptureError):
    """The function replaces state that it should write in place: a replay would not do that again."""


class HookError(CaptureError):
    """A hook raised, or returned something other than None."""


class ReplayMismatch(GraphError):
    """A call does not fit the surface the graph was captured with."""


class StaleGraph(GraphError):
    """The graph is valid, but what it is bound to (parameters, weights, an interval) is not."""


class MemoryInUse(StaleGraph):
    """Replaying would overwrite memory that another pass, waiting for its backward, still needs."""


class OrderError(GraphError, ValueError):
    """A schedule's order is not a legal sequence of forwards and backwards."""


def here() -> Location:
    """The user's innermost line on the current stack."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return _locate([(f, f.f_lineno) for f in reversed(frames)])


def raised_at(error: BaseException) -> Location:
    """The user's innermost line on the way to `error`."""
    return _locate(list(_frames_of(error.__traceback__)))


def _frames_of(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _locate(frames: list[tuple[FrameType, int]]) -> Location:
    file, line = "", 0
    for frame, lineno in reversed(frames):
        filename = frame.f_code.co_filename
        if not is_library(filename):
            file, line = filename, lineno
            break
    return Location(_module_path([frame for frame, _ in frames]), file, line)


def is_library(filename: str) -> bool:
    """A file of rollgraph, PyTorch or the standard library: never the place of a user's mistake."""
    standard = filename.startswith(_STANDARD) and "-packages" not in filename
    return standard or filename.startswith((*_LIBRARIES, "<frozen", "<tape>"))


def _module_path(frames: list[FrameType]) -> str:
    """The chain of modules being called, read off the frames: nothing has to be hooked."""
    path: list[str] = []
    current: torch.nn.Module | None = None
    for frame in frames:
        if frame.f_code.co_name not in _MODULE_CALLS:
            continue
        module = frame.f_locals.get("self")
        if not isinstance(module, torch.nn.Module) or module is current:
            continue
        if current is None:
            path.append(type(module).__name__)
        else:
            names = [name for name, child in current.named_modules() if child is module]
            path.append(names[0] if names else type(module).__name__)
        current = module
    return ".".join(path)
