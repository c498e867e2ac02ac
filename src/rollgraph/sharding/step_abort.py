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
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rollgraph.distributed.world import World
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
        self._ended = False  # by this rank: it has reduced its gradients, or aborted

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
        self._forget(self._step - 1)

    def _forget(self, step: int) -> None:
        """Delete what this rank said of a step that all ranks have left: the store must not grow with every step."""
        with suppress(RuntimeError):  # the store died with rank 0: the next collective will say so
            for event in (_REACHED, _ENDED):
                self._store.delete_key(self._key(event, self._rank, step))

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
            if not self._ended and not isinstance(error, StepAborted):  # the rank that failed first is the one to name
                self._store.set(self._key(_CAUSE), f"rank {self._rank} aborted the step{_describe(error)}")
            for event in (_REACHED, _ABORTED, _ENDED):  # after the cause, for which others look when they see these
                self._store.set(self._key(event, self._rank), "aborted")
            self._store.check([self._key(_ENDED, self._rank)])  # returns only after all of the above is stored
        self._end()

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

    def read_started(self) -> list[str]:
        """What each rank had started when it aborted this step, after all of them have."""
        return [self._store.get(self._key(_STARTED, rank)).decode() for rank in range(self._size)]

    def next_step(self) -> None:
        self._step += 1
        self.aborted = False
        self._announced_reduction = False
        self._ended = False

    def _wait_after_abort(self, event: str, failure: str) -> None:
        limit = f"within {self._timeout:g} s: all ranks must abort the same step"
        here = f"rank {self._rank} aborted a step by drop_gradients()"
        self._wait(event, here, lambda: f"{self._find_missing(event)} {failure} {limit}")

    def _wait(self, event: str, here: str, explain_timeout: Callable[[], str]) -> None:
        """Wait until every rank has announced an event. `here` says in errors what this rank did."""
        keys = [self._key(event, rank) for rank in range(self._size)]
        began = self._liveness.clock()
        while not self._has(keys):
            loss = self._liveness.loss
            if loss is not None:
                raise CommunicationError(f"{here}, and {loss.text}", loss)
            waited = self._liveness.clock() - began
            if waited > self._timeout:
                reason = explain_timeout()
                raise CommunicationError(f"{here}, and {reason}", self._liveness.loss)
            time.sleep(min(_SHORTEST_PAUSE + waited / 10, _LONGEST_PAUSE))

    def _has(self, keys: list[str]) -> bool:
        """Whether the store has these keys. It is asked again and again: PyTorch warns of each wait that times out."""
        try:
            return bool(self._store.check(keys))
        except RuntimeError:  # the store died with rank 0
            return False

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
