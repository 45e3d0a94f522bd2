"""Recordings, while they are written or long after: what is in them, and frames by tap, step and rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trimtab.run_directory import check_directory
from trimtab.scope.frame import Frame, Header, Packed, read_header, unpack
from trimtab.scope.names import Pattern, Shard, order
from trimtab.scope.recording.chunk import Chunk, blocks_between
from trimtab.scope.recording.format import SUFFIX, Rows
from trimtab.scope.shards import Gathering, Merged
from trimtab.scope.vector import FIELDS

FOREVER: Final = 1 << 62
FOLDER: Final = "scope"


class Batch(NamedTuple):
    """Some frames as columns, all with arrays of one size."""

    step: NDArray[np.int64]
    unix_ns: NDArray[np.int64]
    microbatch: NDArray[np.int32]
    stream: NDArray[np.int64]
    """Numbers in :attr:`Recording.streams`."""
    arrays: NDArray[np.uint8]
    """(frames, bytes)."""

    def at(self, rows: NDArray[np.bool_]) -> Batch:
        """Some of them."""
        return Batch(self.step[rows], self.unix_ns[rows], self.microbatch[rows], self.stream[rows], self.arrays[rows])


class Vectors(NamedTuple):
    """Statistics of some frames as columns: one row a frame."""

    step: NDArray[np.int64]
    microbatch: NDArray[np.int32]
    stream: NDArray[np.int64]
    rank: NDArray[np.int64]
    vector: NDArray[np.float64]
    """(frames, 11)."""
    shift: NDArray[np.float64]


class Recording:
    """All chunk files of one recording. From any thread; what is given out does not change any more."""

    def __init__(self, name: str, paths: Iterable[Path]) -> None:
        """ValueError, in one line, where none of them can be read."""
        self.name = name
        self.warnings: list[str] = []
        self._lock = threading.RLock()
        self._chunks: dict[Path, Chunk] = {}
        self._refused: set[Path] = set()
        self._streams: list[Header] = []
        self._raw: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._maps: dict[Path, NDArray[np.int64]] = {}
        self._open(paths := list(paths))
        if not self._chunks:
            empty = next((f"{path} is empty" for path in paths if path.exists()), f"{name}: there is no file of it")
            raise ValueError(self.warnings[0] if self.warnings else empty)

    # ----------------------------------------------------------------- what there is

    @property
    def label(self) -> str:
        """Which run of several it is."""
        return str(next(iter(self._chunks.values())).header.get("label", ""))

    @property
    def unix_ns(self) -> int:
        """When it began."""
        return int(next(iter(self._chunks.values())).header.get("unix_ns", 0))

    @property
    def streams(self) -> list[Header]:
        """What frames have in common, by number."""
        return self._streams

    @property
    def bytes(self) -> int:
        """Of its files."""
        return sum(path.stat().st_size for path in self._chunks if path.exists())

    @property
    def cut(self) -> list[Path]:
        """Files that end in the middle of a record: they are being written, or their writer has died."""
        return [path for path, chunk in self._chunks.items() if chunk.cut and not chunk.warnings]

    def refresh(self) -> None:
        """See what was written since."""
        with self._lock:
            folder = next(iter(self._chunks)).parent
            for chunk in self._chunks.values():
                chunk.refresh()
            self._open(path for path in _files(folder) if _name(path) == self.name)

    def taps(self) -> list[tuple[str, str]]:
        """(tap, what) that there are frames of."""
        found = {(stream.tap, stream.what) for stream in self._streams}
        return sorted(found, key=lambda one: (order(one[0]), one[1]))

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """What was written down of one kind, in the order of the files."""
        return [value for found, _, value in self._notes() if found == kind]

    def subscriptions(self) -> dict[str, dict[str, Any]]:
        """By id, as they were agreed on."""
        return {str(value.get("id")): value for value in self.notes("subscription")}

    def ranks(self) -> dict[int, dict[str, int]]:
        """Where each rank stood in the parallel layout, as far as it said so."""
        return {int(rank): dict(at) for value in self.notes("ranks") for rank, at in value.get("ranks", {}).items()}

    def notices(self, first: int = -1, last: int = FOREVER) -> list[dict[str, Any]]:
        """What ranks and the collector said of these steps, in order of time."""
        said = [(unix_ns, value) for kind, unix_ns, value in self._notes() if kind == "notice"]
        return [value for _, value in sorted(said, key=lambda one: one[0]) if first <= value.get("step", -1) <= last]

    def steps(self, tap: str = "**", what: str | None = None) -> NDArray[np.int64]:
        """Steps that there are frames of, in order."""
        found = [np.unique(batch.step) for batch in self.batches(self.chosen(tap, what))]
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last step, from the index alone."""
        with self._lock:
            blocks = [block for chunk in self._chunks.values() for block in chunk.blocks]
        return (min(block.first for block in blocks), max(block.last for block in blocks)) if blocks else None

    # ------------------------------------------------------------------------ frames

    def chosen(
        self,
        tap: str = "**",
        what: str | None = None,
        *,
        ranks: Iterable[int] | None = None,
        subscription: str | None = None,
    ) -> NDArray[np.int64]:
        """Numbers of the streams that are meant; ``tap`` is a name or a pattern."""
        pattern = Pattern(tap)
        allowed = None if ranks is None else set(ranks)
        names: dict[str, bool] = {}
        found: list[int] = []
        for number, stream in enumerate(self._streams):
            if stream.tap not in names:
                names[stream.tap] = pattern.matches(stream.tap)
            if (
                names[stream.tap]
                and (what is None or stream.what == what)
                and (allowed is None or stream.rank in allowed)
                and (subscription is None or stream.subscription == subscription)
            ):
                found.append(number)
        return np.array(found, np.int64)

    def batches(
        self, streams: NDArray[np.int64], first: int = -1, last: int = FOREVER, microbatch: int | None = None
    ) -> Iterator[Batch]:
        """Frames of these streams as columns, in the order in which they were written."""
        wanted = np.zeros(len(self._streams) + 1, bool)
        wanted[streams] = True
        if not len(streams):
            return
        with self._lock:
            chunks = [(path, chunk) for path, chunk in self._chunks.items()]
        for path, chunk in chunks:
            numbers = self._maps[path]
            numbers = np.where(numbers < len(wanted) - 1, numbers, -1)  # others have come to be known meanwhile
            if not wanted[numbers].any():
                continue
            with self._lock:
                found = list(blocks_between(chunk, first, last))
                self._gather_warnings()
            for _, rows in found:
                batch = _select(rows, numbers, wanted, first, last, microbatch)
                if batch is not None:
                    yield batch

    def frames(
        self,
        tap: str = "**",
        what: str | None = None,
        first: int = -1,
        last: int = FOREVER,
        *,
        ranks: Iterable[int] | None = None,
        microbatch: int | None = None,
        subscription: str | None = None,
    ) -> Iterator[Frame]:
        """Frames, in the order in which they were written."""
        chosen = self.chosen(tap, what, ranks=ranks, subscription=subscription)
        for packed in self.packed(chosen, first, last, microbatch):
            yield unpack(packed)

    def packed(
        self, streams: NDArray[np.int64], first: int = -1, last: int = FOREVER, microbatch: int | None = None
    ) -> Iterator[Packed]:
        """The same, not taken apart."""
        for batch in self.batches(streams, first, last, microbatch):
            columns = (batch.step.tolist(), batch.microbatch.tolist(), batch.unix_ns.tolist(), batch.stream.tolist())
            for row, (step, at, unix_ns, stream) in enumerate(zip(*columns, strict=True)):
                payload = memoryview(batch.arrays[row])
                yield Packed(self._raw[stream], step, at, unix_ns, payload, payload)

    def merged(
        self, tap: str = "**", what: str | None = None, first: int = -1, last: int = FOREVER, **which: Any
    ) -> Iterator[Merged]:
        """Frames of all ranks put together, each moment once; what is incomplete comes last."""
        heads = {name: wish.get("heads") for name, wish in self.subscriptions().items()}
        gathering = Gathering(heads.get, self._holders)
        for frame in self.frames(tap, what, first, last, **which):
            yield from gathering.add(frame)
        yield from gathering.rest()

    def vectors(
        self,
        tap: str,
        first: int = -1,
        last: int = FOREVER,
        *,
        what: str | None = None,
        ranks: Iterable[int] | None = None,
        subscription: str | None = None,
    ) -> Iterator[Vectors]:
        """Statistics of every rank as columns; histograms have them, too."""
        streams = self._streams
        layouts = np.full((len(streams), 2), -1, np.int64)
        chosen: list[int] = self.chosen(tap, what, ranks=ranks, subscription=subscription).tolist()
        for number in chosen:
            layouts[number] = _place(streams[number], "vector", len(FIELDS)), _place(streams[number], "shift", 1)
        ranks_of = np.array([stream.rank for stream in streams], np.int64)
        wanted = np.flatnonzero(layouts[:, 0] >= 0)
        for batch in self.batches(wanted, first, last):
            for (at, shift), rows in _by_layout(layouts[batch.stream]):
                part = batch if rows is None else batch.at(rows)
                wide = np.ascontiguousarray(part.arrays).view("<f8")  # all are padded to 8 bytes
                about = np.zeros(len(wide)) if shift < 0 else wide[:, shift]
                vector = wide[:, at : at + len(FIELDS)]
                yield Vectors(part.step, part.microbatch, part.stream, ranks_of[part.stream], vector, about)

    def close(self) -> None:
        """Let go of the files."""
        for chunk in self._chunks.values():
            chunk.close()

    # ------------------------------------------------------------------------ inside

    def _holders(self, frame: Frame) -> set[Shard] | None:
        """Of what a distributed optimizer has cut, the parts that anything came of."""
        if not any(str(label).endswith("/dp") for label in frame.meta.get("labels") or ()):
            return None
        ours = (frame.tap, frame.what, frame.subscription)
        return {one.shard for one in self._streams if (one.tap, one.what, one.subscription) == ours}

    def _open(self, paths: Iterable[Path]) -> None:
        for path in sorted(paths):
            if path in self._chunks or path in self._refused:
                continue
            try:
                self._chunks[path] = Chunk(path)
            except (ValueError, OSError) as error:
                if isinstance(error, ValueError) and path.stat().st_size > 0:
                    self._refused.add(path)
                    self.warnings.append(str(error))
        for path, chunk in self._chunks.items():
            known = len(self._maps.get(path, ()))
            if known < len(chunk.streams) or path not in self._maps:
                more = [self._number(raw, path) for raw in chunk.streams[known:]]
                before = self._maps.get(path, np.zeros(0, np.int64))
                self._maps[path] = np.concatenate([before, np.array(more, np.int64)])
        self._gather_warnings()

    def _number(self, raw: bytes, path: Path) -> int:
        """Of a stream, the same in all files; -1 where its header makes no sense."""
        found = self._numbers.get(raw)
        if found is None:
            try:
                header = read_header(raw)
            except ValueError as error:
                self.warnings.append(f"{path}: {error}")
                found = -1
            else:
                found = len(self._streams)
                self._streams.append(header)
                self._raw.append(raw)
            self._numbers[raw] = found
        return found

    def _notes(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        with self._lock:
            notes = [note for chunk in self._chunks.values() for note in chunk.notes]
        for note in notes:
            value = note.get("value")
            if isinstance(value, dict):
                yield str(note.get("kind")), int(note.get("unix_ns", 0)), value

    def _gather_warnings(self) -> None:
        for chunk in self._chunks.values():
            self.warnings += [warning for warning in chunk.warnings if warning not in self.warnings]


def open_recordings(run_directory: Path) -> list[Recording]:
    """Those of a run, oldest first; ValueError, in one line, where there is no such directory, or where there are
    recordings and none can be read."""
    folder = run_directory if run_directory.name == FOLDER else run_directory / FOLDER
    check_directory(run_directory, "give record.dir of the job")
    by_name: dict[str, list[Path]] = {}
    for path in _files(folder):
        by_name.setdefault(_name(path), []).append(path)
    found: list[Recording] = []
    problem = ""
    for name, paths in sorted(by_name.items()):
        try:
            found.append(Recording(name, paths))
        except ValueError as error:
            problem = str(error)
    if problem and not found:
        raise ValueError(problem)
    return found


def open_recording(path: Path, name: str | None = None) -> Recording:
    """The one that ``path`` means: a chunk file, or a run directory (its newest, or the one called ``name``)."""
    if path.is_file():
        return Recording(_name(path), [one for one in _files(path.parent) if _name(one) == _name(path)] or [path])
    recordings = open_recordings(path)
    if not recordings:
        raise ValueError(f"{path}: nothing is recorded there; trimtab scope stream --record does it")
    for recording in reversed(recordings):
        if name is None or recording.name == name:
            return recording
    there = ", ".join(recording.name for recording in recordings)
    raise ValueError(f"{path}: there is no recording {name!r}; there are {there}")


def follow(recording: Recording, wait: Callable[[], bool]) -> Iterator[None]:
    """Once now, and again each time that ``wait`` has come back with True, with what was written since."""
    yield
    while wait():
        recording.refresh()
        yield


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def _name(path: Path) -> str:
    return path.name.removesuffix(SUFFIX).rpartition("-")[0] or path.name


def _place(stream: Header, array: str, size: int) -> int:
    """Where an array of so many float64 begins, in units of 8 bytes; -1: there is none."""
    for name, kind, shape, begin, _ in stream.arrays:
        if name == array and kind == np.dtype("<f8") and shape == (size,):
            return begin // 8
    return -1


def _by_layout(layouts: NDArray[np.int64]) -> Iterator[tuple[tuple[int, int], NDArray[np.bool_] | None]]:
    """Where vector and shift lie, and in which rows; mostly in all of them (None) in one place."""
    at, shift = int(layouts[0, 0]), int(layouts[0, 1])
    if (layouts == layouts[0]).all():
        yield (at, shift), None
        return
    for layout in np.unique(layouts, axis=0):
        yield (int(layout[0]), int(layout[1])), (layouts == layout).all(axis=1)


def _select(
    rows: Rows,
    numbers: NDArray[np.int64],
    wanted: NDArray[np.bool_],
    first: int,
    last: int,
    microbatch: int | None,
) -> Batch | None:
    known = rows.stream < len(numbers)
    stream = numbers[np.where(known, rows.stream, 0)] if len(numbers) else np.full(len(rows.stream), -1)
    chosen = known & wanted[stream] & (rows.step >= first) & (rows.step <= last)
    if microbatch is not None:
        chosen &= rows.microbatch == microbatch
    if chosen.all():
        return Batch(rows.step, rows.unix_ns, rows.microbatch, stream, rows.arrays)
    if not chosen.any():
        return None
    return Batch(rows.step[chosen], rows.unix_ns[chosen], rows.microbatch[chosen], stream[chosen], rows.arrays[chosen])
