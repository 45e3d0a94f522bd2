"""Ranks x time as rows of cells: one row a rank, or a host, or a stretch of ranks, so that it fits the terminal.

A row that stands for several ranks shows the worst of them, step by step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from trimtab.scan.online.detect import Detector
from trimtab.scan.online.sequential import Floats, Ints

LEVELS: Final = (0.03, 0.08, 0.15, 0.3)
"""Excess from which on a cell is one shade darker: a log ratio, or a share of the step."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the picture."""

    label: str
    ranks: tuple[int, ...]
    cells: tuple[int, ...]
    """Shades, 0 to 4, oldest first; -1: nothing was said."""
    excess: float
    """Of the worst rank over the last steps; NaN: unknown."""
    worst: int
    """That rank."""


def rows_of(detector: Detector, most: int, columns: int) -> list[Row]:
    """At most ``most`` rows with the last ``columns`` judged steps."""
    world = detector.world_size
    history = list(detector.history)[-columns:]
    cells = np.stack([seen.excess for seen in history], axis=1) if history else np.full((world, 0), np.nan)
    recent = _recent(cells)
    return [_row(label, ranks, cells, recent, detector.noise) for label, ranks in _folded(detector, most)]


def _recent(cells: Floats) -> Floats:
    """What stands out of each rank in its last steps (ranks); NaN where nothing was said."""
    last = cells[:, -4:]
    known = np.isfinite(last)
    total = np.where(known, last, 0.0).sum(axis=1)
    return np.where(known.any(axis=1), total / np.maximum(known.sum(axis=1), 1), np.nan)


def _folded(detector: Detector, most: int) -> list[tuple[str, Ints]]:
    """Ranks, else hosts, else stretches of ranks."""
    every = np.arange(detector.world_size)
    if len(every) <= most:
        return [(f"rank {rank}", every[rank : rank + 1]) for rank in every.tolist()]
    hosts: dict[str, list[int]] = {}
    for rank in every.tolist():
        hosts.setdefault(detector.hosts.get(rank, "?"), []).append(rank)
    if 1 < len(hosts) <= most:
        return [(host, np.array(ranks)) for host, ranks in hosts.items()]
    parts = np.array_split(every, most)
    return [(f"ranks {part[0]}-{part[-1]}", part) for part in parts]


def _row(label: str, ranks: Ints, cells: Floats, recent: Floats, noise: float) -> Row:
    mine = np.fmax.reduce(cells[ranks], axis=0) if cells.shape[1] else np.empty(0)
    # Of many ranks one is always some way off; what is usual for the worst of them is shown as usual.
    mine = np.where(mine < noise * math.sqrt(2 * math.log(10 * len(ranks))), 0.0, mine)
    shades = tuple(-1 if value != value else int(np.searchsorted(LEVELS, value, side="right")) for value in mine)
    known = np.where(np.isfinite(recent[ranks]), recent[ranks], -np.inf)
    worst = int(np.argmax(known))
    excess = float(known[worst]) if np.isfinite(known[worst]) else float("nan")
    return Row(label, tuple(ranks.tolist()), shades, excess, int(ranks[worst]))
