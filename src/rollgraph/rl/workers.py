"""Calls in other processes, which may raise, hang or die there without harm to this one.

Owns a pool of worker processes: started once, used again and again, killed with everything they started when a call
takes too long, and gone when the pool is closed or its process has ended, however it ended. Nothing here knows what is
called. One worker from the outside is worker_handle.py; its inside is worker_keeper.py and worker_process.py.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from rollgraph.rl.worker_handle import NOT_YET, WorkerHandle, wait_for_any
from rollgraph.rl.worker_messages import Failure

__all__ = ["Failure", "MakePool", "Pool", "WorkerHandle", "WorkerPool"]


class Pool(Protocol):
    """Processes that make calls for us, here or elsewhere."""

    def run(self, calls: Sequence[tuple[Any, ...]], timeouts: Sequence[float] | None = None) -> list[Any]: ...
    def close(self) -> None: ...


class MakePool(Protocol):
    """How a pool is made: `WorkerPool`, or something with the same arguments."""

    def __call__(self, count: int, factory: str, arguments: tuple[Any, ...], *, timeout: float) -> Pool: ...


class WorkerPool:
    """Processes that each make a function by `factory(*arguments)`, a dotted path, and then call it for us.

    A result is what JSON can hold. A Failure, or a list with Failures in it, is returned as such.
    """

    def __init__(self, count: int, factory: str, arguments: tuple[Any, ...], *, timeout: float) -> None:
        self._timeout = timeout
        setup = pickle.dumps((factory, arguments))
        self._workers = [WorkerHandle(setup) for _ in range(count)]
        self._closed = False
        try:
            for worker in self._workers:  # start all of them before waiting for any
                worker.start()
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def run(self, calls: Sequence[tuple[Any, ...]], timeouts: Sequence[float] | None = None) -> list[Any]:
        """The result of each call, in order; a Failure if it raised, took too long, or died.

        `timeouts` has the seconds that each call may take, if these are not the pool's.
        """
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        results: list[Any] = [None] * len(calls)
        waiting = deque(range(len(calls)))
        busy: dict[WorkerHandle, int] = {}
        repeated: set[int] = set()

        def finish(worker: WorkerHandle, index: int, result: Any) -> None:
            if _died_of_something_else(worker, result) and index not in repeated:
                repeated.add(index)
                waiting.appendleft(index)
            else:
                results[index] = result

        try:
            while waiting or busy:
                for worker in self._workers:
                    if waiting and worker not in busy:
                        index = waiting.popleft()
                        failure = worker.give(calls[index], timeouts[index] if timeouts else self._timeout)
                        if failure is None:
                            busy[worker] = index
                        else:
                            finish(worker, index, failure)
                wait_for_any(busy)
                for worker in list(busy):
                    result = worker.take()
                    if result is not NOT_YET:
                        finish(worker, busy.pop(worker), result)
        finally:  # after Ctrl-C, a late answer must not be taken for that of the next call
            for worker in busy:
                worker.stop()
        return results

    def close(self) -> None:
        self._closed = True
        for worker in self._workers:
            worker.ask_to_end()  # ask all of them before waiting for any
        for worker in self._workers:
            worker.stop()


def _died_of_something_else(worker: WorkerHandle, result: Any) -> bool:
    """Whether a worker died before it had begun its call, or of a signal that asks to stop.

    The call is not to blame then, and is made once more.
    """
    died = isinstance(result, Failure) and result.kind == "died"
    return died and (not worker.begun or worker.stopped)
