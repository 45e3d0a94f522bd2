"""What stands before everything else: whom the server talks to, how much of it, and what its answers allow a browser.

Nothing here knows what is asked for. It says who asks (:class:`Caller`), or refuses.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final, cast
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab.scope.server.answers import Problem, refusal
from trimtab.scope.server.limits import Limits, Rates, Seconds
from trimtab.scope.server.tokens import Session, Tokens

CSRF_HEADER: Final = "x-trimtab"
"""On every request that changes something. A page of another origin cannot set it without being asked first."""
CONTROL_HEADER: Final = "x-trimtab-control"
"""The second token, for programs that have no session."""
API: Final = "/api/"
_SAFE: Final = ("GET", "HEAD", "OPTIONS")
_SITES: Final = ("same-origin", "none")
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
        "connect-src 'self'; worker-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
"""Of every answer."""
CACHE: Final = "no-store"
"""Of every answer that does not say otherwise."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    address: str
    session: Session | None = None
    control: bool = False
    """Has shown the second token."""
    program: bool = False
    """Shows the tokens with each request, and has no cookie."""

    @property
    def key(self) -> str:
        """What rates and limits go by."""
        return self.address if self.session is None else self.session.name


class Guard:
    """An ASGI application in front of another."""

    def __init__(
        self, app: ASGIApp, tokens: Tokens, limits: Limits, hosts: Collection[str], cookie: str, clock: Seconds
    ) -> None:
        """``hosts``: names under which the server may be addressed, besides those of loopback and the address that a
        connection was made to. ``cookie``: name of the cookie."""
        self._app = app
        self._tokens = tokens
        self._limits = limits
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts)
        self._cookie = cookie
        self._reads = Rates(limits.reads, clock)
        self._writes = Rates(limits.writes, clock)
        self._strangers = Rates(limits.strangers, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check, and pass on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            scope["trimtab.caller"] = self._caller(scope)
            await self._app(scope, _Body(receive, self._limits.body_bytes), answer)
        except Problem as problem:
            await self._refuse(scope, receive, answer, refusal(problem))
        except Exception as error:  # what it was is nobody's business but the log's
            if answer.began:
                raise
            reason = f"the server failed ({type(error).__name__}); its log has more"
            await self._refuse(scope, receive, answer, refusal(Problem(500, reason)))
            raise

    async def _refuse(self, scope: Scope, receive: Receive, answer: _Answer, response: Response) -> None:
        if not answer.began:
            await response(scope, receive, answer)

    def _caller(self, scope: Scope) -> Caller:
        headers = Headers(scope=scope)
        self._check_host(headers, scope)
        self._check_sizes(headers, scope)
        caller = self._who(headers, scope)
        changing = scope["type"] == "http" and scope["method"] not in _SAFE
        if changing or scope["type"] == "websocket":
            _check_origin(headers, required=scope["type"] == "websocket" and not caller.program)
        if changing and headers.get(CSRF_HEADER) is None:
            raise Problem(403, f"a request that changes something needs the header {CSRF_HEADER}: 1")
        rates = self._strangers if caller.session is None else self._writes if changing else self._reads
        if (wait := rates.take(caller.key)) > 0:
            raise Problem(429, f"too many requests; try again in {wait:.1f} s", wait)
        return caller

    def _check_host(self, headers: Headers, scope: Scope) -> None:
        """A page that made its own name point here (DNS rebinding) still says that name."""
        hosts = headers.getlist("host")
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        bound = scope.get("server")
        if name is None or not (_is_loopback(name) or name in self._hosts or (bound and _same_address(name, bound[0]))):
            raise Problem(421, "this server is not addressed by that name; --allow-host NAME adds one")

    def _check_sizes(self, headers: Headers, scope: Scope) -> None:
        if len(scope.get("query_string", b"")) > self._limits.query_bytes:
            raise Problem(414, f"the query is longer than {self._limits.query_bytes} bytes")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:16]) > self._limits.body_bytes or len(length) > 16:
            raise Problem(413, f"the body is longer than {self._limits.body_bytes} bytes")

    def _who(self, headers: Headers, scope: Scope) -> Caller:
        client = scope.get("client")
        address = str(client[0]) if client else "local"
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme:
            session = self._tokens.bearer(token.strip()) if scheme.lower() == "bearer" else None
            if session is None:
                if (wait := self._strangers.take(address)) > 0:
                    raise Problem(429, f"too many attempts; try again in {wait:.1f} s", wait)
                raise Problem(401, "the token is wrong or no longer good; get a new link")
            shown = headers.get(CONTROL_HEADER)
            return Caller(address, session, shown is not None and self._tokens.is_control(shown), program=True)
        session = self._tokens.session(_cookie(headers, self._cookie))
        control = session is not None and self._tokens.control_left(session) > 0
        return Caller(address, session, control)


def caller_of(scope: Scope) -> Caller:
    """Who asks, as the guard found."""
    return cast("Caller", scope["trimtab.caller"])


def is_safe(method: str) -> bool:
    """Such a request changes nothing."""
    return method in _SAFE


def _check_origin(headers: Headers, *, required: bool) -> None:
    """What changes something, or opens a socket, comes from a page of this server or from no page at all."""
    site = headers.get("sec-fetch-site")
    if site is not None and site not in _SITES:
        raise Problem(403, "a page of another origin may not do that")
    origins = headers.getlist("origin")
    if not origins:
        if required:
            raise Problem(403, "a WebSocket needs an Origin, or the token as Authorization: Bearer")
        return
    parts = urlsplit(origins[0])
    if len(origins) > 1 or parts.scheme not in ("http", "https") or parts.netloc.lower() != _host(headers):
        raise Problem(403, "a page of another origin may not do that")


def _host(headers: Headers) -> str:
    return headers.get("host", "").strip().lower()


def _host_name(host: str) -> str | None:
    """Without port, brackets and final dot; None where it is none."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(f"//{host.strip()}")
        _ = parts.port
        if parts.hostname and parts.username is None and not parts.path and not parts.query:
            return parts.hostname.rstrip(".")
    return None


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    with contextlib.suppress(ValueError):  # a name, which may begin as an address does
        return ipaddress.ip_address(name).is_loopback
    return False


def _same_address(name: str, bound: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name) == ipaddress.ip_address(bound.partition("%")[0])
    return False


def _cookie(headers: Headers, name: str) -> str:
    jar: SimpleCookie = SimpleCookie()
    with contextlib.suppress(CookieError):
        jar.load(headers.get("cookie", ""))
    return jar[name].value if name in jar else ""


class _Body:
    """Receives, and counts what is received: a body need not say its length before."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive = receive
        self._left = most

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise Problem(413, "the body is too long")
        return message


class _Answer:
    """Sends, with the headers that every answer has."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.began = False

    async def __call__(self, message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start", "websocket.accept"):
            self.began = True
            self._complete(message)
        await self._send(message)

    @staticmethod
    def _complete(message: Any) -> None:
        message.setdefault("headers", [])
        headers = MutableHeaders(scope=message)
        for name, value in HEADERS.items():
            headers[name] = value
        headers.setdefault("Cache-Control", CACHE)
