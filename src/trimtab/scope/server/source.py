"""A recording as the endpoints see it: what was looked up or merged once is kept, and what was appended is added."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from trimtab.scope.frame import Frame, Header
from trimtab.scope.recording.reader import Batch, Recording
from trimtab.scope.recording.series import series
from trimtab.scope.server.arrival import NOTHING, Newest, Standing, complete_until, newest
from trimtab.scope.server.limits import Seconds
from trimtab.scope.server.reduce import Floats, Integers, Merged, merge_by, nothing

_REFRESH_SECONDS: Final = 0.25
_SETTLING: Final = 16
"""So many last steps are looked at again each time: ranks are not equally far."""
_CACHED_BYTES: Final = 128 << 20
_ENTRY_BYTES: Final = 1024
_MOST_LISTS: Final = 4096
_MOST_MICROBATCHES: Final = 1 << 16
_ROWS_AT_ONCE: Final = 1 << 18
STATISTICS_OF: Final = ("statistics", "histogram")
"""Frames of these kinds have a vector."""


class Source:
    """One recording. From any thread."""

    def __init__(self, recording: Recording, clock: Seconds = time.monotonic) -> None:
        self._recording = recording
        self._clock = clock
        self._lock = threading.Lock()
        self._refreshed = clock()
        self._steps: OrderedDict[tuple[str, str], Integers] = OrderedDict()
        self._wholes: OrderedDict[tuple[str, tuple[int, ...] | None], Merged] = OrderedDict()
        self._bytes = 0

    @property
    def recording(self) -> Recording:
        """As it is now, or was a moment ago."""
        with self._lock:
            now = self._clock()
            if now - self._refreshed >= _REFRESH_SECONDS:
                self._refreshed = now
                self._recording.refresh()
        return self._recording

    def steps(self, tap: str, what: str | None = None) -> Integers:
        """Steps of which there are frames of a tensor (of either kind that has a vector, where ``what`` is
        ``statistics``), in order."""
        key = (tap, what or "")
        with self._lock:
            known = self._steps.get(key, np.empty(0, np.int64))
        recording = self.recording
        known = known[: max(len(known) - _SETTLING, 0)]
        begin = int(known[-1]) + 1 if len(known) else -1
        kinds = STATISTICS_OF if what == "statistics" else (what,)
        found = [known]
        for kind in kinds:
            chosen = recording.chosen(tap, kind)
            found.extend(np.unique(batch.step) for batch in recording.batches(chosen, begin))
        steps = np.unique(np.concatenate(found))
        with self._lock:
            self._steps[key] = steps
            if len(self._steps) > _MOST_LISTS:
                self._steps.popitem(last=False)
        return steps

    def newest(self, tap: str, what: str, standing: Standing | None) -> Newest:
        """The last step of a tensor, or of those of a pattern, that is to be shown. ``standing``: of the job that
        records it; None: nothing more comes."""
        steps = self.steps(tap, what)
        if not len(steps):
            return NOTHING
        found = newest(*self._sent_since(tap, what, int(steps[-_SETTLING:][0])), standing)
        return found._replace(early=found.early and len(steps) <= _SETTLING)

    def complete_until(self, tap: str, standing: Standing | None) -> int:
        """The last step of which all statistics of a tensor have come; -1: there is none."""
        steps = self.steps(tap, "statistics")
        if not len(steps):
            return -1
        begin = int(steps[-_SETTLING:][0])
        found = complete_until(*self._sent_since(tap, "statistics", begin), standing)
        return begin - 1 if found is None else found

    def _sent_since(self, tap: str, what: str, begin: int) -> tuple[list[Batch], list[Header], list[int]]:
        recording = self._recording
        kinds = STATISTICS_OF if what == "statistics" else (what,)
        chosen = [recording.chosen(tap, kind) for kind in kinds]
        batches = [batch for one in chosen for batch in recording.batches(one, begin)]
        return batches, recording.streams, np.concatenate(chosen).tolist()

    def taps(self) -> dict[str, dict[str, Any]]:
        """By name, in the order of the model's computation: kinds of frames, ranks, and what is said of the tensor."""
        found: dict[str, dict[str, Any]] = {}
        recording = self.recording
        for name, what in recording.taps():
            found.setdefault(name, {"what": [], "ranks": set(), "meta": {}})["what"].append(what)
        for stream in list(recording.streams):
            about = found.get(stream.tap)
            if about is not None:
                about["ranks"].add(stream.rank)
                about["meta"] = about["meta"] or stream.meta
        return found

    def ranks(self, tap: str) -> tuple[int, ...]:
        """Ranks that have sent vectors of a tensor."""
        streams = self.recording.streams
        return tuple(sorted({one.rank for one in list(streams) if one.tap == tap and one.what in STATISTICS_OF}))

    def whole(self, tap: str, ranks: tuple[int, ...] | None = None) -> Merged:
        """Vectors of a tensor by step, merged over microbatches, shards and ``ranks``; replicas count once."""
        key = (tap, ranks)
        with self._lock:
            known = self._wholes.get(key, nothing())
        known = known.until(max(len(known.key) - _SETTLING, 0))
        begin = int(known.key[-1]) + 1 if len(known.key) else -1
        found = series(self.recording, tap, begin, ranks=ranks, microbatches=False)
        merged = known.followed_by(Merged(found.step, found.vector, found.shift))
        self._keep(key, merged)
        return merged

    def by_rank(
        self, tap: str, first: int, last: int, ranks: Sequence[int] | None = None
    ) -> Iterator[tuple[Integers, Merged]]:
        """Ranks, and their vectors by step, each rank's microbatches merged; in parts, by ranges of steps."""
        steps = self.steps(tap, "statistics")
        many = len(ranks) if ranks is not None else len(self.ranks(tap))
        for begin, end in _windows(steps[(steps >= first) & (steps <= last)], many):
            span = end - begin + 1
            key, vector, shift = self._vectors(tap, begin, end, ranks, span)
            merged = merge_by(key, vector, shift)
            yield merged.key // span, Merged(merged.key % span + begin, merged.vector, merged.shift)

    def frames(
        self, tap: str, what: str, step: int, ranks: Sequence[int] | None = None, microbatch: int | None = None
    ) -> list[Frame]:
        """Frames of a step, by microbatch, rank and part."""
        found = list(self.recording.frames(tap, what, step, step, ranks=ranks, microbatch=microbatch))
        return sorted(found, key=lambda frame: (frame.microbatch, frame.rank, str(frame.meta.get("part", ""))))

    def coordinates(self) -> dict[int, dict[str, int]]:
        """Where each rank stood, as it said; of one that did not say, as far as its shards do."""
        recording = self.recording
        found: dict[int, dict[str, int]] = {}
        for stream in list(recording.streams):
            found.setdefault(stream.rank, {}).update({axis: index for axis, index, _ in stream.shard})
        return found | recording.ranks()

    def _vectors(
        self, tap: str, first: int, last: int, ranks: Sequence[int] | None, span: int
    ) -> tuple[Integers, Floats, Floats]:
        parts = list(self.recording.vectors(tap, first, last, ranks=ranks))
        if not parts:
            return np.empty(0, np.int64), np.empty((0, 11)), np.empty(0)
        key = np.concatenate([part.rank * span + (part.step - first) for part in parts])
        microbatch = np.concatenate([part.microbatch for part in parts])
        vector = np.concatenate([part.vector for part in parts])
        shift = np.concatenate([part.shift for part in parts])
        if self._overlap(tap, ranks):
            _, once = np.unique(key * _MOST_MICROBATCHES + microbatch, return_index=True)
            return key[once], vector[once], shift[once]
        return key, vector, shift

    def _overlap(self, tap: str, ranks: Sequence[int] | None) -> bool:
        """May two subscriptions have asked a rank for the same?"""
        recording = self._recording
        wanted = set(recording.chosen(tap, ranks=ranks).tolist())
        streams = [one for number, one in enumerate(list(recording.streams)) if number in wanted]
        senders = [one.rank for one in streams if one.what in STATISTICS_OF]
        return len(senders) > len(set(senders))

    def _keep(self, key: tuple[str, tuple[int, ...] | None], merged: Merged) -> None:
        with self._lock:
            old = self._wholes.pop(key, None)
            self._bytes += _size(merged) - (0 if old is None else _size(old))
            self._wholes[key] = merged
            while self._bytes > _CACHED_BYTES and len(self._wholes) > 1:
                _, gone = self._wholes.popitem(last=False)
                self._bytes -= _size(gone)


def _windows(steps: Integers, per_step: int) -> Iterator[tuple[int, int]]:
    """Ranges of steps, first and last of each, that hold few enough rows to be in memory at once."""
    many = max(_ROWS_AT_ONCE // max(per_step, 1), 1)
    for begin in range(0, len(steps), many):
        part = steps[begin : begin + many]
        yield int(part[0]), int(part[-1])


def _size(merged: Merged) -> int:
    return _ENTRY_BYTES + sum(part.nbytes for part in merged)
