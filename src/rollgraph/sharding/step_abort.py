"""Finishing an optimizer step together, or aborting it together: what each rank announces in the store.

A rank announces, without any collective, that it starts to reduce the gradients of a step, that it has reduced them
all, or that it aborts the step. A rank that aborted takes part in the reductions only once the others have started
theirs, and in nothing of the next step before all ranks have aborted this one. So collectives of different steps are
never matched with each other.

No rank finishes a step before all of them have reduced their gradients. Its own reductions do not tell it that: a rank
may fail when it has started all of them.

Owns the announcements. What has to be done about them is up to `gradient_reductions.py`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rollgraph.distributed.world import World
from rollgraph.sharding.background_tasks import CHECK_SECONDS, start
from rollgraph.sharding.collectives import Collectives, CommunicationError, WaitEnded

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01  # seconds between two looks into the store, the longer it takes

# Keys in the store
_REACHED = "reached"  # this rank started its reductions or aborted the step
_ABORTED = "aborted"  # this rank aborted the step
_CAUSE = "cause"  # which rank failed, and why
_ENDED = "ended"  # this rank has reduced its gradients or aborted the step
_STARTED = "started"  # the collectives that this rank has started in the step, if their order depends on the program

_END = "the end of the step"  # what all ranks come to, one way or the other, in errors


class StepAborted(WaitEnded):
    """Another rank aborted this optimizer step, so all ranks drop its gradients."""


class StepAborts:
    """The aborts of one model, step by step. `name` tells models in one store apart and is the same on all ranks."""

    def __init__(self, world: World, collectives: Collectives, name: str) -> None:
        self._rank = world.rank
        self._size = world.size
        self._name = name
        self._store: Any = collectives.store
        self._timeout = collectives.timeout
        assert collectives.liveness is not None, "several ranks watch each other"
        self._liveness = collectives.liveness
        self._step = 0
        self.aborted = False  # by this rank, and the others have not all followed yet
        self._announced_reduction = False
        self._ended = False  # by this rank: it has reduced its gradients, or all ranks have aborted
        self._aborted_before = False  # the step before this one

    def announce_reduction(self) -> None:
        """Call this before the first reduction of a step: from there to the last one all ranks do the same."""
        if not self._announced_reduction:
            self._announced_reduction = True
            with suppress(RuntimeError):  # the store died with rank 0: the reduction will say so
                self._store.set(self._key(_REACHED, self._rank), "reducing")

    def agree_to_finish(self) -> None:
        """This rank has reduced its gradients: wait until all ranks have, and raise if one of them aborts instead."""
        self._end()
        with suppress(RuntimeError):  # the store died with rank 0: the wait will say so
            self._store.set(self._key(_ENDED, self._rank), "reduced")
        self._wait(_ENDED, f"rank {self._rank} has reduced its gradients", lambda: self._liveness.report_timeout(_END))
        self.raise_if_aborted()
        self._forget_step_before()

    def _forget_step_before(self) -> None:
        """Delete what was said of the step before. All ranks have left it, and the store must not grow."""
        if not self._step:
            return
        events = [_REACHED, _ENDED]
        if self._aborted_before:
            events += [_ABORTED, _STARTED]
        keys = [self._key(event, self._rank, self._step - 1) for event in events]
        if self._aborted_before and self._rank == 0:
            keys.append(self._key(_CAUSE, step=self._step - 1))
        with suppress(RuntimeError):  # the store died with rank 0: the next collective will say so
            for key in keys:
                self._store.delete_key(key)

    def _end(self) -> None:
        """Count the end of the step: once on each rank, however it ends there."""
        if not self._ended:
            self._ended = True
            self._liveness.report_progress(_END)

    def abort(self, started: str = "") -> None:
        """Announce that this rank aborts the step, what it has `started`, and why, if an exception is being handled.

        If this rank has agreed to finish the step, the others are not told the cause: they may have finished it.
        """
        if self.aborted:
            return
        self.aborted = True
        error = sys.exception()
        if self._liveness.loss is not None:
            return  # nobody will follow, and the store may have gone with the rank that is lost
        with suppress(RuntimeError):  # the store is gone: the next collective says so, and `error` matters more
            self._store.set(self._key(_STARTED, self._rank), started)
            if not self._ended:
                # The rank that failed first is the one to name.
                self._store.compare_set(self._key(_CAUSE), "", f"rank {self._rank} aborted the step{_describe(error)}")
            for event in (_REACHED, _ABORTED, _ENDED):  # after the cause, for which others look when they see these
                self._store.set(self._key(event, self._rank), "aborted")
            self._store.check([self._key(_ENDED, self._rank)])  # returns only after all of the above is stored

    def raise_if_aborted(self) -> None:
        """Raise if another rank aborted this step."""
        key = self._key(_CAUSE)
        cause = ""
        with suppress(RuntimeError):  # the store died with rank 0: the next collective will say so
            if self._store.check([key]):
                cause = self._store.get(key).decode()
        if cause:
            raise StepAborted(f"{cause}: all ranks drop its gradients")

    def wait_until_all_reached(self) -> None:
        """Wait until every rank has started its reductions or aborted this step."""
        self._wait_after_abort(_REACHED, "neither started its reductions nor called drop_gradients()")

    def wait_until_all_aborted(self) -> None:
        self._wait_after_abort(_ABORTED, "did not")
        self._forget_step_before()

    def read_started(self) -> list[str]:
        """What each rank had started when it aborted this step, after all of them have."""
        return [self._store.get(self._key(_STARTED, rank)).decode() for rank in range(self._size)]

    def next_step(self) -> None:
        self._end()
        self._step += 1
        self._aborted_before = self.aborted
        self.aborted = False
        self._announced_reduction = False
        self._ended = False

    def _wait_after_abort(self, event: str, failure: str) -> None:
        limit = f"within {self._timeout:g} s: all ranks must abort the same step"
        here = f"rank {self._rank} aborted a step by drop_gradients()"
        self._wait(event, here, lambda: f"{self._find_missing(event)} {failure} {limit}")

    def _wait(self, event: str, here: str, explain_timeout: Callable[[], str]) -> None:
        """Wait until every rank has announced an event. `here` says in errors what this rank did.

        A thread looks into the store: if the process that has it is stopped, a look does not end.
        """
        keys = [self._key(event, rank) for rank in range(self._size)]
        given_up = threading.Event()
        look = start(lambda: self._look_for(keys, given_up))
        began = self._liveness.clock()
        try:
            while not look.done():
                loss = self._liveness.loss
                if loss is not None:
                    raise CommunicationError(f"{here}, and {loss.text}", loss)
                if self._liveness.clock() - began > self._timeout:
                    reason = explain_timeout()
                    raise CommunicationError(f"{here}, and {reason}", self._liveness.loss)
                with suppress(TimeoutError):
                    look.exception(CHECK_SECONDS)
        finally:
            given_up.set()
        error = look.exception()
        if isinstance(error, RuntimeError):
            reason = self._liveness.wait_for_loss() or "the store of the ranks does not respond"
            raise CommunicationError(f"{here}, and {reason}", self._liveness.loss) from error
        if error is not None:
            raise error

    def _look_for(self, keys: list[str], given_up: threading.Event) -> None:
        """Return when the store has all keys. It is asked again and again: PyTorch warns of a wait that times out."""
        pause = _SHORTEST_PAUSE
        while not given_up.is_set() and not self._store.check(keys):
            given_up.wait(pause)
            pause = min(1.1 * pause, _LONGEST_PAUSE)

    def _find_missing(self, event: str) -> str:
        try:
            missing = [rank for rank in range(self._size) if not self._store.check([self._key(event, rank)])]
            return ", ".join(f"rank {rank}" for rank in missing)
        except RuntimeError:
            return "some rank (the store does not respond; is rank 0 gone?)"

    def _key(self, event: str, rank: int | None = None, step: int | None = None) -> str:
        """Of this step, unless another one is given."""
        return f"rollgraph/{self._name}/{self._step if step is None else step}/{event}/{rank}"


def _describe(error: BaseException | None) -> str:
    if error is None:
        return ""
    return f" ({type(error).__name__}: {error})".replace("\n", " ")
