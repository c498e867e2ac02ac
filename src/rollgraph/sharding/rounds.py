"""Rounds: the gradients of one optimizer step after another, and which rank gave one up.

A rank notes in the store, beside all collectives, when it begins to reduce the gradients of a round, and when it gives
the round up. One that gave up takes part in reductions only once the others have come to them, and in nothing of the
next round before all have given up the same one: collectives of different steps never meet. Owns those notes; what has
to be done about them is `sharded_model.py`.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from rollgraph.distributed.world import World
from rollgraph.sharding.overlap import Collectives, CommunicationError

_LOOK = 0.25  # seconds of a wait, after which it looks whether a rank is lost


class StepGivenUp(RuntimeError):
    """Another rank gave this step up, so that its gradients are dropped on all ranks."""


class Rounds:
    """The rounds of one model. `name` tells models in one store apart; all ranks use the same."""

    def __init__(self, world: World, collectives: Collectives, name: str) -> None:
        self._world, self._name = world, name
        self._store: Any = collectives.store
        self._timeout, self._liveness = collectives.timeout, collectives.liveness
        self._number = 0
        self.given_up = False  # by this rank, and not settled yet
        self._reduces = False  # and has said so

    def begin_to_reduce(self) -> None:
        """Before the first reduction of a round: what comes until the last one is the same on all ranks."""
        if not self._reduces:
            self._reduces = True
            with suppress(RuntimeError):  # the store is gone with rank 0, and the reduction says so
                self._store.set(self._key("came", self._world.rank), "to reduce")

    def give_up(self, finished: bool) -> None:
        """Say that this rank gives up the round, and why, if an exception is being handled.

        Once it has finished its gradients, ranks that are about to finish theirs are not told: it depends on who is
        faster whether they would hear of it.
        """
        if self.given_up:
            return
        self.given_up = True
        error = sys.exception()
        with suppress(RuntimeError):  # the next collective says so, and the exception at hand is the one to tell
            self._store.set(self._key("came", self._world.rank), "to give up")
            self._store.set(self._key("gave up", self._world.rank), "given up")
            if not finished and not isinstance(error, StepGivenUp):  # whoever was first is the one to name
                self._store.set(self._key("who"), f"rank {self._world.rank} gave up the step{_reason(error)}")
            self._store.check([self._key("came", self._world.rank)])  # answered only when all of it is there

    def refuse_given_up(self) -> None:
        """Raise if another rank gave up this round."""
        key, said = self._key("who"), ""
        with suppress(RuntimeError):  # the store is gone with rank 0, and the next collective says so
            said = self._store.get(key).decode() if self._store.check([key]) else ""
        if said:
            raise StepGivenUp(f"{said}: its gradients are dropped on all ranks")

    def wait_for_reductions(self) -> None:
        """Until every rank has come to its reductions or given up this round."""
        self._wait("came", "came neither to its reductions nor to drop_gradients()")

    def wait_for_all(self) -> None:
        """Until every rank has given up this round."""
        self._wait("gave up", "did not")

    def end(self) -> None:
        """The next round begins."""
        self._number += 1
        self.given_up = self._reduces = False

    def _wait(self, for_what: str, otherwise: str) -> None:
        keys = {rank: self._key(for_what, rank) for rank in range(self._world.size)}
        here = f"rank {self._world.rank} gave up a step by drop_gradients()"
        deadline = time.monotonic() + self._timeout
        while not self._are_there(list(keys.values()), deadline):
            if self._liveness is not None and self._liveness.loss is not None:
                raise CommunicationError(f"{here}, and {self._liveness.loss.text}")
            if time.monotonic() > deadline:
                limit = f"within {self._timeout:g} s: all ranks must give up the same step"
                raise CommunicationError(f"{here}, and {self._who_is_missing(keys)} {otherwise} {limit}")

    def _are_there(self, keys: list[str], deadline: float) -> bool:
        """Wait for a moment."""
        try:
            left = max(0.01, deadline - time.monotonic())
            self._store.wait(keys, timedelta(seconds=min(left, _LOOK)))
            return True
        except RuntimeError:  # not yet; or the store is gone, with rank 0
            time.sleep(0.01)
            return False

    def _who_is_missing(self, keys: dict[int, str]) -> str:
        try:
            return ", ".join(f"rank {rank}" for rank, key in keys.items() if not self._store.check([key]))
        except RuntimeError:
            return "some rank (the store does not answer: is rank 0 gone?)"

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"rollgraph/{self._name}/{self._number}/{what}/{rank}"


def _reason(error: BaseException | None) -> str:
    if error is None:
        return ""
    return f" ({type(error).__name__}: {error})".replace("\n", " ")
