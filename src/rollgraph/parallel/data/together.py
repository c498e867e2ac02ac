"""Ranks that wait for each other: for background tasks, for work on some ranks, and for the end of a step."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any

import torch

from rollgraph.errors import MachineError, UserError
from rollgraph.parallel.data.collectives import Collectives, CommunicationError, WaitEnded
from rollgraph.parallel.ranks.failures import is_user_error
from rollgraph.parallel.ranks.liveness import Liveness
from rollgraph.parallel.ranks.world import World

# -- background tasks ------------------------------------------------------------------------------
# Threads that send and receive during the computation. Waiting for them has the same time-out as waiting for a rank.

CHECK_SECONDS = 0.05  # between two checks for a lost rank

Task = Future[None]


def start_task(work: Callable[[], None]) -> Task:
    """Run `work` in a daemon thread."""
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


def wait_for_tasks(tasks: Sequence[Task], liveness: Liveness, what: str, seconds: float | None = None) -> bool:
    """Wait for tasks. Returns whether all of them succeeded within `seconds`; None: raise after the ranks' time-out.

    All ranks wait for tasks of the same kind, which `what` names.
    """
    liveness.report_progress(what)
    deadline = liveness.clock() + (liveness.timeout if seconds is None else seconds)
    for task in tasks:
        while not task.done():
            liveness.check()
            if liveness.clock() > deadline:
                if seconds is not None:
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


# -- work on some ranks ----------------------------------------------------------------------------
# The work may take longer than `ranks.timeout`, after which a single collective would fail. So all ranks ask each other
# at short intervals whether the work is done. A rank that dies meanwhile is named as in any other collective.

_MAX_PAUSE = 1.0  # seconds between two rounds


class FailedElsewhere(MachineError, RuntimeError):
    """The work failed on another rank; `rank` says on which."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} failed: {reason}")
        self.rank = rank


class RefusedElsewhere(UserError, FailedElsewhere):
    """The work failed on another rank with a user error."""


def run_on_some_ranks(world: World, runs_here: bool, work: Callable[[], str]) -> list[str]:
    """Run `work` on the ranks with `runs_here`. Returns its result on each rank, "" for the others.

    If it fails on one rank, all ranks raise.
    """
    if world.size == 1 or not torch.distributed.is_initialized():  # a missing process group is reported later
        return [work()] * world.size
    collectives = Collectives(world)
    task = _Task(work if runs_here else str)
    while True:
        done = task.wait(min(_MAX_PAUSE, collectives.timeout / 10))
        failed = "" if task.error is None else str(task.error) or type(task.error).__name__
        refused = task.error is not None and is_user_error(task.error)
        states = map(json.loads, collectives.all_gather_text(json.dumps([done, task.result, failed, refused])))
        all_done, results, failures, refusals = zip(*states, strict=True)
        if task.error is not None:
            raise task.error
        for rank, reason in enumerate(failures):
            if reason:
                raise (RefusedElsewhere if refusals[rank] else FailedElsewhere)(rank, reason)
        if all(all_done):
            return list(results)


