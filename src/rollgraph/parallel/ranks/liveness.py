"""Which ranks are alive: every rank sends heartbeats to rank 0, and all ranks name the one that is lost.

Owns one connection from each rank to rank 0 and a thread that serves it. It needs no collective and, once connected, no
store: it works even while collectives and the store hang.

- A process that dies closes its connection: the others know at once.
- A stopped process or a dead machine sends no heartbeats: the others know after `heartbeat_timeout`.
- A process that hangs does not reach the next collective: the others know after `timeout`.
- Whoever started the processes may learn of a loss first, and reports it with `report_lost`.

Rank 0 decides which rank is lost and tells all others, so that all ranks name the same one. Only the loss of rank 0
itself is detected by each rank on its own. `failures.py` has the reports, `connection.py` the sockets. Knows no tensors
and no process groups.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, ItemsView
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from rollgraph.parallel.ranks.connection import Alarm, Connection, Message, RankServer, connect_to_rank_0, wait_readable
from rollgraph.parallel.ranks.failures import (
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

# -- announcements ---------------------------------------------------------------------------------
# Texts that ranks have sent to all others, by key. The first text under a key is valid, and old keys are forgotten.

_MAX_KEYS = 100


class Announcements:
    """The announcements that one rank has seen."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def add(self, key: str, text: str) -> bool:
        """Remember an announcement. Returns whether it is the first one under its key."""
        is_first = key not in self._texts
        self._texts.setdefault(key, text)
        while len(self._texts) > _MAX_KEYS:
            del self._texts[next(iter(self._texts))]
        return is_first

    def first(self, key: str, text: str) -> str:
        """The first text under a key; `text` itself, if there is none yet."""
        self.add(key, text)
        return self._texts[key]

    def get(self, key: str) -> str | None:
        return self._texts.get(key)

    def items(self) -> ItemsView[str, str]:
        return self._texts.items()


# -- heartbeats ------------------------------------------------------------------------------------

_HEARTBEAT_SECONDS = 1.0  # the longest interval between two heartbeats
_SUSPENDED_SECONDS = 1.0  # a longer gap means that this process itself was suspended: the others are not to blame
_GRACE_SECONDS = 5.0  # for a process to exit by itself, even if its timeout has already passed
_STOPPING_SECONDS = 10.0  # the heartbeat time-out after a request to stop: torchrun kills its ranks 30 s after it
_POLL_PAUSE = 0.02  # seconds between two rounds of the liveness thread, to leave the CPU to the training thread
_REPORT_PAUSE = 0.005  # seconds between two progress reports, times the number of ranks
RANK_0 = "rollgraph/rank 0"  # the key of its address in the store


