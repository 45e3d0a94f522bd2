"""One file of torch.profiler as events of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import polars as pl

from trimtab.traces.formats.kineto.communication import Groups
from trimtab.traces.formats.kineto.device import device_rows
from trimtab.traces.formats.kineto.files import About, about
from trimtab.traces.formats.kineto.host import Steps, annotation_rows, communication_rows, operator_rows
from trimtab.traces.formats.kineto.slices import Slices, read_slices
from trimtab.traces.own_header import printable


@dataclass(frozen=True, slots=True)
class Part:
    """What one file held."""

    about: About
    events: pl.DataFrame
    """An event table without event ids."""
    device: str
    device_name: str
    groups: dict[str, tuple[int, ...]]
    said: tuple[str, ...]
    """What is wrong with it."""


def read_part(file: Path) -> Part:
    """One file; ValueError, in one line, where there is nothing in it."""
    slices = read_slices(file)
    told = about(file, slices.metadata)
    rank = told.rank if told.rank is not None else told.named or 0
    groups = Groups(slices.metadata, rank, told.world_size or 1)
    steps = Steps(slices)
    on_device = len(slices.device.row) > 0
    mended: list[str] = []
    if on_device:
        tables = [device_rows(slices, groups, rank, mended)]
    else:
        tables = [operator_rows(slices), communication_rows(slices, groups, rank)]
    tables += [annotation_rows(slices)]
    for table in tables:
        table.step = steps.at(table.start if table.ready is None else table.ready)
    tables += [steps.rows()]
    tables = [table for table in tables if len(table)]
    if not tables:
        raise ValueError(f"{printable(file)}: holds no event that can be used")
    events = pl.concat([table.frame(rank) for table in tables])
    return Part(
        told,
        events,
        "cuda" if on_device else "cpu",
        _device_name(slices) if on_device else "",
        groups.members(all_listed=_nameless(events)),
        (*slices.problems, *(f"{printable(file)}: {problem}" for problem in mended)),
    )


def _nameless(events: pl.DataFrame) -> bool:
    """Whether there are communications of which the file does not say in which group they were."""
    return bool(events.select((pl.col("op").is_not_null() & pl.col("group").is_null()).any()).item())


def _device_name(slices: Slices) -> str:
    """The name of the rank's device, by its number; of a mixed host it may be the first one's."""
    listed = slices.metadata.get("deviceProperties")
    entries = cast(list[Any], listed) if isinstance(listed, list) else []
    devices = [cast(dict[str, Any], one) for one in entries if isinstance(one, dict)]
    names = {str(one.get("id")): str(one.get("name", "")) for one in devices}
    number = slices.device.streams[0][0]
    return printable(names.get(str(number), next(iter(names.values()), "")))
