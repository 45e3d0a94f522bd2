"""Ranks of which there are sums in place of pieces, because they are replayed as a whole (see :mod:`.fold`)."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.scan.arrays import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Summed:
    """What causes compare, of ranks that have no rows of work in the table."""

    ranks: Bools
    """By dense rank: it is one of them. What the arrays say about the others is not used."""
    models: Bools
    """By dense rank: the others are replayed as it is, so that what is tried on it alone is tried on all of them."""
    seconds: Floats
    """kinds x ranks x steps."""
    instances: Floats
    """kinds x ranks x steps: pieces of work, by (chunk, microbatch)."""
    microbatches: Ints
    """Numbers of all microbatches, ascending."""
    passes: Floats
    """(forward, backward) x ranks x steps x microbatches, in nanoseconds."""
