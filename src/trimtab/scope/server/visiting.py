"""Servers from outside: is there one of a run directory, how a browser comes to it, and how it ends.

Nothing here needs what a server needs.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from trimtab.run_directory import check_directory
from trimtab.scope.recording.format import SUFFIX
from trimtab.scope.recording.reader import FOLDER
from trimtab.scope.server.address_book import TOKENS

_ANSWERS_WITHIN: Final = 3.0
_STARTS_WITHIN: Final = 30.0
_ENDS_WITHIN: Final = 20.0
_LOOK_SECONDS: Final = 0.05
_DISPLAYS: Final = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
_OF_A_RUN: Final = (f"*{SUFFIX}", f"{FOLDER}/*{SUFFIX}", "rank*.trimtab.arrow", "report.json")
"""Files of which one is in a directory that a job has recorded into."""


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs, and may be asked."""

    url: str
    link: str
    pid: int

    def address(self, query: Mapping[str, str]) -> str:
        """The link, to a view."""
        return with_query(self.link, query)


def with_query(link: str, query: Mapping[str, str]) -> str:
    """``link``, which has a query, with more of it."""
    return f"{link}&{urlencode(query)}" if query else link


def check_run(directory: Path) -> None:
    """ValueError, in one line, where there is nothing to be shown."""
    check_directory(directory, "give record.dir of a job, or where recordings lie")
    if not any(next(directory.glob(pattern), None) for pattern in _OF_A_RUN):
        raise ValueError(
            f"{directory}: nothing is recorded there; give record.dir of a job that runs or has run "
            "(trimtab scope serve waits for one)"
        )


def running(directory: Path) -> Server | None:
    """The server of a run directory, if one is there and knows its own token."""
    try:
        said: Any = json.loads((directory / FOLDER / TOKENS).read_text(encoding="ascii"))
        found = Server(str(said["url"]), str(said["link"]), int(said["pid"]))
        request = urllib.request.Request(
            f"{found.url}api/v1/session", headers={"Authorization": f"Bearer {said['token']}"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
        with opener.open(request, timeout=_ANSWERS_WITHIN) as answer:
            return found if answer.status == 200 else None
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return None  # urllib's errors are OSError, too


def close(directory: Path) -> bool:
    """End the server of a run directory in order; was there one? ValueError where it does not end."""
    found = running(directory)
    if found is None:
        return False
    try:
        os.kill(found.pid, signal.SIGTERM)
    except (ProcessLookupError, PermissionError) as error:
        reason = "of another machine" if isinstance(error, ProcessLookupError) else "of another user"
        raise ValueError(
            f"{directory}: its server {found.url} is {reason}; end it there (process {found.pid})"
        ) from None
    until = time.monotonic() + _ENDS_WITHIN
    while running(directory) is not None or _pid(directory) == found.pid:  # its files go last
        if time.monotonic() > until:
            raise ValueError(f"{directory}: its server (process {found.pid}) does not end; kill -9 {found.pid} does")
        time.sleep(_LOOK_SECONDS)
    return True


def _pid(directory: Path) -> int | None:
    """Of the server that has written down its tokens last."""
    try:
        return int(json.loads((directory / FOLDER / TOKENS).read_text(encoding="ascii"))["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def start(directory: Path, arguments: Sequence[str], log: Path) -> Server:
    """A server of its own, which outlives this process and holds nothing of its terminal; what it says is in ``log``.

    ValueError, with what it said, where it does not begin.
    """
    command = [sys.executable, "-m", "trimtab", "scope", "serve", str(directory), *arguments]
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True, close_fds=True
        )
    until = time.monotonic() + _STARTS_WITHIN
    while process.poll() is None and time.monotonic() < until:
        found = running(directory)
        if found is not None and found.pid == process.pid:
            process.returncode = 0  # nobody waits for it: it goes on
            return found
        time.sleep(_LOOK_SECONDS)
    process.kill()
    process.wait()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    raise ValueError(f"the server does not begin: {lines[-1] if lines else 'it says nothing'} (see {log})")


def browse(
    link: str,
    environment: Mapping[str, str],
    talk: Callable[[str], None],
    start_browser: Callable[[str], bool] = webbrowser.open,
) -> bool:
    """Show ``link`` in a browser; where there is no display, or no browser, say how to get to it from elsewhere."""
    if _has_display(environment):
        with contextlib.suppress(webbrowser.Error, OSError):
            if start_browser(link):
                return True
    parts = urlsplit(link)
    talk(
        f"trimtab: no browser can be started here; from another machine: ssh -L {parts.port}:{parts.netloc} "
        f"{socket.gethostname()}, and then the same link there"
    )
    return False


def _has_display(environment: Mapping[str, str]) -> bool:
    """Without one, webbrowser takes a browser of text, which takes the terminal."""
    return sys.platform in ("darwin", "win32") or any(environment.get(name) for name in _DISPLAYS)
