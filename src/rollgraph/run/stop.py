"""Requests to stop a run, by a program or by a signal.

A `StopRequest` is made by whoever starts a run, and may be used from any thread. `StopSignals` owns SIGTERM and Ctrl-C
while a run lasts, if it is started in the main thread, and turns them into requests. During set-up there is nothing to
save, so a request ends the run at once. Inside `in_steps()` it ends the run after the current step, saved; repeated
signals change nothing, because `torchrun` forwards its own to every rank. The second Ctrl-C ends the run at once,
except inside `uninterrupted()`. If a rank is lost, no step can be finished, and SIGTERM ends the run at once. After the
steps, the run is ending anyway: SIGTERM only ends the patience with ranks that hang.

Python raises KeyboardInterrupt between any two operations, for example between an update and the record of it, where
neither the previous step nor the current one could be saved. Here it is raised only where something can be saved.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from rollgraph.distributed.liveness import Liveness
from rollgraph.distributed.lost_ranks import LossReport, RankLost, StoppedInSetup
from rollgraph.distributed.world import World

_REPEATED = 5.0  # seconds: torchrun forwards to every rank what the terminal has already sent to all of them
_CAUSE_SECONDS = 1.0  # for the loss of a rank to become known, on a busy machine
SIGTERM = "SIGTERM"
CTRL_C = "Ctrl-C"


@contextmanager
def sigterm_ignored_at_the_end(world: World) -> Iterator[None]:
    """Afterwards SIGTERM does not end this process, which ends anyway: it has to say why, or to wait for the others.

    `torchrun` sends it to all ranks when it finds one lost. It ends the patience with ranks that hang.
    """
    try:
        yield
    finally:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, lambda number, frame: _hurry(world))


def _hurry(world: World) -> None:
    if world.liveness is not None:
        world.liveness.hurry()


@contextmanager
def sigterm_restored() -> Iterator[None]:
    """Afterwards SIGTERM does what it did before."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:  # otherwise a handler that Python does not know
            with suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, before)


class StopRequest:
    """Whether a run is to save and end after its current step, and who asked for that."""

    def __init__(self) -> None:
        self.asked_by: str | None = None

    @property
    def requested(self) -> bool:
        return self.asked_by is not None

    def request(self, asked_by: str = "the program") -> None:
        """Ask for it. May be called from any thread, and again; the first one who asked is the one to name."""
        self.asked_by = self.asked_by or asked_by


class StopSignals:
    """A context that turns signals into a request to stop.

    During set-up SIGTERM raises StoppedInSetup; outside of `in_steps()` Ctrl-C raises KeyboardInterrupt. If Ctrl-C was
    pressed once in a step and nothing else was raised, leaving the context raises KeyboardInterrupt. Signals that
    somebody else handles, and signals outside the main thread, are left alone.
    """

    def __init__(self, world: World, request: StopRequest | None = None) -> None:
        self._world = world
        self._request = request or StopRequest()
        self._presses = 0
        self._first_press = 0.0
        self._in_setup = True
        self._in_steps = False
        self._owns_sigint = False
        self._sigterm_before: Any = None
        self._uninterrupted_depth = 0
        self._postponed = False
        self._gave_up = False  # because a rank is lost

    @property
    def requested(self) -> bool:
        return self._request.requested

    @property
    def interrupted(self) -> bool:
        """Whether leaving the context will raise KeyboardInterrupt."""
        return self._presses > 0

    def request(self, asked_by: str = "the program") -> None:
        """Ask the run to save and end after the current step."""
        self._request.request(asked_by)

    def check_in_setup(self) -> None:
        """End the set-up if somebody asked for that, other than by a signal, which does it by itself."""
        if self.requested and self._in_setup:
            raise StoppedInSetup(self._request.asked_by or SIGTERM)

    @contextmanager
    def in_steps(self, *, setup_goes_on: bool = False) -> Iterator[None]:
        """Inside, a signal is a request that waits for the end of a step: whoever takes steps looks at `requested`.

        What comes afterwards is the end of the run or, if `setup_goes_on`, more set-up.
        """
        self._in_setup = False
        self._in_steps = True
        try:
            yield
        finally:
            self._in_steps = False
        self._in_setup = setup_goes_on

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
        loss = self._loss
        another_stopped = loss is not None and loss.stopped  # during set-up, and has gone
        if isinstance(error, RankLost) and self._in_setup and (self.requested or another_stopped):
            raise StoppedInSetup(self._request.asked_by or SIGTERM) from None

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
    def _liveness(self) -> Liveness | None:
        return self._world.liveness

    @property
    def _loss(self) -> LossReport | None:
        return None if self._liveness is None else self._liveness.loss

    def _on_sigterm(self, number: int, frame: Any) -> None:
        is_first = not self.requested
        self.request(SIGTERM)
        if self._in_setup:
            if is_first:
                raise StoppedInSetup(SIGTERM, self._find_cause())
        elif self._loss is None:
            _hurry(self._world)
        elif not self._gave_up:  # once: what cleans up after it goes on
            self._gave_up = True
            raise RankLost(self._loss.text, self._loss)

    def _find_cause(self) -> str:
        """Why the other ranks are being stopped, if one of them is lost; `torchrun` may know of that first."""
        if self._liveness is not None:
            self._liveness.wait_for_loss(_CAUSE_SECONDS)
        loss = self._loss
        return "" if loss is None or loss.stopped else loss.text

    def _on_sigint(self, number: int, frame: Any) -> None:
        if not self._in_steps:
            raise KeyboardInterrupt
        several = self._world.size > 1
        if self._presses and several and time.monotonic() - self._first_press < _REPEATED:
            return
        self._presses += 1
        if self._presses == 1:
            self._first_press = time.monotonic()
            self.request(CTRL_C)
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
