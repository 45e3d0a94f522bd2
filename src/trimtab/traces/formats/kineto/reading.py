"""Files of torch.profiler, one or more a rank, as one trace."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import polars as pl

from trimtab.events import Kind
from trimtab.traces.formats.heads import Head
from trimtab.traces.formats.kineto.files import choose
from trimtab.traces.formats.kineto.part import Part
from trimtab.traces.formats.kineto.sequence import numbered
from trimtab.traces.formats.kineto.workers import read_parts
from trimtab.traces.own_header import printable, rank_list
from trimtab.traces.table import COLUMNS, RankInfo, Trace

_MARKS: Final = re.compile(
    rb'"(?:schemaVersion|deviceProperties|distributedInfo|baseTimeNanoseconds)"\s*:'
    rb'|"cat"\s*:\s*"(?:cpu_op|Operator|cuda_runtime|user_annotation|kernel|Kernel)"|PyTorch Profiler'
)
_EVENT_IDS: Final = 1 << 32
"""Event ids begin here: correlation ids, which CUDA counts in 32 bits, stay below."""
_MOST_SAID: Final = 20
"""Lines about damage in single files; of thousands of ranks each may have one."""


def recognizes(head: Head) -> bool:
    """Whether a file begins as those of torch.profiler do."""
    return head.is_json and _MARKS.search(head.data) is not None


def read(files: Sequence[Path]) -> Trace:
    """The files of a run as one trace. Of several runs in one place the newest is read.

    Raises ValueError, in one line, where no file is usable or the ranks are not known.
    """
    parts: list[Part] = []
    said: list[str] = []
    for read_one in read_parts(files):
        if isinstance(read_one, Part):
            parts.append(read_one)
        else:
            said.append(f"{read_one}; it is left out")
    if not parts:
        raise ValueError(said[0].removesuffix("; it is left out") if said else "no file to read")
    newest = [int(cast(int, part.events["end"].max())) for part in parts]
    run, by_rank = choose([part.about for part in parts], newest, said)
    chosen = {rank: _apart([parts[place] for place in places], rank, said) for rank, places in by_rank.items()}
    said += _said([part for own in chosen.values() for part in own], chosen)
    events, trusted = numbered(pl.concat([_of_rank(own, rank) for rank, own in chosen.items()]), said)
    groups = {name: ranks for own in chosen.values() for part in own for name, ranks in part.groups.items()}
    return Trace(
        events=events,
        ranks={rank: _info(rank, own) for rank, own in chosen.items()},
        world_size=_world_size(chosen, said),
        run_id=run,
        groups=groups,
        sources=tuple(str(part.about.path) for own in chosen.values() for part in own),
        warnings=tuple(said),
        matching="exact" if trusted else "order",
    )


def _apart(parts: list[Part], rank: int, said: list[str]) -> list[Part]:
    """The parts of one rank whose times do not overlap, largest first choice: the others are copies."""
    kept: list[Part] = []
    spans: list[tuple[int, int]] = []
    left: list[str] = []
    for part in sorted(parts, key=lambda one: (-len(one.events), str(one.about.path))):
        begin, end = int(cast(int, part.events["start"].min())), int(cast(int, part.events["end"].max()))
        if any(begin < until and since < end for since, until in spans):
            left.append(printable(part.about.path.name))
        else:
            kept.append(part)
            spans.append((begin, end))
    if left:
        one = printable(kept[0].about.path.name)
        said.append(f"rank {rank} is claimed by several files: {one} read, {', '.join(left)} not")
    return sorted(kept, key=lambda one: int(cast(int, one.events["start"].min())))


def _of_rank(parts: list[Part], rank: int) -> pl.DataFrame:
    events = pl.concat([part.events for part in parts])
    numbered = pl.int_range(_EVENT_IDS, _EVENT_IDS + pl.len(), dtype=pl.Int64)
    own = pl.lit(rank, pl.Int32)
    source = pl.when(pl.col("kind") == Kind.SEND.value).then(own).otherwise("src").alias("src")
    target = pl.when(pl.col("kind") == Kind.RECV.value).then(own).otherwise("dst").alias("dst")
    # The file's head may have been wrong about its rank.
    return events.with_columns(own.alias("rank"), numbered.alias("event_id"), source, target).select(list(COLUMNS))


def _info(rank: int, parts: list[Part]) -> RankInfo:
    last = parts[-1]
    return RankInfo(rank, last.about.host, last.device, last.device_name, last.about.host)


def _world_size(chosen: dict[int, list[Part]], said: list[str]) -> int:
    sizes = {part.about.world_size for own in chosen.values() for part in own if part.about.world_size is not None}
    least = max(chosen) + 1
    if len(sizes) > 1:
        said.append(f"the files do not agree on the number of ranks ({', '.join(map(str, sorted(sizes)))})")
    return max([least, *sizes])


def _said(parts: Sequence[Part], chosen: dict[int, list[Part]]) -> list[str]:
    said = [problem for part in parts for problem in part.said]
    if len(said) > _MOST_SAID:
        said = [*said[:_MOST_SAID], f"and {len(said) - _MOST_SAID} more like these, of other files"]
    stepless = [
        rank for rank, own in chosen.items() if not any(part.events["step"].is_not_null().any() for part in own)
    ]
    if stepless:
        said.append(f"{rank_list(stepless)}: the profiler marked no steps (its schedule and step() do that)")
    unknown: dict[str, int] = defaultdict(int)
    for own in chosen.values():
        for part in own:
            comms = part.events.filter(pl.col("op").is_not_null())
            unknown["group"] += comms["group"].null_count()
            unknown["bytes"] += comms["bytes"].null_count()
    missing = [f"the {name} of {count} communications" for name, count in unknown.items() if count]
    if missing:
        said.append(f"the files do not tell {', nor '.join(missing)}")
    return said
