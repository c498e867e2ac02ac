"""Work that some ranks do while the others wait, however long it takes.

A collective alone would end the run after `ranks.timeout`, so all ranks ask one another at short intervals whether the
work is done. A rank that dies meanwhile is named as in any other collective.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import torch

from rollgraph.distributed.exit_codes import is_users
from rollgraph.distributed.world import World
from rollgraph.errors import UserError
from rollgraph.sharding import Collectives

_PAUSE = 1.0  # seconds between two rounds, at most


class FailedElsewhere(RuntimeError):
    """The work failed on another rank; `rank` says on which."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} failed: {reason}")
        self.rank = rank


class RefusedElsewhere(UserError, FailedElsewhere):
    """The same, because of what a person gave."""


def work_on_some(world: World, works_here: bool, work: Callable[[], str]) -> list[str]:
    """What `work` returns on each rank with `works_here`, and "" on the others. If it fails on one, all raise."""
    if world.size == 1 or not torch.distributed.is_initialized():  # a missing process group is reported later
        return [work()] * world.size
    collectives = Collectives(world)
    task = _Task(work if works_here else str)
    while True:
        done = task.wait(min(_PAUSE, collectives.timeout / 10))
        failed = "" if task.error is None else str(task.error) or type(task.error).__name__
        refused = task.error is not None and is_users(task.error)
        states = map(json.loads, collectives.all_gather_text(json.dumps([done, task.result, failed, refused])))
        dones, results, failures, refusals = zip(*states, strict=True)
        if task.error is not None:
            raise task.error
        for rank, reason in enumerate(failures):
            if reason:
                raise (RefusedElsewhere if refusals[rank] else FailedElsewhere)(rank, reason)
        if all(dones):
            return list(results)


class _Task:
    """A function that runs in a thread, which does not keep the process from ending."""

    def __init__(self, work: Callable[[], str]) -> None:
        self.result = ""
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="shared work", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether it is done by then."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, work: Callable[[], str]) -> None:
        try:
            self.result = work()
        except BaseException as error:  # nobody else hears of it
            self.error = error
