"""What a cause hands over to be priced: which work or transfers it slowed, and what they would take without it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trimtab.config import ScanConfig
from trimtab.scan.arrays import Floats, Ints
from trimtab.scan.counters import Counters
from trimtab.scan.kernels.compare import Kernels
from trimtab.scan.kernels.segments import Segments
from trimtab.scan.measure import Measures
from trimtab.scan.model import FindingKind, Pattern
from trimtab.scan.stats import Noise, Stretch, certainty, critical
from trimtab.scan.table import Table
from trimtab.scan.transfers import Transfers


@dataclass(frozen=True, slots=True)
class Context:
    """All that a cause may look at."""

    table: Table
    measures: Measures
    transfers: Transfers
    config: ScanConfig
    row_of_transfer: Ints
    """Row of the table of each transfer's communication."""
    counters: Counters = field(default_factory=Counters)
    kernels: Kernels | None = None
    segments: Segments | None = None
    """Both None where the trace tells of no kernels."""

    @property
    def steps(self) -> Ints:
        """Numbers of the judged steps."""
        return self.table.steps.numbers

    def looks(self, series: int) -> int:
        """How often chance gets a try: every series, at every step, for each of the causes that look at it."""
        return series * max(1, len(self.steps)) * len(FindingKind)

    def bound(self, stretch: Stretch, noise: Noise, series: int) -> float:
        """Lower bound of the stretch's mean as a share of that mean, 0 to 1."""
        z = critical(noise, self.config.confidence, self.looks(series))
        return float(np.clip(1 - z * stretch.error / stretch.mean, 0.0, 1.0))

    def confidence(self, stretch: Stretch, noise: Noise, series: int) -> float:
        """Certainty that the stretch is not chance."""
        return certainty(stretch.mean / max(stretch.error, 1e-300), noise, self.looks(series))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cause before it is priced.

    ``pieces`` and ``transfers`` are indices, ``*_fix`` the factors that undo the cause. ``certain`` is the
    part of the effect (0 to 1) that the data bears out at the wanted confidence.
    """

    kind: FindingKind
    ranks: Ints
    """Dense indices."""
    certain: float
    confidence: float
    ratio: float
    first: int
    last: int
    """Indices into the judged steps."""
    ops: tuple[str, ...]
    evidence: tuple[str, ...]
    pieces: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    piece_fix: Floats = field(default_factory=lambda: np.zeros(0))
    transfers: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    transfer_fix: Floats = field(default_factory=lambda: np.zeros(0))
    stage: int | None = None
    link: tuple[int, int] | None = None
    pattern: Pattern | None = None
    """None: from the first and last step."""
    least_share: float | None = None
    """Share of the step time from which it counts; None: the configured one."""


def describe_steps(context: Context, first: int, last: int) -> str:
    """``in steps 8 to 15``, or ``in all steps``."""
    numbers = context.steps
    if first == 0 and last == len(numbers) - 1:
        return "in all steps"
    if first == last:
        return f"in step {numbers[first]}"
    return f"in steps {numbers[first]} to {numbers[last]}"


def describe_ranks(context: Context, ranks: Ints, most: int = 6) -> str:
    """``rank 3``, ``ranks 1, 5, 7`` or ``ranks 0, 1, 2, ... (64)``."""
    ids = [str(context.table.ids[rank]) for rank in ranks]
    if len(ids) == 1:
        return f"rank {ids[0]}"
    shown = ", ".join(ids[:most])
    return f"ranks {shown}, ... ({len(ids)})" if len(ids) > most else f"ranks {shown}"
