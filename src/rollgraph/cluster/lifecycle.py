"""What the driver of a cluster run decides: which workers are placed, when an attempt begins, and when the run is over.

Pure: it is told what happened and what time it is, and answers with orders. It neither sends nor waits, so that every
order of events can be tested; `driver.py` carries its orders out.

    placing --all ranks are placed--> meeting --rank 0 has an address--> running --all have ended--> over
       ^                                                                    | a rank is lost, or fails
       +------------- all others have left the attempt -------------- leaving

A worker that is lost is replaced at once, while the others are still leaving; these stay as they are, and take part in
the next attempt. News of an older attempt, or of a worker that was replaced, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from rollgraph.cluster.messages import (
    Abort,
    Begin,
    Ended,
    Event,
    Heard,
    Order,
    Outcome,
    Place,
    Placed,
    Publish,
    Published,
    Release,
    Stop,
    Tell,
    TellWaiting,
    WorkerLost,
)


class Phase(Enum):
    PLACING = "placing"
    MEETING = "meeting"
    RUNNING = "running"
    LEAVING = "leaving"
    OVER = "over"


@dataclass(frozen=True)
class Patience:
    """Seconds to wait before a worker counts as lost."""

    silence: float  # in which nothing is heard of it
    leaving: float  # in which it does not leave an attempt that another one was lost in
    suspect: float = 3.0  # in which nothing is heard of a worker that the others have named as lost
    reminder: float = 20.0  # between two lines that say what the run waits for


@dataclass
class Seat:
    """A rank, and the worker that has it."""

    rank: int
    worker: int
    node: str | None = None  # None: the worker is being placed
    heard: float = 0.0  # when it last answered
    busy: bool = False  # it takes part in the present attempt, and has not left it
    leave_by: float | None = None  # when it counts as lost unless it has done what it was asked to
    suspected: bool = False  # the others have named it as lost
    failed_starts: int = 0  # workers in a row that were lost before they were placed

    @property
    def name(self) -> str:
        if self.node is None:
            return f"rank {self.rank}, while it was being placed,"
        return f"rank {self.rank} on {self.node}"


class Lifecycle:
    """The life of a run on `ranks` workers.

    `code` becomes the exit code of the run, and `verdict` what to say about it, once the phase is `OVER`. The run gives
    up after `most` attempts in a row that were lost without a finished step: whatever ends them will come again.
    """

    def __init__(self, ranks: int, patience: Patience, *, most: int = 3, gave_up: int = 75) -> None:
        self.phase = Phase.PLACING
        self.attempt = 0
        self.code = 0
        self.verdict = ""
        self._patience = patience
        self._most = most
        self._gave_up = gave_up
        self._fruitless = 0  # attempts since the last step that were lost
        self._stopping = False
        self._outcomes: dict[int, Outcome] = {}  # of the present attempt, by rank, in the order in which they came
        self._cause = ""  # why the ranks leave the present attempt
        self._worker_died = False  # in the present attempt
        self._workers = 0
        self._remind_at = 0.0
        self._now = 0.0
        self._orders: list[Order] = []
        self.seats = [Seat(rank, self._next_worker()) for rank in range(ranks)]

    # -- what it is told ---------------------------------------------------------------------------

    def start(self, now: float) -> list[Order]:
        self._now = now
        self._remind_at = now + self._patience.reminder
        self._orders += [Place(seat.worker, seat.rank) for seat in self.seats]
        return self._take_orders()

    def handle(self, event: Event, now: float) -> list[Order]:
        self._now = now
        seat = next((seat for seat in self.seats if seat.worker == event.worker), None)
        if seat is None or self.phase is Phase.OVER:
            return []  # the worker was replaced
        seat.heard = now
        match event:
            case Placed():
                seat.node = event.node
                seat.failed_starts = 0
            case WorkerLost():
                self._lose(seat, event.reason)
            case Published():
                if self.phase is Phase.MEETING and event.attempt == self.attempt and seat.rank == 0:
                    self._begin(event.address)
            case Heard():
                if event.step is not None and event.attempt == self.attempt:
                    self._fruitless = 0
            case Ended():
                if event.attempt == self.attempt and seat.busy:
                    self._end(seat, event.outcome)
            case _:
                assert_never(event)
        self._advance()
        return self._take_orders()

    def tick(self, now: float) -> list[Order]:
        """Time has passed."""
        self._now = now
        for seat in list(self.seats):
            if self.phase is Phase.OVER:
                break
            if seat.node is None:
                continue
            silent = now - seat.heard
            if silent > (self._patience.suspect if seat.suspected else self._patience.silence):
                self._replace(seat, f"nothing was heard of it for {silent:.0f} s")
            elif seat.leave_by is not None and now > seat.leave_by:
                self._replace(seat, "it does not respond")
        self._advance()
        if self.phase is Phase.PLACING and now > self._remind_at:
            self._remind_at = now + self._patience.reminder
            self._orders.append(TellWaiting(tuple(seat.rank for seat in self.seats if seat.node is None)))
        return self._take_orders()

    def stop(self, now: float) -> list[Order]:
        """Somebody asked the run to stop."""
        self._now = now
        self._stopping = True
        if self.phase is Phase.RUNNING:
            self._orders += [Stop(seat.worker) for seat in self.seats if seat.busy]
        self._advance()
        return self._take_orders()

    # -- what follows ------------------------------------------------------------------------------

    def _advance(self) -> None:
        placed = all(seat.node is not None for seat in self.seats)
        busy = any(seat.busy for seat in self.seats)
        if self.phase in (Phase.PLACING, Phase.MEETING) and self._stopping:
            self._finish(0, "stopped while nothing was running; saved checkpoints are whole")
        elif self.phase is Phase.PLACING and placed:
            self._meet()
        elif self.phase is Phase.RUNNING and not busy:
            texts = [outcome.text for outcome in self._outcomes.values() if outcome.how == "stopped"]
            self._finish(0, texts[0] if texts else "")
        elif self.phase is Phase.LEAVING and not busy:
            self._decide()

    def _meet(self) -> None:
        self.phase = Phase.MEETING
        self.attempt += 1
        first = self.seats[0]
        first.leave_by = self._now + self._patience.leaving
        self._orders.append(Publish(first.worker, self.attempt))

    def _begin(self, address: str) -> None:
        self.phase = Phase.RUNNING
        self._outcomes.clear()
        self._worker_died = False
        for seat in self.seats:
            seat.busy = True
            seat.suspected = False
            seat.leave_by = None
            self._orders.append(Begin(seat.worker, self.attempt, address))

    def _end(self, seat: Seat, outcome: Outcome) -> None:
        self._outcomes[seat.rank] = outcome
        seat.busy = False
        seat.suspected = False
        seat.leave_by = None
        if outcome.how == "failed":
            self._leave(f"{seat.name} failed: {outcome.text}", seat.rank)
        elif outcome.how == "lost":
            self._leave(outcome.text, outcome.lost_rank)
            self._suspect(outcome.lost_rank)

    def _leave(self, cause: str, lost_rank: int | None) -> None:
        """All ranks leave the attempt. The first cause counts: later ones may be its echoes."""
        if self.phase is not Phase.RUNNING:
            return
        self.phase = Phase.LEAVING
        self._cause = cause
        for seat in self.seats:
            if seat.busy:
                seat.leave_by = self._now + self._patience.leaving
                self._orders.append(Abort(seat.worker, self.attempt, cause, lost_rank))

    def _suspect(self, rank: int | None) -> None:
        """The others miss this rank. It may be well, and say what happened to it; it is replaced if it is silent."""
        if rank is not None:
            self.seats[rank].suspected = self.seats[rank].busy

    def _replace(self, seat: Seat, reason: str) -> None:
        self._orders.append(Release(seat.worker))
        self._lose(seat, reason)

    def _lose(self, seat: Seat, reason: str) -> None:
        """Place another worker for the rank. If an attempt is under way, all others leave it."""
        cause = f"{seat.name} was lost: {reason}"
        failed_starts = 0 if seat.node is not None else seat.failed_starts + 1
        if failed_starts > self._most:
            self._finish(
                self._gave_up, f"gave up after {failed_starts} workers could not be started; the last: {cause}"
            )
            return
        self._orders.append(Tell(cause))
        self._worker_died = self._worker_died or seat.busy
        placed = Seat(seat.rank, self._next_worker(), heard=self._now, failed_starts=failed_starts)
        self.seats[seat.rank] = placed
        self._orders.append(Place(placed.worker, placed.rank))
        self._remind_at = self._now + self._patience.reminder
        self._leave(cause, seat.rank)
        if self.phase is Phase.MEETING:
            self._place()

    def _decide(self) -> None:
        """All survivors have left: the run is over if a rank failed by itself, and otherwise goes on.

        Where a worker died, whatever the others report may be an echo of that. If it is not, it will come again.
        """
        failed = [rank for rank, outcome in self._outcomes.items() if outcome.how == "failed"]
        if failed and not self._worker_died:
            outcome = self._outcomes[failed[0]]
            self._finish(outcome.code, f"{self.seats[failed[0]].name} failed: {outcome.text}")
            return
        self._fruitless += 1
        if self._stopping:
            self._finish(self._gave_up, f"asked to stop, but {self._cause}; saved checkpoints are whole")
        elif self._fruitless > self._most:
            often = f"{self._fruitless} attempts in a row without a finished step"
            self._finish(self._gave_up, f"gave up after {often}; the last: {self._cause}")
        else:
            self._place()

    def _place(self) -> None:
        self.phase = Phase.PLACING
        for seat in self.seats:
            seat.leave_by = None

    def _finish(self, code: int, verdict: str) -> None:
        self.phase = Phase.OVER
        self.code = code
        self.verdict = verdict
        self._orders += [Release(seat.worker) for seat in self.seats]

    def _next_worker(self) -> int:
        self._workers += 1
        return self._workers

    def _take_orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders
