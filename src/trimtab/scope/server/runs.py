"""The runs that a server shows: their recordings, and what else lies in their directories. No others."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from trimtab.run_directory import check_directory
from trimtab.scope.collector.audit import read_audit
from trimtab.scope.recording.format import SUFFIX
from trimtab.scope.recording.reader import FOLDER, Recording
from trimtab.scope.server.answers import Problem
from trimtab.scope.server.figures import checked_plots
from trimtab.scope.server.files import is_inside, lines_inside, read_json_inside, stays_inside
from trimtab.scope.server.limits import Seconds
from trimtab.scope.server.source import Source

LIVE: Final = "live"
"""Another name of the newest recording of the job that the server belongs to."""
REPORT: Final = "report.json"
PLOTS: Final = "report-plots.json"
WATCH: Final = "trimtab-watch.jsonl"
_MOST_REPORT_BYTES: Final = 64 << 20
_MOST_PLOTS_BYTES: Final = 16 << 20
_MOST_LOG_BYTES: Final = 4 << 20
_LOOK_SECONDS: Final = 0.5
_LINKED: Final = "a link in its folder leads out of it, so it is not read"
_NOTHING: Final = "nothing is recorded there yet"
_ODD: Final = re.compile(r"[^A-Za-z0-9._-]+")


def file_part(text: str) -> str:
    """A text, fit to be a part of a file's name."""
    return _ODD.sub("_", text)[:100]


class Run:
    """One recording, or a run directory that holds none yet."""

    def __init__(self, name: str, directory: Path, source: Source | None, error: str) -> None:
        """``error``: why there is no source."""
        self.name = name
        self.directory = directory
        self.error = error
        self._source = source

    def recording(self) -> Source:
        """What is recorded; :class:`Problem` where that cannot be read."""
        if self._source is None:
            raise Problem(422, f"{self.name}: {self.error}")
        return self._source

    @property
    def file_name(self) -> str:
        """Its name, fit for a file's."""
        return file_part(self.name)

    def about(self, live: bool) -> dict[str, Any]:
        """What it is of, and what is wrong with it."""
        found: dict[str, Any] = {
            "name": self.name,
            "directory": self.directory.name,
            "path": str(self.directory.parent if self.directory.name == FOLDER else self.directory),
            "live": live,
            "recorded": self.error != _NOTHING,
            "report": is_inside(self.directory, REPORT),
            "error": self.error,
            "warnings": [],
            "label": "",
            "unix_ns": 0,
            "first_step": None,
            "last_step": None,
            "bytes": 0,
        }
        if self._source is None:
            return found
        recording = self._source.recording
        span = recording.span
        return found | {
            "warnings": recording.warnings[:32],
            "label": recording.label,
            "unix_ns": recording.unix_ns,
            "first_step": None if span is None else span[0],
            "last_step": None if span is None else span[1],
            "bytes": recording.bytes,
        }

    def audit(self) -> list[dict[str, Any]]:
        """Every activation of a perturbation that the ranks have written down."""
        folder = self.directory / FOLDER
        if not stays_inside(self.directory, folder):
            raise Problem(404, f"{self.name}: {_LINKED}")
        return read_audit(folder)

    def report(self) -> dict[str, Any] | None:
        """What scan said of it; None where nothing lies there."""
        found = read_json_inside(self.directory, REPORT, _MOST_REPORT_BYTES)
        if found is not None and not isinstance(found, dict):
            raise Problem(422, f"{REPORT} of the run makes no sense: expected an object")
        return cast("dict[str, Any] | None", found)

    def plots(self, most_cells: int) -> dict[str, Any] | None:
        """What the figures of the report are drawn from; None where nothing lies there."""
        found = read_json_inside(self.directory, PLOTS, _MOST_PLOTS_BYTES)
        if found is None:
            return None
        try:
            return checked_plots(found, PLOTS, most_cells)
        except ValueError as error:
            raise Problem(422, f"{error}; trimtab scan RUN_DIR --save makes it anew") from None

    def watched(self, most: int) -> dict[str, Any]:
        """What the log of watch says: its last events, and which alarms were on at its end."""
        found = lines_inside(self.directory, WATCH, _MOST_LOG_BYTES)
        lines = [cast("dict[str, Any]", line) for line in found or () if isinstance(line, dict)]
        return {"there": found is not None, **_state_of(lines), "events": lines[-most:]}


