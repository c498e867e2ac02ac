"""Joining the other ranks for one attempt of a run, and leaving them after success or failure.

In an attempt all ranks try to run together. When a rank is lost, the attempt is over for all of them: each rank leaves
without waiting for the others and joins the next attempt, in the same process or in a new one. Ranks of different
attempts never communicate. A driver that numbers its attempts gives each attempt an `own_store`. `torchrun` keeps one
store across restarts, and its restart counts may differ between machines. There, ranks belong together if they are
connected to the same rank 0 (`connection.py`), and all their other keys in the store are prefixed with its token.
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
from rollgraph.errors import UserError
from rollgraph.log.streams import write_to_stderr
from rollgraph.parallel.ranks.connection import first_line, rank_0_unreachable
from rollgraph.parallel.ranks.failures import ExitCode, RankLost, is_user_error
from rollgraph.parallel.ranks.liveness import Liveness
from rollgraph.parallel.ranks.world import World, check_exclusive_gpu, local_device

# -- useless retries -------------------------------------------------------------------------------
# `torchrun --max-restarts` restarts all ranks after any error. After a user error, the next attempt would load, capture
# and fail like the one before. The store outlives the ranks, so the rank that fails leaves the reason there.

_REFUSED_KEY = "rollgraph/refused"


class RefusedBefore(UserError):
    """An earlier attempt of the same run failed with a user error."""


def refuse_retries(store: Any, error: BaseException) -> None:
    """Leave a note in the store if trying again would not help."""
    if _outlives_ranks(store) and is_user_error(error) and not isinstance(error, RefusedBefore):
        with suppress(RuntimeError):  # the store is gone, so nobody will restart the ranks either
            store.set(_REFUSED_KEY, str(error))


def raise_if_refused(store: Any) -> None:
    """Raise if an earlier attempt left a note."""
    if not _outlives_ranks(store):
        return
    with suppress(RuntimeError):  # the store is gone: joining will report it
        if store.check([_REFUSED_KEY]):
            raise RefusedBefore(f"an earlier attempt failed, and so would this one: {store.get(_REFUSED_KEY).decode()}")


def _outlives_ranks(store: Any) -> bool:
    return store is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


# -- attempts --------------------------------------------------------------------------------------

_ALL_JOINED = "all ranks have joined"  # what rank 0 announces
_POLL_SECONDS = 0.01

# Process groups of failed attempts. We keep them until the process ends: freeing one waits for its collectives.
_broken_groups: list[Any] = []


@dataclass(frozen=True)
class Attempt:
    """One attempt of all ranks to run together, as one rank sees it."""

    number: int  # from 0; if ranks disagree, that of rank 0 is valid
    rank: int
    size: int
    local_rank: int = 0
    node: str = field(default_factory=socket.gethostname)  # a name of the machine that helps people find it
    store: Any = None  # of torch.distributed; a single rank needs none
    device: str | None = None  # None: the GPU of the local rank, if there are GPUs

    @classmethod
    def current(cls, timeout: float, environ: Mapping[str, str] = os.environ) -> Attempt:
        """The attempt that the variables of `torchrun` describe; without them, a single rank."""
        world = World.current(environ)
        number = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        store = None if world.size == 1 else _find_store(world, timeout)
        return cls(number, world.rank, world.size, world.local_rank, store=store)


def own_store(store: Any, number: int) -> Any:
    """The store to pass as `Attempt.store`: ranks of other attempts neither read nor write its keys."""
    return dist.PrefixStore(f"attempt/{number}", store)


def join(attempt: Attempt, limits: RanksConfig) -> World:
    """Join the other ranks of an attempt in a process group: gloo between CPUs, NCCL between GPUs.

    With `backend: gloo`, gloo connects GPUs, too, through host memory, and ranks may share a GPU. `limits` has the
    time-outs of all waits for other ranks, here and later. Always call `leave` in the end.
    """
    device = attempt.device or local_device(attempt.local_rank)
    on_gpu = device.startswith("cuda")
    world = World(attempt.rank, attempt.size, device, local_rank=attempt.local_rank, attempt=attempt.number)
    if attempt.size == 1:
        return world
    if limits.backend == "gloo":
        world = replace(world, staged=on_gpu)
    elif attempt.device is None:
        check_exclusive_gpu(attempt.local_rank)
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
        on_loss=_abort_nccl if _uses_nccl(world) else _keep_collectives,
        exit_process=_exit_lost,
    )
    world = replace(world, liveness=liveness, attempt=liveness.attempt)
    try:
        _wait_until_all_joined(liveness)
        _init_process_group(world, dist.PrefixStore(f"rollgraph/{liveness.token}", attempt.store), liveness)
    except BaseException as error:
        leave(world, error)
        raise
    return world


def leave(world: World, error: BaseException | None = None) -> None:
    """Leave the other ranks. The same process may join them again, for the next attempt.

    After an error we tell the other ranks, abort our collectives and wait for nobody. Without an error, all ranks leave
    together; if a rank is lost meanwhile, this raises.
    """
    if world.liveness is None:
        return
    if error is None:
        try:
            world.liveness.leave()
        except BaseException as failure:
            leave(world, failure)
            raise
        dist.destroy_process_group()
        return
    world.liveness.leave(error)
    if dist.is_initialized():
        _broken_groups.extend(distributed_c10d._world.pg_map)
        distributed_c10d._abort_process_group()


@contextmanager
def joined(limits: RanksConfig) -> Iterator[World]:
    """A context in which the ranks that `torchrun` started are joined.

    `torchrun` restarts all ranks after any error. After a user error, the restarted ranks raise the same error at once.
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
    """The key-value store where the ranks find each other. Rank 0 or `torchrun` hosts it."""
    timeout_delta = timedelta(seconds=timeout)
    try:
        store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout_delta))
    except RuntimeError as error:
        raise rank_0_unreachable(world.rank, timeout, first_line(error)) from error
    return store


