"""Threads that send and receive beside the computation, and waiting for them no longer than for a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread

from rollgraph.distributed.liveness import Liveness
from rollgraph.sharding.collectives import CommunicationError

CHECK_SECONDS = 0.05  # between two looks at the other ranks

Task = Future[None]


def start(work: Callable[[], None]) -> Task:
    """Run something in a thread that does not keep the process from ending."""
    task: Task = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            task.set_exception(error)
        else:
            task.set_result(None)

    Thread(target=run, name="background task", daemon=True).start()
    return task


def wait(tasks: Sequence[Task], liveness: Liveness, what: str, patience: float | None = None) -> bool:
    """Whether all tasks ended well within so many seconds. Without a number, raise after the timeout of the ranks.

    All ranks wait for tasks of the same kind, which `what` names.
    """
    liveness.report_progress(what)
    deadline = liveness.clock() + (liveness.timeout if patience is None else patience)
    for task in tasks:
        while not task.done():
            liveness.check()
            if liveness.clock() > deadline:
                if patience is not None:
                    return False
                raise CommunicationError(liveness.report_timeout(what), liveness.loss)
            with suppress(TimeoutError):
                task.exception(CHECK_SECONDS)
        _raise_failure(task.exception(), liveness, what)
    return True


def _raise_failure(error: BaseException | None, liveness: Liveness, what: str) -> None:
    if isinstance(error, OSError):  # a connection broke
        reason = liveness.wait_for_loss() or "all ranks are alive"
        raise CommunicationError(f"rank {liveness.rank}: {what} failed: {reason} ({error})", liveness.loss) from error
    if error is not None:
        raise error
