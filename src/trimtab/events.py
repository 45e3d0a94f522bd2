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
    start of the next. Where a device works behind the host, ``ready`` is when the host began it, ``start`` and
    ``end`` are when the device came to the two boundaries.

Identity
    ``group`` names a process group; two ranks that took part in the same communication carry the same
    (group's ranks, group, op, seq) for collectives, or (group, src, dst, tag, seq) for send and recv.
    ``src`` and ``dst`` are global ranks.

Counters
    A sample is a ``counter`` event named ``gpu`` or ``host`` on the stream ``host`` whose ``start`` and ``end`` are
    the time of the sample. ``args`` is one flat JSON object, its names carry the units; what the system does not
    offer is absent. Values are of the moment, but for: ``..._total`` counts since the driver was loaded; a share of
    time, a rate and a count without ``_total`` cover the ``interval_s`` seconds since the sample before.
    ``gpu``: sm_clock_mhz, sm_clock_set_mhz (the applications clock), sm_clock_max_mhz, memory_clock_mhz,
    memory_clock_max_mhz, temperature_c, power_w, power_limit_w, throttle (names of :data:`THROTTLE_REASONS`),
    busy_share, memory_busy_share, pcie_generation, pcie_width, pcie_replays_total, ecc_corrected_total,
    ecc_uncorrected_total, nvlink_crc_errors_total, nvlink_replays_total, nvlink_recoveries_total.
    ``host``: interval_s, load_1m, cpus (of the host), cpus_available (to the process), cpu_busy_share (of all CPUs of
    the host), cpu_pressure_share (of the time in which some task waited for a CPU), cgroup_throttled_share,
    main_thread_wait_share (of the time in which the main thread was ready to run and did not), process_cpus (CPUs
    that the process kept busy), major_faults, minor_faults, voluntary_switches, involuntary_switches (of the
    process), swapped_in_pages (of the host), rss_bytes, memory_available_bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import pyarrow as pa

SCHEMA_VERSION: Final = 1
"""Version of the event schema; a reader refuses files of a newer one."""

FILE_SUFFIX: Final = ".trimtab.arrow"
"""Ending of the recorder's files: one Arrow IPC stream each."""

SUMMARY_SUFFIX: Final = ".summary.arrow"
"""Ending of the files of summaries, which stay when the detail of a step is removed; see :data:`HEADER_KEY`."""


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
NAME_WINDOW: Final = "window"
"""Of a host span: a profiler window is opened, or closed; its args name the file and the first and last step."""
NAME_GPU: Final = "gpu"
"""Of a counter: the rank's GPU."""
NAME_HOST: Final = "host"
"""Of a counter: the host, and this process on it."""

THROTTLE_REASONS: Final = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
)
"""Why a GPU does not run at its highest clock, in the order of NVML's bits (nvmlClocksEventReasons)."""

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
``file_index`` (0, 1, ... as files rotate), ``started_unix_ns``, ``detail`` (``summary`` in files of summaries,
else absent).

Each batch, only what changed since the last one: ``groups`` {name: [global ranks]}, ``topology``
{tp, cp, ep, dp, pp, vpp}, ``coordinates`` {tp, cp, ep, dp, pp}, ``anchors`` [[device_ns, host_ns], ...],
``device_name`` (where the header could not know it yet), ``dropped`` (events lost so far), ``unknown_times`` (events
so far whose start or end the device could not tell), ``oversubscribed`` (emulated targets overrun so far), ``faults``
(injected faults, as text), ``closed`` (true in the last batch of an orderly end).

A file of summaries has the same columns. Its events have their ``event_id`` where they stand for themselves: each
step, with ``args`` {compute_ns, comm_ns, beside_ns, data_ns, events}, the time that was covered by computation, by
communication and waits in place, by communication beside the compute stream, by data loading, and the number of
events; events of gc, checkpoint, evaluation and user of 1 ms and more; counters once a minute. A row without an
``event_id`` stands for all events of one site (kind, name, stream, layer, group, op, dtype, src, dst, tag, shape) in
the steps ``step`` to ``last_step``: ``start`` of the first and ``end`` of the last, ``bytes`` of all, ``args`` {count,
total_ns, min_ns, max_ns, max_step (where the longest was), last_step, wait_ns, max_wait_ns (from ready to start)}.
"""

DETAIL_KEY: Final = "detail"
DETAIL_SUMMARY: Final = "summary"
