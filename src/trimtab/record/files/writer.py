"""The writer thread: takes rows from the ring, resolves their times, and appends them to the files."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from trimtab.record.clocks import UNKNOWN, DeferredDevice, Device, resolve_all
from trimtab.record.compiled_parts import Parts
from trimtab.record.complain import failed
from trimtab.record.files.ring import COLUMN, WIDTH, Ring, Rows
from trimtab.record.files.rows import Sites
from trimtab.record.files.storage import Storage
from trimtab.record.files.summary import StepSum

_TIMES: Final = (COLUMN["ready"], COLUMN["start"], COLUMN["end"])
_SPAN: Final = (COLUMN["start"], COLUMN["end"])
_BATCH_ROWS: Final = 4_096
_GRACE_ROUNDS: Final = 20
_GRACE_SECONDS: Final = 0.1
_SHORTEST_WAIT_SECONDS: Final = 0.01


class Follower(Protocol):
    """Whoever wants to know how the steps went while the job runs. Called on the writer's thread."""

    def step_ended(self, step: StepSum) -> None:
        """One has been summed up."""

    def round_over(self, again: Callable[[StepSum], StepSum]) -> None:
        """A round is over, whether there was anything to write or not; ``again`` is that of the summaries."""


class Writer:
    """Moves rows from memory to the file until it is stopped or something fails; then it steps aside."""

    def __init__(
        self, ring_events: int, flush_seconds: float, storage: Storage, device: Device, parts: Parts | None = None
    ) -> None:
        """Nothing runs before :meth:`start`. ``parts`` are the compiled ones."""
        self._wakes: SimpleQueue[None] = SimpleQueue()  # its put may be interrupted by itself, an Event's set may not
        self.ring = Ring(ring_events, self.wake, None if parts is None else parts.Store)
        self.sites = Sites()
        self.args: dict[int, str] = {}
        """JSON text of events that have args, by event id; set before the row is pushed."""
        self._flush_seconds = max(flush_seconds, _SHORTEST_WAIT_SECONDS)
        self._storage = storage
        self._device = device
        self._descriptions: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._groups: dict[str, list[int]] = {}
        self._dropped = 0
        self._unknown_times = 0
        self._waiting: Rows = np.empty((0, WIDTH), np.int64)
        self._follower: Follower | None = None
        self._stopping = False
        self._finished = False
        self._thread: threading.Thread | None = None

    def start(self, failed: Callable[[Exception], None]) -> None:
        """Begin; ``failed`` is called on the writer's thread, once, when it can write no more."""
        thread = threading.Thread(target=self._run, args=(failed,), name="trimtab-writer", daemon=True)
        thread.start()
        self._thread = thread  # not earlier: there may be no thread to be had

    def wake(self) -> None:
        """Do a round now."""
        self._wakes.put(None)

    def describe(self, metadata: dict[str, Any]) -> None:
        """Metadata for the next batch; ``groups`` add up, everything else replaces what was there."""
        self._descriptions.put(metadata)

    @property
    def path(self) -> Path:
        """The file being written."""
        return self._storage.path

    def follow(self, follower: Follower) -> None:
        """Tell ``follower`` of the steps from now on; one that raises is told no more."""
        self._follower = follower
        self._storage.follow(self._step_ended)

    @property
    def unresolved(self) -> Rows:
        """Rows (n x WIDTH) that wait for the device, as of the last round; not to be changed. From any thread."""
        return self._waiting

    @property
    def groups(self) -> Mapping[str, list[int]]:
        """The ranks of each process group that was described, by its name. From any thread, not to be changed."""
        return self._groups

    def note_window(self, name: str) -> None:
        """A profiler's file of this name lies beside the rank's own; it counts as one of them. From any thread."""
        self._storage.note(name)

    def request_stop(self) -> None:
        """Write what is left and end the file in order, soon."""
        self._stopping = True
        self.wake()

    def stop(self, timeout: float) -> bool:
        """The same now; False if it took longer than ``timeout`` seconds. Never started, it finishes right here."""
        self.request_stop()
        if self._thread is None:
            if not self._finished:
                self.finish()
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Close the file as it is."""
        with contextlib.suppress(Exception):
            self._storage.abandon()

    def round(self) -> None:
        """Write what has come in, and look after the files."""
        self._write(self._due(), {})
        self._round_over()
        self._storage.tend()

    def finish(self) -> None:
        """Write all the rest and end the file. A device gets a moment to reach its last marks."""
        self._finished = True
        rows = self._due()
        for _ in range(_GRACE_ROUNDS):
            if not len(self._waiting):
                break
            time.sleep(_GRACE_SECONDS)
            rows = np.concatenate([rows, self._due()])
        rows = np.concatenate([rows, _given_up(self._waiting)])
        self._write(rows, {"closed": True})
        self._round_over()
        self._storage.close()

    def _run(self, failed: Callable[[Exception], None]) -> None:
        try:
            while not self._stopping:
                self._wait()
                self.round()
            self.finish()
        except BaseException as error:  # nobody else would notice that the thread has ended
            self.abandon()
            failed(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__} in the writer"))

    def _step_ended(self, step: StepSum) -> None:
        if self._follower is not None:
            self._told(lambda follower: follower.step_ended(step))

    def _round_over(self) -> None:
        if self._follower is not None:
            self._told(lambda follower: follower.round_over(self._storage.again))

    def _told(self, tell: Callable[[Follower], None]) -> None:
        assert self._follower is not None
        try:
            tell(self._follower)
        except Exception as error:
            self._follower = None
            failed(f"steps are not told while the job runs ({type(error).__name__}: {error})")

    def _wait(self) -> None:
        with contextlib.suppress(Empty):
            self._wakes.get(timeout=self._flush_seconds)
            while True:
                self._wakes.get_nowait()

    def _due(self) -> Rows:
        """Rows whose times are known; the others stay for the next round."""
        rows = self.ring.drain()
        if not isinstance(self._device, DeferredDevice):
            return rows
        anchors = self._device.tend()
        if anchors:
            self._descriptions.put({"anchors": anchors})
        rows = np.concatenate([self._waiting, rows])
        times = rows[:, _TIMES]
        resolve_all(self._device, times)
        rows[:, _TIMES] = _in_order(times)
        if not (times < UNKNOWN).any():
            self._waiting = rows[:0]
            return rows
        ready = (times >= UNKNOWN).all(axis=1)
        self._waiting = rows[~ready]
        too_many = max(len(self._waiting) - self.ring.size, 0)  # a device that hangs: keep memory bounded
        overdue, self._waiting = self._waiting[:too_many], self._waiting[too_many:]
        return np.concatenate([_given_up(overdue), rows[ready]])

    def _write(self, rows: Rows, metadata: dict[str, Any]) -> None:
        metadata = self._described() | metadata
        if self.ring.dropped != self._dropped:
            self._dropped = metadata["dropped"] = self.ring.dropped
        unknown = int((rows[:, _SPAN] == UNKNOWN).any(axis=1).sum())
        if unknown:
            self._unknown_times += unknown
            metadata["unknown_times"] = self._unknown_times
        if not len(rows) and not metadata:
            return
        closed = {"closed": metadata.pop("closed")} if "closed" in metadata else {}
        last = max(len(rows) - 1, 0) // _BATCH_ROWS
        for piece in range(last + 1):
            part = rows[piece * _BATCH_ROWS : (piece + 1) * _BATCH_ROWS]
            self._append(part, (metadata if piece == 0 else {}) | (closed if piece == last else {}))

    def _append(self, rows: Rows, metadata: dict[str, Any]) -> None:
        args: list[str | None] = [None] * len(rows)
        for row in np.flatnonzero(rows[:, COLUMN["extra"]]):
            args[row] = self.args.pop(int(rows[row, COLUMN["event_id"]]), None)
        self._storage.append(rows, self.sites, args, metadata)
        pa.default_memory_pool().release_unused()  # the job needs it more

    def _described(self) -> dict[str, Any]:
        changed: dict[str, Any] = {}
        with contextlib.suppress(Empty):
            while True:
                metadata = dict(self._descriptions.get_nowait())
                if "groups" in metadata:
                    self._groups |= {name: list(ranks) for name, ranks in metadata["groups"].items()}
                    metadata["groups"] = self._groups
                if "anchors" in metadata:
                    metadata["anchors"] = changed.get("anchors", []) + metadata["anchors"]
                changed |= metadata
        return changed


def _in_order(times: Rows) -> Rows:
    """``times`` (n x 3: ready, start, end) with no end before what comes first, where all three are resolved.

    The device's times are some microseconds off when told by the host's clock, and an event may have times of both: a
    message's end is the host's, and the stage that it is for may have become ready for it later, on the device.
    """
    known = (times >= UNKNOWN).all(axis=1) & (times[:, -1] > UNKNOWN)
    times[known, -1] = times[known].max(axis=1)
    return times


def _given_up(rows: Rows) -> Rows:
    """The rows with marks that nobody waits for any more turned into unknown times."""
    rows = rows.copy()
    times = rows[:, _TIMES]
    times[times < UNKNOWN] = UNKNOWN
    rows[:, _TIMES] = times
    return rows