def _wait_until_all_joined(liveness: Liveness) -> None:
    """Creating a process group cannot be interrupted. So first make sure that all ranks have joined."""
    while liveness.announced(_ALL_JOINED) is None:
        liveness.check()
        if liveness.rank == 0 and liveness.all_joined:
            liveness.announce(_ALL_JOINED, "")
        else:
            time.sleep(_POLL_SECONDS)


def _init_process_group(world: World, store: Any, liveness: Liveness) -> None:
    backend = "nccl" if _uses_nccl(world) else "gloo"
    timeout_delta = timedelta(seconds=liveness.timeout)
    liveness.report_progress("connecting to the other ranks")
    try:
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout_delta)
    except RuntimeError as error:
        reason = liveness.wait_for_loss() or "all ranks are alive"
        message = f"rank {world.rank}: the ranks could not connect: {reason} ({first_line(error)})"
        raise RankLost(message, liveness.loss) from error


def _uses_nccl(world: World) -> bool:
    return world.device.startswith("cuda") and not world.staged


def _keep_collectives() -> None:
    """With gloo, `Collectives` polls for lost ranks while it waits."""


def _abort_nccl() -> None:
    """Abort the collectives that wait on the GPU for a lost rank: nothing else ends them before their timeout."""
    with suppress(RuntimeError):  # there is no process group yet, or it is gone
        for group in list(distributed_c10d._world.pg_map):
            group.abort()


def _exit_lost(reason: str) -> None:
    """Called by the liveness thread if the training thread hangs, or has not reached a collective since the loss."""
    write_to_stderr(f"rollgraph: {reason}\n")
    os._exit(ExitCode.RANK_LOST)


def end_process(code: int) -> int:
    """Return the exit code; exit at once if a process group is left, because Python would wait for its collectives."""
    if _broken_groups or dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