class Runs:
    """All of them. From any thread."""

    def __init__(
        self, directories: Sequence[Path], *, live: Path | None = None, clock: Seconds = time.monotonic
    ) -> None:
        """``live``: the one that a job records into. ValueError, in one line, for what is no directory."""
        for directory in directories:
            check_directory(directory, "give record.dir of a job, or where recordings lie")
        self._directories = {name: path.resolve() for name, path in _named(directories)}
        self._live = None if live is None else live.resolve()
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._looked = -_LOOK_SECONDS
        self._seen: dict[Path, tuple[str, ...]] = {}

    def directories(self) -> list[Path]:
        """Of which runs are shown."""
        return list(self._directories.values())

    def names(self) -> list[str]:
        """Of all runs; in a directory the oldest first."""
        return list(self._look())

    def get(self, name: str, *, readable: bool = True) -> Run:
        """The run of that name, or :data:`LIVE`; :class:`Problem` for one that is not known or cannot be read."""
        runs = self._look()
        run = self._newest(runs) if name == LIVE else runs.get(name)
        if run is None:
            known = ", ".join([*runs][-8:]) or "none"
            raise Problem(404, f"no run {name[:80]!a}; known are {known}")
        if readable:
            run.recording()
        return run

    def about(self, name: str) -> dict[str, Any]:
        """See :meth:`Run.about`."""
        run = self.get(name, readable=False)
        return run.about(self.is_live(run))

    def is_live(self, run: Run) -> bool:
        """Is it the one that the job records into?"""
        return self._newest(self._look()) is run

    def _newest(self, runs: dict[str, Run]) -> Run | None:
        live = [run for run in runs.values() if run.directory == self._live]
        return live[-1] if live else None

    def _look(self) -> dict[str, Run]:
        """See which there are now."""
        with self._lock:
            now = self._clock()
            if now - self._looked >= _LOOK_SECONDS:
                self._looked = now
                for label, directory in self._directories.items():
                    self._look_into(label, directory)
            return self._runs

    def _look_into(self, label: str, directory: Path) -> None:
        folder = directory if any(directory.glob(f"*{SUFFIX}")) else directory / FOLDER
        files = sorted(folder.glob(f"*{SUFFIX}")) if stays_inside(directory, folder) else None
        names = ("",) if files is None else tuple(dict.fromkeys(_recording(path) for path in files))
        if self._seen.get(directory) == names:
            return
        self._seen[directory] = names
        runs = {name: run for name, run in self._runs.items() if run.directory != directory}
        if files is None:
            runs[label] = Run(label, directory, None, _LINKED)
        elif not files:
            runs[label] = Run(label, directory, None, _NOTHING)
        for name in names if files else ():
            full = f"{label}.{name}"
            known = self._runs.get(full)
            runs[full] = (
                known
                if known is not None and not known.error
                else _open(full, directory, name, files or [], self._clock)
            )
        self._runs = runs


def _open(full: str, directory: Path, name: str, files: Sequence[Path], clock: Seconds) -> Run:
    try:
        recording = Recording(name, [path for path in files if _recording(path) == name])
        return Run(full, directory, Source(recording, clock), "")
    except (ValueError, OSError) as error:
        said = error.strerror or "cannot be read" if isinstance(error, OSError) else str(error)
        return Run(full, directory, None, said.replace(f"{directory}/", ""))


def _recording(path: Path) -> str:
    """Name of the recording that a chunk file belongs to."""
    return path.name.removesuffix(SUFFIX).rpartition("-")[0] or path.name


def _named(directories: Sequence[Path]) -> list[tuple[str, Path]]:
    """A name for each, of characters that mean nothing in a URL: its own, numbered where it comes again."""
    found: dict[str, Path] = {}
    for directory in directories:
        path = directory.resolve()
        base = _ODD.sub("_", path.name if path.name != FOLDER else path.parent.name) or "run"
        base = f"{base}_" if base == LIVE else base
        name, number = base, 2
        while name in found and found[name] != path:
            name, number = f"{base}~{number}", number + 1
        found[name] = path
    return list(found.items())


def _state_of(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Alarms that were raised and are not over, and the hang that has not ended."""
    alarms: dict[str, Any] = {}
    hang: dict[str, Any] | None = None
    for line in lines:
        kind, alarm = line.get("event"), line.get("alarm")
        if kind == "restart":
            alarms, hang = {}, None
        elif kind in ("alarm", "over") and isinstance(alarm, dict):
            about = cast("dict[str, Any]", alarm)
            key = f"{about.get('kind')} {about.get('ranks')}"
            if kind == "alarm":
                alarms[key] = alarm
            else:
                alarms.pop(key, None)
        elif kind in ("hang", "moving"):
            hang = line if kind == "hang" else None
    return {"alarms": list(alarms.values()), "hangs": hang}
