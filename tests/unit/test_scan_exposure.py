"""Exposed tensor parallel communication: which waits count, how long, and of which pass."""

import polars as pl
import pytest

from trimtab.scan.exposure import tensor_parallel_exposure
from trimtab.scan.pipeline_times import pipeline_times, stages_of
from trimtab.topology import Coordinates
from trimtab.traces.table import COLUMNS, RankInfo, Trace

pytestmark = pytest.mark.timeout(60)
MS = 1_000_000
TENSOR, DATA = "TENSOR_MODEL_PARALLEL_GROUP/1@0", "DATA_PARALLEL_GROUP/2@0"


class Run:
    """TP 2 x DP 2 of one stage: ranks 0, 1 and 2, 3 are tensor parallel groups."""

    def __init__(self):
        self.rows = []

    def add(self, rank, step, kind, begin, end, **more):
        self.rows.append(
            {"rank": rank, "step": step, "event_id": len(self.rows), "kind": kind, "stream": "compute", "name": "x"}
            | {"ready": round(begin * MS), "start": round(begin * MS), "end": round(end * MS)}
            | more
        )
        return len(self.rows) - 1

    def reduce(self, rank, step, begin, end, seq, group=TENSOR, stream="compute"):
        named = group if rank < 2 or group != TENSOR else group.replace("@0", "@2")
        return self.add(rank, step, "collective", begin, end, group=named, op="all_reduce", seq=seq, stream=stream)

    def trace(self):
        columns = {name: [row.get(name) for row in self.rows] for name in COLUMNS}
        ranks = {
            rank: RankInfo(rank, clock="one", coordinates=Coordinates(tp=rank % 2, dp=rank // 2)) for rank in range(4)
        }
        groups = {TENSOR: (0, 1), TENSOR.replace("@0", "@2"): (2, 3), DATA: (0, 2)}
        return Trace(pl.DataFrame(columns, schema_overrides=COLUMNS), ranks, 4, run_id="r", groups=groups)


def measured(run, microbatches=2):
    trace = run.trace()
    return tensor_parallel_exposure(trace, stages_of(trace), microbatches)


def steps(run, each):
    """Two steps (the first warms up) of two microbatches: ``each(rank, step, begin, number)`` fills one."""
    for rank in range(4):
        for step in range(2):
            for microbatch in range(2):
                begin = step * 1000 + microbatch * 100
                run.add(rank, step, "forward", begin, begin + 10, microbatch=microbatch, chunk=0)
                run.add(rank, step, "backward", begin + 20, begin + 40, microbatch=microbatch, chunk=0)
                each(rank, step, begin, 10 * step + 5 * microbatch)
    return run


def test_waits_within_passes_count_and_of_a_collective_the_last_to_come():
    run = Run()

    def each(rank, step, begin, seq):
        late = 2 if rank % 2 else 0  # the other rank of the group waits for it: that is no communication
        run.reduce(rank, step, begin + 2 + late, begin + 5, seq)
        run.reduce(rank, step, begin + 25, begin + 29, seq + 1)
        run.reduce(rank, step, begin + 31, begin + 33, seq + 2)
        run.reduce(rank, step, begin + 50, begin + 60, seq + 3)  # between passes
        run.reduce(rank, step, begin + 6, begin + 8, seq, group=DATA)  # of another kind

    found = measured(steps(run, each))
    assert found.degree == 2
    assert found.forward == pytest.approx([1e-3])
    assert found.backward == pytest.approx([6e-3])


def test_of_communication_beside_the_compute_only_the_wait_for_it_counts():
    run = Run()

    def each(rank, step, begin, seq):
        number = run.reduce(rank, step, begin + 1, begin + 8, seq, stream="comm")
        run.add(rank, step, "host", begin + 6, begin + 8, name="wait", correlation_id=number)

    found = measured(steps(run, each))
    assert found.forward == pytest.approx([2e-3])
    assert found.backward == (0.0,)


def test_without_tensor_parallelism_nothing_is_exposed():
    run = steps(Run(), lambda rank, step, begin, seq: None)
    found = measured(run)
    assert (found.forward, found.backward) == ((0.0,), (0.0,))
    assert pipeline_times(run.trace()).forward == ((0.01,),)
