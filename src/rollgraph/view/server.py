"""Serves the page. `rollgraph train --view` starts it as a process of its own, so that a step never waits for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO
from urllib.parse import quote

import uvicorn

from rollgraph.view.catalog import Catalog
from rollgraph.view.routes import make_app
from rollgraph.view.safety import Access

PORT = 7117
EVERY_ADDRESS = ("0.0.0.0", "::")
TRIES = 20  # ports after the first, if that is taken


def open_socket(host: str, port: int | None) -> socket.socket:
    """Listen at the port; without one, at the first that is free from PORT on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = range(PORT, PORT + TRIES) if port is None else [port]
    for number in ports:
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, number))
            found.listen(128)  # from now on, whoever knows the address is answered, if not at once
        except OSError:
            found.close()
            if number == ports[-1]:
                raise
            continue
        return found
    raise AssertionError("there is at least one port")


def address_of(access: Access) -> str:
    """What to open in a browser. A server that listens at every address is named after its machine."""
    name = socket.gethostname() if access.host in EVERY_ADDRESS else access.host
    host = f"[{name}]" if ":" in name else name
    return f"http://{host}:{access.port}/" + (f"?token={quote(access.token, safe='')}" if access.token else "")


def serve(folders: Sequence[Path], access: Access, listening: socket.socket, until: IO[bytes] | None = None) -> None:
    """Answer until Ctrl-C or SIGTERM, or until the end of a stream that its writer holds open."""
    app = make_app(Catalog(folders), access, lambda: server.should_exit)
    settings = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=3, lifespan="off", proxy_headers=False, server_header=False
    )
    server = uvicorn.Server(settings)

    def wait(stream: IO[bytes]) -> None:
        while stream.read(4096):
            pass
        server.should_exit = True

    if until is not None:
        threading.Thread(target=wait, args=(until,), daemon=True).start()
    with suppress(KeyboardInterrupt):  # which the server raises again once it has ended
        server.run(sockets=[listening])