class Liveness:
    """The liveness check of one rank among `size`, on the machine `node`.

    `store` is that of torch.distributed; it is used once, to find rank 0 by `key`. `on_loss` is called at once when a
    rank is lost, by any thread. If the process is still alive when the timeout after a loss has passed, `exit_process`
    is called with the report.
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
        exit_process: Callable[[str], None] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.node = socket.gethostname() if node is None else node
        self.loss: LossReport | None = None
        self._heartbeat_timeout = min(timeout, heartbeat_timeout or timeout)
        self._on_loss = on_loss
        self._exit_process = exit_process
        self._exit_deadline = 0.0
        self._loss_known = threading.Event()
        self._suspended = 0.0  # seconds for which this process was suspended
        self._progress = (0, STARTUP)  # operations started, the last one; one tuple, because two threads use it
        self.phase = SETUP
        self._announcements = Announcements()
        self._is_closing = False
        self._interval = min(_HEARTBEAT_SECONDS, self._heartbeat_timeout / 20)
        self._next_report = 0.0  # no progress report before this time
        self._next_heartbeat = 0.0
        self._lock = threading.RLock()
        # Rank 0 watches everyone, the other ranks watch rank 0.
        watched = range(1, size) if rank == 0 else range(1)
        self._peers = {peer_rank: Peer(self.clock()) for peer_rank in watched}
        self._connections: dict[int, Connection] = {}
        self._server: RankServer | None = None
        if rank == 0:
            self._server = RankServer(size, store, key, self.node, attempt)
            self.token = self._server.token  # unique to this group of ranks
            self.attempt = attempt
        else:
            rank_0 = connect_to_rank_0(rank, store, key, timeout, self.node)
            self._add_peer(0, rank_0.node, rank_0.connection)
            self.token, self.attempt = rank_0.token, rank_0.attempt
        self.hosts = self._server.hosts if self._server else [self._connections[0].local_host]  # addresses of this rank
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
        """Monotonic seconds, not counting time this process was suspended or starved of CPU."""
        return time.monotonic() - self._suspended

    def report_progress(self, operation: str) -> None:
        """Record that this rank starts an operation in which all ranks take part."""
        self._progress = (self._progress[0] + 1, operation)
        if time.monotonic() > self._next_report:  # otherwise the next heartbeat carries it
            self._send_heartbeat()

    def enter_phase(self, phase: str) -> None:
        """Record that this rank enters a phase of the run, such as "generate"."""
        if phase != self.phase:
            self.phase = phase
            self._send_heartbeat()

    def check(self) -> None:
        """Raise if a rank is lost."""
        if self.loss is not None:
            raise RankLost(self.loss.text, self.loss)

    def report_lost(self, rank: int, reason: str) -> None:
        """For whoever started the ranks: a rank is lost, e.g. because its node is. May be called from any thread."""
        peer = self._peers.get(rank, Peer(self.clock()))
        self._declare(peer.report(rank, f"{peer.describe(rank)} is lost: {reason}"))

    def report_failure(self, error: BaseException) -> None:
        """Tell the others why this rank cannot go on. After this, no rank waits for another, including this one."""
        if self.loss is None:
            self._broadcast_error(error)

    def shorten_heartbeat_timeout(self) -> None:
        """The run was asked to stop: no longer wait so long for a rank that sends no heartbeats."""
        self._heartbeat_timeout = min(self._heartbeat_timeout, _STOPPING_SECONDS)

    @property
    def all_joined(self) -> bool:
        """On rank 0: whether every rank has connected."""
        return all(peer.connected for peer in self._peers.values())

    def wait_for_loss(self, seconds: float = 30.0) -> str:
        """After a failure: the report of a lost rank, if there is one within `seconds`; otherwise empty."""
        self._loss_known.wait(min(self.timeout, seconds))
        return "" if self.loss is None else self.loss.text

    def report_timeout(self, operation: str) -> str:
        """After an operation timed out on this rank: the report of a rank that did not reach it."""
        number, _ = self._progress
        if self.rank == 0:
            self._declare_stragglers(number, operation)
        else:
            self._send_heartbeat()  # otherwise this rank itself might seem to be behind
            self._broadcast({"timeout": [number, operation]})
        reason = self.wait_for_loss()
        return reason or f"{operation} did not complete within {self.timeout:g} s, and rank 0 does not say why"

    def announce(self, key: str, text: str) -> str:
        """Send a text to all ranks. Returns the text that is valid: the first one under this key at rank 0."""
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
        """Leave the other ranks, and tell them about an error.

        Without an error, all ranks leave together, rank 0 last, and raise if a rank is lost meanwhile. If a rank did
        not wait for the others, its exit would make `torchrun` end them.
        """
        if error is not None:
            self.report_failure(error)
        else:
            if self.rank != 0:
                self._broadcast({"leaving": True})
            self._wait_until_others_leave()
        self.close()
        self._thread.join(_GRACE_SECONDS)  # so that the last messages are sent, if possible
        if error is None:
            self.check()

    def _wait_until_others_leave(self) -> None:
        began = self.clock()
        while self.loss is None:
            remaining = [rank for rank, peer in self._peers.items() if not peer.has_left]
            if not remaining:
                return
            if self.rank == 0 and self.clock() > began + self.timeout:  # rank 0 itself may have more to write
                self._declare(
                    report_unfinished(remaining[0], self._peers[remaining[0]], self.timeout), timeout_started=began
                )
            time.sleep(0.01)

    def _broadcast_error(self, error: BaseException) -> None:
        report = report_failure(self.rank, Peer(self.clock(), *self._progress, self.phase, self.node), error)
        if self.rank == 0:
            self._declare_failure(report)
        else:
            self._broadcast({"failed": asdict(report)})
            self._accept_loss(report, self.timeout)

    def _declare_failure(self, report: LossReport) -> None:
        """On rank 0. If a rank was stopped during set-up, no rank has anything to save, so all have to exit soon."""
        self._declare(report, timeout_started=-math.inf if report.stopped else None)

    def close(self) -> None:
        """Stop the thread without waiting for other ranks."""
        self._is_closing = True
        self._broadcast({"leaving": True})
        self._alarm.ring()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(OSError, ValueError):  # the sockets were closed by another thread
            before = time.monotonic()
            while not self._is_closing or self._has_unsent():
                handlers = self._wait_for_messages()
                now = time.monotonic()
                if now - before > self._interval + min(_SUSPENDED_SECONDS, self._heartbeat_timeout / 4):
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
        """Wait for sockets that can be read. Returns the function to call for each."""
        handlers: dict[int, Callable[[], None]] = {self._alarm.fileno(): self._alarm.clear}
        if self._server is not None:
            handlers[self._server.fileno()] = self._accept_rank
        connections = dict(self._connections)
        for rank, connection in connections.items():
            handlers[connection.fileno()] = partial(self._receive, rank, connection)
        return [handlers[number] for number in wait_readable(handlers, connections.values(), self._interval)]

    def _accept_rank(self) -> None:
        assert self._server is not None
        # A rank that connects again belongs to the next attempt, and read the address of this attempt in the store.
        expected = [rank for rank, peer in self._peers.items() if not peer.connected and not self._is_closing]
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
            if not peer.has_left:
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
            report, seconds_to_exit = content
            self._accept_loss(LossReport(**report), seconds_to_exit)
        elif kind == "timeout":
            number, operation = content
            self._declare_stragglers(number, operation)
        elif kind == "failed":
            report = LossReport(**content)
            peer.has_left = peer.has_left or report.rank == rank
            self._declare_failure(report)
        elif kind == "leaving":
            peer.has_left = True

    def _send_heartbeat(self) -> None:
        now = time.monotonic()
        self._next_report = now + min(_REPORT_PAUSE * self.size, self._interval)
        self._next_heartbeat = now + self._interval
        self._broadcast({"heartbeat": [*self._progress, self.phase]})

    def _check_peers(self) -> None:
        silent = find_silent(self._peers, self.clock(), self._heartbeat_timeout, self.timeout)
        if silent is not None:
            self._declare_silent(silent)
        if (
            self.loss is not None
            and self._exit_process is not None
            and not self._is_closing
            and self.clock() > self._exit_deadline
        ):
            self._exit_process(self.loss.text)

    # -- declaring a loss, announcing --------------------------------------------------------------

    def _declare_silent(self, rank: int) -> None:
        peer = self._peers[rank]
        limit = self._heartbeat_timeout if peer.connected else self.timeout
        self._declare(report_silent(rank, peer, self.clock(), limit), timeout_started=peer.last_heard)

    def _declare_stragglers(self, number: int, operation: str) -> None:
        """On rank 0: the `number`-th operation timed out on some rank."""
        now = self.clock()
        silent = find_silent(self._peers, now, self._heartbeat_timeout / 2, self.timeout / 2)
        if silent is not None:
            self._declare_silent(silent)
            return
        all_peers = {0: Peer(now, *self._progress, self.phase, self.node), **self._peers}
        self._declare(report_stragglers(all_peers, number, operation, self.timeout), timeout_started=now - self.timeout)

    def _declare(self, report: LossReport, timeout_started: float | None = None) -> None:
        """Tell all ranks about a loss. Only the first counts: later ones may be its effects.

        Every rank must then exit by itself within `timeout` of `timeout_started` (None: now), but always gets
        `_GRACE_SECONDS`. After that, `exit_process` is called.
        """
        now = self.clock()
        if timeout_started is None:
            timeout_started = now
        seconds_to_exit = max(timeout_started + self.timeout - now, _GRACE_SECONDS)
        with self._lock:
            if self.loss is None:
                self._broadcast({"lost": [asdict(report), seconds_to_exit]})
                self._accept_loss(report, seconds_to_exit)

    def _accept_loss(self, report: LossReport, seconds_to_exit: float) -> None:
        """Record the loss. This process must exit by itself within `seconds_to_exit`."""
        if self.loss is None:
            self._exit_deadline = self.clock() + seconds_to_exit
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
    """A function for forked children, whose copies of connections would otherwise outlive the rank."""

    def close() -> None:
        liveness = reference()
        if liveness is not None:
            liveness._close_sockets()
            liveness._connections.clear()
            liveness._peers.clear()

    return close
