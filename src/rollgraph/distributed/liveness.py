"""Which ranks are there: every rank says so, beside its work, and one that stops doing so is named by all others.

Owns a connection of each rank to rank 0, and a thread that reads it. It needs no collective and, once it stands, no
store, so it works while both are stuck. A process that ends without a word closes its connection: that is known at
once. One that is stopped stays silent, and one that is stuck does not come to a collective: these are known after the
time-out. What is found is said once, by rank 0 to all, so that all name the same rank; only if rank 0 itself is lost
does each find that by itself. Knows neither tensors nor process groups.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_TICK = 1.0  # seconds between two signs of life, at most
_AWAY = 1.0  # seconds that this process was not running, after which it does not hold the silence against others
_MOMENT = 5.0  # seconds that a process has to end by itself, where its time-out is over already
_PAUSE = 0.02  # seconds between two looks at the connections: the work comes first
_APART = 0.005  # seconds for each rank that are between two reports of progress
_KEPT = 100  # messages of `post`
_STORE_KEY = "rollgraph/liveness"


class RankLost(RuntimeError):
    """A rank is gone, stopped or stuck; says which one, and what it did last."""


@dataclass(frozen=True)
class Loss:
    """What was found, e.g. Loss(1, "rank 1 got no further than a comparison, and is gone without a word")."""

    rank: int | None  # None: something failed, and all ranks are there
    text: str


@dataclass
class _Seen:
    """What is known of another rank."""

    heard: float  # when it gave the last sign of life
    line: _Line | None = None
    count: int = 0  # of the collectives that it has begun
    what: str = "its start"
    left: bool = False  # it said so


class Liveness:
    """The presence of `size` ranks, of which this is one.

    `store` is that of torch.distributed, used to find rank 0 and not again. With `end`, a process that has not left
    when the time-out after a loss is over is ended by calling it with what was found.
    """

    def __init__(
        self, rank: int, size: int, store: Any, timeout: float, end: Callable[[str], None] | None = None
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.loss: Loss | None = None
        self._end, self._deadline = end, 0.0
        self._known = threading.Event()
        self._away = 0.0
        self._progress = (0, "its start")
        self._board: dict[str, str] = {}
        self._left = False
        self._tick = min(_TICK, timeout / 20)
        self._server: socket.socket | None = None
        self._lock = threading.RLock()
        self._ranks = {other: _Seen(self.clock()) for other in self._watched()}
        turn = store.add(f"{_STORE_KEY}/{rank}", 1)  # all ranks make theirs in the same order
        key = f"{_STORE_KEY}/at/{turn}"
        if rank == 0:
            self._open(store, key)
        else:
            self._ranks[0].line = _find_rank_0(rank, store, key, timeout)
            self._ranks[0].heard = self.clock()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._beat_after = self._beat_before = 0.0
        os.register_at_fork(after_in_child=_let_go(weakref.ref(self)))
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    # -- for the thread that works -----------------------------------------------------------------

    def clock(self) -> float:
        """Seconds, without those in which this process itself was stopped or starved."""
        return time.monotonic() - self._away

    def note(self, what: str) -> None:
        """This rank begins something that all ranks do."""
        self._progress = (self._progress[0] + 1, what)
        if time.monotonic() > self._beat_after:  # else with the next sign of life
            self._beat()

    def check(self) -> None:
        """Raise if a rank is lost."""
        if self.loss is not None:
            raise RankLost(self.loss.text)

    def explain(self, patience: float = 30.0) -> str:
        """After something failed: who is lost, if that turns out soon; else nothing."""
        self._known.wait(min(self.timeout, patience))
        return self.loss.text if self.loss is not None else ""

    def late(self, what: str) -> str:
        """After this rank waited for the whole time-out: who did not come."""
        count = self._progress[0]
        if self.rank == 0:
            self._find_behind(count, what)
        else:
            self._beat()  # or this rank itself might seem to be behind
            self._tell_all({"late": [count, what]})
        return self.explain() or f"{what} did not end within {self.timeout:g} s, and rank 0 does not say why"

    def post(self, key: str, text: str) -> str:
        """Tell all ranks. The first word on a key stands, and is what is given back: that of rank 0's board."""
        if self.rank == 0:
            self._put_up(key, text)
        else:
            self._tell_all({"post": [key, text]})
            end = time.monotonic() + _MOMENT
            while key not in self._board and self.loss is None and time.monotonic() < end:
                time.sleep(0.005)
        return self._board.setdefault(key, text)

    def posted(self, key: str) -> str | None:
        return self._board.get(key)

    def leave(self, error: BaseException | None = None) -> None:
        """Say goodbye. The others are told of an error. Without one, rank 0 waits for all others, because it is who
        they talk to, and raises if one of them is lost on the way."""
        if error is None and self.rank == 0:
            self._wait_for_others()
        if error is not None and self.loss is None:
            self._tell_of(error)
        self.close()
        self._drain()
        if error is None:
            self.check()

    def _wait_for_others(self) -> None:
        deadline = self.clock() + self.timeout
        while self.loss is None and not all(seen.left for seen in self._ranks.values()):
            if self.clock() > deadline:
                other, seen = next((other, seen) for other, seen in self._ranks.items() if not seen.left)
                late = f"{_further(other, seen)}, and did not end within {self.timeout:g} s of rank 0"
                self._found(other, late, since=deadline - self.timeout)
            time.sleep(0.01)

    def _tell_of(self, error: BaseException) -> None:
        if isinstance(error, RankLost):  # and nobody is known to be: it is no fault of this rank
            self._tell_all({"failed": str(error)}) if self.rank else self._found(None, str(error))
            return
        reason = f"{type(error).__name__}: {error}".strip(": ")
        self._tell_all({"bye": reason}) if self.rank else self._found(0, f"rank 0 ended with an error, {reason}")

    def close(self) -> None:
        """Stop listening, without waiting for anybody."""
        self._left = True
        self._tell_all({"bye": ""})
        self._stir()

    # -- the other thread --------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(OSError, ValueError):  # the sockets are closed under it
            before = time.monotonic()
            while not self._left or self._unsent():
                ready = self._select()
                now = time.monotonic()
                if now - before > self._tick + min(_AWAY, self.timeout / 4):
                    self._away += now - before
                before = now
                for source in ready:
                    self._read(source)
                if now > self._beat_before:
                    self._beat()
                self._judge()
                time.sleep(_PAUSE)
        self._hang_up()

    def _select(self) -> list[Any]:
        """What can be read, as soon as there is something."""
        sources: dict[int, Any] = {self._woken.fileno(): self._woken}
        if self._server is not None:
            sources[self._server.fileno()] = self._server
        poll = select.poll()
        for source in sources:
            poll.register(source, select.POLLIN)
        for line in self._lines():
            sources[line.fileno()] = line
            poll.register(line, select.POLLIN | (select.POLLOUT if line.waiting else 0))
        ready = []
        for number, event in poll.poll(1000 * self._tick):
            if event & select.POLLOUT:
                sources[number].flush()
            if event & ~select.POLLOUT:
                ready.append(sources[number])
        return ready

    def _lines(self) -> list[_Line]:
        return [seen.line for seen in self._ranks.values() if seen.line is not None]

    def _unsent(self) -> bool:
        return any(line.waiting for line in self._lines())

    def _read(self, source: Any) -> None:
        if source is self._woken:
            with suppress(BlockingIOError):
                self._woken.recv(4096)
        elif source is self._server:
            self._welcome()
        else:
            other = next(other for other, seen in self._ranks.items() if seen.line is source)
            self._listen(other, self._ranks[other], source)

    def _welcome(self) -> None:
        """A rank comes; or a stranger, who does not know the token."""
        assert self._server is not None
        connection, _ = self._server.accept()
        with suppress(OSError, ValueError, TypeError, KeyError):
            connection.settimeout(_MOMENT)
            with connection.makefile("rb") as file:  # it says nothing more until it is answered
                said = json.loads(file.readline(1000))
            if said["token"] == self._token and said["rank"] in self._ranks:
                seen = self._ranks[said["rank"]]
                seen.line, seen.heard = _Line(connection), self.clock()
                seen.line.send({"welcome": True})
                for post in self._board.items():
                    seen.line.send({"post": post})
                if self.loss is not None:
                    seen.line.send({"lost": [self.loss.rank, self.loss.text, _MOMENT]})
                return
        connection.close()

    def _listen(self, other: int, seen: _Seen, line: _Line) -> None:
        messages, over = line.receive()
        if messages:
            seen.heard = self.clock()
        for message in messages:
            for kind, content in message.items():
                self._take(other, seen, kind, content)
        if over:
            seen.line = None
            line.close()
            if not seen.left:
                self._found(other, f"{_further(other, seen)}, and is gone without a word")

    def _take(self, other: int, seen: _Seen, kind: str, content: Any) -> None:
        if kind == "beat":
            seen.count, seen.what = content
        elif kind == "post":
            key, text = content
            self._put_up(key, text)
            if self.rank == 0 and seen.line is not None:
                seen.line.send({"post": [key, self._board[key]]})
        elif kind == "lost":
            rank, text, left = content
            self._settle(Loss(rank, text), left)
        elif kind == "late":
            self._find_behind(*content)
        elif kind == "failed":
            self._found(None, content)
        elif kind == "bye":
            seen.left = True
            if content:
                self._found(other, f"rank {other} ended with an error, {content}")

    def _beat(self) -> None:
        """A sign of life, with how far this rank got."""
        now = time.monotonic()
        self._beat_after, self._beat_before = now + min(_APART * self.size, self._tick), now + self._tick
        self._tell_all({"beat": self._progress})

    def _judge(self) -> None:
        now = self.clock()
        for other, seen in self._ranks.items():
            if not seen.left and now - seen.heard > self.timeout:
                self._found_silent(other)
        if self.loss is not None and self._end is not None and not self._left and now > self._deadline:
            self._end(self.loss.text)

    # -- what is found -----------------------------------------------------------------------------

    def _find_behind(self, count: int, what: str) -> None:
        """Rank 0 is asked who did not come to the collective with this number."""
        now = self.clock()
        quiet = [other for other, seen in self._ranks.items() if now - seen.heard > self.timeout / 2 and not seen.left]
        if quiet:
            self._found_silent(quiet[0])
            return
        everyone = {0: _Seen(now, None, *self._progress), **self._ranks}
        least = min(seen.count for seen in everyone.values())
        behind = [other for other, seen in everyone.items() if seen.count == least < count]
        since = now - self.timeout
        if not behind:
            text = f"{what} did not end within {self.timeout:g} s, though all ranks have begun it: is the network down?"
            self._found(None, text, since)
            return
        said = "; ".join(_further(other, everyone[other]) for other in behind)
        self._found(behind[0], f"{said}, and did not come to {what} within {self.timeout:g} s", since)

    def _found_silent(self, other: int) -> None:
        seen = self._ranks[other]
        seconds = min(self.timeout, self.clock() - seen.heard)
        text = f"{_further(other, seen)}, and has given no sign of life for {seconds:.3g} s"
        self._found(other, text, since=seen.heard)

    def _found(self, rank: int | None, text: str, since: float | None = None) -> None:
        """The first one to be found is the cause; what comes after it may be its effect."""
        now = self.clock()
        left = max((now if since is None else since) + self.timeout - now, _MOMENT)
        with self._lock:
            if self.loss is None:
                self._tell_all({"lost": [rank, text, left]})
                self._settle(Loss(rank, text), left)

    def _settle(self, loss: Loss, left: float) -> None:
        """From now on this process has so many seconds to end by itself."""
        if self.loss is None:
            self._deadline = self.clock() + left
            self.loss = loss
            self._known.set()

    def _put_up(self, key: str, text: str) -> None:
        with self._lock:
            if self.rank == 0 and key not in self._board:
                self._tell_all({"post": [key, text]})
            self._board.setdefault(key, text)
            while len(self._board) > _KEPT:
                del self._board[next(iter(self._board))]

    # -- the connections ---------------------------------------------------------------------------

    def _watched(self) -> list[int]:
        """Rank 0 hears everybody, the others hear rank 0."""
        return list(range(1, self.size)) if self.rank == 0 else [0]

    def _open(self, store: Any, key: str) -> None:
        self._token = uuid.uuid4().hex
        master = os.environ.get("MASTER_ADDR", "")
        local = master == "localhost" or master.startswith("127.")
        if local or not socket.has_dualstack_ipv6():
            self._server = socket.create_server(("127.0.0.1" if local else "", 0), backlog=self.size)
        else:
            self._server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=self.size)
        port = self._server.getsockname()[1]
        names = ["127.0.0.1"] if local else [name for name in (master, socket.gethostname()) if name]
        store.set(key, json.dumps({"port": port, "names": names, "machine": _machine(), "token": self._token}))

    def _tell_all(self, message: dict[str, Any]) -> None:
        for line in self._lines():
            line.send(message)

    def _stir(self) -> None:
        with suppress(OSError):
            self._wake.send(b"!")

    def _drain(self) -> None:
        """What was said is on its way, or it cannot be helped."""
        self._thread.join(_MOMENT)

    def _hang_up(self) -> None:
        with suppress(OSError):
            if self._server is not None:
                self._server.close()
            self._wake.close()
            self._woken.close()
            for line in self._lines():
                line.close()


