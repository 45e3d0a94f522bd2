"""The server as a process: listens, says where, and leaves nothing behind when it ends."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
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
from trimtab.scope.server.memory import Memory
from trimtab.scope.server.runs import Runs
from trimtab.scope.server.service import CLOSE_SECONDS, Service
from trimtab.scope.server.sockets import CuttableWebSocket, listen
from trimtab.scope.server.tokens import LINK_HOURS, Tokens
from trimtab.scope.server.watching import Watching
from trimtab.signals import ended_by_signal

_GRACE_SECONDS: Final = 2
_PARENT_CLOSE_SECONDS: Final = 0.8
_IDLE_LOOK_SECONDS: Final = 1.0
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
    idle_minutes: float = 0.0
    """End when nobody has asked for anything for so long; 0: never."""
    limits: Limits = field(default_factory=Limits)


def serve(
    options: Options, control: ControlConfig, environment: Mapping[str, str], talk: Talk, ready: Talk | None = None
) -> None:
    """Serve until Ctrl-C, SIGTERM or the end of the parent. ValueError, in one line, where it cannot begin.

    ``ready``: gets the link when it can be opened; without it the link is told.
    """
    if not options.directories:
        raise ValueError("give the directory into which a job records (record.dir), or some that hold recordings")
    if not 0.0 < options.link_hours <= _MOST_HOURS:
        raise ValueError(f"--link-hours {options.link_hours:g}: expected more than 0 and at most {_MOST_HOURS}")
    if not 0.0 <= options.idle_minutes <= _MOST_HOURS * 60:
        raise ValueError(f"--idle-minutes {options.idle_minutes:g}: expected 0 (never), or how many until it ends")
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
            memory=Memory(options.directories[0] / FOLDER),
        )
        # A job that ends waits for its server, but not for long.
        stack.callback(service.close, _PARENT_CLOSE_SECONDS if options.parent_pipe else CLOSE_SECONDS)
        if scope is not None and options.watch:
            watching = Watching(control, options.directories[0], environment, service.news)
            stack.callback(watching.close)
            service.watching = watching
        stack.callback(door.close)  # before all else: what ends slowly may be killed
        door.publish()
        door.announce(ready)
        _run(service, options, listener, talk)


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

    def announce(self, ready: Talk | None) -> None:
        """Say where it is."""
        link = f"{self.url}?token={self.tokens.link}"
        if ready is None:
            self._talk(f"scope: {link}")
        else:
            ready(link)
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


def _run(service: Service, options: Options, listener: socket.socket, talk: Talk) -> None:
    server = server_of(service, options, listener)
    if options.idle_minutes:
        idle = threading.Thread(target=_end_when_idle, args=(server, service, options.idle_minutes, talk), daemon=True)
        idle.start()
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


def _end_when_idle(server: uvicorn.Server, service: Service, minutes: float, talk: Talk) -> None:
    """Ends the server when nobody looks any more."""
    while (left := minutes * 60.0 - service.idle_seconds()) > 0.0:
        time.sleep(min(left, _IDLE_LOOK_SECONDS))
    talk(f"scope: nobody has looked for {minutes:g} minutes; the server ends")
    server.should_exit = True


def _follow_parent(server: uvicorn.Server) -> None:
    """Ends the server with its parent, however that ends: the pipe closes then."""
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    server.should_exit = True
