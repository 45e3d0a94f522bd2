"""Write a trace for Perfetto (https://ui.perfetto.dev): protobuf, one track per rank and stream, flows between
the members of a communication, one track per counter.

Strings are interned, so that a name costs its length once. Spans that overlap on one stream get further tracks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from trimtab.events import STREAM_COMM, STREAM_COMPUTE, STREAM_HOST, Kind
from trimtab.traces.counters import levels
from trimtab.traces.table import Trace
from trimtab.traces.window import MAX_EVENTS, NAMED, Window, Written, choose, describe, rows, whole_file

SEQUENCE = 1
PACKETS_PER_WRITE = 4096
STREAM_ORDER = (STREAM_COMPUTE, STREAM_COMM, STREAM_HOST)
_BEGIN = pb.TrackEvent.TYPE_SLICE_BEGIN
_END = pb.TrackEvent.TYPE_SLICE_END
_COUNTER = pb.TrackEvent.TYPE_COUNTER


def write_perfetto(
    trace: Trace,
    path: str | os.PathLike[str],
    steps: tuple[int, int] | None = None,
    max_events: int = MAX_EVENTS,
) -> Written:
    """Write ``steps`` (first, last) of ``trace``, by default a window around the slowest step, to ``path``.

    Raises ValueError where there is nothing to write, or the file cannot be written.
    """
    window = choose(trace, steps, max_events)
    target = Path(path)
    with whole_file(target) as sink:
        _Writer(sink, trace, window).write()
    return Written(target, len(window.events), window.steps)


class _Strings:
    """Interned strings of one kind: each gets a number, and is written with the packet that first uses it."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._ids: dict[str, int] = {}

    def number(self, text: str, packet: pb.TracePacket) -> int:
        """Number of ``text``; adds it to the packet's interned data if it is new."""
        known = self._ids.get(text)
        if known is None:
            known = self._ids[text] = len(self._ids) + 1
            entry = getattr(packet.interned_data, self._field).add()
            entry.iid = known
            if self._field == "debug_annotation_string_values":
                entry.str = text.encode()
            else:
                entry.name = text
        return known


