"""The event: one schema for everything that is recorded or read, its version and its Arrow types.

All times are integer nanoseconds. A column is null where the value is unknown or does not apply.

Times
    A compute span (forward, backward, wgrad, recompute, optimizer) lies on the stream ``compute``: ``ready``
    is when the host launched it, ``start`` and ``end`` when the device ran it. On a CPU the host is the device.
    A host span (data, gc, host, checkpoint, evaluation, user) lies on the stream ``host``.
    A communication (collective, send, recv): ``ready`` is when the rank's compute stream reached it, ``start``
    when it was issued, ``end`` when it was complete on this rank. On the stream ``compute`` the rank waited for
    it in place (synchronous). On the stream ``comm`` it ran beside the compute; each wait of the compute stream
    for it is a ``host`` event named ``wait`` on the stream ``compute`` whose ``correlation_id`` is the
    communication's ``event_id``.
    A step is a ``host`` event named ``step`` on the stream ``host``, from the start of one training step to the
    start of the next.

Identity
    ``group`` names a process group; two ranks that took part in the same communication carry the same
    (group's ranks, group, op, seq) for collectives, or (group, src, dst, tag, seq) for send and recv.
    ``src`` and ``dst`` are global ranks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import pyarrow as pa

SCHEMA_VERSION: Final = 1
"""Version of the event schema; a reader refuses files of a newer one."""

FILE_SUFFIX: Final = ".trimtab.arrow"
"""Ending of the recorder's files: one Arrow IPC stream each."""


class Kind(StrEnum):
    """What an event is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WGRAD = "wgrad"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    COLLECTIVE = "collective"
    SEND = "send"
    RECV = "recv"
    DATA = "data"
    HOST = "host"
    GC = "gc"
    KERNEL = "kernel"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    COUNTER = "counter"
    USER = "user"


COMPUTE_KINDS: Final = (Kind.FORWARD, Kind.BACKWARD, Kind.WGRAD, Kind.RECOMPUTE, Kind.OPTIMIZER, Kind.KERNEL)
COMM_KINDS: Final = (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)

STREAM_COMPUTE: Final = "compute"
STREAM_COMM: Final = "comm"
STREAM_HOST: Final = "host"

NAME_STEP: Final = "step"
NAME_WAIT: Final = "wait"

_text = pa.dictionary(pa.int32(), pa.string())

FILE_SCHEMA: Final = pa.schema(
    [
        ("step", pa.int32()),
        ("event_id", pa.int64()),
        ("parent_id", pa.int64()),
        ("correlation_id", pa.int64()),
        ("kind", _text),
        ("name", _text),
        ("stream", _text),
        ("ready", pa.int64()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("cpu_ns", pa.int64()),
        ("microbatch", pa.int32()),
        ("chunk", pa.int32()),
        ("layer", pa.int32()),
        ("group", _text),
        ("seq", pa.int64()),
        ("op", _text),
        ("bytes", pa.int64()),
        ("dtype", _text),
        ("src", pa.int32()),
        ("dst", pa.int32()),
        ("tag", pa.int32()),
        ("shape", pa.list_(pa.int64())),
        ("args", pa.string()),
    ]
)
"""Columns of one rank's file. run_id, attempt and rank are constant there and live in the header."""

EVENT_SCHEMA: Final = pa.schema([("run_id", _text), ("attempt", pa.int32()), ("rank", pa.int32()), *FILE_SCHEMA])
"""Columns of an event table: many ranks together."""

HEADER_KEY: Final = b"trimtab"
"""Key in the Arrow schema metadata (file header) and in the record batches' custom metadata; both hold JSON.

Header: ``schema_version, run_id, attempt, rank, world_size, host, pid, device`` (``cpu``, ``cuda`` or
``emulated``), ``device_name, clock_domain`` (equal for ranks that read one clock, the host's boot id),
``unix_offset_ns`` (add it to a time to get Unix time), ``granularity, versions`` (a dict),
``file_index`` (0, 1, ... as files rotate), ``started_unix_ns``.

Each batch, only what changed since the last one: ``groups`` {name: [global ranks]}, ``topology``
{tp, cp, ep, dp, pp, vpp}, ``coordinates`` {tp, cp, ep, dp, pp}, ``anchors`` [[device_ns, host_ns], ...],
``dropped`` (events lost so far), ``oversubscribed`` (emulated targets overrun so far), ``faults`` (injected
faults, as text), ``closed`` (true in the last batch of an orderly end).
"""
