"""Deciding which rank is lost, from what is known about each one.

Owns the records and the wording of every verdict. Pure Python: it neither sends nor waits. `liveness.py` feeds it with
heartbeats and tells the other ranks what it decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollgraph.distributed.exit_codes import is_users

STARTUP = "startup"  # the last operation of a rank that has not reported any yet
SETUP = "set-up"  # the phase of a rank that has not entered any yet


@dataclass(frozen=True)
class LossReport:
    """A verdict, e.g. LossReport(1, "rank 1 on node-a (train; last operation: …) disappeared without notice")."""

    rank: int | None  # None: something failed although all ranks are alive
    text: str
    node: str = ""  # the machine of the rank, where that is known
    phase: str = ""  # what it was doing
    stopped: bool = False  # the rank left because it was asked to, during set-up
    refused: bool = False  # the rank left because of what a person gave it: trying again would not help


class RankLost(RuntimeError):
    """A rank died, was stopped or is stuck. `loss` says which one, on which node and in which phase."""

    def __init__(self, message: str, loss: LossReport | None = None) -> None:
        super().__init__(message)
        self.loss = loss or LossReport(None, message)

    @property
    def lost_rank(self) -> int | None:
        """None if all ranks are alive."""
        return self.loss.rank


class StoppedInSetup(KeyboardInterrupt):
    """This process was asked to stop before the first step. Whoever lets Ctrl-C through lets this through."""

    def __init__(self, asked_by: str = "SIGTERM", cause: str = "") -> None:
        super().__init__(asked_by)
        self.asked_by = asked_by
        self.cause = cause  # the loss of a rank, which makes `torchrun` stop the others

    def __str__(self) -> str:
        stopped = f"stopped before the first step, as {self.asked_by} asked"
        return f"{stopped}: {self.cause}" if self.cause else stopped


@dataclass
class Peer:
    """What this process knows about a rank."""

    last_heard: float  # time of its last message
    operations: int = 0  # how many operations it has started
    last_operation: str = STARTUP
    phase: str = SETUP
    node: str = ""  # unknown before it has connected
    connected: bool = False  # it has been heard of at all
    left: bool = False  # it said goodbye

    def describe(self, rank: int) -> str:
        place = f" on {self.node}" if self.node else ""
        return f"rank {rank}{place} ({self.phase}; last operation: {self.last_operation})"

    def report(self, rank: int, text: str) -> LossReport:
        return LossReport(rank, text, self.node, self.phase)


def find_silent(peers: Mapping[int, Peer], now: float, limit: float, joining: float) -> int | None:
    """The first rank that has sent nothing for more than `limit` seconds, or that has not joined within `joining`."""
    for rank, peer in peers.items():
        if not peer.left and now - peer.last_heard > (limit if peer.connected else joining):
            return rank
    return None


def report_silent(rank: int, peer: Peer, now: float, limit: float) -> LossReport:
    seconds = min(limit, now - peer.last_heard)
    if not peer.connected:
        return LossReport(rank, f"rank {rank} did not join within {seconds:.3g} s", phase=SETUP)
    return peer.report(rank, f"{peer.describe(rank)} has sent no heartbeat for {seconds:.3g} s")


def report_disconnected(rank: int, peer: Peer) -> LossReport:
    return peer.report(rank, f"{peer.describe(rank)} disappeared without notice")


def report_failure(rank: int, peer: Peer, error: BaseException) -> LossReport:
    """What a rank says of itself when it cannot go on."""
    if isinstance(error, RankLost):  # it is not to blame, although no lost rank is known
        return LossReport(None, str(error))
    if isinstance(error, StoppedInSetup):
        text = f"rank {rank} was asked to stop before the first step"
        return LossReport(rank, text, peer.node, peer.phase, stopped=True)
    text = f"rank {rank} on {peer.node} failed with {type(error).__name__}: {error}".rstrip(": ")
    return LossReport(rank, text, peer.node, peer.phase, refused=is_users(error))


def report_unfinished(rank: int, peer: Peer, timeout: float) -> LossReport:
    return peer.report(rank, f"{peer.describe(rank)} did not finish within {timeout:g} s after rank 0")


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
    first = peers[behind[0]]
    return LossReport(behind[0], f"{named} did not reach {operation} within {timeout:g} s", first.node, first.phase)
