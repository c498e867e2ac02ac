"""Waiting for a collective: a wait that times out does not mean that the collective failed."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rollgraph.parallel.data import collectives
from rollgraph.parallel.data.collectives import Collectives
from rollgraph.parallel.ranks.world import World
from tests.parallel.worlds import run_world


class CompletesAfterTheWait:
    """A collective whose waits with a timeout all time out, and which completes just after."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            time.sleep(0.01)
            raise RuntimeError("Operation timed out!")
        self._work.wait()

    def is_completed(self) -> bool:
        while not self._work.is_completed():
            time.sleep(0.01)
        return True


def exchange_names(world: World) -> list[str]:
    start = collectives._all_gather
    collectives._all_gather = lambda *arguments, **options: CompletesAfterTheWait(start(*arguments, **options))
    return Collectives(world).all_gather_text(f"rank {world.rank}")


@pytest.mark.multi
def test_a_collective_that_completes_after_a_timed_out_wait_has_not_failed(tmp_path: Path) -> None:
    assert run_world(2, tmp_path, exchange_names) == [["rank 0", "rank 1"]] * 2


class Failed:
    """A collective that ended with an error."""

    def wait(self, timeout: timedelta | None = None) -> None:
        raise RuntimeError("Connection reset by peer")

    def is_completed(self) -> bool:
        return True


def exchange_and_fail(world: World) -> str:
    collectives._all_gather = lambda *arguments, **options: Failed()
    group = Collectives(world, timeout=1.0)
    try:
        group.all_gather_text("text")
    except collectives.CommunicationError as error:
        dist.barrier()
        return str(error)
    return "no error"


@pytest.mark.multi
def test_a_collective_that_failed_is_an_error(tmp_path: Path) -> None:
    for rank, message in enumerate(run_world(2, tmp_path, exchange_and_fail)):
        assert message == f"rank {rank}: the exchange of strings failed: all ranks are alive (Connection reset by peer)"
