"""Where a server is to be found: ``server.json`` for everybody, and its tokens in a file for its user alone."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

SERVER: Final = "server.json"
TOKENS: Final = "server-token"


class AddressBook:
    """The two files of one server, in RUN_DIR/scope; gone when it is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = False

    def write(self, url: str, link: str, control: str | None) -> None:
        """Write both, or replace them. OSError where that cannot be."""
        about = {"url": url, "pid": os.getpid()}
        secret = {"token": link, "link": f"{url}?token={link}"} | ({} if control is None else {"control": control})
        self._folder.mkdir(exist_ok=True)
        self._written = True
        replace_file(self._folder / TOKENS, {**about, **secret}, 0o600)
        replace_file(self._folder / SERVER, about, 0o644)

    def remove(self) -> None:
        """Take them away, unless another server has replaced them."""
        if not self._written:
            return
        for name in (SERVER, TOKENS):
            path = self._folder / name
            with contextlib.suppress(OSError, ValueError, AttributeError):
                if json.loads(path.read_text(encoding="ascii")).get("pid") == os.getpid():
                    path.unlink()


def replace_file(path: Path, value: dict[str, Any], mode: int) -> None:
    """All or nothing, and never readable for more than ``mode`` says, not even for a moment."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            json.dump(value, file)
            file.write("\n")
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
