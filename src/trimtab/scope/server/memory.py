"""What a server that was killed had asked the job for: the next one in the directory ends it, unless it is to stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from trimtab.scope.fields import Fields
from trimtab.scope.server.address_book import replace_file
from trimtab.scope.server.answers import Problem
from trimtab.scope.server.files import read_json_inside

WISHES: Final = "server-wishes.json"
_MOST_BYTES: Final = 64 << 10
_MOST_NAMES: Final = 1024


class Memory:
    """A file in RUN_DIR/scope with the names of subscriptions that are to end with their sessions. What cannot be
    written or read is as if it were not there: the subscriptions then stay, as those of other programs do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: tuple[str, ...] = ()

    def read(self) -> tuple[str, ...]:
        """What an earlier server has left."""
        with contextlib.suppress(Problem, ValueError):
            said = read_json_inside(self._folder, WISHES, _MOST_BYTES)
            if said is not None:
                self._written = Fields(said, WISHES).texts("subscriptions", most=_MOST_NAMES)
        return self._written

    def write(self, names: Iterable[str]) -> None:
        """Those of now; the file goes with the last."""
        wanted = tuple(sorted(names))
        if wanted == self._written:
            return
        with contextlib.suppress(OSError):
            if wanted:
                replace_file(self._folder / WISHES, {"subscriptions": list(wanted)}, 0o600)
            else:
                (self._folder / WISHES).unlink(missing_ok=True)
            self._written = wanted
