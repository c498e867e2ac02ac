"""The exceptions of graphs, and the lines of the user's program that cause them.

Owns the exception hierarchy and the search for the user's line. After any of these errors, parameters, gradients and
RNG are as they were before the call.
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
    """A line of the user's program, e.g. `module layers.0.mlp, model.py:31`."""

    module: str  # path in the module tree, "" outside any module
    file: str
    line: int

    def __str__(self) -> str:
        parts = []
        if self.module:
            parts.append(f"module {self.module}")
        if self.file:
            parts.append(f"{self.file}:{self.line}")
        return ", ".join(parts) or "a place outside your program"


class GraphError(RuntimeError):
    """Base of everything raised by `rollgraph.graph`."""

    def __init__(self, message: str = "", where: Location | None = None, *, frozen_value: bool = False) -> None:
        super().__init__(message)
        self.where = where  # the user's line, if it is not the one that was running
        self.frozen_value = frozen_value  # a Python value that was frozen at capture has changed


class CaptureError(GraphError):
    """The function cannot be captured; the process is as it was before the attempt."""


class WarmupError(CaptureError):
    """The function raised in a warm-up run, before the recording: it fails without a graph, too."""


class HostReadError(CaptureError):
    """The function reads a tensor value on the host, which a replay would not repeat."""

    def __init__(self, message: str = "", where: Location | None = None, *, operation: str = "") -> None:
        super().__init__(message, where)
        self.operation = operation  # the operation that reads


class GeneratorError(CaptureError):
    """Random numbers come from a generator, or from an RNG state, that a replay cannot follow."""


class StateError(CaptureError):
    """The function replaces state instead of writing it in place, which a replay would not repeat."""


class NeedsWarmup(CaptureError):
    """The first call of a function cannot be its recording: only a later call shows what a replay has to do."""


class HookError(CaptureError):
    """A hook raised, or returned something other than None."""


class ReplayMismatch(GraphError):
    """A call does not fit the surface the graph was captured with."""


class StaleGraph(GraphError):
    """The graph is no longer valid: something it is bound to (a parameter, a weight, an open interval) changed."""


class MemoryInUse(StaleGraph):
    """A replay would overwrite memory that is still needed: by a pending backward, or by another thread."""


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
    """The user's innermost line in the traceback of `error`."""
    return _locate(list(_frames_of(error.__traceback__)))


def _frames_of(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _locate(frames: list[tuple[FrameType, int]]) -> Location:
    module = _module_path([frame for frame, _ in frames])
    for frame, line in reversed(frames):
        filename = frame.f_code.co_filename
        if not is_library(filename):
            return Location(module, filename, line)
    return Location(module, "", 0)


def is_library(filename: str) -> bool:
    """Whether a file belongs to rollgraph, PyTorch or the standard library, and not to the user's program."""
    standard = filename.startswith(_STANDARD) and "-packages" not in filename
    return standard or filename.startswith((*_LIBRARIES, "<frozen", "<tape>"))


def _module_path(frames: list[FrameType]) -> str:
    """The chain of running modules, read from the stack frames, so that no module needs a hook."""
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
