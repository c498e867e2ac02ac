"""Requests to stop a run, by a program or by a signal.

Whoever starts a run creates the `StopRequest`, and may use it from any thread. `StopSignals` handles SIGTERM, SIGHUP
and Ctrl-C during a run in the main thread, and turns them into requests:

- During set-up there is nothing to save, so a request ends the run at once.
- Inside `in_steps()` a request ends the run after the current step, which is saved. Repeated SIGTERMs change nothing,
  because `torchrun` forwards its own to every rank. The second Ctrl-C ends the run at once, except inside
  `uninterrupted()`.
- If a rank is lost, no step can be finished, and SIGTERM ends the run at once.
- After the steps the run is ending anyway: SIGTERM only shortens the heartbeat time-out.

SIGHUP, which a terminal sends when it is closed, counts as SIGTERM, unless it is ignored, as under `nohup`.

Python may raise KeyboardInterrupt between any two operations, for example between an update and the record of it, where
neither the previous step nor the current one could be saved. Here it is raised only where a step can be saved.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from rollgraph.log.streams import write_to_stderr
from rollgraph.parallel.ranks.failures import LossReport, RankLost, StoppedInSetup
from rollgraph.parallel.ranks.liveness import Liveness
from rollgraph.parallel.ranks.world import World

_REPEATED = 5.0  # seconds: torchrun forwards the Ctrl-C that the terminal has already sent to every rank
_CAUSE_SECONDS = 1.0  # for a loss to become known on a busy machine
# The handlers that ours may replace.
_TERMINATIONS = {signal.SIGTERM: (signal.SIG_DFL, signal.SIG_IGN), signal.SIGHUP: (signal.SIG_DFL,)}
SIGTERM = "SIGTERM"
CTRL_C = "Ctrl-C"


@contextmanager
def ignore_terminations_at_exit(world: World) -> Iterator[None]:
    """After this context no SIGTERM ends the process, which is ending anyway: it has to say why, or to wait for others.

    `torchrun` sends SIGTERM to all ranks when it finds one lost. The signal then only shortens the heartbeat time-out.
    """
    try:
        yield
    finally:
        with suppress(ValueError):  # not the main thread
            for number, default_handlers in _TERMINATIONS.items():
                if number == signal.SIGTERM or signal.getsignal(number) in default_handlers:
                    signal.signal(number, lambda number, frame: _shorten_heartbeat_timeout(world))


def _shorten_heartbeat_timeout(world: World) -> None:
    if world.liveness is not None:
        world.liveness.shorten_heartbeat_timeout()


@contextmanager
def restore_termination_handlers() -> Iterator[None]:
    """After this context SIGTERM and SIGHUP have their previous handlers again."""
    previous = {number: signal.getsignal(number) for number in _TERMINATIONS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            if handler is not None:  # None: a handler that was not installed from Python
                with suppress(ValueError):  # not the main thread
                    signal.signal(number, handler)


class StopRequest:
    """Whether a run should save and end after its current step, and who requested that."""

    def __init__(self) -> None:
        self.requested_by: str | None = None

    @property
    def requested(self) -> bool:
        return self.requested_by is not None

    @property
    def by_termination(self) -> bool:
        """Whether SIGTERM, or SIGHUP from a closed terminal, requested it."""
        return self.requested_by in {number.name for number in _TERMINATIONS}

    def request(self, requested_by: str = "the program") -> None:
        """Request the stop. May be called from any thread, and repeatedly: the first caller is remembered."""
        self.requested_by = self.requested_by or requested_by


class StopSignals:
    """A context that turns signals into a request to stop.

    During set-up SIGTERM raises StoppedInSetup; outside of `in_steps()` Ctrl-C raises KeyboardInterrupt. If Ctrl-C was
    pressed once in a step and nothing else was raised, leaving the context raises KeyboardInterrupt. We do not touch
    signals that other code handles, or signals outside the main thread.
    """

    def __init__(self, world: World, request: StopRequest | None = None) -> None:
        self._world = world
        self._request = request or StopRequest()
        self._ctrl_c_presses = 0
        self._first_ctrl_c = 0.0
        self._in_setup = True
        self._in_steps = False
        self._owns_sigint = False
        self._previous_handlers: dict[signal.Signals, Any] = {}  # the handlers that ours replace
        self._uninterrupted_depth = 0
        self._interrupt_postponed = False
        self._raised_rank_lost = False  # RankLost was raised by a signal

    @property
    def requested(self) -> bool:
        return self._request.requested

    @property
    def interrupted(self) -> bool:
        """Whether leaving the context will raise KeyboardInterrupt."""
        return self._ctrl_c_presses > 0

    def request(self, requested_by: str = "the program") -> None:
        """Request that the run saves and ends after the current step."""
        self._request.request(requested_by)

    def check_in_setup(self) -> None:
        """Raise if a stop was requested during set-up by the program; signals raise by themselves."""
        if self.requested and self._in_setup:
            raise StoppedInSetup(self._request.requested_by or SIGTERM)

    @contextmanager
    def in_steps(self, *, setup_follows: bool = False) -> Iterator[None]:
        """Inside, a signal only requests a stop: the loop over steps checks `requested` after each step.

        After this context comes the end of the run or, if `setup_follows`, more set-up. After an error, the run ends.
        """
        self._in_setup = False
        self._in_steps = True
        try:
            yield
        finally:
            self._in_steps = False
        self._in_setup = setup_follows

    def __enter__(self) -> Self:
        try:
            for number, default_handlers in _TERMINATIONS.items():
                if signal.getsignal(number) in default_handlers:
                    self._previous_handlers[number] = signal.signal(number, self._on_termination)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._on_sigint)
                self._owns_sigint = True
        except ValueError:  # not the main thread
            pass
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self._owns_sigint:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        if self.interrupted and kind is None:
            raise KeyboardInterrupt
        loss = self._loss
        another_stopped = loss is not None and loss.stopped  # another rank was stopped during set-up, and has left
        if isinstance(error, RankLost) and self._in_setup and (self.requested or another_stopped):
            raise StoppedInSetup(self._request.requested_by or SIGTERM) from None

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Postpone the second Ctrl-C to the end of this block, so that the block runs to its end."""
        self._uninterrupted_depth += 1
        try:
            yield
        except BaseException:
            self._interrupt_postponed = False  # the run ends anyway
            raise
        finally:
            self._uninterrupted_depth -= 1
        if self._interrupt_postponed and not self._uninterrupted_depth:
            self._interrupt_postponed = False
            raise KeyboardInterrupt

    @property
    def _liveness(self) -> Liveness | None:
        return self._world.liveness

    @property
    def _loss(self) -> LossReport | None:
        return None if self._liveness is None else self._liveness.loss

    def _on_termination(self, number: int, frame: Any) -> None:
        is_first = not self.requested
        requested_by = signal.Signals(number).name
        self.request(requested_by)
        if self._in_setup:
            if is_first:
                raise StoppedInSetup(requested_by, self._find_cause())
        elif self._loss is None:
            _shorten_heartbeat_timeout(self._world)
        elif not self._raised_rank_lost:  # once: the cleanup after it must not be interrupted again
            self._raised_rank_lost = True
            raise RankLost(self._loss.text, self._loss)

    def _find_cause(self) -> str:
        """The report of a lost rank, if that is why ranks are being stopped. `torchrun` may know of it before us."""
        if self._liveness is not None:
            self._liveness.wait_for_loss(_CAUSE_SECONDS)
        loss = self._loss
        return "" if loss is None or loss.stopped else loss.text

    def _on_sigint(self, number: int, frame: Any) -> None:
        if not self._in_steps:
            raise KeyboardInterrupt
        has_other_ranks = self._world.size > 1
        if self._ctrl_c_presses and has_other_ranks and time.monotonic() - self._first_ctrl_c < _REPEATED:
            return
        self._ctrl_c_presses += 1
        if self._ctrl_c_presses == 1:
            self._first_ctrl_c = time.monotonic()
            self.request(CTRL_C)
            when = f"again after {_REPEATED:g} s" if has_other_ranks else "again"
            self._print_on_rank_0(f"Ctrl-C: the run will save and end after this step; press {when} to end it at once")
        elif self._ctrl_c_presses == 2 and self._uninterrupted_depth:
            self._interrupt_postponed = True
            self._print_on_rank_0("Ctrl-C: the run will end after this update; press again to lose the update")
        else:
            raise KeyboardInterrupt

    def _print_on_rank_0(self, text: str) -> None:
        if self._world.rank == 0:
            write_to_stderr(f"\n{text}\n")  # the signal may have interrupted a print
