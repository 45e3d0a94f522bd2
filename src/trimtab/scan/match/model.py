"""Communications: which events of different ranks are one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.scan.arrays import Bools, Floats, Ints
from trimtab.scan.model import MatchedBy, Matching

SURE = 0.95
"""What is less certain to be one communication is left unmatched."""


@dataclass(frozen=True, slots=True)
class Matches:
    """Communications: each is a set of rows of the table."""

    rows: Ints
    """Rows of the table that are communications, in ascending order."""
    comm: Ints
    """Id of the communication that each of ``rows`` belongs to, 0..count-1."""
    count: int
    size: Ints
    """Members found, by communication."""
    wanted: Ints
    """Members that its group has."""
    complete: Bools
    """Every member of a present rank was found, each once, and surely: it can be replayed."""
    whole: Bools
    """Complete, and no member belongs to a rank that is missing altogether."""
    p2p: Bools
    """By communication: a send and its receive."""
    by_order: Bools
    """By communication: found by order, not by a sequence number."""
    sure: Floats
    """By communication: how sure it is that its members are one, 0 to 1."""
    warnings: tuple[str, ...] = ()

    def equals(self, other: Matches) -> bool:
        """The same events are the same communications, and as usable."""
        return np.array_equal(self.comm, other.comm) and np.array_equal(self.complete, other.complete)

    def summary(self) -> Matching:
        """For the report."""
        matched = int(self.whole.sum())
        by_order = int((self.whole & self.by_order).sum())
        confidence = float(self.sure[self.whole].sum()) / self.count if self.count else 1.0
        return Matching(
            matched=matched,
            unmatched=self.count - matched,
            confidence=round(confidence, 6),
            by=MatchedBy(sequence_numbers=matched - by_order, order=by_order),
        )
