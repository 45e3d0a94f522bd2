"""The sender: samples become frames, and frames go to the collector. On the session's own thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from numpy.typing import NDArray

from trimtab.scope.frame import ALIGNMENT, MOST_FRAME_BYTES, Frame, encode, pack, split
from trimtab.scope.job.budget import Budget
from trimtab.scope.job.device import Accelerator, Arrays, Mover, needed, to_host
from trimtab.scope.job.outbox import Outbox, Sample
from trimtab.scope.job.sampling import Source

_ROUND: Final = 64
"""Samples that are looked at together."""
_MOST_HEADERS: Final = 64
_HEADER_ROOM: Final = 8192
"""What the head and the header of a frame may take; those of a tap take some 300 bytes."""
_FULL: Final = 8
"""A message is sent when it is as long as a part of this many of the longest."""


class Sender:
    """Empties the outbox."""

    def __init__(
        self,
        rank: int,
        outbox: Outbox,
        budget: Budget,
        accelerators: Callable[[Any], Accelerator | None],
        ring_bytes: int,
        message_bytes: int = MOST_FRAME_BYTES,
        failed: Callable[[str, Exception], None] | None = None,
    ) -> None:
        """``ring_bytes`` of pinned memory, if there is a device. ``message_bytes``: longest message. ``failed`` is told
        of a tap whose sample cannot be sent."""
        self._rank = rank
        self._outbox = outbox
        self._budget = budget
        self._accelerators = accelerators
        self._ring_bytes = ring_bytes
        self._most = min(message_bytes, MOST_FRAME_BYTES)
        self._failed = failed
        self._movers: dict[int, tuple[Accelerator, Mover]] = {}
        self._message: list[bytes] = []
        self._length = 0
        self.sent = 0
        self.dropped = 0
        """Samples that could not be moved, or made no frame."""

    @property
    def busy(self) -> bool:
        """Something is on its way from the device."""
        return any(mover.busy for _, mover in self._movers.values())

    def turn(self, publish: Callable[[bytes], None]) -> bool:
        """Send what can be sent now; whether there was anything. Never waits."""
        arrived = self._arrived()
        for sample, arrays in arrived:
            try:
                for raw in frames(sample, arrays, self._rank, self._most):
                    self._add(raw, publish)
                self.sent += 1
            except ValueError as error:  # no frame: others are not to go with it
                self.dropped += 1
                if self._failed is not None:
                    self._failed(sample.source.tap, error)
            time.sleep(0)  # the training thread may want the interpreter
        self._flush(publish)
        return bool(arrived)

    def reset(self) -> None:
        """Nobody listens any more."""
        self._outbox.clear()
        for _, mover in self._movers.values():
            mover.reset()

    def _arrived(self) -> list[tuple[Sample, Arrays]]:
        arrived: list[tuple[Sample, Arrays]] = []
        for accelerator, mover in self._movers.values():
            if mover.busy:
                arrived += self._landed(accelerator, mover)
        self._forget_dropped()
        while len(arrived) < _ROUND:
            sample = self._outbox.first()
            if sample is None:
                break
            if sample.ready is None:
                if self._outbox.take(sample):
                    arrived.append((sample, to_host(sample.tensors)))
                continue
            accelerator, mover = self._mover(sample)
            if needed(sample) > mover.size:
                self.dropped += self._outbox.take(sample)
                continue
            if mover.busy or not accelerator.done(sample.ready):
                break
            if self._outbox.take(sample):
                self._launch(accelerator, mover, sample)
                break
        return arrived

    def _launch(self, accelerator: Accelerator, mover: Mover, first: Sample) -> None:
        """Copy it, and those after it that are ready, too."""
        batch, size = [first], needed(first)
        while len(batch) < _ROUND:
            sample = self._outbox.first()
            if sample is None or sample.ready is None or self._mover(sample)[1] is not mover:
                break
            if size + needed(sample) > mover.size or not accelerator.done(sample.ready):
                break
            if self._outbox.take(sample):
                batch.append(sample)
                size += needed(sample)
        mover.launch(batch)

    def _landed(self, accelerator: Accelerator, mover: Mover) -> list[tuple[Sample, Arrays]]:
        landed = mover.landed() or []
        for sample, _ in landed:
            if sample.began is not None:
                self._budget.spent(sample.source.subscription, accelerator.elapsed_ns(sample.began, sample.ready))
            accelerator.recycle(sample.began, sample.ready)
        return landed

    def _forget_dropped(self) -> None:
        """Their events may be used again. They are not asked whether the device got there: recording one again is
        allowed at any time."""
        gone = self._outbox.gone
        while gone:
            sample = gone.popleft()
            if sample.ready is not None:
                self._mover(sample)[0].recycle(sample.began, sample.ready)

    def _mover(self, sample: Sample) -> tuple[Accelerator, Mover]:
        tensor = next(iter(sample.tensors.values()))
        accelerator = self._accelerators(tensor)
        assert accelerator is not None, "a sample with an event is on a device"
        found = self._movers.get(id(accelerator))
        if found is None:
            found = self._movers[id(accelerator)] = accelerator, Mover(accelerator, self._ring_bytes)
        return found

    def _add(self, raw: bytes, publish: Callable[[bytes], None]) -> None:
        if self._length + len(raw) > self._most:
            self._flush(publish)
        self._message.append(raw)
        self._length += len(raw)
        if self._length >= self._most // _FULL:
            self._flush(publish)

    def _flush(self, publish: Callable[[bytes], None]) -> None:
        if self._message:
            message, self._message, self._length = self._message, [], 0
            publish(b"".join(message))


def frames(sample: Sample, arrays: Arrays, rank: int, most: int = MOST_FRAME_BYTES) -> Iterator[bytes]:
    """A sample as encoded frames of at most ``most`` bytes: one, if it fits; else its arrays are cut, flat, into parts,
    and ``meta`` says which part it is and the shapes of the whole."""
    source = sample.source
    room = most - min(_HEADER_ROOM, most // 2)
    if sum(map(_padded_size, arrays.values())) <= room:
        yield _packed(source, sample, rank, arrays, source.meta)
        return
    parts = list(cut(arrays, room))
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    for index, part in enumerate(parts):
        meta = source.meta | {"part": [index, len(parts)], "shapes": shapes}
        yield _packed(source, sample, rank, part, meta, index)


def cut(arrays: Arrays, room: int) -> Iterator[Arrays]:
    """Pieces of the flattened arrays, in order, of at most ``room`` bytes together."""
    part: Arrays = {}
    left = room
    for name, array in arrays.items():
        flat = array.reshape(-1)
        at = 0
        while at < flat.size or name not in part:
            count = min(left // flat.itemsize, flat.size - at)
            if count == 0 and flat.size:
                yield part
                part, left = {}, room
                continue
            part[name] = flat[at : at + count]
            left -= _padded_size(part[name])
            at += count
            if at >= flat.size:
                break
    yield part


def _packed(source: Source, sample: Sample, rank: int, arrays: Arrays, meta: dict[str, Any], part: int = -1) -> bytes:
    """A frame; its header is the same from step to step, so it is made once."""
    key = (part, len(meta), *((name, array.dtype.char, array.shape) for name, array in arrays.items()))
    header = source.headers.get(key)
    if header is None:
        frame = Frame(
            source.tap,
            source.what,
            source.subscription,
            sample.moment.step,
            sample.moment.microbatch,
            rank,
            source.shard,
            source.replica,
            arrays,
            meta,
            sample.unix_ns,
        )
        raw = encode(frame)
        if len(source.headers) >= _MOST_HEADERS:
            source.headers.clear()
        source.headers[key] = split(raw)[0].header
        return raw
    payload = b"".join(_padded(array) for array in arrays.values())
    return pack(header, sample.moment.step, sample.moment.microbatch, sample.unix_ns, payload)


def _padded(array: NDArray[Any]) -> bytes:
    raw = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return raw + bytes(-len(raw) % ALIGNMENT)


def _padded_size(array: NDArray[Any]) -> int:
    return array.nbytes + -array.nbytes % ALIGNMENT
