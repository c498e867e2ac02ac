"""The phase machine: what a worker is doing, and what each transition requires.

Touches no tensor: it decides which work a transition takes and has `PhaseActions` do it. A phase is a context; leaving
it restores what was there on entry, exception or not. No transition captures a graph. `phase_memory.py` decides which
memory a phase takes from another.

| phase | before it | while it lasts | after it failed |
|---|---|---|---|
| generate, score, save | gather the full parameters | hooks are paused | |
| train | | hooks are on | gradients are dropped |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

IDLE = "idle"
READING = ("generate", "score", "save")  # phases that read the full parameters and compute no gradients
PHASES = (*READING, "train")


class PhaseError(RuntimeError):
    """A phase cannot be entered now."""


class PhaseActions(Protocol):
    """What the machine has done for it. `ShardedModel` implements it."""

    def paused(self, gather: bool) -> AbstractContextManager[None]: ...
    def drop_gradients(self) -> None: ...


class Phases:
    """One phase at a time. Entering the current phase again costs nothing.

    `take_memory` is called with the name of a phase that is being entered; what it raises refuses the phase.
    """

    def __init__(self, actions: PhaseActions, take_memory: Callable[[str], None] = lambda phase: None) -> None:
        self._actions = actions
        self._take_memory = take_memory
        self.current = IDLE
        self.entered: Counter[str] = Counter()

    @contextmanager
    def enter(self, phase: str) -> Iterator[None]:
        if phase not in PHASES:
            raise PhaseError(f"there is no phase {phase!r}: expected one of {', '.join(PHASES)}")
        if self.current not in (IDLE, phase):
            raise PhaseError(f"cannot {phase} during {self.current}: leave that phase first")
        with ExitStack() as stack:
            if phase != self.current:
                stack.enter_context(self._transition(phase))
            try:
                yield
            except BaseException:
                if phase == "train":
                    self._actions.drop_gradients()
                raise

    @contextmanager
    def _transition(self, phase: str) -> Iterator[None]:
        """From idle to a phase, and back."""
        with ExitStack() as stack:
            if phase in READING:
                stack.enter_context(self._actions.paused(gather=True))
            self._take_memory(phase)  # after the gathers: ranks have ended an aborted step by then
            try:
                self.current = phase
                self.entered[phase] += 1
                yield
            finally:
                self.current = IDLE
