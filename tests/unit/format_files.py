"""Small files of other programs' formats, made up for tests: what a job of a few ranks would have left."""

from __future__ import annotations

import json
import pickle
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

Event = dict[str, Any]

SHARED = Path(__file__).parents[3] / "shared" / "data"
"""Public traces, where they have been laid beside the repository."""


def rows_of_bytedance(
    dp: int = 2, pp: int = 2, vpp: int = 1, steps: int = 3, tp: int = 1, batches: int = 2
) -> list[Event]:
    """A plain pipeline whose stages wait in place for their messages; chunks of a stage one after the other."""
    rows: list[Event] = []
    for step in range(10, 10 + steps):
        for replica in range(dp):
            for stage in range(pp):
                where = {"dp_rank": replica, "stage": stage, "rank": (replica + dp * stage) * tp, "step": step}
                rows += [where | row for row in _worker(stage, pp, vpp, batches)]
    return rows


def _worker(stage: int, pp: int, vpp: int, batches: int) -> Iterator[Event]:
    """The operations of one worker in one step, 10 ms each, in the place that the pipeline gives them."""

    def row(optype: str, at: float, length: float, seq: int, chunk: int = -1, batch: int = -1) -> Event:
        place = chunk * pp + stage if chunk >= 0 else -1
        times = {"start_ts": at, "duration": length, "seq_id": seq}
        return {"optype": optype, **times, "mc": chunk, "mb_id": batch, "gmc": place}

    yield row("params-all-gather", 0.0, 0.005, 0, 0)
    slots = vpp * batches
    for number in range(slots):
        chunk, batch = divmod(number, batches)
        at = 0.02 * (number * pp + stage) + 0.01
        if stage > 0 or chunk > 0:
            yield row("forward-recv", at - 0.005, 0.005, number)
        yield row("forward-compute", at, 0.01, number, chunk, batch)
        if stage < pp - 1 or chunk < vpp - 1:
            yield row("forward-send", at + 0.01, 0.001, number)
    begin = 0.02 * (slots * pp + pp) + 0.01
    for number in range(slots):
        chunk, batch = vpp - 1 - number // batches, number % batches
        at = begin + 0.02 * (number * pp + pp - 1 - stage)
        if stage < pp - 1 or chunk < vpp - 1:
            yield row("backward-recv", at - 0.005, 0.005, number)
        yield row("backward-compute", at, 0.01, number, chunk, batch)
        if stage > 0 or chunk > 0:
            yield row("backward-send", at + 0.01, 0.001, number)
    end = begin + 0.02 * (slots * pp + pp) + 0.05
    yield row("gc", end - 0.04, 0.0, 0, -1, 0)
    yield row("layernorm-grads-all-reduce", end - 0.02, 0.001, 0)
    yield row("grads-reduce-scatter", end, 0.01, 0, 0)
    yield row("optimizer-clip-main-grad", end + 0.01, 0.002, 0)
    yield row("optimizer", end + 0.012, 0.01, 0)


def write_bytedance(path: Path, rows: list[Event]) -> Path:
    frame = pl.DataFrame(rows).with_columns(
        pl.col("start_ts", "duration").cast(pl.Float32), pl.col("dp_rank", "stage", "mc", "mb_id").cast(pl.Int8)
    )
    pq.write_table(frame.to_arrow().cast(pa.schema(_narrow(frame))), path)
    return path


def _narrow(frame: pl.DataFrame) -> list[tuple[str, pa.DataType]]:
    words = pa.dictionary(pa.int32(), pa.string())
    return [(field.name, words if field.name == "optype" else field.type) for field in frame.to_arrow().schema]


def megatronapp_merged(iterations: int = 3, stages: int = 2, chunks: int = 2, batches: int = 2) -> list[Event]:
    """A merged file of the plain pipeline: computations of 1 ms, the next stage 1 ms later, then the reduction."""
    events: list[Event] = []
    length = 10_000 * stages * chunks * batches
    for iteration in range(iterations):
        zero = iteration * length
        for stage in range(stages):
            events.append(_moment("iteration begin", zero, stage, iteration))
            number = 0
            for name in ("forward", "backward"):
                order = range(chunks) if name == "forward" else range(chunks - 1, -1, -1)
                for chunk in order:
                    for batch in range(batches):
                        depth = stage if name == "forward" else stages - 1 - stage
                        at = zero + 2_000 * (number * stages + depth) + 100
                        told = {"microbatch": batch, "model_chunk": chunk, "pp_rank": stage}
                        events.append(_mark(name, "B", at, stage, {"iteration": iteration}))
                        events.append(_mark(name, "E", at + 1_000, stage, {"iteration": iteration, **told}))
                        number += 1
            events.append(_moment("reduce", zero + length - 1_000, stage, iteration))
            events.append(_moment("iteration end", zero + length - 500, stage, iteration))
    return sorted(events, key=lambda event: event["ts"])


