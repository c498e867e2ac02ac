"""TCP connections between rank 0 and all other ranks: JSON messages, one per line.

Owns the sockets. Rank 0 listens and publishes its address in the store of torch.distributed; the other ranks look it up
there and connect. Does not know what the messages mean.

The store may outlive the ranks: `torchrun` keeps it when it starts them again, and then the address in it is that of a
process that is dead, until the new rank 0 replaces it. So an address counts only once somebody answers there who knows
its token, and a rank that gets no answer looks the address up again.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
import uuid
from collections.abc import Container, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from rollgraph.distributed.lost_ranks import SETUP, LossReport, RankLost

HANDSHAKE_SECONDS = 5.0  # for each answer; afterwards the address is looked up again
_LONGEST_LINE = 1000  # bytes of a handshake
_RETRY_SECONDS = 0.1
LOCALHOST = "127.0.0.1"

Message = dict[str, Any]


class Connection:
    """JSON messages in both directions. Sending never blocks: what the socket does not take waits in a buffer."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)
        self._socket = connected
        self.local_host: str = connected.getsockname()[0]  # how the other side reaches this one
        self._lock = threading.RLock()
        self._received = b""  # the beginning of a message whose end has not arrived
        self._unsent = b""
        self._broken = False

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent) and not self._broken

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        with self._lock:
            self._unsent += json.dumps(message).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        with self._lock:
            try:
                while self.has_unsent:
                    sent = self._socket.send(self._unsent)
                    self._unsent = self._unsent[sent:]
            except BlockingIOError:
                pass
            except OSError:  # the reading side finds out why
                self._broken = True

    def receive(self) -> tuple[list[Message], bool]:
        """The messages that have arrived, and whether the other side has closed the connection."""
        closed = False
        try:
            while not closed:
                part = self._socket.recv(65536)
                self._received += part
                closed = not part
        except BlockingIOError:
            pass
        except OSError:
            closed = True
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines], closed

    def close(self) -> None:
        self._socket.close()


class Alarm:
    """Wakes up a thread that waits for sockets."""

    def __init__(self) -> None:
        self._sender, self._receiver = socket.socketpair()
        self._receiver.setblocking(False)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def ring(self) -> None:
        with suppress(OSError):
            self._sender.send(b"!")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            self._receiver.recv(4096)

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


def wait_readable(numbers: Iterable[int], connections: Iterable[Connection], seconds: float) -> list[int]:
    """The sockets, by their numbers, that can be read within so many seconds. Flushes what can be written meanwhile."""
    poll = select.poll()
    for number in numbers:
        poll.register(number, select.POLLIN)
    waiting = {connection.fileno(): connection for connection in connections if connection.has_unsent}
    for number in waiting:
        poll.modify(number, select.POLLIN | select.POLLOUT)
    readable = []
    for number, event in poll.poll(1000 * seconds):
        if event & select.POLLOUT:
            waiting[number].flush()
        if event & ~select.POLLOUT:
            readable.append(number)
    return readable


class RankServer:
    """Rank 0's listening socket. Only a process that read the token from the store may connect."""

    def __init__(self, size: int, store: Any, key: str, node: str, attempt: int) -> None:
        self.token = uuid.uuid4().hex
        self._about_me = {"node": node, "attempt": attempt}
        master = os.environ.get("MASTER_ADDR", "")
        local = master == "localhost" or master.startswith("127.")
        if local:
            self.hosts = [LOCALHOST]
            self._socket = socket.create_server((LOCALHOST, 0), backlog=size)
        else:
            self.hosts = list(dict.fromkeys(host for host in (master, node, socket.gethostname()) if host))
            self._socket = listen_everywhere(size)
        address = {"port": self.port, "hosts": self.hosts, "machine": machine_id(), "token": self.token}
        store.set(key, json.dumps(address))

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self, expected: Container[int]) -> tuple[int, str, Connection] | None:
        """Accept the connection of one of the `expected` ranks: its number and its node; None of any other.

        A rank that no longer waits for the answer, because this process was slow, has not joined: it tries again.
        """
        connected, _ = self._socket.accept()
        with suppress(OSError, ValueError, TypeError, KeyError):
            connected.settimeout(HANDSHAKE_SECONDS)
            hello = read_line(connected)
            if hello["token"] == self.token and hello["rank"] in expected:
                send_line(connected, self._about_me)
                if read_line(connected)["joined"]:
                    return hello["rank"], str(hello["node"]), Connection(connected)
        connected.close()
        return None

    def close(self) -> None:
        self._socket.close()


def send_line(connected: socket.socket, message: Message) -> None:
    connected.sendall(json.dumps(message).encode() + b"\n")


def read_line(connected: socket.socket) -> Message:
    """One line of a handshake, byte by byte: what follows it belongs to the Connection."""
    line = b""
    while not line.endswith(b"\n"):
        part = connected.recv(1)
        if not part or len(line) > _LONGEST_LINE:
            raise ConnectionError("the connection was closed")
        line += part
    message: Message = json.loads(line)
    return message


def listen_everywhere(size: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=size)
    return socket.create_server(("", 0), backlog=size)


class Rank0(NamedTuple):
    """The connection of another rank to rank 0."""

    connection: Connection
    token: str  # the same for all ranks that are connected to this process, and for no others
    node: str
    attempt: int  # its number, as rank 0 counts


def connect_to_rank_0(rank: int, store: Any, key: str, timeout: float, node: str) -> Rank0:
    """Connect to the address that rank 0 published in the store, as soon as there is one where it answers."""
    deadline = time.monotonic() + timeout
    reason = ""
    while True:
        try:
            address = json.loads(store.get(key))
        except RuntimeError as error:
            raise rank_0_silent(rank, timeout, first_line(error)) from error
        hosts = [LOCALHOST] if address["machine"] == machine_id() else address["hosts"]
        for host in hosts:
            try:
                patience = min(HANDSHAKE_SECONDS, max(0.1, deadline - time.monotonic()))
                return _connect(host, address, {"rank": rank, "node": node}, patience)
            except (OSError, ValueError, TypeError, KeyError) as error:
                reason = f"{host} port {address['port']}: {error}"
        if time.monotonic() > deadline:
            raise rank_0_silent(rank, timeout, reason)
        time.sleep(_RETRY_SECONDS)


def _connect(host: str, address: Message, about_me: Message, timeout: float) -> Rank0:
    connected = socket.create_connection((host, address["port"]), timeout)
    try:
        send_line(connected, {"token": address["token"], **about_me})
        welcome = read_line(connected)
        found = str(welcome["node"]), int(welcome["attempt"])
        send_line(connected, {"joined": True})
        return Rank0(Connection(connected), address["token"], *found)
    except BaseException:
        connected.close()
        raise


def rank_0_silent(rank: int, timeout: float, reason: str) -> RankLost:
    text = f"rank {rank}: rank 0 did not respond within {timeout:g} s: {reason}"
    return RankLost(text, LossReport(0, text, phase=SETUP))


def first_line(error: BaseException) -> str:
    """A summary of an error of PyTorch, whose text goes on with a C++ stack trace."""
    return str(error).strip().partition("\n")[0]


def machine_id() -> str:
    """The same for all processes that can reach each other at 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()
