"""Reward workers on a Ray cluster, and this process's connection to the cluster."""

from __future__ import annotations

import builtins
import importlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollgraph.errors import InvalidInput
from rollgraph.parallel.ranks.stop import restore_termination_handlers
from rollgraph.rl.rewards.pool import WorkerPool
from rollgraph.rl.rewards.process import Failure

# -- Ray, which is optional ------------------------------------------------------------------------

INSTALL_RAY = "pip install 'rollgraph[ray]'"


def import_ray(key: str) -> Any:
    """The package `ray`; the error if it is missing names the configuration key that needs it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(f"{key} needs Ray, which cannot be imported ({error}): {INSTALL_RAY}", name="ray") from error


@contextmanager
def ray_connection(address: str | None, key: str, working_dir: str | None = None) -> Iterator[Any]:
    """Connect to a Ray cluster; a process that is connected already stays connected to the same cluster.

    Ray replaces `print`; this restores Python's.
    """
    ray = import_ray(key)
    if ray.is_initialized():
        yield ray
        return
    python_print = builtins.print
    try:
        runtime_env = {"working_dir": working_dir} if working_dir is not None else None
        with restore_termination_handlers():  # Ray would end a run unsaved
            ray.init(address=address, runtime_env=runtime_env, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        problem = "no Ray cluster could be started" if address is None else f"no Ray cluster answers at {address}"
        raise ConnectionError(f"cluster.address: {problem} ({error})") from error
    try:
        yield ray
    finally:
        ray.shutdown()
        builtins.print = python_print


# -- workers on other machines ---------------------------------------------------------------------
# An actor hosts a pool of one process (`rl/rewards/pool.py`), so a call that hangs, raises or crashes is handled on its
# machine, as it would be on this one. This file adds lost actors and nodes: the call is repeated on another actor.

_SCHEDULING_SECONDS = 120.0  # to wait for free CPU cores before we give up
_MARGIN_SECONDS = 150.0  # longer than an actor takes to start and stop its process; after it, the actor is lost


class PoolActor:
    """The actor: a pool with one worker process."""

    def __init__(self, factory: str, arguments: tuple[Any, ...], timeout: float, folder: str) -> None:
        if os.path.isdir(folder):  # so that relative paths of functions are resolved as on the rank
            os.chdir(folder)
        self._pool = WorkerPool(1, factory, arguments, timeout=timeout)

    def ready(self) -> None:
        """Return once the process runs."""

    def run(self, call: tuple[Any, ...], timeout: float) -> Any:
        return self._pool.run([call], [timeout])[0]


@dataclass(frozen=True)
class _Call:
    """A call in flight: `actor` is an index of ClusterPool._actors."""

    index: int
    actor: int
    deadline: float


class ClusterPool:
    """A `WorkerPool` with its processes on a Ray cluster. Connects to `address` unless this process is connected."""

    def __init__(
        self, count: int, factory: str, arguments: tuple[Any, ...], *, timeout: float, address: str | None = None
    ) -> None:
        self._ray = ray = import_ray("reward.place: cluster")
        if not ray.is_initialized():
            with restore_termination_handlers():  # Ray would end a run unsaved
                ray.init(address=address or "auto", configure_logging=False)
        self._timeout = timeout
        self._settings = (factory, arguments, timeout, os.getcwd())
        self._actor_class = ray.remote(PoolActor)
        self._closed = False
        self._actors = [self._start() for _ in range(count)]
        try:
            self._wait_for_cores()
        except BaseException:
            self.close()
            raise

    def _start(self) -> Any:
        return self._actor_class.options(num_cpus=1, num_gpus=0, max_restarts=0).remote(*self._settings)

    def _wait_for_cores(self) -> None:
        started = [actor.ready.remote() for actor in self._actors]
        ready, unscheduled = self._ray.wait(started, num_returns=len(started), timeout=_SCHEDULING_SECONDS)
        if unscheduled:
            free_cores = self._ray.available_resources().get("CPU", 0)
            detail = (
                f"each of {len(self._actors)} workers needs a CPU core of the cluster, but {len(unscheduled)} had none "
                f"after {_SCHEDULING_SECONDS:g} s ({free_cores:g} are free)"
            )
            raise InvalidInput(detail, argument="workers", alternative=("place", "local"))
        self._ray.get(ready)  # raises the error of an actor that could not start

    def run(self, calls: Sequence[tuple[Any, ...]], timeouts: Sequence[float] | None = None) -> list[Any]:
        """The result of each call, in order; a Failure if it raised, timed out or crashed."""
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        limits = timeouts or [self._timeout] * len(calls)
        results: list[Any] = [None] * len(calls)
        queued = deque(range(len(calls)))
        busy: dict[Any, _Call] = {}
        retried: set[int] = set()
        idle = list(range(len(self._actors)))
        while queued or busy:
            while queued and idle:
                index, actor = queued.popleft(), idle.pop()
                ref = self._actors[actor].run.remote(calls[index], limits[index])
                busy[ref] = _Call(index, actor, time.monotonic() + limits[index] + _MARGIN_SECONDS)
            for ref in self._wait_for_any(busy):
                call = busy.pop(ref)
                idle.append(call.actor)
                try:
                    results[call.index] = self._get_result(ref)
                except (self._ray.exceptions.RayError, TimeoutError) as error:
                    self._restart_actor(call.actor)
                    if call.index in retried:
                        reason = f"its worker on the cluster was lost twice ({type(error).__name__})"
                        results[call.index] = Failure("died", reason)
                    else:
                        retried.add(call.index)
                        queued.appendleft(call.index)
        return results

    def _wait_for_any(self, busy: dict[Any, _Call]) -> list[Any]:
        """Wait for an answer or the first deadline; returns answered calls and those past their deadline."""
        seconds = max(0.0, min(call.deadline for call in busy.values()) - time.monotonic())
        answered, unanswered = self._ray.wait(list(busy), num_returns=1, timeout=seconds)
        now = time.monotonic()
        return [*answered, *(ref for ref in unanswered if busy[ref].deadline < now)]

    def _get_result(self, ref: Any) -> Any:
        """The result of a call; raises if its actor is lost."""
        try:
            return self._ray.get(ref, timeout=0)
        except self._ray.exceptions.RayTaskError as error:  # the actor lives; for example, the call could not be sent
            return Failure("raised", str(error.cause))

    def _restart_actor(self, actor: int) -> None:
        self._ray.kill(self._actors[actor])
        self._actors[actor] = self._start()

    def close(self) -> None:
        self._closed = True
        for actor in self._actors:
            self._ray.kill(actor)