def _mark(name: str, phase: str, at: float, pid: int, args: Event) -> Event:
    return {"name": name, "cname": "x", "ph": phase, "ts": at, "pid": pid, "tid": 0, "args": args}


def _moment(name: str, at: float, pid: int, iteration: int) -> Event:
    return _mark(name, "i", at, pid, {"iteration": iteration})


def megatronapp_rank(dp: int, pp: int, tp: int = 0, sizes: tuple[int, int, int] = (2, 2, 1)) -> list[Event]:
    """A rank's own file: a forward and a backward, the messages between two stages, and the reduction of gradients."""
    rank = tp + sizes[2] * (dp + sizes[0] * pp)
    where = {"dp_rk": dp, "pp_rk": pp, "tp_rk": tp, "dev": rank % 8, "g_rk": rank}
    spans: list[tuple[str, int, int, Event]] = [("forward-warmup", 0, 10, {"micro_batch_index": 0})]
    if pp == 0:
        spans += [("send-warmup", 10, 11, {"data": 4096}), ("exchange-next", 11, 30, {"data": 4096})]
    else:
        spans = [("recv-warmup", 0, 11, {"data": 4096}), ("forward", 11, 20, {"micro_batch_index": 0})]
        spans += [("exchange-prev", 29, 30, {"data": 4096})]
    spans += [("backward-cooldown", 30, 50, {"micro_batch_index": 0}), ("allreduce", 50, 55, {})]
    spans += [("transformer_layer_3", 31, 40, {})]
    rows: list[Event] = []
    for _ in range(3):
        rows.append({"name": "iteration", "ph": "B", "pad_before": 1_000_000})
        marks = [
            ({**where, "name": name, "ph": "B", "rel_ts": begin * 1_000_000}, begin, -end)
            for name, begin, end, _ in spans
        ]
        marks += [
            ({**more, **where, "name": name, "ph": "E", "rel_ts": end * 1_000_000}, end, -begin)
            for name, begin, end, more in spans
        ]
        rows += [mark for mark, *_ in sorted(marks, key=lambda one: (one[1], one[0]["ph"] == "B", one[2]))]
        rows.append({**where, "name": "iteration", "ph": "E", "rel_ts": 60_000_000, "duration_wall": 61_000_000})
    return rows


def flight_recorder(rank: int, last: int = 5, ranks: int = 4, **more: Any) -> Event:
    """A dump of ``last`` all-reduces of the default group, one of which has ended."""
    entries = [
        {
            "frames": [
                {"name": "wrapper", "filename": "/lib/torch/distributed/c10d.py", "line": 83},
                {"name": "main", "filename": "/home/me/train.py", "line": 7},
            ],
            "record_id": number,
            "pg_id": 0,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "op_id": number + 1,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 1_700_000_000_000_000_000 + number * 1_000_000 + rank,
            "input_sizes": [[1024, 2]],
            "input_dtypes": ["BFloat16"],
            "output_sizes": [[1024, 2]],
            "output_dtypes": ["BFloat16"],
            "state": "completed" if number == 0 else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": 1_700_000_000_000_500_000 if number == 0 else None,
            "retired": number == 0,
            "timeout_ms": 600_000,
            "is_p2p": False,
            **more,
        }
        for number in range(last)
    ]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}


def write_flight_recorder(folder: Path, dumps: dict[int, Event], kind: str = "pickle") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, dump in dumps.items():
        content = pickle.dumps(dump, protocol=2) if kind == "pickle" else json.dumps(dump).encode()
        (folder / f"nccl_trace_rank_{rank}").write_bytes(content)
    return folder


