"""All files of one rank: detail, summaries, the ledger, and the budget that holds them together.

The writer thread owns it. Nothing here waits, and each round costs a few comparisons unless a file is due.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import pyarrow as pa

from trimtab.config import RecordConfig
from trimtab.events import DETAIL_KEY, DETAIL_SUMMARY, FILE_SCHEMA, HEADER_KEY, SUMMARY_SUFFIX
from trimtab.record.complain import failed
from trimtab.record.files.ledger import STILL_OPEN, Entry, FileKind, Ledger
from trimtab.record.files.retention import Retention, space
from trimtab.record.files.ring import Rows
from trimtab.record.files.rows import Sites, to_batch
from trimtab.record.files.spool import EACH_BATCH, Opener, Spool, create_exclusively, file_name
from trimtab.record.files.summary import StepSum, Summaries
from trimtab.record.run_identity import directory_of

_SUMMARY_SECONDS: Final = 300.0
"""Summaries go out this often (each batch of them takes 2 KB beside its rows); who lives shorter leaves none."""
_BUDGET_SECONDS: Final = 30.0
_BUDGET_PARTS: Final = 8
"""The budget holds at least this many files of detail."""
_SUMMARY_ROTATE_BYTES: Final = 16 << 20


class Storage:
    """Where a rank's events go. Single-threaded but for :meth:`note`; every method may raise OSError."""

    def __init__(
        self,
        config: RecordConfig,
        header: dict[str, Any],
        opener: Opener = create_exclusively,
        *,
        clock: Callable[[], float] = time.monotonic,
        space: Callable[[Path], tuple[int, int]] = space,
    ) -> None:
        """Create the rank's first file. ``header``: see run_identity.make_header. ``clock``: seconds."""
        self._clock = clock
        self._opener = opener
        self._rank = int(header["rank"])
        self._run_id = str(header["run_id"])
        self._directory = directory_of(config.dir)
        self._ledger = Ledger(self._directory, self._rank)
        budget = config.disk_mb << 20
        rotate = max(config.rotate_mb, 1) << 20
        if budget:
            rotate = min(rotate, max(budget // _BUDGET_PARTS, 1 << 16))
        first = max(int(header["attempt"]), self._ledger.attempt + 1)
        self._detail = Spool(self._directory, header | {"attempt": first}, rotate, opener, finished=self._detail_done)
        self._header = header | {"attempt": self._detail.attempt, DETAIL_KEY: DETAIL_SUMMARY}
        self._retention = Retention(
            self._directory, self._ledger, self._run_id, budget, config.keep_free_mb << 20, space
        )
        self._longest = config.rotate_minutes * 60
        self._summaries: Summaries | None = None
        self._summarising = True
        self._step_ended: Callable[[StepSum], None] | None = None
        self._summary: Spool | None = None
        self._said: dict[str, Any] = {}
        self._noted: SimpleQueue[str] = SimpleQueue()
        self._rotated = self._flushed = self._looked = self._stretch_began = clock()
        self._due = False
        self._remember(range(first, self._detail.attempt))

    @property
    def path(self) -> Path:
        """The file being written."""
        return self._detail.path

    def note(self, name: str) -> None:
        """A profiler window of this name was written beside the files; from any thread."""
        self._noted.put(name)

    def append(self, rows: Rows, sites: Sites, args: list[str | None], metadata: dict[str, Any]) -> None:
        """Write n rows (perhaps none; times resolved) with their args, and what ``metadata`` changes."""
        self._detail.append(to_batch(rows, sites, args, FILE_SCHEMA), metadata)
        self._said |= {key: value for key, value in metadata.items() if key not in EACH_BATCH}
        self._summarise(rows, sites, args)

    def follow(self, step_ended: Callable[[StepSum], None]) -> None:
        """Have each step told as it is summed up. From any thread."""
        self._step_ended = step_ended
        summaries = self._summaries
        if summaries is not None:
            summaries.ended = step_ended

    def again(self, step: StepSum) -> StepSum:
        """See :meth:`Summaries.again`."""
        return step if self._summaries is None else self._summaries.again(step)

    def tend(self) -> None:
        """After each round: whatever has become due."""
        now = self._clock()
        if self._longest and self._detail.rows and now - self._rotated >= self._longest:
            self._detail.rotate()
        crowded = self._summaries is not None and self._summaries.crowded
        if self._due or crowded or now - self._flushed >= _SUMMARY_SECONDS:  # due: before any detail may go
            self._flush_summaries(now)
        if self._due or now - self._looked >= _BUDGET_SECONDS:
            self._take_noted()
            self._due, self._looked = False, now
            self._retention.enforce({spool.path.name: spool.written for _, spool in self._open_files()})

    def close(self) -> None:
        """End the files in order."""
        try:
            if self._summary is not None:
                self._said["closed"] = True
                self._flush_summaries(self._clock(), everything=True)
                self._summary.close()
            if not self._noted.empty():
                self._take_noted()
        finally:
            self._detail.close()

    def abandon(self) -> None:
        """Close the files as they are."""
        if self._summary is not None:
            self._summary.abandon()
        self._detail.abandon()

    def _summarise(self, rows: Rows, sites: Sites, args: Sequence[str | None]) -> None:
        """Add to the summaries. Should that go wrong, the detail is still worth having."""
        if not self._summarising:
            return
        if self._summaries is None:
            self._summaries = Summaries(sites)
            self._summaries.ended = self._step_ended
        if self._summaries.at_beginning:
            self._stretch_began = self._clock()
        try:
            self._summaries.add(rows, args)
        except Exception as error:
            self._summarising = False
            failed(f"rank {self._rank}: steps are not summarised any more ({type(error).__name__}: {error})")

    def _flush_summaries(self, now: float, *, everything: bool = False) -> None:
        self._flushed = now
        if self._summaries is None or not self._summarising:
            return
        rows, args = self._summaries.take(now - self._stretch_began, everything=everything)
        if not len(rows) and (self._summary is None or not everything):
            return
        if self._summary is None:
            self._summary = self._begin_summary()
        said, self._said = self._said, {}
        self._summary.append(to_batch(rows, self._summaries.sites, args, FILE_SCHEMA), said)

    def _begin_summary(self) -> Spool:
        return Spool(
            self._directory,
            self._header,
            _SUMMARY_ROTATE_BYTES,
            self._opener,
            suffix=SUMMARY_SUFFIX,
            claim=False,
            finished=lambda name, size: self._finish("summary", name, size),
        )

    def _detail_done(self, name: str, size: int) -> None:
        self._rotated = self._clock()
        self._finish("detail", name, size)

    def _finish(self, kind: FileKind, name: str, size: int) -> None:
        """A file is complete and the next one begun: from now on it may be removed."""
        self._ledger.add(Entry(self._run_id, self._detail.attempt, kind, name, size))
        self._save_ledger()
        self._due = True

    def _save_ledger(self) -> None:
        for kind, spool in self._open_files():
            self._ledger.add(Entry(self._run_id, self._detail.attempt, kind, spool.path.name, STILL_OPEN))
        self._ledger.save()

    def _open_files(self) -> Iterator[tuple[FileKind, Spool]]:
        yield "detail", self._detail
        if self._summary is not None:
            yield "summary", self._summary

    def _take_noted(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                name = self._noted.get_nowait()
                with contextlib.suppress(OSError):
                    size = (self._directory / name).stat().st_size
                    self._finish("window", name, size)

    def _remember(self, attempts: range) -> None:
        """Files of earlier attempts that had no ledger: they were never rotated, so there is one each."""
        for attempt in attempts:
            name = file_name(self._rank, attempt, 0)
            with contextlib.suppress(OSError, ValueError, pa.ArrowException):
                with pa.OSFile(str(self._directory / name)) as source, pa.ipc.open_stream(source) as reader:
                    run_id = str(json.loads(reader.schema.metadata[HEADER_KEY])["run_id"])
                self._ledger.add(Entry(run_id, attempt, "detail", name, STILL_OPEN))
        if self._ledger.entries:
            self._ledger.measure(self._detail.path.name)
            self._save_ledger()