class _Line:
    """A connection: JSON, a line each, both ways. Sending never waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._connection, self._lock = connection, threading.RLock()
        self._in, self._out = b"", b""
        self._broken = False

    @property
    def waiting(self) -> bool:
        return bool(self._out) and not self._broken

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._out += json.dumps(message).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        with self._lock:
            try:
                while self.waiting:
                    sent = self._connection.send(self._out)
                    self._out = self._out[sent:]
            except BlockingIOError:
                pass
            except OSError:  # whoever reads finds out why
                self._broken = True

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """What has arrived, and whether nothing more will."""
        over = False
        try:
            while not over:
                part = self._connection.recv(65536)
                self._in += part
                over = not part
        except BlockingIOError:
            pass
        except OSError:
            over = True
        *lines, self._in = self._in.split(b"\n")
        return [json.loads(line) for line in lines], over

    def close(self) -> None:
        self._connection.close()


def _find_rank_0(rank: int, store: Any, key: str, timeout: float) -> _Line:
    """Connect to rank 0, where it said in the store that it is."""
    deadline = time.monotonic() + timeout
    try:
        where = json.loads(store.get(key))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RankLost(f"rank {rank}: rank 0 did not come within {timeout:g} s: {reason}") from error
    names = ["127.0.0.1"] if where["machine"] == _machine() else where["names"]
    while True:
        for name in names:
            try:
                return _call(name, where, rank, max(0.1, deadline - time.monotonic()))
            except (OSError, ValueError) as error:
                reason = f"{name} port {where['port']}: {error}"
        if time.monotonic() > deadline:
            raise RankLost(f"rank {rank}: rank 0 did not answer within {timeout:g} s: {reason}")
        time.sleep(0.1)


def _call(name: str, where: dict[str, Any], rank: int, timeout: float) -> _Line:
    connection = socket.create_connection((name, where["port"]), timeout)
    try:
        connection.sendall(json.dumps({"token": where["token"], "rank": rank}).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):  # a byte at a time: what follows is for the line
            part = connection.recv(1)
            if not part:
                raise ConnectionError("it closed the connection")
            answer += part
        return _Line(connection)
    except BaseException:
        connection.close()
        raise


def _further(other: int, seen: _Seen) -> str:
    return f"rank {other} got no further than {seen.what}"


def _machine() -> str:
    """The same for processes that reach each other at 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()


def _let_go(liveness: weakref.ref[Liveness]) -> Callable[[], None]:
    """In a forked child: else its connection would outlive the rank."""

    def let_go() -> None:
        found = liveness()
        if found is not None:
            found._hang_up()
            found._ranks.clear()

    return let_go
