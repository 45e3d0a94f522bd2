"""Read SQLite exports of Nsight Systems (``nsys export --type sqlite``), one a rank or one a host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import polars as pl

from trimtab.events import COMM_KINDS
from trimtab.traces.formats.heads import Head
from trimtab.traces.formats.kineto.files import rank_in
from trimtab.traces.formats.nsight.activity import KERNELS, RANGES, Process, read_processes
from trimtab.traces.formats.nsight.database import MAGIC, opened
from trimtab.traces.own_header import printable, rank_list
from trimtab.traces.table import RankInfo, Trace

_MARKS: Final = frozenset(
    {KERNELS, RANGES, "CUPTI_ACTIVITY_KIND_RUNTIME", "TARGET_INFO_SESSION_START_TIME", "StringIds"}
)

_BOTH: Final = "both ranks"


def recognizes(head: Head) -> bool:
    """Whether it is an SQLite file with some of the tables of such an export, or one too damaged to tell."""
    if not head.data.startswith(MAGIC):
        return False
    try:
        with opened(head.path) as database:
            return not database.tables.isdisjoint(_MARKS)
    except ValueError:
        return True


def read(files: Sequence[Path]) -> Trace:
    """The processes in ``files`` as ranks."""
    found, warnings = _processes(files)
    ranks, more = _ranks(found)
    warnings += more
    parts = [
        process.events.with_columns(rank=pl.lit(rank, pl.Int32))
        for rank, (_, process) in zip(ranks, found, strict=True)
    ]
    events = pl.concat(parts).with_columns(event_id=pl.int_range(pl.len(), dtype=pl.Int64))
    stepless = [rank for rank, part in zip(ranks, parts, strict=True) if part["step"].is_null().all()]
    if stepless:
        warnings.append(
            f"{rank_list(stepless)}: no NVTX range is named like a step: mark each with "
            'torch.cuda.nvtx.range(f"step {n}")'
        )
    communicates = pl.col("kind").is_in([kind.value for kind in COMM_KINDS])
    groups: dict[str, tuple[int, ...]] = {}
    if events.select(communicates.any()).item():
        warnings.append("groups, sizes and numbers of communications are not in this format")
        if sorted(ranks) == [0, 1]:  # of two ranks, both are in every group
            groups = {_BOTH: (0, 1)}
            events = events.with_columns(group=pl.when(communicates).then(pl.lit(_BOTH)).cast(pl.Categorical))
    several = len({file for file, _ in found}) > 1
    return Trace(
        events=events,
        ranks={
            rank: RankInfo(
                rank,
                host=printable(process.host),
                device="cuda",
                device_name=printable(process.device_name),
                clock=f"{printable(process.host)} {printable(file.name)}" if several else "one export",
            )
            for rank, (file, process) in sorted(zip(ranks, found, strict=True), key=lambda pair: pair[0])
        },
        world_size=max(ranks) + 1,
        groups=groups,
        run_id=files[0].stem if len(files) == 1 else files[0].parent.name,
        sources=tuple(dict.fromkeys(str(file) for file, _ in found)),
        warnings=tuple(warnings),
        matching="order",
        aligned=not several,
    )


def _processes(files: Sequence[Path]) -> tuple[list[tuple[Path, Process]], list[str]]:
    """Each process with the file that it is in; and warnings."""
    found: list[tuple[Path, Process]] = []
    warnings: list[str] = []
    for file in files:
        try:
            processes, problems = read_processes(file)
        except ValueError as error:
            warnings.append(f"{printable(file)}: {printable(error)}")
            continue
        warnings += [f"{printable(file)}: {problem}" for problem in problems]
        if any(processes[0].device == other.device and processes[0].events.equals(other.events) for _, other in found):
            warnings.append(f"{printable(file)}: a copy of another file here; left out")
        else:
            found += [(file, process) for process in processes]
    if not found:
        raise ValueError(warnings[0])
    return found, warnings


def _ranks(found: Sequence[tuple[Path, Process]]) -> tuple[list[int], list[str]]:
    """The rank of each process: by the file's name where it holds one, else counted; and warnings."""
    of_file = [file for file, _ in found]
    named = [rank_in(file.name) for file in of_file]
    ranks = [rank for rank in named if rank is not None]
    if len(ranks) == len(found) == len(set(ranks)):
        return ranks, []
    if len(found) == 1:
        return [0], [f"{printable(of_file[0])}: says no rank; it is taken as rank 0"]
    if len(set(of_file)) == len(found):
        raise ValueError(
            f"{printable(of_file[0])}: an export of Nsight Systems does not tell its rank: put it into the names, "
            "as in nsys profile -o rank%q{RANK}"
        )
    said = "ranks are not in this format: the processes are numbered by file name, and by GPU within a file"
    return list(range(len(found))), [said]