class _Writer:
    """Packets of one file."""

    def __init__(self, sink: IO[bytes], trace: Trace, window: Window) -> None:
        self.sink = sink
        self.trace = trace
        self.window = window
        self.batch = pb.Trace()
        self.tracks: dict[tuple[int, str, int], int] = {}
        self.next_uuid = 1
        self.names = _Strings("event_names")
        self.categories = _Strings("event_categories")
        self.labels = _Strings("debug_annotation_names")
        self.values = _Strings("debug_annotation_string_values")

    def write(self) -> None:
        """The whole file."""
        first = self.packet()
        first.sequence_flags = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        open_slices: dict[int, list[int]] = {}
        place: tuple[int, str] | None = None
        for row in self.rows():
            rank: int = row["rank"]
            if (rank, "", 0) not in self.tracks:
                self.describe_rank(rank)
            if row["kind"] == Kind.COUNTER:
                self.count(row)
                continue
            if (rank, row["stream"]) != place:
                self.close_slices(open_slices)
                place = (rank, row["stream"])
            track = self.track(rank, row["stream"], row["lane"])
            stack = open_slices.setdefault(track, [])
            while stack and stack[-1] <= row["start"]:
                self.end(track, stack.pop())
            self.begin(track, row)
            stack.append(row["end"])
        self.close_slices(open_slices)
        self.flush()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Events in order, a stream without a name as ``other``."""
        for row in rows(self.window.events):
            row["stream"] = row["stream"] or "other"
            yield row

    def packet(self) -> pb.TracePacket:
        """A new packet of our sequence."""
        if len(self.batch.packet) >= PACKETS_PER_WRITE:
            self.flush()
        packet = self.batch.packet.add()
        packet.trusted_packet_sequence_id = SEQUENCE
        return packet

    def flush(self) -> None:
        """Hand the packets to the file; traces may be concatenated."""
        self.sink.write(self.batch.SerializeToString())
        self.batch = pb.Trace()

    def describe_rank(self, rank: int) -> None:
        """The group that a rank's tracks lie in; pid 0 means the idle task to viewers, so they count from 1."""
        descriptor = self.packet().track_descriptor
        descriptor.uuid = self.tracks[rank, "", 0] = self.new_uuid()
        descriptor.process.pid = rank + 1
        descriptor.process.process_name = describe(self.trace, rank)
        descriptor.process.legacy_sort_index = rank
        descriptor.child_ordering = pb.TrackDescriptor.EXPLICIT

    def track(self, rank: int, stream: str, lane: int) -> int:
        """Track of one lane of a stream."""
        known = self.tracks.get((rank, stream, lane))
        if known is not None:
            return known
        descriptor = self.packet().track_descriptor
        descriptor.uuid = self.tracks[rank, stream, lane] = self.new_uuid()
        descriptor.parent_uuid = self.tracks[rank, "", 0]
        descriptor.name = stream if lane == 0 else f"{stream} ({lane + 1})"
        order = STREAM_ORDER.index(stream) if stream in STREAM_ORDER else len(STREAM_ORDER)
        descriptor.sibling_order_rank = order * 1000 + lane
        return descriptor.uuid

    def count(self, row: dict[str, Any]) -> None:
        """The values of a sample of counters."""
        for name, value in levels(row["name"], row["args"]).items():
            track = self.counter_track(row["rank"], name)
            packet = self.packet()
            packet.timestamp = row["start"] - self.window.origin_ns
            packet.track_event.type = _COUNTER
            packet.track_event.track_uuid = track
            packet.track_event.double_counter_value = value

    def counter_track(self, rank: int, name: str) -> int:
        """Track of one counter of a rank, below its streams."""
        known = self.tracks.get((rank, name, -1))
        if known is not None:
            return known
        descriptor = self.packet().track_descriptor
        descriptor.uuid = self.tracks[rank, name, -1] = self.new_uuid()
        descriptor.parent_uuid = self.tracks[rank, "", 0]
        descriptor.name = name
        descriptor.counter.SetInParent()
        descriptor.sibling_order_rank = (len(STREAM_ORDER) + 1) * 1000
        return descriptor.uuid

    def new_uuid(self) -> int:
        """A track's number."""
        self.next_uuid += 1
        return self.next_uuid

    def begin(self, track: int, row: dict[str, Any]) -> None:
        """A slice begins."""
        packet = self.packet()
        packet.timestamp = row["start"] - self.window.origin_ns
        packet.sequence_flags = pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        event = packet.track_event
        event.type = _BEGIN
        event.track_uuid = track
        event.name_iid = self.names.number(row["name"] or row["kind"], packet)
        event.category_iids.append(self.categories.number(row["kind"], packet))
        if row["flow"]:
            event.flow_ids.append(row["flow"])
        for label in NAMED:
            if row[label] is not None:
                self.annotate(packet, label, row[label])
        if row["ready"] is not None and row["ready"] < row["start"]:
            self.annotate(packet, "launched_ns_before", row["start"] - row["ready"])

    def annotate(self, packet: pb.TracePacket, label: str, value: int | str) -> None:
        """An argument of a slice."""
        annotation = packet.track_event.debug_annotations.add()
        annotation.name_iid = self.labels.number(label, packet)
        if isinstance(value, str):
            annotation.string_value_iid = self.values.number(value, packet)
        else:
            annotation.int_value = value

    def end(self, track: int, when: int) -> None:
        """A slice ends."""
        packet = self.packet()
        packet.timestamp = when - self.window.origin_ns
        packet.sequence_flags = pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        packet.track_event.type = _END
        packet.track_event.track_uuid = track

    def close_slices(self, open_slices: dict[int, list[int]]) -> None:
        """End what is still open on these tracks."""
        for track, stack in open_slices.items():
            while stack:
                self.end(track, stack.pop())
        open_slices.clear()
