"""The phase machine: what a worker is doing, and what each change of it needs.

Touches no tensor: it decides which work a change takes and asks `Effects` to do it. Entering is a context, and leaving
restores what was there on entry, exception or not. No change captures a graph.

| phase | before it | while it lasts | after it failed |
|---|---|---|---|
| generate, score, save | full parameters | hooks are paused | |
| train | | hooks are on | gradients are dropped |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

IDLE = "idle"
READING = ("generate", "score", "save")  # they read whole parameters and make no gradients
PHASES = (*READING, "train")


class PhaseError(RuntimeError):
    """A phase was entered that cannot be entered now."""


class Effects(Protocol):
    """What the machine asks for. A `ShardedModel` does it."""

    def paused(self, gather: bool) -> AbstractContextManager[None]: ...
    def drop_gradients(self) -> None: ...


class Phases:
    """One phase at a time; entering the one that is there costs nothing."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self.current = IDLE
        self.entered: Counter[str] = Counter()

    @contextmanager
    def enter(self, phase: str) -> Iterator[None]:
        if phase not in PHASES:
            raise PhaseError(f"there is no phase {phase!r}: expected one of {', '.join(PHASES)}")
        if self.current not in (IDLE, phase):
            raise PhaseError(f"cannot {phase} inside of {self.current}: leave it first")
        with self._change(phase) if phase != self.current else nullcontext():
            try:
                yield
            except BaseException:
                if phase == "train":
                    self._effects.drop_gradients()
                raise

    @contextmanager
    def _change(self, phase: str) -> Iterator[None]:
        """From idle to a phase, and back."""
        with self._effects.paused(gather=True) if phase in READING else nullcontext():
            self.current = phase
            self.entered[phase] += 1
            try:
                yield
            finally:
                self.current = IDLE
