"""The server as a process: listens, says where, and leaves nothing behind when it ends."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvicorn

from trimtab.config import ControlConfig
from trimtab.control.sockets import is_loopback, show_address
from trimtab.scope.collector.interface import Scope
from trimtab.scope.collector.opening import open_scope
from trimtab.scope.recording.reader import FOLDER
from trimtab.scope.server.address_book import TOKENS, AddressBook
from trimtab.scope.server.application import Application
from trimtab.scope.server.limits import Limits
from trimtab.scope.server.runs import Runs
from trimtab.scope.server.service import CLOSE_SECONDS, Service
from trimtab.scope.server.sockets import CuttableWebSocket, listen
from trimtab.scope.server.tokens import LINK_HOURS, Tokens
from trimtab.scope.server.watching import Watching
from trimtab.signals import ended_by_signal

_GRACE_SECONDS: Final = 2
_PARENT_CLOSE_SECONDS: Final = 0.8
_MOST_HOURS: Final = 24 * 366
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a browser of this host finds what listens everywhere."""
_HEADERS_BYTES: Final = 32 << 10
Talk = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose."""

    directories: tuple[Path, ...]
    bind: str = "127.0.0.1:0"
    allow_perturb: bool = False
    allow_hosts: tuple[str, ...] = ()
    live: bool = True
    """The first directory may be that of a running job."""
    record: bool = True
    watch: bool = True
    parent_pipe: bool = False
    """End with whoever holds the other end of the standard input."""
    link_hours: float = LINK_HOURS
    limits: Limits = field(default_factory=Limits)


def serve(options: Options, control: ControlConfig, environment: Mapping[str, str], talk: Talk) -> None:
    """Serve until Ctrl-C, SIGTERM or the end of the parent. ValueError, in one line, where it cannot begin."""
    if not options.directories:
        raise ValueError("give the directory into which a job records (record.dir), or some that hold recordings")
    if not 0.0 < options.link_hours <= _MOST_HOURS:
        raise ValueError(f"--link-hours {options.link_hours:g}: expected more than 0 and at most {_MOST_HOURS}")
    with ExitStack() as stack:
        runs = Runs(options.directories, live=options.directories[0] if options.live else None)
        listener = stack.enter_context(contextlib.closing(listen(options.bind)))
        stack.enter_context(ended_by_signal())
        scope = _scope(options, control, environment, talk, stack)
        door = _Door(options, listener, scope is not None, talk)
        service = Service(
            runs,
            scope,
            limits=options.limits,
            tokens=door.tokens,
            allow_perturb=door.perturb,
            record=options.record,
            renewed=door.publish,
        )
        # A job that ends waits for its server, but not for long.
        stack.callback(service.close, _PARENT_CLOSE_SECONDS if options.parent_pipe else CLOSE_SECONDS)
        if scope is not None and options.watch:
            watching = Watching(control, options.directories[0], environment, service.news)
            stack.callback(watching.close)
            service.watching = watching
        stack.callback(door.close)  # before all else: what ends slowly may be killed
        door.publish()
        door.announce()
        _run(service, options, listener)


def _scope(
    options: Options, control: ControlConfig, environment: Mapping[str, str], talk: Talk, stack: ExitStack
) -> Scope | None:
    """The job's collector; None where there are recordings only."""
    if not options.live:
        return None
    try:
        return stack.enter_context(open_scope(options.directories[0], control, environment))
    except ValueError as error:
        talk(f"trimtab: {error}; only what was recorded is shown")
        return None


class _Door:
    """Where the server is to be found, and by whom."""

    def __init__(self, options: Options, listener: socket.socket, live: bool, talk: Talk) -> None:
        host, port = listener.getsockname()[:2]
        self._options = options
        self._host = host
        self._talk = talk
        self._book = AddressBook(options.directories[0] / FOLDER)
        self.perturb = options.allow_perturb and live
        self.tokens = Tokens(link_hours=options.link_hours, sessions=options.limits.sessions)
        self.url = f"http://{show_address(_LOOPBACK.get(str(host), str(host)), port)}/"

    def publish(self) -> None:
        """Write down the link that is good now."""
        try:
            self._book.write(self.url, self.tokens.link, self.tokens.control if self.perturb else None)
        except OSError as error:
            self._talk(f"trimtab: {error.filename}: cannot be written ({error.strerror}); the link is told here only")

    def announce(self) -> None:
        """Say where it is."""
        self._talk(f"scope: {self.url}?token={self.tokens.link}")
        if self.perturb:
            file = self._options.directories[0] / FOLDER / TOKENS
            self._talk(f"scope: who is to disturb the job needs the control token, too; it is in {file}")
        if not is_loopback(str(self._host)):
            self._talk(
                f"trimtab: scope listens on {self._host}: whoever sees the traffic, which is not encrypted, sees the "
                "model's tensors and the tokens; on a network that others use, bind to loopback and use ssh -L"
            )

    def close(self) -> None:
        """It is not there any more."""
        self._book.remove()


def _run(service: Service, options: Options, listener: socket.socket) -> None:
    server = server_of(service, options, listener)
    if options.parent_pipe:
        threading.Thread(target=_follow_parent, args=(server,), name="trimtab-parent", daemon=True).start()
    server.run(sockets=[listener])


def server_of(service: Service, options: Options, listener: socket.socket) -> uvicorn.Server:
    """What serves ``service`` on ``listener``."""
    port = listener.getsockname()[1]
    application = Application(service, hosts=options.allow_hosts, cookie=f"trimtab-scope-{port}")
    limits = options.limits
    return uvicorn.Server(
        uvicorn.Config(
            application,
            http="h11",
            ws=CuttableWebSocket,
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,  # the link's token is in its first line
            proxy_headers=False,
            server_header=False,
            limit_concurrency=limits.connections,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            h11_max_incomplete_event_size=_HEADERS_BYTES,
            ws_max_size=limits.message_bytes,
            ws_per_message_deflate=False,
        )
    )


def _follow_parent(server: uvicorn.Server) -> None:
    """Ends the server with its parent, however that ends: the pipe closes then."""
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    server.should_exit = True