def nccl_inspector(rank: int, comm: str = "0xabc", ranks: int = 2, verbose: bool = True, count: int = 4) -> str:
    """The lines of one process: all-reduces of one communicator, 100 us each."""
    lines: list[str] = []
    for number in range(count):
        at = 1_752_867_229_000_000 + 1_000 * number + rank
        performance = {
            "coll": "AllReduce",
            "coll_sn": number,
            "coll_msg_size_bytes": 1 << 20,
            "coll_exec_time_us": 100,
            "coll_timing_source": "kernel_gpu",
            "coll_algobw_gbs": 10.5,
            "coll_busbw_gbs": 15.75,
        }
        if verbose:
            kernel = {
                "channel_id": 0,
                "kernel_start_ts": at + 20,
                "kernel_stop_ts": at + 120,
                "kernel_record_ts": at + 120,
            }
            performance["event_trace_ts"] = {"coll_start_ts": at, "coll_stop_ts": at + 5, "kernel_events": [kernel]}
        header = {"id": comm, "rank": rank, "n_ranks": ranks, "nnodes": 1}
        metadata = {
            "inspector_output_format_version": "v4.0",
            "dump_timestamp_us": at + 500,
            "hostname": "n0",
            "pid": 100 + rank,
        }
        lines.append(json.dumps({"header": header, "metadata": metadata, "coll_perf": performance}))
    return "\n".join(lines) + "\n"


NSIGHT_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, devStateName TEXT, name TEXT NOT NULL, nameEnum INTEGER,
    value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER, id INTEGER NOT NULL, name TEXT, busLocation TEXT);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
    domainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL,
    gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
"""
"""Tables as ``nsys export`` makes them, as far as the columns matter here."""
EPOCH = 1_700_000_000_000_000_000


def write_nsight(path: Path, processes: int = 1, first_gpu: int = 0) -> Path:
    """Three steps of 1 ms: a kernel, a copy, and an all-reduce on a stream of its own, launched 10 us before."""
    with closing(sqlite3.connect(path)) as database:
        database.executescript(NSIGHT_SCHEMA)
        names = [
            "gemm<float>(int)",
            "gemm",
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(Args)",
            "step 7",
            "cudaLaunchKernel",
        ]
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", list(enumerate(names)))
        database.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?, '', '')", (EPOCH,))
        database.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (0, '', 'Hostname', 0, 'node7')")
        database.executemany(
            "INSERT INTO TARGET_INFO_GPU VALUES (0, ?, 'NVIDIA H200', '')", [(first_gpu + n,) for n in range(processes)]
        )
        for process in range(processes):
            pid = (1_000 + process) << 24
            for step in range(3):
                at, number = step * 1_000_000, 10 * step
                text, text_id = (None, 3) if step == 0 else (f"step {7 + step}", None)
                ranges = [
                    (at, at + 1_000_000, 59, text, pid + 5, text_id),
                    (at + 10, at + 90, 59, "load_data", pid + 5, None),
                ]
                database.executemany(
                    "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, textId) VALUES (?,?,?,?,?,?)",
                    ranges,
                )
                device, spans = first_gpu + process, [(0, 100, 7, 0), (1, 300, 21, 2)]
                for offset, start, stream, name in spans:
                    database.execute(
                        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 4, 0)",
                        (at + start * 1_000 - 10_000, at + start * 1_000 - 5_000, pid + 5, number + offset),
                    )
                    database.execute(
                        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, 1, ?, ?, ?, ?, 1, 4, 1, 1, 128, 1, 1)",
                        (at + start * 1_000, at + start * 1_000 + 100_000, device, stream, number + offset, pid, name),
                    )
                database.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, 1, 7, ?, ?, 4096, 1)",
                    (at + 500_000, at + 510_000, device, number + 9, pid),
                )
        database.commit()
    return path


def chrome(ranks: int = 2) -> list[Event]:
    """Steps, a span with begin and end, and one of kernels."""
    events: list[Event] = []
    for rank in range(ranks):
        events.append(
            {
                "ph": "M",
                "name": "process_name",
                "pid": 500 + rank,
                "tid": 0,
                "args": {"name": f"rank {rank} (dp{rank})"},
            }
        )
        for step in range(3):
            at = step * 1_000.0
            events += [
                {"ph": "X", "name": f"step {step}", "pid": 500 + rank, "tid": 1, "ts": at, "dur": 1_000.0},
                {
                    "ph": "B",
                    "name": "load",
                    "pid": 500 + rank,
                    "tid": 2,
                    "ts": at + 1,
                    "args": {"step": step, "mb_id": 4},
                },
                {"ph": "E", "name": "load", "pid": 500 + rank, "tid": 2, "ts": at + 11},
                {"ph": "X", "name": "gemm", "cat": "gpu_op", "pid": 500 + rank, "tid": 3, "ts": at + 20, "dur": 5.5},
            ]
    return events
