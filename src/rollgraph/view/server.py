"""The dashboard's web server: access control, routes, and server-sent events when a run has grown.

`rollgraph train --view` runs it in a separate process, so that a training step never waits for it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollgraph.view import answers
from rollgraph.view.answers import Answer, BadRequest, NotFound, QueryParams
from rollgraph.view.export import STATIC
from rollgraph.view.runs import Catalog, RunData, UnknownRun

# -- access control --------------------------------------------------------------------------------
# A malicious web page can make a browser send requests to this machine, even under the attacker's own host name (DNS
# rebinding). So requests must name a host of this server, must not come from another origin, and can only read. A
# server that other machines can reach also requires a token.

COOKIE = "rollgraph_token_"  # the port follows, because a browser shares cookies between all ports of a host
LOCAL = ("localhost", "127.0.0.1", "::1")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def is_local(host: str) -> bool:
    """Whether a server that listens at this host can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """Where the server listens, and the token that requests need; "" means no token."""

    host: str
    port: int
    token: str = ""

    def allows_host(self, header: str) -> bool:
        """Whether the Host header names this server: this machine or, with a token, any host.

        Without a token, foreign names are refused even if they resolve to this machine (DNS rebinding).
        """
        name = split_host(header)
        if name is None:
            return False
        return name in LOCAL or name == self.host or bool(self.token)

    def allows_origin(self, origin: str | None, host: str) -> bool:
        if origin is None:
            return True
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.netloc == host

    @property
    def cookie(self) -> str:
        return f"{COOKIE}{self.port}"

    def accepts_token(self, token: str) -> bool:
        return secrets.compare_digest(token.encode("utf-8", "replace"), self.token.encode())


def split_host(header: str) -> str | None:
    """The host in a Host header, without its port; None if there is none."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


class RequestGuard:
    """Middleware that refuses requests without access, and adds the security headers to every response."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refuse(Request(scope))
        answer: Callable[[Scope, Receive, Send], Awaitable[None]] = refusal or self._app
        await answer(scope, receive, send_with_headers)

    def _refuse(self, request: Request) -> Response | None:
        """The error response for a request that is not allowed; None for one that is."""
        host = request.headers.get("host", "")
        if request.method not in ("GET", "HEAD"):
            return _error_response(405, "this server only shows runs: use GET")
        if not self._access.allows_host(host):
            return _error_response(421, "this server has another name: open it by its address, or with --token")
        if not self._access.allows_origin(request.headers.get("origin"), host):
            return _error_response(403, "the request comes from a page of another origin")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and _is_data(request):
            return _error_response(403, "the request comes from a page of another site")
        return self._require_token(request)

    def _require_token(self, request: Request) -> Response | None:
        """Refuse requests without the token. The page exchanges it for a cookie, so that it leaves the address bar."""
        if not self._access.token:
            return None
        token = request.query_params.get("token")
        if token is not None and self._access.accepts_token(token):
            if _is_data(request):
                return None
            answer = RedirectResponse("./", 303)
            # Lax, so that links on other sites work.
            answer.set_cookie(self._access.cookie, token, httponly=True, samesite="lax")
            return answer
        if self._access.accepts_token(request.cookies.get(self._access.cookie, "")):
            return None
        return _error_response(401, "open the address with ?token=, as `rollgraph view` printed it")


def _is_data(request: Request) -> bool:
    return request.url.path != "/"


def _error_response(status: int, why: str) -> Response:
    return JSONResponse({"error": why, "notes": []}, status)


# -- events ----------------------------------------------------------------------------------------

LOOK_INTERVAL = 1.0  # seconds between two looks at the runs
INDEXING_INTERVAL = 0.05  # the same while a large file is being indexed
CATCH_UP_SECONDS = 0.5  # most seconds of indexing before the page is told its progress
SHUTDOWN_POLL = 0.25  # seconds between two checks whether the server is shutting down
KEEPALIVE_LOOKS = 15  # looks without a change, after which a comment keeps the connection open


