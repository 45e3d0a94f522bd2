"""The WebSocket: a task that reads what a client says, one that sends, and one that keeps the connection honest.

docs/scope-server.md has the messages.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

import anyio
from starlette.websockets import WebSocket, WebSocketDisconnect

from trimtab.control.messages import from_json
from trimtab.scope.fields import Fields
from trimtab.scope.server.answers import Problem
from trimtab.scope.server.client import Client, Filter
from trimtab.scope.server.guard import caller_of
from trimtab.scope.server.hub import message
from trimtab.scope.server.limits import Rates
from trimtab.scope.server.service import Service
from trimtab.scope.server.tokens import Session

ABORT: Final = "trimtab.abort"
"""Extension of the ASGI scope: cuts the connection without waiting for the other side to take what was sent."""
POLICY: Final = 1008
TRY_AGAIN: Final = 1013
EXPIRED: Final = 4401
"""Codes with which a connection is closed."""
_MOST_MISTAKES: Final = 16


async def live(websocket: WebSocket, service: Service) -> None:
    """Serve one WebSocket until it ends."""
    session = caller_of(websocket.scope).session
    if session is None:
        raise Problem(401, "no token was shown; open the link that the server printed")
    bell = _Bell()
    client = service.hub.join(session.name, bell.ring)
    service.opened(session)
    try:
        await _Connection(websocket, service, session, client, bell).run()
    finally:
        service.hub.leave(client)
        service.closed(session)


class _Bell:
    """Wakes the task that sends."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def ring(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event = anyio.Event()


class _Connection:
    def __init__(self, websocket: WebSocket, service: Service, session: Session, client: Client, bell: _Bell) -> None:
        self._websocket = websocket
        self._service = service
        self._session = session
        self._client = client
        self._bell = bell
        self._rates = Rates(service.limits.messages)
        self._mistakes = 0
        self._handlers = {
            "subscribe": self._subscribe,
            "unsubscribe": self._unsubscribe,
            "ack": self._acknowledge,
            "window": self._window,
            "resume": self._resume,
            "ping": self._ping,
        }

    async def run(self) -> None:
        await self._websocket.accept()
        async with anyio.create_task_group() as tasks:
            try:
                await self._send(message("hello", self._service.greeting(self._session)))
                tasks.start_soon(self._send_all, tasks.cancel_scope)
                tasks.start_soon(self._beat, tasks.cancel_scope)
                await self._read_all()
            except WebSocketDisconnect:
                pass
            finally:
                tasks.cancel_scope.cancel()

    # --- reading

    async def _read_all(self) -> None:
        while True:
            said = await self._websocket.receive()
            if said["type"] == "websocket.disconnect":
                return
            if (wait := self._rates.take("")) > 0:
                await self._close(POLICY, f"too many messages; one in {wait:.2f} s")
                return
            try:
                answer = self._handle(said.get("text"))
            except ValueError as error:
                self._mistakes += 1
                answer = message("error", {"error": " ".join(str(error).split())[:500]})
            if self._mistakes > _MOST_MISTAKES:
                await self._close(POLICY, "too many messages that make no sense")
                return
            if answer:
                self._client.reply(answer)

    def _handle(self, text: str | None) -> str | None:
        if text is None or len(text) > self._service.limits.message_bytes:
            raise ValueError(f"a message is JSON of at most {self._service.limits.message_bytes} bytes")
        said = Fields(from_json(text.encode()), "message")
        handler = self._handlers[said.one_of("op", tuple(self._handlers))]
        self._service.seen(self._session)
        answer = handler(said)
        said.done()
        return answer

    def _subscribe(self, said: Fields) -> str:
        wanted = Filter.from_json(said)
        said.done()
        self._client.want(wanted)
        return message("subscribed", {"id": wanted.name})

    def _unsubscribe(self, said: Fields) -> str:
        name = said.text("id", longest=64)
        self._client.unwant(name)
        return message("unsubscribed", {"id": name})

    def _acknowledge(self, said: Fields) -> None:
        self._client.acknowledge(said.integer("number"))

    def _window(self, said: Fields) -> None:
        self._client.set_window(said.integer("frames", low=0, high=4096))

    def _resume(self, said: Fields) -> str:
        found = self._service.hub.resume(self._client, said.text("epoch", longest=64), said.integer("number"))
        return message("resumed", found)

    def _ping(self, said: Fields) -> str:
        return message("pong", {"id": said.integer("id", 0), "unix_ns": time.time_ns()})

    # --- sending

    async def _send_all(self, scope: anyio.CancelScope) -> None:
        while True:
            await self._bell.wait()
            while (said := self._client.take()) is not None:
                if not await self._send(said):
                    scope.cancel()
                    return
            if self._client.overrun:
                await self._close(TRY_AGAIN, "too many notices wait")
                scope.cancel()
                return

    async def _send(self, said: str | bytes) -> bool:
        """Was it taken in time? Else the connection is cut: it would never take a goodbye, either."""
        with anyio.move_on_after(self._service.limits.slow_seconds) as patience:
            try:
                if isinstance(said, str):
                    await self._websocket.send_text(said)
                else:
                    await self._websocket.send_bytes(said)
            except (WebSocketDisconnect, RuntimeError):  # it is gone, or was hung up on meanwhile
                return False
        if not patience.cancelled_caught:
            return True
        self._service.slow += 1
        abort = self._websocket.scope.get("extensions", {}).get(ABORT)
        if abort is not None:
            abort["cut"]()
        return False

    async def _beat(self, scope: anyio.CancelScope) -> None:
        while True:
            await anyio.sleep(self._service.limits.heartbeat_seconds)
            left = self._service.tokens.time_left(self._session)
            if left <= 0:
                await self._close(EXPIRED, "the session is over; open a new link")
                scope.cancel()
                return
            self._client.reply(message("heartbeat", self._heartbeat(left)))

    def _heartbeat(self, left: float) -> dict[str, Any]:
        return {
            "number": self._service.hub.number,
            "unix_ns": time.time_ns(),
            "dropped": self._client.dropped,
            "session_seconds": round(left),
        }

    async def _close(self, code: int, reason: str) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError), anyio.move_on_after(1.0):
            await self._websocket.close(code, reason)
