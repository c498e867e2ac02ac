"""How ranks fail: reports of lost ranks, and exit codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from json import JSONDecodeError

from rollgraph.errors import MachineError, UserError, user_line

# -- exit codes ------------------------------------------------------------------------------------
# docs/restarts.md explains what each code means, and whether to start the same command again. Importing this module is
# instant.


class ExitCode(IntEnum):
    """The exit codes of `rollgraph train`, `eval` and `export`."""

    FINISHED = 0
    FAILED = 1
    REFUSED = 2
    RANK_LOST = 75
    INTERRUPTED = 130
    TERMINATED = 143


def is_user_error(error: BaseException) -> bool:
    """Whether the user's input caused an error, so that trying again would not help.

    By convention of this package, a ValueError is about an input. A missing package is for the user to install.
    """
    is_garbage = isinstance(error, JSONDecodeError | UnicodeError)  # Python's own ValueErrors, not ours
    return isinstance(error, UserError | ValueError | ImportError) and not is_garbage


# -- lost ranks ------------------------------------------------------------------------------------
# Owns the reports and their wording. Pure Python: it neither sends nor waits. `liveness.py` feeds it heartbeats and
# sends its decisions to the other ranks.

STARTUP = "startup"  # the last operation of a rank that has not reported one yet
SETUP = "set-up"  # the phase of a rank that has not entered one yet


@dataclass(frozen=True)
class LossReport:
    """Who is lost, e.g. LossReport(1, "rank 1 on node-a (train; last operation: …) disappeared without notice")."""

    rank: int | None  # None: an operation failed although all ranks are alive
    text: str
    node: str = ""  # the machine of the rank, if known
    phase: str = ""  # of the run, e.g. "train"
    stopped: bool = False  # the rank left because it was asked to stop during set-up
    refused: bool = False  # the rank left because of a user error: trying again would not help


class RankLost(MachineError, RuntimeError):
    """A rank died, was stopped or hangs. `loss` says which one, on which node and in which phase."""

    def __init__(self, message: str, loss: LossReport | None = None) -> None:
        super().__init__(message)
        self.loss = loss or LossReport(None, message)

    @property
    def lost_rank(self) -> int | None:
        """None if all ranks are alive."""
        return self.loss.rank


class StoppedInSetup(KeyboardInterrupt):
    """This process was asked to stop before the first step. Code that lets Ctrl-C through lets this through."""

    def __init__(self, requested_by: str = "SIGTERM", cause: str = "") -> None:
        super().__init__(requested_by)
        self.requested_by = requested_by
        self.cause = cause  # a lost rank, which makes `torchrun` stop the others

    def __str__(self) -> str:
        stopped = f"stopped before the first step, as {self.requested_by} asked"
        return f"{stopped}: {self.cause}" if self.cause else stopped


@dataclass
class Peer:
    """What this process knows about another rank."""

    last_heard: float  # time of its last message
    operations: int = 0  # how many operations it has started
    last_operation: str = STARTUP
    phase: str = SETUP
    node: str = ""  # empty until it has connected
    connected: bool = False
    has_left: bool = False  # it said goodbye

    def describe(self, rank: int) -> str:
        on_node = f" on {self.node}" if self.node else ""
        return f"rank {rank}{on_node} ({self.phase}; last operation: {self.last_operation})"

    def report(self, rank: int, text: str) -> LossReport:
        return LossReport(rank, text, self.node, self.phase)


def find_silent(peers: Mapping[int, Peer], now: float, heartbeat_timeout: float, join_timeout: float) -> int | None:
    """The first rank that is silent for more than `heartbeat_timeout` seconds, or has not joined in `join_timeout`."""
    for rank, peer in peers.items():
        if not peer.has_left and now - peer.last_heard > (heartbeat_timeout if peer.connected else join_timeout):
            return rank
    return None


def report_silent(rank: int, peer: Peer, now: float, timeout: float) -> LossReport:
    seconds = min(timeout, now - peer.last_heard)
    if not peer.connected:
        return LossReport(rank, f"rank {rank} did not join within {seconds:.3g} s", phase=SETUP)
    return peer.report(rank, f"{peer.describe(rank)} has sent no heartbeat for {seconds:.3g} s")


def report_disconnected(rank: int, peer: Peer) -> LossReport:
    return peer.report(rank, f"{peer.describe(rank)} disappeared without notice")


def report_failure(rank: int, peer: Peer, error: BaseException) -> LossReport:
    """The report of a rank about itself, when it cannot go on."""
    if isinstance(error, RankLost):  # this rank is not to blame, although no lost rank is known
        return LossReport(None, str(error))
    if isinstance(error, StoppedInSetup):
        text = f"rank {rank} was asked to stop before the first step"
        return LossReport(rank, text, peer.node, peer.phase, stopped=True)
    text = f"rank {rank} on {peer.node} failed with {type(error).__name__}: {error}".rstrip(": ")
    if line := user_line(error):
        text += f" ({line})"
    return LossReport(rank, text, peer.node, peer.phase, refused=is_user_error(error))


def report_unfinished(rank: int, peer: Peer, timeout: float) -> LossReport:
    return peer.report(rank, f"{peer.describe(rank)} did not finish within {timeout:g} s after rank 0")


def report_stragglers(peers: Mapping[int, Peer], number: int, operation: str, timeout: float) -> LossReport:
    """Name the ranks that did not reach an operation, the `number`-th one, before it timed out.

    The ranks that are furthest behind are the cause. Ranks between them and `operation` wait for them, too.
    """
    fewest = min(peer.operations for peer in peers.values())
    if fewest >= number:
        text = f"{operation} did not complete within {timeout:g} s although every rank started it; is the network down?"
        return LossReport(None, text)
    behind = [rank for rank, peer in peers.items() if peer.operations == fewest]
    descriptions = ", ".join(peers[rank].describe(rank) for rank in behind)
    first = peers[behind[0]]
    return LossReport(
        behind[0], f"{descriptions} did not reach {operation} within {timeout:g} s", first.node, first.phase
    )
