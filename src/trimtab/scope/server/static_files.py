"""The page's files: read once, and looked up by name, so that no request ever names a path."""

from __future__ import annotations

import hashlib
import mimetypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

FOLDER: Final = Path(__file__).parent / "static"
INDEX: Final = "index.html"
REFUSED: Final = "refused.html"
"""Shown where a link is no longer good."""
FOREVER: Final = "public, max-age=31536000, immutable"
ASK: Final = "no-cache"
_HASHED: Final = re.compile(r"[-.][A-Za-z0-9_-]{8,}\.[a-z0-9]+$")
_FOLDER_OF_HASHED: Final = "assets/"
"""Where the bundler puts files whose names change with what they hold."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One of them."""

    content: bytes
    media: str
    tag: str
    cache: str

    def respond(self, request: Request, status: int = 200) -> Response:
        """It, or that it has not changed."""
        headers = {"ETag": self.tag, "Cache-Control": self.cache}
        if status == 200 and self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, status, headers, self.media)


def load(folder: Path = FOLDER) -> dict[str, StaticFile]:
    """All files below ``folder``, by their path in it."""
    found: dict[str, StaticFile] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        name = path.relative_to(folder).as_posix()
        content = path.read_bytes()
        media = mimetypes.guess_type(name)[0] or "application/octet-stream"
        if media.startswith("text/") or media.endswith("javascript"):
            media += "; charset=utf-8"
        hashed = name.startswith(_FOLDER_OF_HASHED) and _HASHED.search(name) is not None
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        found[name] = StaticFile(content, media, tag, FOREVER if hashed else ASK)
    return found
