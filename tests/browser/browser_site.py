"""``trimtab scope serve`` as a process, and a program that asks it what a page should show."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import httpx2

PAGE: Final = "TRIMTAB_PAGE"
"""Environment variable: a folder with a bundle to be tested in place of the one that is shipped."""
_LINK: Final = re.compile(r"scope: (http://127\.0\.0\.1:(\d+)/)\?token=(\S+)")
_OTHER_PAGE: Final = """
import pathlib, sys
from trimtab.scope.server import static_files
static_files.load.__defaults__ = (pathlib.Path(sys.argv.pop(1)),)
from trimtab.cli import main
main()
"""
_ENDS_WITHIN: Final = 20.0


def plain_environment() -> dict[str, str]:
    """Without settings of whoever runs this."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TRIMTAB_")}


class Site:
    """A server of some run directories.

    ``site.link("view=series&step=8")`` is where a browser begins, ``site.get("/runs/live/series", tap="loss",
    statistic="mean")`` what the API says, ``site.post("/subscriptions", {...})`` asks for something.
    """

    def __init__(self, *directories: Path, arguments: tuple[str, ...] = ("--no-live",)) -> None:
        self.directories = directories
        self._arguments = arguments
        self.url = ""
        self.token = ""
        self.api = httpx2.Client()
        self.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return httpx2.URL(self.url).port or 0

    @property
    def control(self) -> str:
        """The control token."""
        return json.loads((self.directories[0] / "scope" / "server-token").read_text())["control"]

    def link(self, query: str = "", **parameters: Any) -> str:
        """The address that a user is given, with a view's."""
        more = "&".join(part for part in (query.lstrip("/?"), urlencode(parameters)) if part)
        return f"{self.url}?token={self.token}{'&' if more else ''}{more}"

    def get(self, path: str, **query: Any) -> Any:
        """JSON of an endpoint that is expected to answer, such as ``/runs``."""
        response = self.api.get(path, params=query)
        assert response.status_code == 200, response.text
        return response.json()

    def frames(self, path: str, **query: Any) -> list[Any]:
        """Frames, decoded, of an endpoint such as ``/runs/RUN/tiles``."""
        from trimtab.scope.frame import decode_all
        from trimtab.scope.shards import join_pieces

        response = self.api.get(path, params=query)
        assert response.status_code == 200, response.text
        return join_pieces(decode_all(memoryview(response.content)))

    def post(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """JSON of an endpoint that changes something; with the control token, where there is one."""
        headers = {"X-Trimtab-Control": self.control} if "--allow-perturb" in self._arguments else {}
        response = self.api.request(method, path, json=body, headers=headers)
        assert response.status_code < 300, response.text
        return response.json()

    def close(self) -> None:
        """Ends in order."""
        self.api.close()
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_WITHIN)
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def start(self, port: int = 0) -> None:
        """Begin, with new tokens; after :meth:`close` again."""
        page = os.environ.get(PAGE)
        trimtab = ["-c", _OTHER_PAGE, page] if page else ["-m", "trimtab"]
        command = [sys.executable, *trimtab, "scope", "serve", "--bind", f"127.0.0.1:{port}", *self._arguments]
        command += [str(directory) for directory in self.directories]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=plain_environment())
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        found = _LINK.match(line)
        if found is None:
            self._process.kill()
            raise AssertionError(line + self._process.stderr.read())
        self.url, _, self.token = found.groups()
        headers = {"Authorization": f"Bearer {self.token}", "X-Trimtab": "1"}
        self.api = httpx2.Client(base_url=f"{self.url}api/v1", headers=headers, timeout=60)
