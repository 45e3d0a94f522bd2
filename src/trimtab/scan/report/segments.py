"""Stretches of a timeline, as coarse as a screen can show them: kernels are microseconds long, a step is seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from trimtab.scan.plots import Category, Segment

SCREEN: Final = 2000
"""A stretch shorter than this part of what is shown is less than a pixel."""


def coarse(segments: Sequence[Segment], screens: int = 1) -> list[Segment]:
    """``segments`` with runs of like ones, too short to be seen each, made one; gaps as short are left out.

    ``screens``: how many screens wide it is shown where it is enlarged most.
    """
    if not segments:
        return []
    least = (max(s.end_s for s in segments) - min(s.start_s for s in segments)) / (SCREEN * screens)
    kept = [s for s in segments if s.category is not Category.GAP or s.end_s - s.start_s >= least]
    kept.sort(key=lambda segment: (segment.rank, segment.start_s))
    out: list[Segment] = []
    for _, mine in groupby(kept, key=lambda segment: segment.rank):
        out += _merged(mine, least)
    return out


def _merged(segments: Iterator[Segment], least: float) -> list[Segment]:
    """One rank's segments, in order of their start."""
    out: list[Segment] = []
    counts: list[int] = []
    for segment in segments:
        before = out[-1] if out else None
        if (
            before is not None
            and before.category is segment.category
            and segment.start_s - before.end_s < least
            and min(segment.end_s - segment.start_s, before.end_s - before.start_s) < least
        ):
            end = max(before.end_s, segment.end_s)
            out[-1] = Segment(before.rank, before.start_s, end, before.category, before.label)
            counts[-1] += 1
        else:
            out.append(segment)
            counts.append(1)
    return [
        s if n == 1 else Segment(s.rank, s.start_s, s.end_s, s.category, f"{n} stretches, the first: {s.label}")
        for s, n in zip(out, counts, strict=True)
    ]
