"""The listening socket, and WebSockets that can be cut."""

from __future__ import annotations

import socket

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from trimtab.control.sockets import parse_address, show_address
from trimtab.scope.server.live import ABORT

_BACKLOG = 128


class CuttableWebSocket(WebSocketsSansIOProtocol):
    """One whose application may cut the connection: closing waits for the other side to take what was sent."""

    async def run_asgi(self) -> None:
        """See uvicorn."""
        self.scope["extensions"][ABORT] = {"cut": self.transport.abort}  # pyright: ignore[reportTypedDictNotRequiredAccess]
        await super().run_asgi()


def listen(text: str) -> socket.socket:
    """A socket that listens at ``host:port`` (port 0: any); ValueError, in one line, where that cannot be."""
    host, port = parse_address(text)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ValueError(f"--bind {show_address(host, port)}: cannot listen there ({reason})") from None
    listener.setblocking(False)
    return listener
