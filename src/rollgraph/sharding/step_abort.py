"""Aborting an optimizer step together: what each rank announces in the store when it fails within a step.

A rank announces, without any collective, that it starts to reduce the gradients of a step, or that it aborts the step.
A rank that aborted takes part in the reductions only once the others have started theirs, and in nothing of the next
step before all ranks have aborted this one. So collectives of different steps are never matched with each other.

Owns the announcements. What has to be done about them is up to `gradient_reductions.py`.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from rollgraph.distributed.world import World
from rollgraph.sharding.collectives import Collectives, CommunicationError, WaitEnded

_CHECK_INTERVAL = 0.25  # seconds: a wait checks this often whether a rank is lost

# Keys in the store
_REACHED = "reached"  # this rank started its reductions or aborted the step
_ABORTED = "aborted"  # this rank aborted the step
_CAUSE = "cause"  # which rank failed, and why
_STARTED = "started"  # the collectives that this rank has started in the step, if their order depends on the program


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
        self._liveness = collectives.liveness
        self._step = 0
        self.aborted = False  # by this rank, and the others have not all followed yet
        self._announced_reduction = False

    def announce_reduction(self) -> None:
        """Call this before the first reduction of a step: from there to the last one all ranks do the same."""
        if not self._announced_reduction:
            self._announced_reduction = True
            with suppress(RuntimeError):  # the store died with rank 0: the reduction will say so
                self._store.set(self._key(_REACHED, self._rank), "reducing")

    def abort(self, finished: bool, started: str = "") -> None:
        """Announce that this rank aborts the step, what it has `started`, and why, if an exception is being handled.

        If this rank has finished its gradients, ranks that are about to finish theirs are not told the cause: whether
        they would read it in time is a race.
        """
        if self.aborted:
            return
        self.aborted = True
        error = sys.exception()
        if self._liveness is not None and self._liveness.loss is not None:
            return  # nobody will follow, and the store may have gone with the rank that is lost
        with suppress(RuntimeError):  # the store is gone: the next collective says so, and `error` matters more
            self._store.set(self._key(_STARTED, self._rank), started)
            self._store.set(self._key(_REACHED, self._rank), "aborted")
            self._store.set(self._key(_ABORTED, self._rank), "aborted")
            if not finished and not isinstance(error, StepAborted):  # the rank that failed first is the one to name
                self._store.set(self._key(_CAUSE), f"rank {self._rank} aborted the step{_describe(error)}")
            self._store.check([self._key(_REACHED, self._rank)])  # returns only after all of the above is stored

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
        self._wait(_REACHED, "neither started its reductions nor called drop_gradients()")

    def wait_until_all_aborted(self) -> None:
        self._wait(_ABORTED, "did not")

    def read_started(self) -> list[str]:
        """What each rank had started when it aborted this step, after all of them have."""
        return [self._store.get(self._key(_STARTED, rank)).decode() for rank in range(self._size)]

    def next_step(self) -> None:
        self._step += 1
        self.aborted = False
        self._announced_reduction = False

    def _wait(self, event: str, failure: str) -> None:
        keys = {rank: self._key(event, rank) for rank in range(self._size)}
        here = f"rank {self._rank} aborted a step by drop_gradients()"
        deadline = time.monotonic() + self._timeout
        while not self._wait_briefly(list(keys.values()), deadline):
            loss = None if self._liveness is None else self._liveness.loss
            if loss is not None:
                raise CommunicationError(f"{here}, and {loss.text}", loss)
            if time.monotonic() > deadline:
                missing = self._find_missing(keys)
                limit = f"within {self._timeout:g} s: all ranks must abort the same step"
                raise CommunicationError(f"{here}, and {missing} {failure} {limit}")

    def _wait_briefly(self, keys: list[str], deadline: float) -> bool:
        try:
            remaining = max(0.01, deadline - time.monotonic())
            self._store.wait(keys, timedelta(seconds=min(remaining, _CHECK_INTERVAL)))
            return True
        except RuntimeError:  # not yet, or the store died with rank 0
            time.sleep(0.01)
            return False

    def _find_missing(self, keys: dict[int, str]) -> str:
        try:
            return ", ".join(f"rank {rank}" for rank, key in keys.items() if not self._store.check([key]))
        except RuntimeError:
            return "some rank (the store does not respond; is rank 0 gone?)"

    def _key(self, event: str, rank: int | None = None) -> str:
        return f"rollgraph/{self._name}/{self._step}/{event}/{rank}"


def _describe(error: BaseException | None) -> str:
    if error is None:
        return ""
    return f" ({type(error).__name__}: {error})".replace("\n", " ")
