"""Which ranks are alive: every rank sends heartbeats to rank 0, and a rank that stops is named by all others.

Owns one connection from each rank to rank 0, and a thread that serves it. It needs no collective and, once connected,
no store, so it works while both are stuck.

- A process that dies closes its connection: the others know at once.
- A process that is stopped stops sending heartbeats, and one that is stuck does not reach the next collective: the
  others know after the timeout.

Rank 0 decides and tells everyone, so that all ranks name the same one. Only the loss of rank 0 itself is found by each
rank on its own. `lost_ranks.py` has the verdicts, `connection.py` the sockets. Knows no tensors and no process groups.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from rollgraph.distributed.connection import Connection, Message, RankServer, connect_to_rank_0
from rollgraph.distributed.lost_ranks import (
    STARTUP,
    LossReport,
    Peer,
    RankLost,
    StoppedInSetup,
    find_silent,
    report_disconnected,
    report_error,
    report_silent,
    report_stopped,
    report_stragglers,
    report_unfinished,
)

_HEARTBEAT_SECONDS = 1.0  # between two heartbeats, at most
_SUSPENDED_SECONDS = 1.0  # a longer gap means that this process itself did not run: the others are not to blame
_GRACE_SECONDS = 5.0  # for a process to exit by itself, even if its timeout has already passed
_POLL_PAUSE = 0.02  # seconds between two rounds of the thread: the training thread comes first
_REPORT_PAUSE = 0.005  # seconds between two progress reports, for each rank
_MAX_ANNOUNCEMENTS = 100
_STORE_KEY = "rollgraph/liveness"


class Liveness:
    """The liveness check of one rank among `size`.

    `store` is the one of torch.distributed; it is used once, to find rank 0. If `end` is given, it is called with the
    verdict in a process that is still there when the timeout after a loss has passed.
    """

    def __init__(
        self, rank: int, size: int, store: Any, timeout: float, end: Callable[[str], None] | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.loss: LossReport | None = None
        self._end = end
        self._end_at = 0.0
        self._loss_known = threading.Event()
        self._suspended = 0.0  # seconds in which this process did not run
        self._progress = (0, STARTUP)  # operations started, the last one; one tuple, because two threads use it
        self._announcements: dict[str, str] = {}
        self._left = False
        self._interval = min(_HEARTBEAT_SECONDS, timeout / 20)
        self._next_report = 0.0  # no progress report before this time
        self._next_heartbeat = 0.0
        self._lock = threading.RLock()
        # Rank 0 watches everyone, the other ranks watch rank 0.
        watched = range(1, size) if rank == 0 else range(1)
        self._peers = {other: Peer(self.clock()) for other in watched}
        self._connections: dict[int, Connection] = {}
        self._server: RankServer | None = None
        generation = store.add(f"{_STORE_KEY}/{rank}", 1)  # all ranks create theirs in the same order
        key = f"{_STORE_KEY}/at/{generation}"
        if rank == 0:
            self._server = RankServer(size, store, key)
        else:
            self._connections[0] = connect_to_rank_0(rank, store, key, timeout)
            self._peers[0].last_heard = self.clock()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_receiver.setblocking(False)
        os.register_at_fork(after_in_child=_close_in_child(weakref.ref(self)))
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    # -- called by the training thread -------------------------------------------------------------

    def clock(self) -> float:
        """Seconds, not counting those in which this process itself was stopped or starved."""
        return time.monotonic() - self._suspended

    def report_progress(self, operation: str) -> None:
        """This rank starts an operation that all ranks take part in."""
        self._progress = (self._progress[0] + 1, operation)
        if time.monotonic() > self._next_report:  # otherwise the next heartbeat carries it
            self._send_heartbeat()

    def check(self) -> None:
        """Raise if a rank is lost."""
        if self.loss is not None:
            raise RankLost(self.loss.text, self.lost_rank)

    @property
    def lost_rank(self) -> int | None:
        """The rank that is lost, if any is."""
        return None if self.loss is None else self.loss.rank

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
            while key not in self._announcements and self.loss is None and time.monotonic() < deadline:
                time.sleep(0.005)
        return self._announcements.setdefault(key, text)

    def announced(self, key: str) -> str | None:
        return self._announcements.get(key)

    def leave(self, error: BaseException | None = None) -> None:
        """Say goodbye, and tell the others about an error.

        Without an error, rank 0 first waits for all others, because they talk through it, and raises if one of them is
        lost meanwhile.
        """
        if error is None and self.rank == 0:
            self._wait_for_others()
        if error is not None and self.loss is None:
            self._broadcast_error(error)
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
            if self.clock() > began + self.timeout:
                rank = remaining[0]
                self._declare(report_unfinished(rank, self._peers[rank], self.timeout), since=began)
            time.sleep(0.01)

    def _broadcast_error(self, error: BaseException) -> None:
        if isinstance(error, RankLost):  # this rank is not to blame, although no lost rank is known
            if self.rank == 0:
                self._declare(LossReport(None, str(error)))
            else:
                self._broadcast({"failed": str(error)})
            return
        if isinstance(error, StoppedInSetup):
            if self.rank == 0:
                self._declare_stopped(0)
            else:
                self._broadcast({"stopped": True})
            return
        text = f"{type(error).__name__}: {error}".strip(": ")
        if self.rank == 0:
            self._declare(report_error(0, text))
        else:
            self._broadcast({"leaving": text})

    def close(self) -> None:
        """Stop the thread without waiting for anyone."""
        self._left = True
        self._broadcast({"leaving": ""})
        self._wake_thread()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(OSError, ValueError):  # the sockets are closed while it uses them
            before = time.monotonic()
            while not self._left or self._has_unsent():
                handlers = self._wait_for_messages()
                now = time.monotonic()
                if now - before > self._interval + min(_SUSPENDED_SECONDS, self.timeout / 4):
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
        """What to call for each socket that can be read. Flushes those that can be written."""
        poll = select.poll()
        handlers: dict[int, Callable[[], None]] = {self._wake_receiver.fileno(): self._drain_wake_ups}
        poll.register(self._wake_receiver, select.POLLIN)
        if self._server is not None:
            handlers[self._server.fileno()] = self._accept_rank
            poll.register(self._server, select.POLLIN)
        writable: dict[int, Connection] = {}
        for rank, connection in list(self._connections.items()):
            handlers[connection.fileno()] = partial(self._receive, rank, connection)
            events = select.POLLIN
            if connection.has_unsent:
                events |= select.POLLOUT
                writable[connection.fileno()] = connection
            poll.register(connection, events)
        ready = []
        for number, event in poll.poll(1000 * self._interval):
            if event & select.POLLOUT:
                writable[number].flush()
            if event & ~select.POLLOUT:
                ready.append(handlers[number])
        return ready

    def _drain_wake_ups(self) -> None:
        with suppress(BlockingIOError):
            self._wake_receiver.recv(4096)

    def _accept_rank(self) -> None:
        assert self._server is not None
        accepted = self._server.accept(self._peers)
        if accepted is None:
            return
        rank, connection = accepted
        self._connections[rank] = connection
        self._peers[rank].last_heard = self.clock()
        for announcement in self._announcements.items():
            connection.send({"announce": announcement})
        if self.loss is not None:
            connection.send({"lost": [self.loss.rank, self.loss.text, self.loss.stopped, _GRACE_SECONDS]})

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
            peer.operations, peer.last_operation = content
        elif kind == "announce":
            key, text = content
            self._record_announcement(key, text)
            if self.rank == 0 and rank in self._connections:
                self._connections[rank].send({"announce": [key, self._announcements[key]]})
        elif kind == "lost":
            *report, seconds_left = content
            self._accept_verdict(LossReport(*report), seconds_left)
        elif kind == "timeout":
            number, operation = content
            self._declare_stragglers(number, operation)
        elif kind == "failed":
            self._declare(LossReport(None, content))
        elif kind == "leaving":
            peer.left = True
            if content:
                self._declare(report_error(rank, content))
        elif kind == "stopped":
            peer.left = True
            self._declare_stopped(rank)

    def _send_heartbeat(self) -> None:
        now = time.monotonic()
        self._next_report = now + min(_REPORT_PAUSE * self.size, self._interval)
        self._next_heartbeat = now + self._interval
        self._broadcast({"heartbeat": self._progress})

    def _check_peers(self) -> None:
        silent = find_silent(self._peers, self.clock(), self.timeout)
        if silent is not None:
            self._declare_silent(silent)
        if self.loss is not None and self._end is not None and not self._left and self.clock() > self._end_at:
            self._end(self.loss.text)

    # -- verdicts and announcements ----------------------------------------------------------------

    def _declare_silent(self, rank: int) -> None:
        peer = self._peers[rank]
        self._declare(report_silent(rank, peer, self.clock(), self.timeout), since=peer.last_heard)

    def _declare_stopped(self, rank: int) -> None:
        """A rank left during set-up. Nobody has anything to save, so all have to be gone soon."""
        self._declare(report_stopped(rank), since=-math.inf)

    def _declare_stragglers(self, number: int, operation: str) -> None:
        """On rank 0: an operation, the `number`-th one, timed out on some rank."""
        now = self.clock()
        silent = find_silent(self._peers, now, self.timeout / 2)
        if silent is not None:
            self._declare_silent(silent)
            return
        everyone = {0: Peer(now, *self._progress), **self._peers}
        self._declare(report_stragglers(everyone, number, operation, self.timeout), since=now - self.timeout)

    def _declare(self, report: LossReport, since: float | None = None) -> None:
        """The first loss is the cause. Later ones may be its effect and are ignored."""
        now = self.clock()
        if since is None:
            since = now
        seconds_left = max(since + self.timeout - now, _GRACE_SECONDS)
        with self._lock:
            if self.loss is None:
                self._broadcast({"lost": [report.rank, report.text, report.stopped, seconds_left]})
                self._accept_verdict(report, seconds_left)

    def _accept_verdict(self, report: LossReport, seconds_left: float) -> None:
        """From now on this process has `seconds_left` to exit by itself."""
        if self.loss is None:
            self._end_at = self.clock() + seconds_left
            self.loss = report
            self._loss_known.set()

    def _record_announcement(self, key: str, text: str) -> None:
        with self._lock:
            if self.rank == 0 and key not in self._announcements:
                self._broadcast({"announce": [key, text]})
            self._announcements.setdefault(key, text)
            while len(self._announcements) > _MAX_ANNOUNCEMENTS:
                oldest = next(iter(self._announcements))
                del self._announcements[oldest]

    # -- sockets -----------------------------------------------------------------------------------

    def _broadcast(self, message: Message) -> None:
        """Send to all ranks that this one is connected to."""
        for connection in list(self._connections.values()):
            connection.send(message)

    def _has_unsent(self) -> bool:
        return any(connection.has_unsent for connection in list(self._connections.values()))

    def _wake_thread(self) -> None:
        with suppress(OSError):
            self._wake_sender.send(b"!")

    def _close_sockets(self) -> None:
        with suppress(OSError):
            if self._server is not None:
                self._server.close()
            self._wake_sender.close()
            self._wake_receiver.close()
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
