"""From a run directory to its collector."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from pathlib import Path

from trimtab.config import ControlConfig
from trimtab.control.endpoint import Complaints
from trimtab.scope.collector.collector import Collector
from trimtab.scope.collector.connection import Place


@contextlib.contextmanager
def open_scope(
    run_directory: Path,
    config: ControlConfig,
    environment: Mapping[str, str],
    *,
    complaints: Complaints | None = None,
) -> Generator[Collector, None, None]:
    """The collector of the job that records into ``run_directory``, in this process or, where another one collects,
    as its client. ValueError, in one line, where there is no such directory or no hub can be had."""
    collector = Collector(Place(run_directory, config, environment), complaints=complaints)
    try:
        yield collector
    finally:
        collector.close()
