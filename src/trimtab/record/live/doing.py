"""What a rank is doing at this moment: the step, the communications that are open, and how far each group has come.

All of it is read from another thread than the one that trains, which is not disturbed: only what it has left anyway is
looked at. On a device that works behind the host the open communications are those whose marks it has not reached.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Final, Protocol

from trimtab.events import COMM_KINDS, STREAM_COMPUTE
from trimtab.record.clocks import Clock, unix_offset_ns
from trimtab.record.files.ring import COLUMN
from trimtab.record.recorder import Recorder
from trimtab.record.run_identity import Identity
from trimtab.scan.online.summary import (
    MOST_GROUPS,
    MOST_OPEN,
    GroupProgress,
    Heartbeat,
    OpenCommunication,
    Runs,
    runs_of,
)

_MOST_ROWS: Final = 4096
_MOST_FRAMES: Final = 40
_MOST_RUNS_KEPT: Final = 1024


class _Group(Protocol):
    label: str
    ranks: tuple[int, ...]

    @property
    def collectives(self) -> int: ...


class Communications(Protocol):
    """The interception, as far as it is needed here."""

    @property
    def open(self) -> Sequence[tuple[Any, bool]]:
        """Communications (:class:`Pending`) whose end is not known, and whether somebody waits for them."""
        ...

    @property
    def groups(self) -> Sequence[_Group]:
        """All groups met so far."""
        ...


class Doing:
    """Reads off what the rank is doing."""

    def __init__(
        self,
        recorder: Recorder,
        identity: Identity,
        attempt: int,
        host: str,
        communications: Communications | None,
        clock: Clock = time.perf_counter_ns,
        unix_offset: Callable[[], int] = unix_offset_ns,
    ) -> None:
        """``clock`` is that of the recorder; ``unix_offset`` makes Unix time of it."""
        self._recorder = recorder
        self._identity = identity
        self._attempt = attempt
        self._host = host
        self._communications = communications
        self._clock = clock
        self._unix_offset = unix_offset
        self._counts: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._beats = 0
        self._runs: dict[str, Runs] = {}

    def heartbeat(self) -> Heartbeat:
        """Now, short: the oldest communications and the groups used last."""
        every = self.open()
        return self._said(every[:MOST_OPEN], self._progress(every)[:MOST_GROUPS])

    def everything(self) -> tuple[Heartbeat, list[str]]:
        """Now, with all open communications and groups, and the Python stack of the main thread, innermost first."""
        every = self.open()
        return self._said(every, self._progress(every)), list(_stack(threading.main_thread().ident or 0))

    def open(self) -> list[OpenCommunication]:
        """The communications under way, the oldest first."""
        offset = self._unix_offset()
        found = [*self._on_host(offset), *self._on_device(offset)]
        return sorted(found, key=lambda one: (one.since_unix_ns, one.seq))

    def _said(self, every: list[OpenCommunication], groups: list[GroupProgress]) -> Heartbeat:
        recorder, identity, offset = self._recorder, self._identity, self._unix_offset()
        now = self._clock() + offset
        began = recorder.step_began_ns
        return Heartbeat(
            identity.run_id,
            self._attempt,
            identity.rank,
            identity.world_size,
            self._host,
            now,
            step=recorder.step,
            step_since_unix_ns=began + offset if began >= 0 else now,
            phase=str(recorder.phase),
            open=tuple(every),
            groups=tuple(groups),
        )

    def _on_host(self, offset: int) -> Iterator[OpenCommunication]:
        if self._communications is None:
            return
        for pending, blocking in self._communications.open:
            if pending.foreground:
                yield OpenCommunication(
                    pending.group.label,
                    pending.operator.op,
                    pending.seq,
                    max(pending.nbytes, 0),
                    self._since(pending.ready, offset),
                    self._members(pending.group.label, pending.group.ranks),
                    pending.src,
                    pending.dst,
                    pending.tag,
                    blocking,
                )

    def _on_device(self, offset: int) -> Iterator[OpenCommunication]:
        """Rows that the writer holds back until the device has come to their ends."""
        writer = self._recorder.writer
        if writer is None:
            return
        for row in writer.unresolved[:_MOST_ROWS].tolist():
            kind, _, stream, _, group, op, _, src, dst, tag, _ = writer.sites.at(row[COLUMN["site"]])
            if kind in COMM_KINDS and row[COLUMN["end"]] < -1:
                ranks = writer.groups.get(group, ())
                since = self._since(row[COLUMN["start"]], offset)
                seq, nbytes = row[COLUMN["seq"]], max(row[COLUMN["bytes"]], 0)
                members = self._members(group, ranks)
                blocking = stream == STREAM_COMPUTE
                yield OpenCommunication(group, op, seq, nbytes, since, members, src, dst, tag, blocking)

    def _since(self, mark: int, offset: int) -> int:
        """Unix time of a mark; where the device has not come to it, that of the step."""
        began = max(self._recorder.step_began_ns, 0)
        return max((mark if mark >= 0 else began) + offset, 0)

    def _members(self, label: str, ranks: Sequence[int]) -> Runs:
        runs = self._runs.get(label)
        if runs is None:
            runs = runs_of(ranks)
            if len(self._runs) < _MOST_RUNS_KEPT:
                self._runs[label] = runs
        return runs

    def _progress(self, every: list[OpenCommunication]) -> list[GroupProgress]:
        """Of each group, those used last first. What is not open is complete, as far as anybody knows."""
        if self._communications is None:
            return []
        first_open: dict[str, int] = {}
        for one in every:
            if not one.is_message and one.seq >= 0:
                first_open[one.group] = min(one.seq, first_open.get(one.group, one.seq))
        self._beats += 1
        found: list[GroupProgress] = []
        for group in self._communications.groups:
            label, issued = group.label, group.collectives - 1
            if self._counts.get(label) != issued:
                self._counts[label] = issued
                self._used[label] = self._beats
            found.append(GroupProgress(label, issued, first_open.get(label, issued + 1) - 1))
        return sorted(found, key=lambda one: (one.group not in first_open, -self._used.get(one.group, 0)))


def _stack(thread: int) -> Iterator[str]:
    frame: FrameType | None = sys._current_frames().get(thread)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
