"""From a recorded run to a file for another program."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from trimtab.traces.own_header import printable
from trimtab.traces.read import read
from trimtab.traces.table import Trace
from trimtab.traces.window import Written

PERFETTO = (".perfetto-trace", ".pftrace", ".perfetto")
CHROME = (".json", ".json.gz")
PARQUET = (".parquet",)


def convert(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    steps: tuple[int, int] | None = None,
    run_id: str | None = None,
) -> Written:
    """Read the run at ``path`` and write it to ``target``, whose ending says in which format.

    ``steps`` (first, last) limits what is written; without it, viewers' formats get a window around the slowest
    step. Raises ValueError in one line for what cannot be read or is not known.
    """
    writer_for(target)
    return write(read(path, run_id=run_id), target, steps)


def write(trace: Trace, target: str | os.PathLike[str], steps: tuple[int, int] | None = None) -> Written:
    """Write ``trace`` to ``target``, whose ending says in which format."""
    return writer_for(target)(trace, target, steps)


def writer_for(target: str | os.PathLike[str]) -> Callable[..., Written]:
    """The function that writes files with the ending of ``target``; ValueError if it is not known."""
    name = Path(target).name.lower()
    if name.endswith(PERFETTO):
        from trimtab.traces.perfetto import write_perfetto  # needs a package of its own

        return write_perfetto
    if name.endswith(CHROME):
        from trimtab.traces.chrome import write_chrome

        return write_chrome
    if name.endswith(PARQUET):
        from trimtab.traces.parquet import write_parquet

        return write_parquet
    known = ", ".join((*PERFETTO, *CHROME, *PARQUET))
    raise ValueError(f"{printable(target)}: its ending names no known format, choose from {known}")
