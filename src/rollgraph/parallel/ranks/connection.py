"""TCP connections between rank 0 and all other ranks: JSON messages, one per line.

Owns the sockets. Rank 0 listens and publishes its address in the store of torch.distributed. The other ranks read it
and connect. Knows nothing about the content of messages.

The store may outlive the ranks: `torchrun` keeps it across restarts. Until the new rank 0 publishes its own address,
the store still has that of a dead process. So an address is valid only once a process that knows its token answers
there. A rank that gets no answer reads the address again.
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

from rollgraph.parallel.ranks.failures import SETUP, LossReport, RankLost

HANDSHAKE_SECONDS = 5.0  # time-out of each answer; after it the address is read again
_MAX_LINE_BYTES = 1000  # of a handshake
_RETRY_SECONDS = 0.1
LOCALHOST = "127.0.0.1"

Message = dict[str, Any]


class Connection:
    """JSON messages in both directions. Sending never blocks: bytes that the socket cannot take wait in a buffer."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._socket = sock
        self.local_host: str = sock.getsockname()[0]  # the address at which the other side reaches this process
        self._lock = threading.RLock()
        self._received = b""  # the start of a message that has not arrived completely
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
            except OSError:  # receive() finds out why
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
    """Wakes up a thread that waits in `wait_readable`."""

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


def wait_readable(fds: Iterable[int], connections: Iterable[Connection], seconds: float) -> list[int]:
    """The file descriptors that become readable within `seconds`. Flushes connections that can be written meanwhile."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    waiting = {connection.fileno(): connection for connection in connections if connection.has_unsent}
    for fd in waiting:
        poll.modify(fd, select.POLLIN | select.POLLOUT)
    readable = []
    for fd, event in poll.poll(1000 * seconds):
        if event & select.POLLOUT:
            waiting[fd].flush()
        if event & ~select.POLLOUT:
            readable.append(fd)
    return readable


class RankServer:
    """Rank 0's listening socket. Only processes that have read the token from the store may connect."""

    def __init__(self, size: int, store: Any, key: str, node: str, attempt: int) -> None:
        self.token = uuid.uuid4().hex
        self._identity = {"node": node, "attempt": attempt}
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
        """Accept a connection. Returns rank, node and connection if it is one of the `expected` ranks, otherwise None.

        If this process was slow, the rank may no longer wait for the answer. Then it has not joined, and tries again.
        """
        sock, _ = self._socket.accept()
        with suppress(OSError, ValueError, TypeError, KeyError):
            sock.settimeout(HANDSHAKE_SECONDS)
            hello = read_line(sock)
            if hello["token"] == self.token and hello["rank"] in expected:
                send_line(sock, self._identity)
                if read_line(sock)["joined"]:
                    return hello["rank"], str(hello["node"]), Connection(sock)
        sock.close()
        return None

    def close(self) -> None:
        self._socket.close()


def send_line(sock: socket.socket, message: Message) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")


def read_line(sock: socket.socket) -> Message:
    """Read one line of a handshake, byte by byte: the bytes after it belong to the Connection."""
    line = b""
    while not line.endswith(b"\n"):
        part = sock.recv(1)
        if not part or len(line) > _MAX_LINE_BYTES:
            raise ConnectionError("the connection was closed")
        line += part
    message: Message = json.loads(line)
    return message


def listen_everywhere(size: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=size)
    return socket.create_server(("", 0), backlog=size)


class Rank0Connection(NamedTuple):
    """A rank's connection to rank 0."""

    connection: Connection
    token: str  # unique to this rank 0 and shared by all ranks that are connected to it
    node: str
    attempt: int  # the number of the attempt, as rank 0 counts it


def connect_to_rank_0(rank: int, store: Any, key: str, timeout: float, node: str) -> Rank0Connection:
    """Connect to rank 0 at the address in the store. Tries again until rank 0 answers or `timeout` seconds are over."""
    deadline = time.monotonic() + timeout
    reason = ""
    while True:
        try:
            address = json.loads(store.get(key))
        except RuntimeError as error:
            raise rank_0_unreachable(rank, timeout, first_line(error)) from error
        hosts = [LOCALHOST] if address["machine"] == machine_id() else address["hosts"]
        for host in hosts:
            try:
                seconds = min(HANDSHAKE_SECONDS, max(0.1, deadline - time.monotonic()))
                return _connect(host, address, {"rank": rank, "node": node}, seconds)
            except (OSError, ValueError, TypeError, KeyError) as error:
                reason = f"{host} port {address['port']}: {error}"
        if time.monotonic() > deadline:
            raise rank_0_unreachable(rank, timeout, reason)
        time.sleep(_RETRY_SECONDS)


def _connect(host: str, address: Message, identity: Message, timeout: float) -> Rank0Connection:
    sock = socket.create_connection((host, address["port"]), timeout)
    try:
        send_line(sock, {"token": address["token"], **identity})
        welcome = read_line(sock)
        node_and_attempt = str(welcome["node"]), int(welcome["attempt"])
        send_line(sock, {"joined": True})
        return Rank0Connection(Connection(sock), address["token"], *node_and_attempt)
    except BaseException:
        sock.close()
        raise


def rank_0_unreachable(rank: int, timeout: float, reason: str) -> RankLost:
    text = f"rank {rank}: rank 0 did not respond within {timeout:g} s: {reason}"
    return RankLost(text, LossReport(0, text, phase=SETUP))


def first_line(error: BaseException) -> str:
    """The first line of a PyTorch error, whose text may go on with a C++ stack trace."""
    return str(error).strip().partition("\n")[0]


def machine_id() -> str:
    """An id shared by all processes that can reach each other at 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()
