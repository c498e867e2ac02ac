"""Who may ask, and what a browser may do with the answer.

A page of another site can make a browser send requests to this machine, under a name that its owner lets point here.
So requests must name a host that this server has, must not come from another origin, and only read. Whoever can reach
a server that listens beyond this machine needs a token.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "rollgraph_token_"  # and the port: a browser gives the cookies of one server to all others of its host
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
    """Whether only this machine can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """Where the server listens, and the token that requests need; "" is none."""

    host: str
    port: int
    token: str = ""

    def allows_host(self, header: str) -> bool:
        """Whether a request is for this server: for this machine or, with a token, for any of its addresses.

        A name that somebody else lets point here is refused without a token, whatever it resolves to.
        """
        name = split_host(header)
        if name is None:
            return False
        return name in LOCAL or name == self.host or bool(self.token)

    def allows_origin(self, origin: str | None, host: str) -> bool:
        if origin is None:
            return True
        found = urlsplit(origin)
        return found.scheme in ("http", "https") and found.netloc == host

    @property
    def cookie(self) -> str:
        return f"{COOKIE}{self.port}"

    def knows(self, token: str) -> bool:
        return secrets.compare_digest(token.encode("utf-8", "replace"), self.token.encode())


def split_host(header: str) -> str | None:
    """The name in a Host header, without its port; None if it has no name."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


class RequestGuard:
    """Refuses what is not allowed before anything else sees it, and adds the headers that every answer has."""

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

        refused = self._refuse(Request(scope))
        answer: Callable[[Scope, Receive, Send], Awaitable[None]] = refused or self._app
        await answer(scope, receive, send_with_headers)

    def _refuse(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if request.method not in ("GET", "HEAD"):
            return _refusal(405, "this server only shows runs: use GET")
        if not self._access.allows_host(host):
            return _refusal(421, "this server has another name: open it by its address, or with --token")
        if not self._access.allows_origin(request.headers.get("origin"), host):
            return _refusal(403, "the request comes from a page of another origin")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and _is_data(request):
            return _refusal(403, "the request comes from a page of another site")
        return self._refuse_stranger(request)

    def _refuse_stranger(self, request: Request) -> Response | None:
        """Without the token, nothing. The page itself trades it for a cookie, so that it leaves the address."""
        if not self._access.token:
            return None
        given = request.query_params.get("token")
        if given is not None and self._access.knows(given):
            if _is_data(request):
                return None
            answer = RedirectResponse("./", 303)
            # Lax, so that links from elsewhere may lead here.
            answer.set_cookie(self._access.cookie, given, httponly=True, samesite="lax")
            return answer
        if self._access.knows(request.cookies.get(self._access.cookie, "")):
            return None
        return _refusal(401, "open the address with ?token=, as `rollgraph view` printed it")


def _is_data(request: Request) -> bool:
    return request.url.path != "/"


def _refusal(status: int, why: str) -> Response:
    return JSONResponse({"error": why, "notes": []}, status)
