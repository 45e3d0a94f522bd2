"""Plans as CSV files of torch.distributed.pipelining, in both directions.

One row a rank, one cell an action: ``2F0`` is the forward of microbatch 0 in part 2 of the model, ``2B0`` its whole
backward, ``2I0`` the backward for the input and ``2W0`` the one for the weights; ``(2F1;1B0)OVERLAP_F_B`` holds two.
An empty cell is an idle slot. Torch counts the parts of the model as *stages*; here those are positions.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.shape import Placement, Shape

MAX_BYTES = 32 << 20
"""A larger file is not read; 64 stages with 2 chunks and 1,000 microbatches take 3 MiB."""
MAX_ACTIONS = 2_000_000
"""More are refused: each takes about 100 bytes."""
MAX_ROWS = 65_536
"""Ranks of a file."""

_WORKS = {"F": Work.F, "I": Work.B, "W": Work.W, "B": Work.BW}
_LETTERS = {work: letter for letter, work in _WORKS.items()}
_COMPUTE = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})")
# What a file with communication has besides: the executor derives all of it from the order.
_ELSE = re.compile(r"\d{1,9}(?:(?:SEND|RECV)_[FB]\d{1,9}|UNSHARD|RESHARD|REDUCE_GRAD)")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")

_Entry = tuple[int, Work, int]
"""Position, work, microbatch."""


def read_torch_csv(path: str | os.PathLike[str]) -> Plan:
    """Read what torch's schedules dump, with communication (which is skipped) or without.

    The ranks' positions say whether the placement is loop or v. Forwards and backwards that overlap follow each
    other, in the order in which the file has them.

    :raises ValueError: the file cannot be read, is too large, has an entry that is no action, is of another placement,
        or is no complete plan that can run; one line with the file, the row and what is wrong.
    """
    source = Path(path)
    try:
        with source.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"{source}: larger than {MAX_BYTES >> 20} MiB")
    try:
        return _plan(source.name, _rows(data.decode("ascii")))
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{source}, row {row}: not a CSV of torch's pipelines (a byte that is not ASCII)") from None
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{source}{', ' if str(error).startswith('row') else ': '}{error}") from None


def write_torch_csv(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan as torch's format "compute_only", from which torch adds the communication."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    for stage, row in enumerate(plan.actions):
        writer.writerow(
            f"{plan.shape.position(stage, action.chunk)}{_LETTERS[action.work]}{action.microbatch}" for action in row
        )
    Path(path).write_text(text.getvalue(), encoding="ascii", newline="")


def _rows(text: str) -> list[list[_Entry]]:
    rows: list[list[_Entry]] = []
    count = 0
    for number, cells in enumerate(csv.reader(io.StringIO(text, newline=""), strict=True), 1):
        if number > MAX_ROWS:
            raise ValueError(f"row {number}: more than {MAX_ROWS:,} ranks")
        rows.append(list(_entries(number, cells)))
        count += len(rows[-1])
        if count > MAX_ACTIONS:
            raise ValueError(f"row {number}: more than {MAX_ACTIONS:,} actions")
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise ValueError("has no actions")
    return rows


def _entries(row: int, cells: Iterable[str]) -> Iterator[_Entry]:
    for column, cell in enumerate(cells, 1):
        stripped = cell.strip()
        overlap = _OVERLAP.fullmatch(stripped)
        for part in overlap[1].split(";") if overlap else (stripped,):
            found = _COMPUTE.fullmatch(part.strip())
            if found:
                yield int(found[1]), _WORKS[found[2]], int(found[3])
            elif overlap or (stripped and not _ELSE.fullmatch(stripped)):
                raise ValueError(
                    f"row {row}, entry {column}: {cell[:40]!r} is not an action such as 0F0, 0I0, 0W0 or 0B0"
                )


def _plan(name: str, rows: list[list[_Entry]]) -> Plan:
    shape = _shape(rows)
    actions = tuple(
        tuple(Action(work, shape.place(position).chunk, microbatch) for position, work, microbatch in row)
        for row in rows
    )
    plan = Plan(name, shape, actions)
    plan.validate()
    return plan


def _shape(rows: list[list[_Entry]]) -> Shape:
    held = [sorted({position for position, _, _ in row}) for row in rows]
    chunks = len(held[0])
    for number, positions in enumerate(held, 1):
        if len(positions) != chunks or not positions:
            raise ValueError(
                f"row {number}: rank {number - 1} has {len(positions)} parts of the model, rank 0 {chunks}"
            )
    microbatches = 1 + max(microbatch for row in rows for _, _, microbatch in row)
    for placement in Placement:
        if placement is Placement.V and chunks % 2:
            continue
        shape = Shape(len(rows), chunks, microbatches, placement)
        expected = [sorted(shape.position(stage, chunk) for chunk in range(chunks)) for stage in range(len(rows))]
        if held == expected:
            return shape
    raise ValueError(f"rank 0 has the parts {held[0][:8]} of the model: the placement is neither loop nor v")
