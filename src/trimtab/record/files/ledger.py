"""The files of one rank in a directory, over all its attempts: kept by the rank itself, in a small file of its own.

The names of thousands of ranks lie in one directory, often on a shared file system. Listing it in every rank would be
a storm of metadata requests, so a rank remembers its own names. The ledger appears when there is something to
remember: at the first rotation, or when a rank finds files of an earlier attempt.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

FileKind = Literal["detail", "summary", "window"]

STILL_OPEN: Final = -1
"""Size of a file that is, or was at the last word, being written."""
_VERSION: Final = 1
_MOST_BYTES: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class Entry:
    """A file."""

    run_id: str
    attempt: int
    kind: FileKind
    name: str
    bytes: int
    """Or :data:`STILL_OPEN`."""


class Ledger:
    """What one rank has written into a directory. Single-threaded; only :meth:`save` may raise OSError.

    A ledger that cannot be read, or was lost in a crash of the machine (it is not synced), costs no data: the files
    that it named are then neither counted nor removed.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        """Read it, if there is one."""
        self.path = directory / f"rank{rank:05d}.ledger.json"
        self.entries: list[Entry] = []
        """In the order in which the files were begun."""
        self.attempt = -1
        """The highest attempt that is known."""
        self._own = re.compile(rf"rank{rank:05d}-a\d+-[\w.-]+", re.ASCII)  # what lies elsewhere is never removed
        with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
            self._load()

    def add(self, entry: Entry) -> None:
        """Remember a file (again: with its new size)."""
        if self._own.fullmatch(entry.name):
            places = [place for place, known in enumerate(self.entries) if known.name == entry.name]
            if places:
                self.entries[places[0]] = entry
            else:
                self.entries.append(entry)
            self.attempt = max(self.attempt, entry.attempt)

    def forget(self, gone: Iterable[Entry]) -> None:
        """These files are there no more. Their attempts stay taken."""
        names = {entry.name for entry in gone}
        self.entries = [entry for entry in self.entries if entry.name not in names]

    def measure(self, but: str) -> None:
        """Look at files that an earlier attempt left open (all ``but`` this name), and forget those that are gone."""
        for entry in [entry for entry in self.entries if entry.bytes == STILL_OPEN and entry.name != but]:
            try:
                size = (self.path.parent / entry.name).stat().st_size
            except OSError:
                self.forget([entry])
            else:
                self.entries[self.entries.index(entry)] = replace(entry, bytes=size)

    def save(self) -> None:
        """Replace the file; a reader, or the next attempt after a kill, finds the old one or the new one."""
        content = {"version": _VERSION, "attempt": self.attempt, "files": [asdict(entry) for entry in self.entries]}
        temporary = self.path.with_name(f".{self.path.name}.part")  # one name: a kill leaves no more than one
        try:
            temporary.write_text(json.dumps(content), encoding="utf-8")
            temporary.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _load(self) -> None:
        with self.path.open("rb") as source:
            content: Any = json.loads(source.read(_MOST_BYTES))
        if content["version"] != _VERSION:
            return
        for item in cast(list[dict[str, Any]], content["files"]):
            entry = Entry(
                str(item["run_id"]), int(item["attempt"]), item["kind"], str(item["name"]), int(item["bytes"])
            )
            if entry.kind in get_args(FileKind) and entry.bytes >= STILL_OPEN:
                self.add(entry)
        self.attempt = max(self.attempt, int(content["attempt"]))
