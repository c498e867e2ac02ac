"""TCP connections between rank 0 and all other ranks: JSON messages, one per line.

Owns the sockets. Rank 0 listens and publishes its address in the store of torch.distributed; the other ranks look it up
there and connect. Does not know what the messages mean.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Container
from contextlib import suppress
from typing import Any

from rollgraph.distributed.lost_ranks import RankLost

_HANDSHAKE_SECONDS = 5.0
_RETRY_SECONDS = 0.1
_LOCALHOST = "127.0.0.1"

Message = dict[str, Any]


class Connection:
    """JSON messages in both directions. Sending never blocks: what the socket does not take waits in a buffer."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)
        self._socket = connected
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


class RankServer:
    """Rank 0's listening socket. Only a process that read the token from the store may connect."""

    def __init__(self, size: int, store: Any, key: str) -> None:
        self._token = uuid.uuid4().hex
        master = os.environ.get("MASTER_ADDR", "")
        local = master == "localhost" or master.startswith("127.")
        if local:
            hosts = [_LOCALHOST]
            self._socket = socket.create_server((_LOCALHOST, 0), backlog=size)
        else:
            hosts = [host for host in (master, socket.gethostname()) if host]
            self._socket = _listen_everywhere(size)
        address = {"port": self.port, "hosts": hosts, "machine": _machine_id(), "token": self._token}
        store.set(key, json.dumps(address))

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self, ranks: Container[int]) -> tuple[int, Connection] | None:
        """Accept one connection; None if it did not come from one of `ranks`."""
        connected, _ = self._socket.accept()
        with suppress(OSError, ValueError, TypeError, KeyError):
            connected.settimeout(_HANDSHAKE_SECONDS)
            with connected.makefile("rb") as file:  # nothing follows this line until it is answered
                hello = json.loads(file.readline(1000))
            if hello["token"] == self._token and hello["rank"] in ranks:
                connection = Connection(connected)
                connection.send({"welcome": True})
                return hello["rank"], connection
        connected.close()
        return None

    def close(self) -> None:
        self._socket.close()


def _listen_everywhere(size: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=size)
    return socket.create_server(("", 0), backlog=size)


def connect_to_rank_0(rank: int, store: Any, key: str, timeout: float) -> Connection:
    """Connect to the address that rank 0 published in the store."""
    deadline = time.monotonic() + timeout
    try:
        address = json.loads(store.get(key))
    except RuntimeError as error:
        raise rank_0_silent(rank, timeout, first_line(error)) from error
    hosts = address["hosts"]
    if address["machine"] == _machine_id():
        hosts = [_LOCALHOST]
    while True:
        for host in hosts:
            try:
                return _connect(host, address, rank, max(0.1, deadline - time.monotonic()))
            except (OSError, ValueError) as error:
                reason = f"{host} port {address['port']}: {error}"
        if time.monotonic() > deadline:
            raise rank_0_silent(rank, timeout, reason)
        time.sleep(_RETRY_SECONDS)


def _connect(host: str, address: Message, rank: int, timeout: float) -> Connection:
    connected = socket.create_connection((host, address["port"]), timeout)
    try:
        hello = {"token": address["token"], "rank": rank}
        connected.sendall(json.dumps(hello).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):  # byte by byte: what follows belongs to the Connection
            part = connected.recv(1)
            if not part:
                raise ConnectionError("rank 0 closed the connection")
            answer += part
        return Connection(connected)
    except BaseException:
        connected.close()
        raise


def rank_0_silent(rank: int, timeout: float, reason: str) -> RankLost:
    return RankLost(f"rank {rank}: rank 0 did not respond within {timeout:g} s: {reason}", lost_rank=0)


def first_line(error: BaseException) -> str:
    """A summary of an error of PyTorch, whose text goes on with a C++ stack trace."""
    return str(error).strip().partition("\n")[0]


def _machine_id() -> str:
    """The same for all processes that can reach each other at 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()
