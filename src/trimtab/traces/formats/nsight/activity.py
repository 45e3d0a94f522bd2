"""What one export of Nsight Systems holds: kernels, their launches, and marked ranges, by process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl

from trimtab.events import NAME_STEP, STREAM_COMM, STREAM_COMPUTE, STREAM_HOST, Kind
from trimtab.traces.formats.kineto.communication import op_of
from trimtab.traces.formats.kineto.slices import communicates
from trimtab.traces.formats.nsight.database import Database, opened
from trimtab.traces.formats.tables import event_table
from trimtab.traces.own_rank import MOST_TIME_NS

KERNELS: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
RANGES: Final = "NVTX_EVENTS"
_LAUNCHES: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
_COPIES: Final = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
_GRID: Final = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
_COPY_KINDS: Final = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_PUSH_POP, _START_END = 59, 60
"""``eventType`` of ranges."""
_STEP: Final = r"(?i)^(?:ProfilerStep#|(?:train(?:ing)?[ _-]?)?(?:step|iteration|iter)[ _#:=-]*)(\d{1,9})\s*$"
"""How ranges around training steps are named: ``step 12``, ``iteration12``, ``train_step: 12``."""
_DATA: Final = r"(?i)data_?load|load_?data|(?:next|get)_?batch"
_MOST_NAME: Final = 1_000


@dataclass(frozen=True, slots=True)
class Process:
    """One process that used a GPU."""

    events: pl.DataFrame
    """An event table without ranks."""
    device: int
    """The GPU that it used most, by its number on the host."""
    device_name: str
    host: str


def read_processes(path: Path) -> tuple[list[Process], list[str]]:
    """The processes of the export at ``path``, in order of their GPUs, and what is wrong with it.

    Raises ValueError where there is none.
    """
    with opened(path) as database:
        names = database.texts("StringIds", "id", "value")
        kernels = _kernels(database, names)
        ranges = _ranges(database, names)
        epoch = database.frame("TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"])["utcEpochNs"].max()
        host = database.texts("TARGET_INFO_SYSTEM_ENV", "name", "value").get("Hostname", "")
        gpus = database.texts("TARGET_INFO_GPU", "id", "name")
    offset = epoch if isinstance(epoch, int) and 0 <= epoch < MOST_TIME_NS >> 1 else 0
    problems = [] if offset else ["it does not tell when it began: its times count from then"]
    kernels, bad = _sane(kernels, offset)
    ranges, more = _sane(ranges, offset)
    if bad + more:
        problems.append(f"{bad + more} events have no time that makes sense; left out")
    if kernels.is_empty() and ranges.is_empty():
        raise ValueError(
            "an export of Nsight Systems without kernels and without ranges (nsys profile --trace=cuda,nvtx)"
        )
    processes = [_process(pid, kernels, ranges, host, gpus) for pid in _pids(kernels, ranges)]
    return sorted(processes, key=lambda one: one.device), problems


def _pids(kernels: pl.DataFrame, ranges: pl.DataFrame) -> list[int]:
    """Processes with kernels, or else all."""
    return (kernels if len(kernels) else ranges)["pid"].unique().sort().to_list()


def _pid(column: str) -> pl.Expr:
    """The process that a serialised identifier of a process or thread tells: its bits 24 to 47."""
    return (pl.col(column) // (1 << 24) % (1 << 24)).fill_null(0).alias("pid")


def _named(numbers: pl.Expr, names: dict[Any, str]) -> pl.Expr:
    """The texts of ``numbers``."""
    known = {number: text[:_MOST_NAME] for number, text in names.items() if isinstance(number, int)}
    return numbers.replace_strict(known or {0: ""}, default=None, return_dtype=pl.String)


def _kernels(database: Database, names: dict[Any, str]) -> pl.DataFrame:
    """Kernels and copies: ``pid, start, end, ready, name, device, stream, bytes, shape``."""
    shared = ["start", "end", "deviceId", "streamId", "correlationId", "globalPid"]
    kernels = database.frame(KERNELS, [*shared, "demangledName", "shortName", *_GRID])
    label = pl.coalesce(_named(pl.col("demangledName"), names), _named(pl.col("shortName"), names), pl.lit("kernel"))
    parts = [kernels.with_columns(name=label, shape=pl.concat_list(_GRID), bytes=pl.lit(None, pl.Int64))]
    for table in _COPIES:
        copies = database.frame(table, [*shared, "bytes", "copyKind"])
        direction = pl.col("copyKind").replace_strict(_COPY_KINDS, default="", return_dtype=pl.String)
        label = pl.format("Memcpy {}", direction) if table.endswith("MEMCPY") else pl.lit("Memset")
        parts.append(copies.with_columns(name=label, shape=pl.lit(None, pl.List(pl.Int64))))
    columns = [*shared, "name", "shape", "bytes"]
    ran = pl.concat([part.select(columns) for part in parts]).with_columns(_pid("globalPid"))
    launches = database.frame(_LAUNCHES, ["start", "globalTid", "correlationId"]).with_columns(_pid("globalTid"))
    launches = launches.select("pid", "correlationId", ready="start").unique(["pid", "correlationId"], keep="first")
    return ran.join(launches, on=["pid", "correlationId"], how="left", maintain_order="left")


def _ranges(database: Database, names: dict[Any, str]) -> pl.DataFrame:
    """Ranges of NVTX: ``pid, start, end, name``."""
    ranges = database.frame(RANGES, ["start", "end", "eventType", "globalTid", "textId"], ["text"])
    ranges = ranges.filter(pl.col("eventType").is_in([_PUSH_POP, _START_END]) & pl.col("end").is_not_null())
    label = pl.coalesce(pl.col("text").str.slice(0, _MOST_NAME), _named(pl.col("textId"), names))
    return ranges.with_columns(_pid("globalTid"), name=label).filter(pl.col("name").is_not_null())


def _sane(frame: pl.DataFrame, offset: int) -> tuple[pl.DataFrame, int]:
    """Rows whose times can be, in Unix time if ``offset`` is its origin; and how many are not."""
    limit = MOST_TIME_NS >> 1
    fine = pl.col("start").is_between(-limit, limit) & pl.col("end").is_between(-limit, limit)
    kept = frame.filter(fine.fill_null(False))
    times = [pl.col(name) + offset for name in ("start", "end", "ready") if name in frame.columns]
    kept = kept.with_columns(end=pl.max_horizontal("start", "end")).with_columns(times)
    return kept, len(frame) - len(kept)


def _process(pid: int, kernels: pl.DataFrame, ranges: pl.DataFrame, host: str, gpus: dict[Any, str]) -> Process:
    """The process ``pid`` as events."""
    ran, marked = (frame.filter(pl.col("pid") == pid) for frame in (kernels, ranges))
    steps = _steps(marked)
    events = [_device_events(ran), _host_events(marked)]
    table = pl.concat([_in_steps(event_table(part), steps) for part in events if len(part)])
    used = ran.group_by("deviceId").agg((pl.col("end") - pl.col("start")).sum()).sort("end", "deviceId")
    device = int(used["deviceId"][-1] or 0) if len(used) else 0
    return Process(pl.concat([table, event_table(steps)]), device, gpus.get(device, ""), host)


def _steps(marked: pl.DataFrame) -> pl.DataFrame:
    """Ranges that are named like training steps, each number once."""
    number = pl.col("name").str.extract(_STEP, 1).cast(pl.Int64, strict=False)
    steps = marked.with_columns(step=number).filter(pl.col("step").is_not_null())
    return (
        steps.sort("start")
        .unique("step", keep="first", maintain_order=True)
        .select(
            "step",
            "start",
            "end",
            ready="start",
            kind=pl.lit(Kind.HOST.value),
            name=pl.lit(NAME_STEP),
            stream=pl.lit(STREAM_HOST),
        )
    )


def _device_events(ran: pl.DataFrame) -> pl.DataFrame:
    """Kernels by stream; the one that computes most is ``compute``, communication on others is ``comm``."""
    names = ran["name"].unique().to_list()
    talks = pl.col("name").is_in([name for name in names if communicates(name)])
    ops = {name: op_of(name) or "unknown" for name in names if communicates(name)}
    op = pl.col("name").replace_strict(ops or {"": ""}, default=None, return_dtype=pl.String)
    busy = ran.filter(~talks).group_by("deviceId", "streamId").agg((pl.col("end") - pl.col("start")).sum())
    busy = busy.sort("end", "deviceId", "streamId")
    computes = pl.lit(False)
    if len(busy):
        device, stream, _ = busy.row(-1)
        computes = pl.col("deviceId").eq_missing(device) & pl.col("streamId").eq_missing(stream)
    kinds = {"send": Kind.SEND.value, "recv": Kind.RECV.value}
    kind = op.replace_strict(kinds, default=Kind.COLLECTIVE.value, return_dtype=pl.String)
    following = pl.col("start").shift(-1).over("deviceId", "streamId")
    return ran.sort("start").with_columns(
        end=pl.max_horizontal("start", pl.min_horizontal("end", following)),
        kind=pl.when(talks).then(kind).otherwise(pl.lit(Kind.KERNEL.value)),
        op=op,
        stream=pl.when(computes)
        .then(pl.lit(STREAM_COMPUTE))
        .when(talks)
        .then(pl.lit(STREAM_COMM))
        .otherwise(pl.format("device {} stream {}", "deviceId", "streamId")),
        ready=pl.min_horizontal("ready", "start"),
        correlation_id="correlationId",
    )


def _host_events(marked: pl.DataFrame) -> pl.DataFrame:
    """Ranges but for the steps."""
    loads = pl.col("name").str.contains(_DATA)
    return marked.filter(~pl.col("name").str.contains(_STEP)).with_columns(
        kind=pl.when(loads).then(pl.lit(Kind.DATA.value)).otherwise(pl.lit(Kind.USER.value)),
        stream=pl.lit(STREAM_HOST),
        ready="start",
    )


def _in_steps(events: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """``events`` with the step in which each was launched."""
    if not len(steps):
        return events
    begun = steps.select(begun="start", until="end", number=pl.col("step").cast(pl.Int32)).sort("begun")
    moment = pl.coalesce("ready", "start")
    joined = events.with_columns(moment=moment).sort("moment").join_asof(begun, left_on="moment", right_on="begun")
    inside = pl.col("moment") < pl.col("until")
    return joined.with_columns(step=pl.when(inside).then("number")).drop("moment", "begun", "until", "number")
