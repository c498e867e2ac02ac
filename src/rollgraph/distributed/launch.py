"""Joining the other processes that `torchrun` started, leaving them, and exiting when one of them is lost."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.rendezvous import rendezvous

from rollgraph.distributed.connection import first_line, rank_0_silent
from rollgraph.distributed.liveness import Liveness
from rollgraph.distributed.lost_ranks import RankLost
from rollgraph.distributed.world import World

_groups = itertools.count()  # that this process joined, which all ranks do in the same order
LOST = 75  # exit code if another rank was lost: start the same command again to continue the run


@contextmanager
def joined(world: World, timeout: float = 600.0) -> Iterator[World]:
    """Join the ranks of the world in a process group: gloo between CPUs, NCCL between GPUs.

    No rank waits for another one longer than `timeout` seconds, here or inside. After an error the process group is not
    destroyed, because that would wait for the lost rank: call `end_process` to exit nevertheless.
    """
    if world.size == 1:
        yield world
        return
    if world.device.startswith("cuda"):
        torch.cuda.set_device(world.device)
    store = _find_store(world, timeout)
    liveness = Liveness(world.rank, world.size, store, timeout, end=_exit_lost)
    try:
        _init_process_group(world, store, liveness)
        yield replace(world, liveness=liveness)
    except BaseException as error:
        liveness.leave(error)
        raise
    liveness.leave()
    torch.distributed.destroy_process_group()


def _find_store(world: World, timeout: float) -> Any:
    """The key-value store where the ranks find each other. It lives in rank 0 or in `torchrun`."""
    limit = timedelta(seconds=timeout)
    try:
        store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=limit))
    except RuntimeError as error:
        raise rank_0_silent(world.rank, timeout, first_line(error)) from error
    return store


def _init_process_group(world: World, store: Any, liveness: Liveness) -> None:
    backend = "nccl" if world.device.startswith("cuda") else "gloo"
    limit = timedelta(seconds=liveness.timeout)
    store = torch.distributed.PrefixStore(f"rollgraph/{next(_groups)}", store)  # an earlier group left its addresses
    liveness.report_progress("connecting to the other ranks")
    try:
        torch.distributed.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=limit
        )
    except RuntimeError as error:
        reason = liveness.wait_for_loss() or "all ranks are alive"
        message = f"rank {world.rank}: the ranks could not connect: {reason} ({first_line(error)})"
        raise RankLost(message, liveness.lost_rank) from error


def _exit_lost(reason: str) -> None:
    """Called by the liveness thread if the training thread is stuck, or has not reached a collective since the loss."""
    os.write(2, f"rollgraph: {reason}\n".encode())
    os._exit(LOST)


def end_process(code: int) -> int:
    """Return the exit code, or exit at once if a process group is left: its cleanup would wait for a lost rank."""
    if torch.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
