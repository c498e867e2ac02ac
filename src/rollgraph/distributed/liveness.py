"""Which ranks are alive: every rank sends heartbeats to rank 0, and a rank that stops is named by all others.

Owns one connection from each rank to rank 0, and a thread that serves it. It needs no collective and, once connected,
no store, so it works while both are stuck.

- A process that dies closes its connection: the others know at once.
- A process that is stopped, and a machine that is gone, send no more heartbeats: the others know after
  `heartbeat_timeout`.
- A process that is stuck does not reach the next collective: the others know after `timeout`.
- Whoever started the processes may know of a loss first, and says so with `report_lost`.

Rank 0 decides and tells everyone, so that all ranks name the same one. Only the loss of rank 0 itself is found by each
rank on its own. `lost_ranks.py` has the verdicts, `connection.py` the sockets. Knows no tensors and no process groups.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from rollgraph.distributed.announcements import Announcements
from rollgraph.distributed.connection import Alarm, Connection, Message, RankServer, connect_to_rank_0, wait_readable
from rollgraph.distributed.lost_ranks import (
    SETUP,
    STARTUP,
    LossReport,
    Peer,
    RankLost,
    find_silent,
    report_disconnected,
    report_failure,
    report_silent,
    report_stragglers,
    report_unfinished,
)

_HEARTBEAT_SECONDS = 1.0  # between two heartbeats, at most
_SUSPENDED_SECONDS = 1.0  # a longer gap means that this process itself did not run: the others are not to blame
_GRACE_SECONDS = 5.0  # for a process to exit by itself, even if its timeout has already passed
_HURRIED_SECONDS = 10.0  # without a heartbeat once the run is asked to stop: torchrun kills its ranks 30 s later
_POLL_PAUSE = 0.02  # seconds between two rounds of the thread: the training thread comes first
_REPORT_PAUSE = 0.005  # seconds between two progress reports, for each rank
RANK_0 = "rollgraph/rank 0"  # where in the store its address is


class Liveness:
    """The liveness check of one rank among `size`, on the machine `node`.

    `store` is the one of torch.distributed; it is used once, to find rank 0 by `key`. If `end` is given, it is called
    with the verdict in a process that is still there when the timeout after a loss has passed; `on_loss` is called at
    once, by any thread.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any,
        timeout: float,
        *,
        heartbeat_timeout: float | None = None,
        node: str | None = None,
        attempt: int = 0,
        key: str = RANK_0,
        on_loss: Callable[[], None] = lambda: None,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.node = socket.gethostname() if node is None else node
        self.loss: LossReport | None = None
        self._longest_silence = min(timeout, heartbeat_timeout or timeout)
        self._on_loss = on_loss
        self._end = end
        self._end_at = 0.0
        self._loss_known = threading.Event()
        self._suspended = 0.0  # seconds in which this process did not run
        self._progress = (0, STARTUP)  # operations started, the last one; one tuple, because two threads use it
        self.phase = SETUP
        self._announcements = Announcements()
        self._left = False
        self._interval = min(_HEARTBEAT_SECONDS, self._longest_silence / 20)
        self._next_report = 0.0  # no progress report before this time
        self._next_heartbeat = 0.0
        self._lock = threading.RLock()
        # Rank 0 watches everyone, the other ranks watch rank 0.
        watched = range(1, size) if rank == 0 else range(1)
        self._peers = {other: Peer(self.clock()) for other in watched}
        self._connections: dict[int, Connection] = {}
        self._server: RankServer | None = None
        if rank == 0:
            self._server = RankServer(size, store, key, self.node, attempt)
            self.token = self._server.token  # of this group of ranks: no other group has the same
            self.attempt = attempt
        else:
            found = connect_to_rank_0(rank, store, key, timeout, self.node)
            self._add_peer(0, found.node, found.connection)
            self.token, self.attempt = found.token, found.attempt
        self.hosts = self._server.hosts if self._server else [self._connections[0].local_host]  # of this rank
        self._alarm = Alarm()
        os.register_at_fork(after_in_child=_close_in_child(weakref.ref(self)))
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def _add_peer(self, rank: int, node: str, connection: Connection) -> None:
        peer = self._peers[rank]
        peer.last_heard = self.clock()
        peer.node = node
        peer.connected = True
        self._connections[rank] = connection

    # -- called by the training thread -------------------------------------------------------------

    def clock(self) -> float:
        """Seconds, not counting those in which this process itself was stopped or starved."""
        return time.monotonic() - self._suspended

    def report_progress(self, operation: str) -> None:
        """This rank starts an operation that all ranks take part in."""
        self._progress = (self._progress[0] + 1, operation)
        if time.monotonic() > self._next_report:  # otherwise the next heartbeat carries it
            self._send_heartbeat()

    def enter_phase(self, phase: str) -> None:
        """This rank begins something that people have a name for, such as "generate"."""
        if phase != self.phase:
            self.phase = phase
            self._send_heartbeat()

    def check(self) -> None:
        """Raise if a rank is lost."""
        if self.loss is not None:
            raise RankLost(self.loss.text, self.loss)

    def report_lost(self, rank: int, reason: str) -> None:
        """Whoever started the ranks knows that one is lost, e.g. because its node is. May be called from any thread."""
        peer = self._peers.get(rank, Peer(self.clock()))
        self._declare(peer.report(rank, f"{peer.describe(rank)} is lost: {reason}"))

    def report_failure(self, error: BaseException) -> None:
        """Tell the others why this rank cannot go on. They, and this rank itself, wait for nothing from here on."""
        if self.loss is None:
            self._broadcast_error(error)

    def hurry(self) -> None:
        """The run was asked to stop: no longer be patient with a rank that sends no heartbeats."""
        self._longest_silence = min(self._longest_silence, _HURRIED_SECONDS)

    @property
    def all_joined(self) -> bool:
        """On rank 0: whether every rank has connected."""
        return all(peer.connected for peer in self._peers.values())

    def wait_for_loss(self, patience: float = 30.0) -> str:
        """After a failure: which rank is lost, if that becomes known soon. Empty if not."""
        self._loss_known.wait(min(self.timeout, patience))
        return "" if self.loss is None else self.loss.text

    def report_timeout(self, operation: str) -> str:
        """After this rank waited in an operation for the whole timeout: which rank did not reach it."""
        number, _ = self._progress
        if self.rank == 0:
            self._declare_stragglers(number, operation)
        else:
            self._send_heartbeat()  # or this rank itself might seem to be behind
            self._broadcast({"timeout": [number, operation]})
        reason = self.wait_for_loss()
        return reason or f"{operation} did not complete within {self.timeout:g} s, and rank 0 does not say why"

    def announce(self, key: str, text: str) -> str:
        """Tell all ranks. The first text announced under a key wins, as rank 0 sees it, and is returned."""
        if self.rank == 0:
            self._record_announcement(key, text)
        else:
            self._broadcast({"announce": [key, text]})
            deadline = time.monotonic() + _GRACE_SECONDS
            while self._announcements.get(key) is None and self.loss is None and time.monotonic() < deadline:
                time.sleep(0.005)
        return self._announcements.first(key, text)

    def announced(self, key: str) -> str | None:
        return self._announcements.get(key)

    def leave(self, error: BaseException | None = None) -> None:
        """Say goodbye, and tell the others about an error.

        Without one, all ranks leave together, rank 0 last, and raise if one is lost meanwhile. The end of a rank that
        did not wait would make `torchrun` end the others.
        """
        if error is not None:
            self.report_failure(error)
        else:
            if self.rank != 0:
                self._broadcast({"leaving": True})
            self._wait_for_others()
        self.close()
        self._thread.join(_GRACE_SECONDS)  # so that the last messages are sent, if they can be
        if error is None:
            self.check()

    def _wait_for_others(self) -> None:
        began = self.clock()
        while self.loss is None:
            remaining = [rank for rank, peer in self._peers.items() if not peer.left]
            if not remaining:
                return
            if self.rank == 0 and self.clock() > began + self.timeout:  # rank 0 itself may have more to write
                self._declare(report_unfinished(remaining[0], self._peers[remaining[0]], self.timeout), since=began)
            time.sleep(0.01)

    def _broadcast_error(self, error: BaseException) -> None:
        report = report_failure(self.rank, Peer(self.clock(), *self._progress, self.phase, self.node), error)
        if self.rank == 0:
            self._declare_failure(report)
        else:
            self._broadcast({"failed": asdict(report)})
            self._accept_verdict(report, self.timeout)

    def _declare_failure(self, report: LossReport) -> None:
        """On rank 0. If a rank left during set-up, nobody has anything to save, so all have to be gone soon."""
        self._declare(report, since=-math.inf if report.stopped else None)

    def close(self) -> None:
        """Stop the thread without waiting for anyone."""
        self._left = True
        self._broadcast({"leaving": True})
        self._alarm.ring()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(OSError, ValueError):  # the sockets are closed while it uses them
            before = time.monotonic()
            while not self._left or self._has_unsent():
                handlers = self._wait_for_messages()
                now = time.monotonic()
                if now - before > self._interval + min(_SUSPENDED_SECONDS, self._longest_silence / 4):
                    self._suspended += now - before
                before = now
                for handle in handlers:
                    handle()
                if now > self._next_heartbeat:
                    self._send_heartbeat()
                self._check_peers()
                time.sleep(_POLL_PAUSE)
        self._close_sockets()

    def _wait_for_messages(self) -> list[Callable[[], None]]:
        """What to call for each socket that can be read."""
        handlers: dict[int, Callable[[], None]] = {self._alarm.fileno(): self._alarm.clear}
        if self._server is not None:
            handlers[self._server.fileno()] = self._accept_rank
        connections = dict(self._connections)
        for rank, connection in connections.items():
            handlers[connection.fileno()] = partial(self._receive, rank, connection)
        return [handlers[number] for number in wait_readable(handlers, connections.values(), self._interval)]

    def _accept_rank(self) -> None:
        assert self._server is not None
        # A rank that was here before is one of the next attempt, which found the address of this one in the store.
        expected = [rank for rank, peer in self._peers.items() if not peer.connected and not self._left]
        accepted = self._server.accept(expected)
        if accepted is None:
            return
        rank, node, connection = accepted
        self._add_peer(rank, node, connection)
        for announcement in self._announcements.items():
            connection.send({"announce": announcement})
        if self.loss is not None:
            connection.send({"lost": [asdict(self.loss), _GRACE_SECONDS]})

    def _receive(self, rank: int, connection: Connection) -> None:
        peer = self._peers[rank]
        messages, closed = connection.receive()
        if messages:
            peer.last_heard = self.clock()
        for message in messages:
            for kind, content in message.items():
                self._handle(rank, peer, kind, content)
        if closed:
            self._connections.pop(rank, None)
            connection.close()
            if not peer.left:
                self._declare(report_disconnected(rank, peer))

    def _handle(self, rank: int, peer: Peer, kind: str, content: Any) -> None:
        if kind == "heartbeat":
            peer.operations, peer.last_operation, peer.phase = content
        elif kind == "announce":
            key, text = content
            self._record_announcement(key, text)
            if self.rank == 0 and rank in self._connections:
                self._connections[rank].send({"announce": [key, self._announcements.get(key)]})
        elif kind == "lost":
            report, seconds_left = content
            self._accept_verdict(LossReport(**report), seconds_left)
        elif kind == "timeout":
            number, operation = content
            self._declare_stragglers(number, operation)
        elif kind == "failed":
            report = LossReport(**content)
            peer.left = peer.left or report.rank == rank
            self._declare_failure(report)
        elif kind == "leaving":
            peer.left = True

    def _send_heartbeat(self) -> None:
        now = time.monotonic()
        self._next_report = now + min(_REPORT_PAUSE * self.size, self._interval)
        self._next_heartbeat = now + self._interval
        self._broadcast({"heartbeat": [*self._progress, self.phase]})

    def _check_peers(self) -> None:
        silent = find_silent(self._peers, self.clock(), self._longest_silence, self.timeout)
        if silent is not None:
            self._declare_silent(silent)
        if self.loss is not None and self._end is not None and not self._left and self.clock() > self._end_at:
            self._end(self.loss.text)

    # -- verdicts and announcements ----------------------------------------------------------------

    def _declare_silent(self, rank: int) -> None:
        peer = self._peers[rank]
        limit = self._longest_silence if peer.connected else self.timeout
        self._declare(report_silent(rank, peer, self.clock(), limit), since=peer.last_heard)

    def _declare_stragglers(self, number: int, operation: str) -> None:
        """On rank 0: an operation, the `number`-th one, timed out on some rank."""
        now = self.clock()
        silent = find_silent(self._peers, now, self._longest_silence / 2, self.timeout / 2)
        if silent is not None:
            self._declare_silent(silent)
            return
        everyone = {0: Peer(now, *self._progress, self.phase, self.node), **self._peers}
        self._declare(report_stragglers(everyone, number, operation, self.timeout), since=now - self.timeout)

    def _declare(self, report: LossReport, since: float | None = None) -> None:
        """The first loss is the cause. Later ones may be its effect and are ignored."""
        now = self.clock()
        if since is None:
            since = now
        seconds_left = max(since + self.timeout - now, _GRACE_SECONDS)
        with self._lock:
            if self.loss is None:
                self._broadcast({"lost": [asdict(report), seconds_left]})
                self._accept_verdict(report, seconds_left)

    def _accept_verdict(self, report: LossReport, seconds_left: float) -> None:
        """From now on this process has `seconds_left` to exit by itself."""
        if self.loss is None:
            self._end_at = self.clock() + seconds_left
            self.loss = report
            self._loss_known.set()
            self._on_loss()

    def _record_announcement(self, key: str, text: str) -> None:
        with self._lock:
            if self._announcements.add(key, text) and self.rank == 0:
                self._broadcast({"announce": [key, text]})

    # -- sockets -----------------------------------------------------------------------------------

    def _broadcast(self, message: Message) -> None:
        """Send to all ranks that this one is connected to."""
        for connection in list(self._connections.values()):
            connection.send(message)

    def _has_unsent(self) -> bool:
        return any(connection.has_unsent for connection in list(self._connections.values()))

    def _close_sockets(self) -> None:
        with suppress(OSError):
            if self._server is not None:
                self._server.close()
            self._alarm.close()
            for connection in list(self._connections.values()):
                connection.close()


def _close_in_child(reference: weakref.ref[Liveness]) -> Callable[[], None]:
    """For a forked child, whose copy of a connection would otherwise outlive the rank."""

    def close() -> None:
        liveness = reference()
        if liveness is not None:
            liveness._close_sockets()
            liveness._connections.clear()
            liveness._peers.clear()

    return close
