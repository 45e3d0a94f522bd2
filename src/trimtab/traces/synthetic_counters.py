"""Counters of a synthetic job: samples of a healthy GPU and host, and of GPUs whose clock a fault holds down."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trimtab.events import NAME_GPU, NAME_HOST, STREAM_HOST, Kind
from trimtab.traces.synthetic_job import FaultKind, SyntheticJob
from trimtab.traces.synthetic_run import Run
from trimtab.traces.synthetic_times import concerned
from trimtab.traces.table import COLUMNS

FIRST_ID = 1 << 30
"""Of the samples' event ids, beyond those of a rank's work."""
STREAM = 1 << 21
"""Key of the counters' random stream, apart from those of stages and clocks."""
CLOCK_MHZ, POWER_W, TEMPERATURE_C = 1980.0, 620.0, 62.0
HOT_C = 91.0

Times = NDArray[np.float64]


def counter_events(job: SyntheticJob, run: Run, rate: Times, offset: Times) -> pl.DataFrame:
    """An event table of samples each ``job.counter_seconds``; the ranks' clocks show ``time * rate + offset``."""
    end = run.origin[-1] + max(float(stage.end.max()) for stage in run.stages)
    since = np.arange(0.5, end / (job.counter_seconds * 1e9)) * job.counter_seconds * 1e9
    step = np.searchsorted(run.origin, since, side="right") - 1
    slow = _slower(job, run)
    rng = np.random.default_rng(np.random.SeedSequence(job.seed, spawn_key=(STREAM,)))
    rows: list[dict[str, Any]] = []
    for rank in range(job.topology.world_size):
        shown = np.rint(since * rate[rank] + offset[rank]).astype(np.int64) + job.start_unix_ns
        for number, (moment, where) in enumerate(zip(shown.tolist(), step.tolist(), strict=True)):
            jitter = 1 + 0.003 * float(rng.standard_normal())
            samples = {NAME_GPU: _gpu(float(slow[rank, where]), jitter), NAME_HOST: _host(job.counter_seconds, jitter)}
            for place, (name, values) in enumerate(samples.items()):
                row = {"rank": rank, "step": where, "event_id": FIRST_ID + 2 * number + place, "name": name}
                rows.append(row | {"start": moment, "end": moment, "args": json.dumps(values)})
    shared = {"kind": Kind.COUNTER.value, "stream": STREAM_HOST}
    frame = pl.DataFrame(rows, schema={name: COLUMNS[name] for name in ("rank", "step", "event_id", "name")} | _TIMED)
    known = [pl.lit(value, COLUMNS[name]).alias(name) for name, value in shared.items()]
    frame = frame.with_columns(known)
    missing = [pl.lit(None, kind).alias(name) for name, kind in COLUMNS.items() if name not in frame.columns]
    return frame.with_columns(missing).select(list(COLUMNS))


_TIMED = {"start": pl.Int64, "end": pl.Int64, "args": pl.String}


def _slower(job: SyntheticJob, run: Run) -> Times:
    """(world, steps): by what factor a fault holds the rank's clock down."""
    slower = np.ones((job.topology.world_size, job.steps))
    width = run.layout.width
    for fault in job.faults:
        if fault.kind == FaultKind.SLOW_CLOCK:
            for stage in range(len(run.stages)):
                where = concerned(job, fault, stage, run.layout).T
                slower[stage * width : (stage + 1) * width][where] *= fault.factor
    return slower


def _gpu(slower: float, jitter: float) -> dict[str, Any]:
    held = slower > 1
    return {
        "sm_clock_mhz": round(CLOCK_MHZ * jitter / slower),
        "sm_clock_set_mhz": CLOCK_MHZ,
        "sm_clock_max_mhz": CLOCK_MHZ,
        "memory_clock_mhz": 3201,
        "temperature_c": HOT_C if held else TEMPERATURE_C,
        "power_w": round(POWER_W * jitter / slower, 1),
        "power_limit_w": 700.0,
        "throttle": ["hw_slowdown", "hw_thermal_slowdown"] if held else [],
        "busy_share": 0.99,
        "pcie_generation": 5,
        "pcie_width": 16,
        "pcie_replays_total": 0,
        "ecc_corrected_total": 0,
        "ecc_uncorrected_total": 0,
        "nvlink_crc_errors_total": 0,
        "nvlink_replays_total": 0,
        "nvlink_recoveries_total": 0,
    }


def _host(seconds: float, jitter: float) -> dict[str, Any]:
    return {
        "interval_s": seconds,
        "load_1m": round(20 * jitter, 2),
        "cpus": 128,
        "cpus_available": 16,
        "cpu_busy_share": 0.15,
        "main_thread_wait_share": 0.0,
        "process_cpus": 1.1,
        "major_faults": 0,
        "voluntary_switches": round(40 * seconds),
        "involuntary_switches": round(2 * seconds),
        "swapped_in_pages": 0,
        "rss_bytes": 8 << 30,
        "memory_available_bytes": 900 << 30,
    }