async def stream_events(catalog: Catalog, is_ending: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield `data: {"run": id, "size": bytes, "status": text, "first": bool}` for each run that has changed.

    A new connection first gets all runs: after a lost connection, the data on the page may be old.
    """
    yield ": hello\n\n"
    last_states: dict[str, Any] = {}
    for change in await run_in_threadpool(find_changed_runs, catalog, last_states):
        yield format_event(change, first=True)
    quiet = 0
    while await wait_for_next_look(catalog, is_ending):
        changed = await run_in_threadpool(find_changed_runs, catalog, last_states)
        for change in changed:
            yield format_event(change, first=False)
        quiet = 0 if changed else quiet + 1
        if quiet == KEEPALIVE_LOOKS:
            quiet = 0
            yield ": still here\n\n"


async def wait_for_next_look(catalog: Catalog, is_ending: Callable[[], bool]) -> bool:
    """Wait until the next look. Returns False if the server is shutting down."""
    seconds_left = LOOK_INTERVAL if all(run.is_indexed for run in catalog.known_runs()) else INDEXING_INTERVAL
    while seconds_left > 0 and not is_ending():
        await asyncio.sleep(min(SHUTDOWN_POLL, seconds_left))
        seconds_left -= SHUTDOWN_POLL
    return not is_ending()


def format_event(change: dict[str, Any], *, first: bool) -> str:
    return f"data: {json.dumps({**change, 'first': first})}\n\n"


def find_changed_runs(catalog: Catalog, last_states: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs whose files or status differ from `last_states`, which is updated."""
    changed = []
    runs = catalog.find()
    for run in runs:
        run.catch_up(CATCH_UP_SECONDS)
        with run.opened():
            state = (run.metrics.progress, run.samples.progress, run.status)
            change = {"run": run.id, "size": run.size, "status": run.status}
        if last_states.get(run.id) != state:
            changed.append(change)
        last_states[run.id] = state
    for id in set(last_states) - {run.id for run in runs}:
        del last_states[id]
        changed.append({"run": id, "size": 0, "status": "gone"})
    return changed


# -- routes ----------------------------------------------------------------------------------------

RUN_ANSWERS: dict[str, Callable[[RunData, QueryParams], Answer]] = {
    "names": answers.answer_names,
    "series": answers.answer_series,
    "phases": answers.answer_phases,
    "samples": answers.answer_samples,
    "prompts": answers.answer_prompts,
    "diagnosis": answers.answer_diagnosis,
    "machine": answers.answer_machine,
}


class PlainJson(JSONResponse):
    """JSON with readable Unicode. Lone surrogates, which UTF-8 cannot encode, are escaped."""

    def render(self, content: Any) -> bytes:
        return answers.dump_json(content).encode("utf-8", "backslashreplace")


def make_app(catalog: Catalog, access: Access, is_ending: Callable[[], bool] = lambda: False) -> Starlette:
    """The application. Event streams end once `is_ending()` is true."""

    def runs(request: Request) -> Response:
        return PlainJson(answers.list_runs(catalog))

    def run_answer(request: Request) -> Response:
        answer = RUN_ANSWERS.get(request.path_params["what"])
        if answer is None:
            raise NotFound(f"there is no {request.path_params['what']!r} of a run")
        with catalog.get(request.path_params["run"]).opened() as run:
            return PlainJson(answer(run, request.query_params))

    def sample(request: Request) -> Response:
        with catalog.get(request.path_params["run"]).opened() as run:
            return PlainJson(answers.answer_sample(run, request.path_params["id"]))

    def prompt(request: Request) -> Response:
        with catalog.get(request.path_params["run"]).opened() as run:
            return PlainJson(answers.answer_prompt(run, request.path_params["key"], request.query_params))

    def compare(request: Request) -> Response:
        return PlainJson(answers.answer_compare(catalog, request.query_params))

    async def events(request: Request) -> Response:
        return StreamingResponse(stream_events(catalog, is_ending), media_type="text/event-stream")

    def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    return Starlette(
        routes=[
            Route("/", page),
            Route("/api/runs", runs),
            Route("/api/runs/{run}/samples/{id}", sample),
            Route("/api/runs/{run}/prompts/{key}", prompt),
            Route("/api/runs/{run}/{what}", run_answer),
            Route("/api/compare", compare),
            Route("/api/events", events),
            Mount("/static", StaticFiles(directory=STATIC, check_dir=False)),
        ],
        middleware=[Middleware(RequestGuard, access=access)],
        exception_handlers={
            BadRequest: error_handler(400),
            NotFound: error_handler(404),
            UnknownRun: error_handler(404),
            OSError: error_handler(503, "a file of the run disappeared while it was read"),
            404: error_handler(404, "there is nothing at this address"),
            Exception: error_handler(500, "the server failed; its terminal says how"),
        },
    )


def error_handler(status: int, text: str = "") -> Callable[[Request, Exception], Response]:
    def respond(request: Request, error: Exception) -> Response:
        return PlainJson({"error": text or str(error), "notes": []}, status)

    return respond


# -- the server ------------------------------------------------------------------------------------

PORT = 7117
EVERY_ADDRESS = ("0.0.0.0", "::")
PORTS_TRIED = 20  # from PORT on


def open_listener(host: str, port: int | None) -> socket.socket:
    """Listen at the port; if it is None, at the first free port from PORT on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = range(PORT, PORT + PORTS_TRIED) if port is None else [port]
    for candidate in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen(128)  # from here on, connections are queued until the server answers them
        except OSError:
            listener.close()
            if candidate == ports[-1]:
                raise
            continue
        return listener
    raise AssertionError("there is at least one port")


def access_url(access: Access) -> str:
    """The URL to open in a browser. A server that listens at every address gets the name of its machine."""
    name = socket.gethostname() if access.host in EVERY_ADDRESS else access.host
    host = f"[{name}]" if ":" in name else name
    return f"http://{host}:{access.port}/" + (f"?token={quote(access.token, safe='')}" if access.token else "")


def serve_dashboard(
    folders: Sequence[Path], access: Access, listener: socket.socket, stop_stream: IO[bytes] | None = None
) -> None:
    """Serve until Ctrl-C or SIGTERM or, if given, until `stop_stream` ends, which the parent process holds open."""
    app = make_app(Catalog(folders), access, lambda: server.should_exit)
    settings = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=3, lifespan="off", proxy_headers=False, server_header=False
    )
    server = uvicorn.Server(settings)

    def wait(stream: IO[bytes]) -> None:
        while stream.read(4096):
            pass
        server.should_exit = True

    if stop_stream is not None:
        threading.Thread(target=wait, args=(stop_stream,), daemon=True).start()
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after its shutdown
        server.run(sockets=[listener])
