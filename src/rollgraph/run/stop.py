"""Requests to stop a run: SIGTERM and Ctrl-C.

Owns both signals while a run lasts. During set-up there is nothing to save, so both end the run at once. Inside
`in_steps()`, SIGTERM asks the run to end after the current step, saved; repeated signals change nothing, because
`torchrun` forwards its own to every rank. The first Ctrl-C asks for the same. The second one ends the run at once,
except inside `uninterrupted()`.

Python raises KeyboardInterrupt between any two operations, for example between an update and the record of it, where
neither the previous step nor the current one could be saved. Here it is raised only where something can be saved.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from rollgraph.distributed.lost_ranks import RankLost, StoppedInSetup
from rollgraph.distributed.world import World

_REPEATED = 5.0  # seconds: torchrun forwards to every rank what the terminal has already sent to all of them


class StopSignals:
    """A context that turns signals into `requested`.

    Outside of `in_steps()`, SIGTERM raises StoppedInSetup and Ctrl-C raises KeyboardInterrupt. If Ctrl-C was pressed
    once in a step and nothing else was raised, leaving the context raises KeyboardInterrupt. Signals that somebody else
    handles, and signals outside the main thread, are left alone; `request()` works from anywhere.
    """

    def __init__(self, world: World) -> None:
        self.requested = False
        self._world = world
        self._presses = 0
        self._first_press = 0.0
        self._in_steps = False
        self._owns_sigint = False
        self._sigterm_before: Any = None
        self._uninterrupted_depth = 0
        self._postponed = False

    @property
    def interrupted(self) -> bool:
        """Whether leaving the context will raise KeyboardInterrupt."""
        return self._presses > 0

    def request(self) -> None:
        """Ask the run to save and end after the current step."""
        self.requested = True

    @contextmanager
    def in_steps(self) -> Iterator[None]:
        """Inside, a signal is a request that waits for the end of a step: whoever takes steps looks at `requested`."""
        before = self._in_steps
        self._in_steps = True
        try:
            yield
        finally:
            self._in_steps = before

    def __enter__(self) -> Self:
        try:
            if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.SIG_IGN):
                self._sigterm_before = signal.signal(signal.SIGTERM, self._on_sigterm)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._on_sigint)
                self._owns_sigint = True
        except ValueError:  # not the main thread
            pass
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self._owns_sigint:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._sigterm_before is not None:
            signal.signal(signal.SIGTERM, self._sigterm_before)
        if self.interrupted and kind is None:
            raise KeyboardInterrupt
        if isinstance(error, RankLost) and not self._in_steps and (self.requested or self._another_stopped):
            raise StoppedInSetup from None

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Postpone the second Ctrl-C to the end of this block, so that the block happens as a whole."""
        self._uninterrupted_depth += 1
        try:
            yield
        except BaseException:
            self._postponed = False  # the run ends anyway
            raise
        finally:
            self._uninterrupted_depth -= 1
        if self._postponed and not self._uninterrupted_depth:
            self._postponed = False
            raise KeyboardInterrupt

    @property
    def _another_stopped(self) -> bool:
        """Whether another rank was asked to stop during set-up, and has gone."""
        liveness = self._world.liveness
        return liveness is not None and liveness.loss is not None and liveness.loss.stopped

    def _on_sigterm(self, number: int, frame: Any) -> None:
        is_first = not self.requested
        self.request()
        if is_first and not self._in_steps:
            raise StoppedInSetup

    def _on_sigint(self, number: int, frame: Any) -> None:
        if not self._in_steps:
            raise KeyboardInterrupt
        several = self._world.size > 1
        if self._presses and several and time.monotonic() - self._first_press < _REPEATED:
            return
        self._presses += 1
        if self._presses == 1:
            self._first_press = time.monotonic()
            self.request()
            again = f"again after {_REPEATED:g} s" if several else "again"
            self._say(f"Ctrl-C: the run will save and end after this step; press {again} to end it at once")
        elif self._presses == 2 and self._uninterrupted_depth:
            self._postponed = True
            self._say("Ctrl-C: the run will end after this update; press again to lose the update")
        else:
            raise KeyboardInterrupt

    def _say(self, text: str) -> None:
        if self._world.rank == 0:
            os.write(2, f"\n{text}\n".encode())  # the signal may have interrupted a print
