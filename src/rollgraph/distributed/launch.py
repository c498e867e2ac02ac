"""Several processes: joining the others that `torchrun` started, leaving them, and ending when one of them is lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from rollgraph.distributed.liveness import Liveness, RankLost
from rollgraph.distributed.world import World

LOST = 75  # the exit code where another rank was lost: the run can be started again as it was


@contextmanager
def joined(world: World, timeout: float = 600.0) -> Iterator[World]:
    """Inside, the ranks of the world can talk: gloo between CPUs, NCCL between GPUs.

    They wait for each other for `timeout` seconds at most, here and inside. After an error the process group is left as
    it is, because leaving it would wait for whoever is lost: `end_process` ends a process all the same.
    """
    if world.size == 1:
        yield world
        return
    if world.device.startswith("cuda"):
        torch.cuda.set_device(world.device)
    store = _find_store(world, timeout)
    liveness = Liveness(world.rank, world.size, store, timeout, end=_end_lost)
    try:
        _connect(world, store, liveness)
        yield replace(world, liveness=liveness)
    except BaseException as error:
        liveness.leave(error)
        raise
    liveness.leave()
    torch.distributed.destroy_process_group()


def _find_store(world: World, timeout: float) -> Any:
    """Where ranks find each other: at rank 0, or at the `torchrun` that started them."""
    limit = timedelta(seconds=timeout)
    try:
        store, _, _ = next(torch.distributed.rendezvous("env://", world.rank, world.size, timeout=limit))
    except RuntimeError as error:
        raise RankLost(f"rank {world.rank}: rank 0 did not come within {timeout:g} s: {_first_line(error)}") from error
    return store


def _connect(world: World, store: Any, liveness: Liveness) -> None:
    backend = "nccl" if world.device.startswith("cuda") else "gloo"
    limit = timedelta(seconds=liveness.timeout)
    liveness.note("its connections to the others")
    try:
        torch.distributed.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=limit
        )
    except RuntimeError as error:
        lost = liveness.explain() or "no rank is gone"
        raise RankLost(f"rank {world.rank}: the ranks are not connected: {lost} ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _end_lost(found: str) -> None:
    """Called beside the work, which is stuck or has not come to a collective since."""
    os.write(2, f"rollgraph: {found}\n".encode())
    os._exit(LOST)


def end_process(code: int) -> int:
    """Give the exit code back, or end at once where a process group is left: it would wait for a rank that is lost."""
    if torch.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