class _Task:
    """A function that runs in a daemon thread."""

    def __init__(self, work: Callable[[], str]) -> None:
        self.result = ""
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="shared work", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether it is done within `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self, work: Callable[[], str]) -> None:
        try:
            self.result = work()
        except BaseException as error:  # raised by run_on_some_ranks
            self.error = error


# -- finishing or aborting a step ------------------------------------------------------------------
# A rank announces through the store, without a collective, that it starts to reduce the gradients of a step, that it
# has reduced all of them, or that it aborts the step. A rank that aborted joins the reductions only once the others
# have started theirs, and starts nothing of the next step before all ranks have aborted this one. So collectives of
# different steps are never matched with each other.
#
# No rank finishes a step before all ranks have reduced their gradients. Completed reductions on one rank do not imply
# that: another rank may fail after it has started all of them.
#
# Owns the announcements; `reductions.py` acts on them.

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.01  # seconds between two polls of the store; grows during a wait

# Keys in the store
_REACHED = "reached"  # this rank started its reductions or aborted the step
_ABORTED = "aborted"  # this rank aborted the step
_CAUSE = "cause"  # the rank that failed, and why
_ENDED = "ended"  # this rank has reduced its gradients or aborted the step
_STARTED = "started"  # the collectives that this rank has started in the step, if their order depends on its program

_END = "the end of the step"  # the name of this operation in errors


class StepAborted(WaitEnded):
    """Another rank aborted this optimizer step, so all ranks drop its gradients."""


class StepAborts:
    """Aborts of the optimizer steps of one model. `name` identifies the model in the store, on all ranks."""

    def __init__(self, world: World, collectives: Collectives, name: str) -> None:
        self._rank = world.rank
        self._size = world.size
        self._name = name
        self._store: Any = collectives.store
        self._timeout = collectives.timeout
        assert collectives.liveness is not None, "several ranks watch each other"
        self._liveness = collectives.liveness
        self._step = 0
        self.aborted = False  # this rank aborted the step, and others have yet to
        self._announced_reduction = False
        self._ended = False  # this rank has reduced its gradients, or all ranks have aborted
        self._aborted_previous = False  # the previous step was aborted

    def announce_reduction(self) -> None:
        """Call this before the first reduction of a step. From there to the last reduction, all ranks do the same."""
        if not self._announced_reduction:
            self._announced_reduction = True
            with suppress(RuntimeError):  # the store died with rank 0: the reduction will report it
                self._store.set(self._key(_REACHED, self._rank), "reducing")

    def agree_to_finish(self) -> None:
        """This rank has reduced its gradients: wait until all ranks have. Raises if one of them aborts instead."""
        self._end()
        with suppress(RuntimeError):  # the store died with rank 0: the wait will report it
            self._store.set(self._key(_ENDED, self._rank), "reduced")
        self._wait(_ENDED, f"rank {self._rank} has reduced its gradients", lambda: self._liveness.report_timeout(_END))
        self.raise_if_aborted()
        self._delete_previous_step()

    def _delete_previous_step(self) -> None:
        """Delete the announcements of the previous step, which all ranks have left: the store must not grow."""
        if not self._step:
            return
        events = [_REACHED, _ENDED]
        if self._aborted_previous:
            events += [_ABORTED, _STARTED]
        keys = [self._key(event, self._rank, self._step - 1) for event in events]
        if self._aborted_previous and self._rank == 0:
            keys.append(self._key(_CAUSE, step=self._step - 1))
        with suppress(RuntimeError):  # the store died with rank 0: the next collective will report it
            for key in keys:
                self._store.delete_key(key)

    def _end(self) -> None:
        """Report the end of the step as progress, once, however the step ends on this rank."""
        if not self._ended:
            self._ended = True
            self._liveness.report_progress(_END)

    def abort(self, started: str = "") -> None:
        """Announce that this rank aborts the step, the collectives it has `started` and the exception being handled.

        If this rank has already agreed to finish the step, it does not announce the cause: others may have finished.
        """
        if self.aborted:
            return
        self.aborted = True
        error = sys.exception()
        if self._liveness.loss is not None:
            return  # no rank will follow, and the store may be gone with the lost rank
        with suppress(RuntimeError):  # the store is gone: the next collective reports it, and `error` matters more
            self._store.set(self._key(_STARTED, self._rank), started)
            if not self._ended:
                # The cause names the rank that failed first.
                self._store.compare_set(self._key(_CAUSE), "", f"rank {self._rank} aborted the step{_describe(error)}")
            for event in (_REACHED, _ABORTED, _ENDED):  # after the cause, which other ranks read when they see these
                self._store.set(self._key(event, self._rank), "aborted")
            self._store.check([self._key(_ENDED, self._rank)])  # returns only after all of the above are stored

    def raise_if_aborted(self) -> None:
        """Raise if another rank aborted this step."""
        key = self._key(_CAUSE)
        cause = ""
        with suppress(RuntimeError):  # the store died with rank 0: the next collective will report it
            if self._store.check([key]):
                cause = self._store.get(key).decode()
        if cause:
            raise StepAborted(f"{cause}: all ranks drop its gradients")

    def wait_until_all_reached(self) -> None:
        """Wait until every rank has started its reductions or aborted this step."""
        self._wait_after_abort(_REACHED, "neither started its reductions nor called gradients.drop()")

    def wait_until_all_aborted(self) -> None:
        self._wait_after_abort(_ABORTED, "did not")
        self._delete_previous_step()

    def read_started(self) -> list[str]:
        """The collectives that each rank had started when it aborted this step. All ranks must have aborted."""
        return [self._store.get(self._key(_STARTED, rank)).decode() for rank in range(self._size)]

    def next_step(self) -> None:
        self._end()
        self._step += 1
        self._aborted_previous = self.aborted
        self.aborted = False
        self._announced_reduction = False
        self._ended = False

    def _wait_after_abort(self, event: str, failure: str) -> None:
        limit = f"within {self._timeout:g} s: all ranks must abort the same step"
        status = f"rank {self._rank} aborted a step by gradients.drop()"
        self._wait(event, status, lambda: f"{self._name_missing(event)} {failure} {limit}")

    def _wait(self, event: str, status: str, explain_timeout: Callable[[], str]) -> None:
        """Wait until every rank has announced an event. `status` describes this rank, for errors.

        A thread polls the store: if the process that hosts it is stopped, a poll does not return.
        """
        keys = [self._key(event, rank) for rank in range(self._size)]
        cancelled = threading.Event()
        poll = start_task(lambda: self._poll_for(keys, cancelled))
        start = self._liveness.clock()
        try:
            while not poll.done():
                loss = self._liveness.loss
                if loss is not None:
                    raise CommunicationError(f"{status}, and {loss.text}", loss)
                if self._liveness.clock() - start > self._timeout:
                    reason = explain_timeout()
                    raise CommunicationError(f"{status}, and {reason}", self._liveness.loss)
                with suppress(TimeoutError):
                    poll.exception(CHECK_SECONDS)
        finally:
            cancelled.set()
        error = poll.exception()
        if isinstance(error, RuntimeError):
            reason = self._liveness.wait_for_loss() or "the store of the ranks does not respond"
            raise CommunicationError(f"{status}, and {reason}", self._liveness.loss) from error
        if error is not None:
            raise error

    def _poll_for(self, keys: list[str], cancelled: threading.Event) -> None:
        """Return when the store has all keys. We poll, because PyTorch warns of a `wait` that times out."""
        pause = _SHORTEST_PAUSE
        while not cancelled.is_set() and not self._store.check(keys):
            cancelled.wait(pause)
            pause = min(1.1 * pause, _LONGEST_PAUSE)

    def _name_missing(self, event: str) -> str:
        try:
            missing = [rank for rank in range(self._size) if not self._store.check([self._key(event, rank)])]
            return ", ".join(f"rank {rank}" for rank in missing)
        except RuntimeError:
            return "some rank (the store does not respond; is rank 0 gone?)"

    def _key(self, event: str, rank: int | None = None, step: int | None = None) -> str:
        """The key of an event in this step, or in another `step`."""
        return f"rollgraph/{self._name}/{self._step if step is None else step}/{event}/{rank}"


def _describe(error: BaseException | None) -> str:
    if error is None:
        return ""
    return f" ({type(error).__name__}: {error})".replace("\n", " ")
