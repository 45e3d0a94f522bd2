"""Read a trace of any known format: each is one file in this package and one line in :data:`FORMATS`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trimtab.traces import own
from trimtab.traces.own_header import printable
from trimtab.traces.table import COLUMNS, Trace


class ReadFunction(Protocol):
    """Reads what its format claims; ValueError where nothing is usable, warnings in the trace for the rest."""

    def __call__(
        self,
        paths: Sequence[Path],
        columns: Sequence[str] | None = None,
        run_id: str | None = None,
        attempt: int | None = None,
    ) -> Trace:
        """The trace at ``paths``, together one run."""
        ...


@dataclass(frozen=True, slots=True)
class Format:
    """One trace format."""

    name: str
    expects: str
    """What its files look like, for error messages."""
    claims: Callable[[Path], bool]
    read: ReadFunction


FORMATS = (Format("trimtab", f"*{own.FILE_SUFFIX} as the recorder writes them", own.claims, own.read),)
"""Known formats; the first that claims a path reads it."""


def read(
    *paths: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    run_id: str | None = None,
    attempt: int | None = None,
) -> Trace:
    """The trace at ``paths``: a file or the directory of a run, or several (one a node, say) that make up a run.

    ``columns`` limits the event table to these columns (and ``rank``), to save memory. Of several runs in one
    place the newest is read, or ``run_id``; of several attempts at it the last, or ``attempt``. Times are on each
    rank's own clock, in Unix nanoseconds.

    Raises ValueError, in one line, where nothing usable is found; damage to single files is said in the
    trace's ``warnings``.
    """
    unknown = [name for name in columns or () if name not in COLUMNS]
    if unknown:
        raise ValueError(f"no column {unknown[0]!r} in an event table, choose from {', '.join(COLUMNS)}")
    places = [Path(path) for path in paths]
    if not places:
        raise ValueError("no trace to read: give the directory of a run's files")
    formats = [_format(place) for place in places]
    if len(set(formats)) > 1:
        raise ValueError(
            f"{printable(places[0])} and the others are not of one format: {', '.join(f.name for f in formats)}"
        )
    return formats[0].read(places, columns=columns, run_id=run_id, attempt=attempt)


def _format(where: Path) -> Format:
    try:
        where.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{printable(where)}: {str(reason).lower()}") from None
    for candidate in FORMATS:
        if candidate.claims(where):
            return candidate
    expected = "; ".join(f"{known.name}: {known.expects}" for known in FORMATS)
    what = "no trace files in this directory" if where.is_dir() else "not a trace file of a known format"
    raise ValueError(f"{printable(where)}: {what} (expected {expected})")
