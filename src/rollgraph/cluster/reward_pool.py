"""Worker processes for rewards on other machines: each in an actor of Ray that takes one CPU core, where one is free.

An actor hosts a pool of one process (`rl/workers.py`), so a call that hangs, raises or crashes is handled there, beside
it, as it would be here. What this adds is a host or a node that is lost: the call is made once more, on another.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollgraph.cluster.ray_package import import_ray
from rollgraph.errors import InvalidInput
from rollgraph.rl.workers import Failure, WorkerPool
from rollgraph.run.stop import sigterm_restored

_ROOM_SECONDS = 120.0  # to wait for free CPU cores before the run is refused
_MARGIN_SECONDS = 150.0  # more than a host takes to start its process and to end it; then the host itself is lost


class PoolHost:
    """In an actor: a process that makes calls, and whatever it takes to be rid of it."""

    def __init__(self, factory: str, arguments: tuple[Any, ...], timeout: float, folder: str) -> None:
        if os.path.isdir(folder):  # so that relative paths of functions mean what they mean to the rank
            os.chdir(folder)
        self._pool = WorkerPool(1, factory, arguments, timeout=timeout)

    def ready(self) -> None:
        """Answers once the process runs."""

    def run(self, call: tuple[Any, ...], timeout: float) -> Any:
        return self._pool.run([call], [timeout])[0]


@dataclass(frozen=True)
class _Call:
    """A call that a host is making."""

    index: int
    host: int
    deadline: float


class ClusterPool:
    """A `WorkerPool` whose processes are on a cluster. This process must be connected to it, or `address` is used."""

    def __init__(
        self, count: int, factory: str, arguments: tuple[Any, ...], *, timeout: float, address: str | None = None
    ) -> None:
        self._ray = ray = import_ray("reward.place: cluster")
        if not ray.is_initialized():
            with sigterm_restored():  # Ray would end a run unsaved
                ray.init(address=address or "auto", configure_logging=False)
        self._timeout = timeout
        self._settings = (factory, arguments, timeout, os.getcwd())
        self._actor = ray.remote(PoolHost)
        self._closed = False
        self._hosts = [self._start() for _ in range(count)]
        try:
            self._wait_for_room()
        except BaseException:
            self.close()
            raise

    def _start(self) -> Any:
        return self._actor.options(num_cpus=1, num_gpus=0, max_restarts=0).remote(*self._settings)

    def _wait_for_room(self) -> None:
        started = [host.ready.remote() for host in self._hosts]
        ready, missing = self._ray.wait(started, num_returns=len(started), timeout=_ROOM_SECONDS)
        if missing:
            free = self._ray.available_resources().get("CPU", 0)
            detail = (
                f"each of {len(self._hosts)} workers needs a CPU core of the cluster, but {len(missing)} had none "
                f"after {_ROOM_SECONDS:g} s ({free:g} are free)"
            )
            raise InvalidInput(detail, argument="workers", alternative=("place", "local"))
        self._ray.get(ready)  # raises what a host could not start with

    def run(self, calls: Sequence[tuple[Any, ...]], timeouts: Sequence[float] | None = None) -> list[Any]:
        """The result of each call, in order; a Failure if it raised, took too long, or died."""
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        limits = timeouts or [self._timeout] * len(calls)
        results: list[Any] = [None] * len(calls)
        waiting = deque(range(len(calls)))
        busy: dict[Any, _Call] = {}
        repeated: set[int] = set()
        idle = list(range(len(self._hosts)))
        while waiting or busy:
            while waiting and idle:
                index, host = waiting.popleft(), idle.pop()
                ref = self._hosts[host].run.remote(calls[index], limits[index])
                busy[ref] = _Call(index, host, time.monotonic() + limits[index] + _MARGIN_SECONDS)
            for ref in self._find_ended(busy):
                call = busy.pop(ref)
                idle.append(call.host)
                try:
                    results[call.index] = self._read(ref)
                except (self._ray.exceptions.RayError, TimeoutError) as error:
                    self._replace(call.host)
                    if call.index in repeated:
                        reason = f"its worker on the cluster was lost twice ({type(error).__name__})"
                        results[call.index] = Failure("died", reason)
                    else:
                        repeated.add(call.index)
                        waiting.appendleft(call.index)
        return results

    def _find_ended(self, busy: dict[Any, _Call]) -> list[Any]:
        """Calls that were answered, and those whose host answers no more."""
        seconds = max(0.0, min(call.deadline for call in busy.values()) - time.monotonic())
        answered, open_calls = self._ray.wait(list(busy), num_returns=1, timeout=seconds)
        now = time.monotonic()
        return [*answered, *(ref for ref in open_calls if busy[ref].deadline < now)]

    def _read(self, ref: Any) -> Any:
        """What a call gave; raises if its host is lost."""
        try:
            return self._ray.get(ref, timeout=0)
        except self._ray.exceptions.RayTaskError as error:  # the host is well: the call could not be sent, say
            return Failure("raised", str(error.cause))

    def _replace(self, host: int) -> None:
        self._ray.kill(self._hosts[host])
        self._hosts[host] = self._start()

    def close(self) -> None:
        self._closed = True
        for host in self._hosts:
            self._ray.kill(host)
