"""Events that the driver of a cluster run receives and orders that it sends: plain values for any transport.

A worker is one process for one rank. Its number is never reused, so an event from a worker that was replaced cannot be
mistaken for one from its replacement. An attempt is one try of all ranks to take the remaining steps.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# -- events and orders -----------------------------------------------------------------------------

Ending = Literal["finished", "stopped", "failed", "lost"]


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended on one worker.

    - finished: all steps are taken; stopped: on request, after saving;
    - failed: this worker raised an error; `code` is the exit code of the run;
    - lost: it lost contact with `lost_rank`, or with all other ranks if that is None.

    >>> Outcome("lost", "rank 3 does not respond", lost_rank=3)
    """

    how: Ending
    text: str = ""
    code: int = 0
    lost_rank: int | None = None


# -- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerPlaced:
    """The worker is ready on a node."""

    worker: int
    node: str


@dataclass(frozen=True)
class WorkerLost:
    """The worker died, or its node did."""

    worker: int
    reason: str


@dataclass(frozen=True)
class StoreOpened:
    """Rank 0 has opened its store: the others can join at this address."""

    worker: int
    attempt: int
    address: str


@dataclass(frozen=True)
class WorkerAlive:
    """The worker answered. If `step` is set, it has finished that step of the run."""

    worker: int
    attempt: int = 0
    step: int | None = None


@dataclass(frozen=True)
class WorkerDone:
    """The worker has ended or left its attempt and is ready for another one."""

    worker: int
    attempt: int
    outcome: Outcome


Event = WorkerPlaced | WorkerLost | StoreOpened | WorkerAlive | WorkerDone


# -- orders ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlaceWorker:
    """Start a worker for a rank as soon as a node has room for it."""

    worker: int
    rank: int


@dataclass(frozen=True)
class KillWorker:
    """Kill a worker that is no longer needed."""

    worker: int


@dataclass(frozen=True)
class OpenStore:
    """Ask the worker of rank 0 to open a `TCPStore` for the rendezvous of an attempt."""

    worker: int
    attempt: int


@dataclass(frozen=True)
class StartAttempt:
    """Join the rendezvous at `address` and start an attempt."""

    worker: int
    attempt: int
    address: str


@dataclass(frozen=True)
class AbortAttempt:
    """Leave an attempt at once, because one of its ranks is lost."""

    worker: int
    attempt: int
    reason: str
    lost_rank: int | None = None


@dataclass(frozen=True)
class StopWorker:
    """Save and end after the current step."""

    worker: int


@dataclass(frozen=True)
class ShowLine:
    """Show a line in the terminal."""

    text: str


@dataclass(frozen=True)
class ShowWaiting:
    """Show what these ranks wait for in the terminal."""

    ranks: tuple[int, ...]


Order = PlaceWorker | KillWorker | OpenStore | StartAttempt | AbortAttempt | StopWorker | ShowLine | ShowWaiting


# -- news of a worker ------------------------------------------------------------------------------
# The driver long-polls every worker: a worker answers when it has news, or after half a second without any. So news
# arrives at once, a worker that does not answer is noticed, and a training step costs no call.


@dataclass(frozen=True)
class DisplayCall:
    """A method call on the driver's progress view."""

    method: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepTaken:
    attempt: int
    step: int


@dataclass(frozen=True)
class AttemptEnded:
    attempt: int
    outcome: Outcome


News = DisplayCall | StepTaken | AttemptEnded


class NewsBox:
    """A queue of news, filled by the training thread and emptied by the thread that answers the driver."""

    def __init__(self) -> None:
        self._news: list[News] = []
        self._progress: DisplayCall | None = None  # only the latest; it does not wake the reader
        self._arrived = threading.Condition()

    def put(self, news: News) -> None:
        with self._arrived:
            if self._progress is not None:
                self._news.append(self._progress)
                self._progress = None
            self._news.append(news)
            self._arrived.notify_all()

    def show_progress(self, progress: DisplayCall) -> None:
        """Replace the pending progress call. Cheap enough to call for every token."""
        self._progress = progress

    def take(self, seconds: float) -> list[News]:
        """Take all news: as soon as there is anything but progress, and after `seconds` at the latest."""
        with self._arrived:
            self._arrived.wait_for(lambda: bool(self._news), seconds)
            news = self._news
            self._news = []
            if self._progress is not None:
                news.append(self._progress)
                self._progress = None
            return news
