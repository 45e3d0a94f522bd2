"""Who stands out in the sums of all ranks, before anybody is replayed: clocks need not be aligned for that."""

from __future__ import annotations

import numpy as np

from trimtab.config import ScanConfig
from trimtab.scan import lanes, measure, table
from trimtab.scan.candidates import Candidate, Context
from trimtab.scan.causes import find
from trimtab.scan.counters import collect
from trimtab.scan.fold.folded import Folded
from trimtab.scan.transfers import Transfers
from trimtab.traces.table import Trace

LEAST_STEPS = 3


def screen(trace: Trace, config: ScanConfig, folded: Folded) -> tuple[Context, list[Candidate]]:
    """The job without its transfers, and the candidates of all causes but slow links."""
    data, _ = table.build(trace, config.warmup_steps)
    lane, _ = folded.fold(data, lanes.cut(data, np.flatnonzero(data.is_comm)))
    measures = measure.measure(data, lane.pieces, folded.sums(data))
    none = np.zeros(0, dtype=np.int64)
    transfers = Transfers(
        node=none,
        post=none,
        comm=none,
        joint=none.astype(bool),
        duration=none.astype(np.float64),
        guessed=none.astype(bool),
        spent=none,
        cls=none,
        link=none,
        last_post=none,
    )
    context = Context(data, measures, transfers, config, none, collect(trace.events, data))
    return context, find(context) if data.steps.count >= LEAST_STEPS else []
