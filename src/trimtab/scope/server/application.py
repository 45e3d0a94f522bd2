"""Routes: the API's table, the WebSocket, the page, and the exchange of the link's token for a cookie."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final
from urllib.parse import urlencode

import anyio
import anyio.to_thread
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from trimtab.control.messages import from_json
from trimtab.scope.server import static_files
from trimtab.scope.server.answers import JSON, Problem, respond
from trimtab.scope.server.api.table import ENDPOINTS
from trimtab.scope.server.background import background
from trimtab.scope.server.endpoint import Call, Endpoint
from trimtab.scope.server.guard import Caller, Guard, caller_of
from trimtab.scope.server.limits import Seconds
from trimtab.scope.server.live import live
from trimtab.scope.server.openapi import ROOT
from trimtab.scope.server.service import Service

TOKEN: Final = "token"
"""Parameter of the link."""
_HOUR: Final = 3600


class Application:
    """The ASGI application of one server."""

    def __init__(
        self,
        service: Service,
        *,
        hosts: Collection[str] = (),
        cookie: str = "trimtab-scope",
        clock: Seconds = time.monotonic,
    ) -> None:
        """``hosts``: names by which it may be addressed, besides those of loopback. ``cookie``: name of the cookie;
        browsers do not tell servers on different ports of a host apart."""
        self.service = service
        self._cookie = cookie
        self._files = static_files.load()
        self._threads: anyio.CapacityLimiter | None = None
        routes = [
            *(Route(ROOT + one.path, self._answering(one), methods=[one.method]) for one in ENDPOINTS),
            WebSocketRoute(f"{ROOT}/live", self._live),
            Route("/", self._index, methods=["GET"]),
            Route("/{name:path}", self._file, methods=["GET"]),
        ]
        router = Router(routes, redirect_slashes=False, lifespan=lambda _: background(service))
        self._guard = Guard(_Errors(router), service.tokens, service.limits, hosts, cookie, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await self._guard(scope, receive, send)

    def _answering(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            caller = caller_of(request.scope)
            self._admit(endpoint, caller)
            call = Call(caller, endpoint.read(_query(request), request.path_params), await _body(endpoint, request))
            if self._threads is None:
                self._threads = anyio.CapacityLimiter(self.service.limits.workers)
            return await anyio.to_thread.run_sync(self._work, endpoint, call, limiter=self._threads)

        return answer

    def _admit(self, endpoint: Endpoint, caller: Caller) -> None:
        if endpoint.access == "open":
            return
        if caller.session is None:
            raise Problem(401, "no token was shown, or the session is over; open the link that the server printed")
        self.service.seen(caller.session)
        if endpoint.access == "control":
            if not self.service.allow_perturb:
                raise Problem(403, "this server is read-only; trimtab scope serve --allow-perturb lets it disturb")
            if not caller.control:
                raise Problem(403, f"that takes the control token; show it at {ROOT}/control first")

    def _work(self, endpoint: Endpoint, call: Call) -> Response:
        """On a thread; encoding the answer is part of the work."""
        try:
            response = respond(endpoint.handler(self.service, call), endpoint.status)
        except ValueError as error:  # bad input, or a job that refuses; anything else is a fault of ours
            raise Problem(400 if endpoint.method == "GET" else 409, str(error)) from None
        if call.more_in_seconds:
            response.headers["Retry-After"] = str(math.ceil(call.more_in_seconds))
        return response

    async def _live(self, websocket: WebSocket) -> None:
        await live(websocket, self.service)

    async def _index(self, request: Request) -> Response:
        token = request.query_params.get(TOKEN)
        if token is None:
            return self._files[static_files.INDEX].respond(request)
        cookie = self.service.tokens.open(token)
        if cookie is None:
            return self._files[static_files.REFUSED].respond(request, 403)
        left = [(name, value) for name, value in request.query_params.multi_items() if name != TOKEN]
        response = Response(status_code=303, headers={"Location": f"/?{urlencode(left)}" if left else "/"})
        response.set_cookie(
            self._cookie,
            cookie,
            max_age=self.service.tokens.session_seconds,
            httponly=True,
            samesite="strict",
            path="/",
        )
        return response

    async def _file(self, request: Request) -> Response:
        found = self._files.get(request.path_params["name"])
        if found is None:
            raise Problem(404, "there is nothing here")
        return found.respond(request)


class _Errors:
    """What the router refuses is said as everything else is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # so that the router raises instead of answering in its own words
        try:
            await self._app(scope, receive, send)
        except HTTPException as error:
            known = {404: "there is nothing here", 405: "not with that method"}
            raise Problem(error.status_code, known.get(error.status_code, error.detail)) from None


def _query(request: Request) -> dict[str, str]:
    items = request.query_params.multi_items()
    found = dict(items)
    if len(found) != len(items):
        raise Problem(400, "a parameter is given twice")
    return found


async def _body(endpoint: Endpoint, request: Request) -> Any:
    if endpoint.body is None:
        return None
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != JSON:
        raise Problem(415, f"the body is to be {JSON}")
    try:
        return from_json(await request.body())
    except ValueError as error:
        raise Problem(400, str(error)) from None
