"""Joining the other ranks for one attempt to run, and leaving them, whole or broken.

An attempt is one try of all ranks together. When a rank is lost, the attempt is over for all of them: each one leaves
it without waiting for anyone and joins the next, in the same process or in a new one. Ranks of different attempts never
meet. A driver that numbers its attempts gives each an `own_store`. `torchrun` keeps one store for all of its restarts,
and its counts of them may differ between machines; there, ranks belong together if they are connected to the same rank
0 (`connection.py`), and everything else they exchange lies under the token that it gave them.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from rollgraph.config.keys import RanksConfig
from rollgraph.distributed.connection import first_line, rank_0_silent
from rollgraph.distributed.exit_codes import ExitCode
from rollgraph.distributed.liveness import Liveness
from rollgraph.distributed.lost_ranks import RankLost
from rollgraph.distributed.refusal import raise_if_refused, refuse_retries
from rollgraph.distributed.world import World, check_own_gpu, own_device

_ALL_JOINED = "all ranks have joined"  # what rank 0 announces
_PAUSE = 0.01  # seconds

# Groups that were left broken. They are kept until the process ends, because freeing one waits for what it has begun.
_broken: list[Any] = []


@dataclass(frozen=True)
class Attempt:
    """One try of all ranks to run together, as one of them sees it."""

    number: int  # counts from 0; the one of rank 0 counts
    rank: int
    size: int
    local_rank: int = 0
    node: str = field(default_factory=socket.gethostname)  # the machine, in words that help a person to find it
    store: Any = None  # of torch.distributed; not needed by a single rank
    device: str | None = None  # None: the GPU of its local rank, if there are GPUs

    @classmethod
    def current(cls, timeout: float, environ: Mapping[str, str] = os.environ) -> Attempt:
        """The attempt of `torchrun`, or of whoever else sets the same variables; without them, the only rank."""
        world = World.current(environ)
        number = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        store = None if world.size == 1 else _find_store(world, timeout)
        return cls(number, world.rank, world.size, world.local_rank, store=store)


def own_store(store: Any, number: int) -> Any:
    """What a driver passes as `Attempt.store`: ranks of an older attempt neither read nor write what is in it."""
    return dist.PrefixStore(f"attempt/{number}", store)


def join(attempt: Attempt, limits: RanksConfig) -> World:
    """Join the other ranks of an attempt in a process group: gloo between CPUs, NCCL between GPUs.

    With `backend: gloo`, that connects GPUs as well, through host memory, and ranks may share one. No rank waits for
    another one longer than the `limits` say, here or later. Call `leave` in any case.
    """
    device = attempt.device or own_device(attempt.local_rank)
    on_gpu = device.startswith("cuda")
    world = World(attempt.rank, attempt.size, device, local_rank=attempt.local_rank, attempt=attempt.number)
    if attempt.size == 1:
        return world
    if limits.backend == "gloo":
        world = replace(world, staged=on_gpu)
    elif attempt.device is None:
        check_own_gpu(attempt.local_rank)
    if on_gpu:
        torch.cuda.set_device(device)
    liveness = Liveness(
        attempt.rank,
        attempt.size,
        attempt.store,
        limits.timeout,
        heartbeat_timeout=limits.heartbeat_timeout,
        node=attempt.node,
        attempt=attempt.number,
        on_loss=_abort_nccl if _uses_nccl(world) else _leave_running,
        end=_exit_lost,
    )
    world = replace(world, liveness=liveness, attempt=liveness.attempt)
    try:
        _wait_for_all(liveness)
        _init_process_group(world, dist.PrefixStore(f"rollgraph/{liveness.token}", attempt.store), liveness)
    except BaseException as error:
        leave(world, error)
        raise
    return world


def leave(world: World, error: BaseException | None = None) -> None:
    """Leave the other ranks. The same process may join them again, for the next attempt.

    After an error the others are told of it, and nobody is waited for: what this rank has begun with them is given up.
    Without one, all ranks leave together, and a rank that is lost meanwhile is raised.
    """
    if world.liveness is None:
        return
    if error is None:
        try:
            world.liveness.leave()
        except BaseException as lost:
            leave(world, lost)
            raise
        dist.destroy_process_group()
        return
    world.liveness.leave(error)
    if dist.is_initialized():
        _broken.extend(distributed_c10d._world.pg_map)
        distributed_c10d._abort_process_group()


@contextmanager
def joined(limits: RanksConfig) -> Iterator[World]:
    """The ranks that `torchrun` started, joined for this context. `torchrun` does not tell errors apart and starts all
    ranks again after any of them; if what a person gave was wrong, they say so again instead of running.
    """
    attempt = Attempt.current(limits.timeout)
    raise_if_refused(attempt.store)
    try:
        world = join(attempt, limits)
    except BaseException as error:
        refuse_retries(attempt.store, error)
        raise
    try:
        yield world
    except BaseException as error:
        refuse_retries(attempt.store, error)
        leave(world, error)
        raise
    leave(world)


def _find_store(world: World, timeout: float) -> Any:
    """The key-value store where the ranks find each other. It lives in rank 0 or in `torchrun`."""
    limit = timedelta(seconds=timeout)
    try:
        store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=limit))
    except RuntimeError as error:
        raise rank_0_silent(world.rank, timeout, first_line(error)) from error
    return store


def _wait_for_all(liveness: Liveness) -> None:
    """A process group is made while nothing can be interrupted. So be sure that all ranks are there to make it."""
    while liveness.announced(_ALL_JOINED) is None:
        liveness.check()
        if liveness.rank == 0 and liveness.all_joined:
            liveness.announce(_ALL_JOINED, "")
        else:
            time.sleep(_PAUSE)


def _init_process_group(world: World, store: Any, liveness: Liveness) -> None:
    backend = "nccl" if _uses_nccl(world) else "gloo"
    limit = timedelta(seconds=liveness.timeout)
    liveness.report_progress("connecting to the other ranks")
    try:
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=limit)
    except RuntimeError as error:
        reason = liveness.wait_for_loss() or "all ranks are alive"
        message = f"rank {world.rank}: the ranks could not connect: {reason} ({first_line(error)})"
        raise RankLost(message, liveness.loss) from error


def _uses_nccl(world: World) -> bool:
    return world.device.startswith("cuda") and not world.staged


def _leave_running() -> None:
    """A wait for gloo looks by itself whether a rank is lost."""


def _abort_nccl() -> None:
    """End the collectives that wait for a lost rank on the GPU: nothing else ends them before the timeout."""
    with suppress(RuntimeError):  # there is no group yet, or it is gone
        for group in list(distributed_c10d._world.pg_map):
            group.abort()


def _exit_lost(reason: str) -> None:
    """Called by the liveness thread if the training thread is stuck, or has not reached a collective since the loss."""
    os.write(2, f"rollgraph: {reason}\n".encode())
    os._exit(ExitCode.RANK_LOST)


def end_process(code: int) -> int:
    """Return the exit code, or exit at once if a broken group is left: Python would wait for what it has begun."""
    if _broken or dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
