"""What the driver of a cluster run is told, and what it orders: plain values that any transport can carry.

A worker is one process for one rank. Its number is never used again, so that news of a worker that was replaced can be
told from news of the one in its place. An attempt is one try of all ranks to take the steps that are left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

How = Literal["finished", "stopped", "failed", "lost"]


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended on one worker.

    - finished: all steps are taken; stopped: as it was asked to, saved;
    - failed: an error of its own, which `code`, the exit code of the run, classifies;
    - lost: it missed `lost_rank`, or lost touch with all others if that is None.
    """

    how: How
    text: str = ""
    code: int = 0
    lost_rank: int | None = None


# -- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """A worker that was ordered is ready on a node."""

    worker: int
    node: str


@dataclass(frozen=True)
class WorkerLost:
    """A worker died, or its node did."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Published:
    """Rank 0 listens for the others at this address."""

    worker: int
    attempt: int
    address: str


@dataclass(frozen=True)
class Heard:
    """A worker answered. With a `step`, it has finished that step of the run."""

    worker: int
    attempt: int = 0
    step: int | None = None


@dataclass(frozen=True)
class Ended:
    """A worker's attempt is over, and the worker is ready for another one."""

    worker: int
    attempt: int
    outcome: Outcome


Event = Placed | WorkerLost | Published | Heard | Ended


# -- orders ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Start a worker for a rank, wherever there is room: now, or once there is."""

    worker: int
    rank: int


@dataclass(frozen=True)
class Release:
    """End a worker that nothing is expected from any more, with force."""

    worker: int


@dataclass(frozen=True)
class Publish:
    """Ask the worker of rank 0 for an address where the ranks of an attempt can meet."""

    worker: int
    attempt: int


@dataclass(frozen=True)
class Begin:
    """Start an attempt."""

    worker: int
    attempt: int
    address: str


@dataclass(frozen=True)
class Abort:
    """Leave an attempt at once, because a rank of it is lost."""

    worker: int
    attempt: int
    reason: str
    lost_rank: int | None = None


@dataclass(frozen=True)
class Stop:
    """Save and end after the step under way."""

    worker: int


@dataclass(frozen=True)
class Tell:
    """Show people a line."""

    text: str


@dataclass(frozen=True)
class TellWaiting:
    """Show people what these ranks wait for."""

    ranks: tuple[int, ...]


Order = Place | Release | Publish | Begin | Abort | Stop | Tell | TellWaiting
