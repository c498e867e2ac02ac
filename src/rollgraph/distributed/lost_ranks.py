"""Deciding which rank is lost, from what is known about each one.

Owns the records and the wording of every verdict. Pure Python: it neither sends nor waits. `liveness.py` feeds it with
heartbeats and tells the other ranks what it decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STARTUP = "startup"  # the last operation of a rank that has not reported any yet


class RankLost(RuntimeError):
    """A rank died, was stopped or is stuck. `lost_rank` says which one; None if all ranks are alive."""

    def __init__(self, message: str, lost_rank: int | None = None) -> None:
        super().__init__(message)
        self.lost_rank = lost_rank


class StoppedInSetup(KeyboardInterrupt):
    """This process was asked to stop (SIGTERM) before the first step. Whoever lets Ctrl-C through lets this through."""

    def __str__(self) -> str:
        return "stopped before the first step, as SIGTERM asked"


@dataclass(frozen=True)
class LossReport:
    """A verdict, e.g. LossReport(1, "rank 1 (last operation: startup) disappeared without notice")."""

    rank: int | None  # None: something failed although all ranks are alive
    text: str
    stopped: bool = False  # the rank left because it was asked to, during set-up


@dataclass
class Peer:
    """What this process knows about a rank."""

    last_heard: float  # time of its last message
    operations: int = 0  # how many operations it has started
    last_operation: str = STARTUP
    left: bool = False  # it said goodbye

    def describe(self, rank: int) -> str:
        return f"rank {rank} (last operation: {self.last_operation})"


def find_silent(peers: Mapping[int, Peer], now: float, limit: float) -> int | None:
    """The first rank that has sent nothing for more than `limit` seconds, if there is one."""
    for rank, peer in peers.items():
        if not peer.left and now - peer.last_heard > limit:
            return rank
    return None


def report_silent(rank: int, peer: Peer, now: float, timeout: float) -> LossReport:
    seconds = min(timeout, now - peer.last_heard)
    return LossReport(rank, f"{peer.describe(rank)} has sent no heartbeat for {seconds:.3g} s")


def report_disconnected(rank: int, peer: Peer) -> LossReport:
    return LossReport(rank, f"{peer.describe(rank)} disappeared without notice")


def report_error(rank: int, error: str) -> LossReport:
    return LossReport(rank, f"rank {rank} failed with {error}")


def report_stopped(rank: int) -> LossReport:
    return LossReport(rank, f"rank {rank} was asked to stop before the first step", stopped=True)


def report_unfinished(rank: int, peer: Peer, timeout: float) -> LossReport:
    return LossReport(rank, f"{peer.describe(rank)} did not finish within {timeout:g} s after rank 0")


def report_stragglers(peers: Mapping[int, Peer], number: int, operation: str, timeout: float) -> LossReport:
    """Name the ranks that did not reach an operation, the `number`-th one, before it timed out.

    The ranks that are furthest behind are the cause; ranks between them and `operation` wait for them as well.
    """
    fewest = min(peer.operations for peer in peers.values())
    if fewest >= number:
        text = f"{operation} did not complete within {timeout:g} s although every rank started it; is the network down?"
        return LossReport(None, text)
    behind = [rank for rank, peer in peers.items() if peer.operations == fewest]
    named = ", ".join(peers[rank].describe(rank) for rank in behind)
    return LossReport(behind[0], f"{named} did not reach {operation} within {timeout:g} s")
