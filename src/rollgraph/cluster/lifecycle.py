"""The state machine of a cluster run: when to place workers, start an attempt, abort it, and end the run.

Pure: it receives events and the time, and returns orders. It neither sends nor waits, so tests can try every sequence
of events. `driver.py` carries the orders out.

    placing --all workers placed--> rendezvous --rank 0 has an address--> running --all have ended--> over
       ^                                                                     | a rank is lost or fails
       +------------------ all survivors have left ------------------- aborting

A lost worker is replaced at once, while the survivors are still leaving the attempt. Survivors keep their processes and
take part in the next attempt. Events from an older attempt, or from a worker that was replaced, change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from rollgraph.cluster.messages import (
    AbortAttempt,
    Event,
    KillWorker,
    OpenStore,
    Order,
    Outcome,
    PlaceWorker,
    ShowLine,
    ShowWaiting,
    StartAttempt,
    StopWorker,
    StoreOpened,
    WorkerAlive,
    WorkerDone,
    WorkerLost,
    WorkerPlaced,
)


class Phase(Enum):
    PLACING = "placing"
    RENDEZVOUS = "rendezvous"
    RUNNING = "running"
    ABORTING = "aborting"
    OVER = "over"


@dataclass(frozen=True)
class Timeouts:
    """Seconds after which a worker counts as lost.

    >>> Timeouts(heartbeat=30.0, abort=60.0)
    """

    heartbeat: float  # without an answer
    abort: float  # to open a store, or to leave an aborted attempt
    reported_lost: float = 3.0  # without an answer, once other ranks have reported the worker as lost
    reminder: float = 20.0  # not a time-out: the interval of the lines that say what the run waits for


@dataclass
class WorkerSlot:
    """A rank, and the worker that currently fills it."""

    rank: int
    worker: int
    node: str | None = None  # None: the worker is being placed
    last_heard: float = 0.0  # the time of its last answer
    in_attempt: bool = False  # it has started the current attempt and not left it
    deadline: float | None = None  # it counts as lost if it has not carried out its order by then
    is_reported_lost: bool = False  # by other ranks
    failed_starts: int = 0  # consecutive workers that were lost before they were placed

    @property
    def name(self) -> str:
        if self.node is None:
            return f"rank {self.rank}, while it was being placed,"
        return f"rank {self.rank} on {self.node}"


class Lifecycle:
    """The state machine of a run on `ranks` workers.

    Once the phase is `OVER`, `code` is the exit code of the run and `verdict` explains it. The run gives up, with
    `gave_up_code`, after more than `max_attempts` consecutive attempts without progress, that is without a finished
    step: their cause would only return.
    """

    def __init__(self, ranks: int, timeouts: Timeouts, *, max_attempts: int = 3, gave_up_code: int = 75) -> None:
        self.phase = Phase.PLACING
        self.attempt = 0
        self.code = 0
        self.verdict = ""
        self._timeouts = timeouts
        self._max_attempts = max_attempts
        self._gave_up_code = gave_up_code
        self._attempts_without_progress = 0  # in a row
        self._stopping = False
        self._outcomes: dict[int, Outcome] = {}  # of the current attempt, by rank, in order of arrival
        self._cause = ""  # why the current attempt is aborted
        self._worker_died = False  # in the current attempt
        self._workers = 0
        self._remind_at = 0.0
        self._now = 0.0
        self._orders: list[Order] = []
        self.slots = [WorkerSlot(rank, self._next_worker()) for rank in range(ranks)]

    # -- events ------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Order]:
        self._now = now
        self._remind_at = now + self._timeouts.reminder
        self._orders += [PlaceWorker(slot.worker, slot.rank) for slot in self.slots]
        return self._flush_orders()

    def handle(self, event: Event, now: float) -> list[Order]:
        self._now = now
        slot = next((slot for slot in self.slots if slot.worker == event.worker), None)
        if slot is None or self.phase is Phase.OVER:
            return []  # the worker was replaced
        slot.last_heard = now
        match event:
            case WorkerPlaced():
                slot.node = event.node
                slot.failed_starts = 0
            case WorkerLost():
                self._replace_lost(slot, event.reason)
            case StoreOpened():
                if self.phase is Phase.RENDEZVOUS and event.attempt == self.attempt and slot.rank == 0:
                    self._start_attempt(event.address)
            case WorkerAlive():
                if event.step is not None and event.attempt == self.attempt:
                    self._attempts_without_progress = 0
            case WorkerDone():
                if event.attempt == self.attempt and slot.in_attempt:
                    self._end_attempt(slot, event.outcome)
            case _:
                assert_never(event)
        self._advance()
        return self._flush_orders()

    def tick(self, now: float) -> list[Order]:
        """Check time-outs. The driver calls this all the time."""
        self._now = now
        for slot in list(self.slots):
            if self.phase is Phase.OVER:
                break
            if slot.node is None:
                continue
            silent = now - slot.last_heard
            if silent > (self._timeouts.reported_lost if slot.is_reported_lost else self._timeouts.heartbeat):
                self._kill_and_replace(slot, f"nothing was heard of it for {silent:.0f} s")
            elif slot.deadline is not None and now > slot.deadline:
                self._kill_and_replace(slot, "it does not respond")
        self._advance()
        if self.phase is Phase.PLACING and now > self._remind_at:
            self._remind_at = now + self._timeouts.reminder
            self._orders.append(ShowWaiting(tuple(slot.rank for slot in self.slots if slot.node is None)))
        return self._flush_orders()

    def stop(self, now: float) -> list[Order]:
        """Somebody asked the run to stop: save after the current step, then end."""
        self._now = now
        self._stopping = True
        if self.phase is Phase.RUNNING:
            self._orders += [StopWorker(slot.worker) for slot in self.slots if slot.in_attempt]
        self._advance()
        return self._flush_orders()

    # -- transitions -------------------------------------------------------------------------------

    def _advance(self) -> None:
        all_placed = all(slot.node is not None for slot in self.slots)
        in_attempt = any(slot.in_attempt for slot in self.slots)
        if self.phase in (Phase.PLACING, Phase.RENDEZVOUS) and self._stopping:
            self._finish(0, "stopped while nothing was running; saved checkpoints are whole")
        elif self.phase is Phase.PLACING and all_placed:
            self._start_rendezvous()
        elif self.phase is Phase.RUNNING and not in_attempt:
            stop_texts = [outcome.text for outcome in self._outcomes.values() if outcome.how == "stopped"]
            self._finish(0, stop_texts[0] if stop_texts else "")
        elif self.phase is Phase.ABORTING and not in_attempt:
            self._end_or_retry()

    def _start_rendezvous(self) -> None:
        self.phase = Phase.RENDEZVOUS
        self.attempt += 1
        rank_0 = self.slots[0]
        rank_0.deadline = self._now + self._timeouts.abort
        self._orders.append(OpenStore(rank_0.worker, self.attempt))

    def _start_attempt(self, address: str) -> None:
        self.phase = Phase.RUNNING
        self._outcomes.clear()
        self._worker_died = False
        for slot in self.slots:
            slot.in_attempt = True
            slot.is_reported_lost = False
            slot.deadline = None
            self._orders.append(StartAttempt(slot.worker, self.attempt, address))

    def _end_attempt(self, slot: WorkerSlot, outcome: Outcome) -> None:
        self._outcomes[slot.rank] = outcome
        slot.in_attempt = False
        slot.is_reported_lost = False
        slot.deadline = None
        if outcome.how == "failed":
            self._abort_attempt(f"{slot.name} failed: {outcome.text}", slot.rank)
        elif outcome.how == "lost":
            self._abort_attempt(outcome.text, outcome.lost_rank)
            self._mark_reported_lost(outcome.lost_rank)

    def _abort_attempt(self, cause: str, lost_rank: int | None) -> None:
        """Order all ranks to leave the attempt. The first cause counts: later ones may be its consequences."""
        if self.phase is not Phase.RUNNING:
            return
        self.phase = Phase.ABORTING
        self._cause = cause
        for slot in self.slots:
            if slot.in_attempt:
                slot.deadline = self._now + self._timeouts.abort
                self._orders.append(AbortAttempt(slot.worker, self.attempt, cause, lost_rank))

    def _mark_reported_lost(self, rank: int | None) -> None:
        """Other ranks have lost this one. It gets a short time-out, to report what happened or count as lost."""
        if rank is not None:
            self.slots[rank].is_reported_lost = self.slots[rank].in_attempt

    def _kill_and_replace(self, slot: WorkerSlot, reason: str) -> None:
        self._orders.append(KillWorker(slot.worker))
        self._replace_lost(slot, reason)

    def _replace_lost(self, slot: WorkerSlot, reason: str) -> None:
        """Place another worker for the rank. If an attempt is running, abort it."""
        cause = f"{slot.name} was lost: {reason}"
        failed_starts = 0 if slot.node is not None else slot.failed_starts + 1
        if failed_starts > self._max_attempts:
            self._finish(
                self._gave_up_code, f"gave up after {failed_starts} workers could not be started; the last: {cause}"
            )
            return
        self._orders.append(ShowLine(cause))
        self._worker_died = self._worker_died or slot.in_attempt
        replacement = WorkerSlot(slot.rank, self._next_worker(), last_heard=self._now, failed_starts=failed_starts)
        self.slots[slot.rank] = replacement
        self._orders.append(PlaceWorker(replacement.worker, replacement.rank))
        self._remind_at = self._now + self._timeouts.reminder
        self._abort_attempt(cause, slot.rank)
        if self.phase is Phase.RENDEZVOUS:
            self._wait_for_workers()

    def _end_or_retry(self) -> None:
        """All survivors have left the attempt: end the run if a rank failed by itself, otherwise try again.

        If a worker died, errors of other ranks may be consequences of that. An error that is not will come back.
        """
        failed = [rank for rank, outcome in self._outcomes.items() if outcome.how == "failed"]
        if failed and not self._worker_died:
            outcome = self._outcomes[failed[0]]
            self._finish(outcome.code, f"{self.slots[failed[0]].name} failed: {outcome.text}")
            return
        self._attempts_without_progress += 1
        if self._stopping:
            self._finish(self._gave_up_code, f"asked to stop, but {self._cause}; saved checkpoints are whole")
        elif self._attempts_without_progress > self._max_attempts:
            count_text = f"{self._attempts_without_progress} attempts in a row without a finished step"
            self._finish(self._gave_up_code, f"gave up after {count_text}; the last: {self._cause}")
        else:
            self._wait_for_workers()

    def _wait_for_workers(self) -> None:
        self.phase = Phase.PLACING
        for slot in self.slots:
            slot.deadline = None

    def _finish(self, code: int, verdict: str) -> None:
        self.phase = Phase.OVER
        self.code = code
        self.verdict = verdict
        self._orders += [KillWorker(slot.worker) for slot in self.slots]

    def _next_worker(self) -> int:
        self._workers += 1
        return self._workers

    def _flush_orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders
