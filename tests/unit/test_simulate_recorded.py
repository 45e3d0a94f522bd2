"""Times of a recorded pipeline: which spans count, how W is told apart, and what cannot be simulated."""

import polars as pl
import pytest

from trimtab.scan.pipeline_times import pipeline_times
from trimtab.topology import Coordinates
from trimtab.traces.table import COLUMNS, RankInfo, Trace

MS = 1_000_000


class Job:
    """Spans of ranks, one after the other on each."""

    def __init__(self, stages=2, dp=1):
        self.rows = []
        self.now = dict.fromkeys(range(stages * dp), 0)
        self.coordinates = {rank: Coordinates(dp=rank % dp, pp=rank // dp) for rank in self.now}

    def span(self, rank, step, kind, chunk, microbatch, ms, name="layer", parent=None, start=None):
        begin = self.now[rank] if start is None else start
        end = begin + round(ms * MS)
        if start is None:
            self.now[rank] = end
        number = len(self.rows)
        self.rows.append(
            {
                **{"rank": rank, "step": step, "event_id": number, "parent_id": parent, "kind": kind, "name": name},
                **{"stream": "compute", "ready": begin, "start": begin, "end": end, "cpu_ns": end - begin},
                **{"microbatch": microbatch, "chunk": chunk},
            }
        )
        return number, begin

    def steps(self, count):
        """Mark ``count`` equal steps over everything."""
        last = max(self.now.values())
        for rank in self.now:
            for step in range(count):
                begin, end = last * step // count, last * (step + 1) // count
                self.rows.append(
                    {
                        **{"rank": rank, "step": step, "event_id": len(self.rows), "kind": "host", "name": "step"},
                        **{"stream": "host", "ready": begin, "start": begin, "end": end},
                    }
                )
        return self

    def trace(self, coordinates=True):
        columns = {name: [row.get(name) for row in self.rows] for name in COLUMNS}
        events = pl.DataFrame(columns, schema_overrides=COLUMNS)
        ranks = {
            rank: RankInfo(rank, clock="one", coordinates=at if coordinates else None)
            for rank, at in self.coordinates.items()
        }
        return Trace(events, ranks, len(ranks), run_id="r")


def split_job(steps=3, microbatches=4, **more):
    job = Job(**more)
    for rank in job.now:
        stage = job.coordinates[rank].pp
        for step in range(steps):
            for microbatch in range(microbatches):
                for chunk in (0, 1):
                    slow = 10 if step == 0 else 1  # the first step warms up
                    job.span(rank, step, "forward", chunk, microbatch, slow * (2 + stage + chunk), "F")
                    job.span(rank, step, "backward", chunk, microbatch, slow * 3, "B")
                    job.span(rank, step, "wgrad", chunk, microbatch, slow * 1.5, "W")
    return job.steps(steps)


def test_what_was_recorded_apart_is_told_apart():
    times = pipeline_times(split_job().trace())
    assert (times.stages, times.chunks, times.microbatches, times.split) == (2, 2, 4, True)
    assert times.forward == ((0.002, 0.003), (0.003, 0.004))
    assert times.backward == ((0.003, 0.003), (0.003, 0.003))
    assert times.wgrad == ((0.0015, 0.0015), (0.0015, 0.0015))
    assert times.steps == 2
    assert times.transfer == 0
    assert "no messages" in times.warnings[0] or "cannot be timed" in times.warnings[0]


def test_layers_are_summed_and_a_whole_backward_divided():
    job = Job()
    for rank in job.now:
        for step in range(3):
            for microbatch in range(2):
                for _ in range(4):
                    job.span(rank, step, "forward", None, microbatch, 1)
                for _ in range(4):
                    job.span(rank, step, "backward", None, microbatch, 2)
                job.span(rank, step, "recompute", None, microbatch, 1)
    times = pipeline_times(job.steps(3).trace(), wgrad_share=0.25)
    assert (times.chunks, times.microbatches, times.split) == (1, 2, False)
    assert times.forward == ((0.004,), (0.004,))
    assert [row[0] for row in times.backward] == pytest.approx([0.75 * 0.009] * 2)
    assert [row[0] for row in times.wgrad] == pytest.approx([0.25 * 0.009] * 2)


def test_of_spans_within_spans_the_outer_ones_count():
    job = Job()
    for rank in job.now:
        for step in range(2):
            for microbatch in range(2):
                outer, begin = job.span(rank, step, "forward", 0, microbatch, 5, "F")
                job.span(rank, step, "forward", 0, microbatch, 3, "layer", parent=outer, start=begin)
                job.span(rank, step, "backward", 0, microbatch, 6, "BW")
    times = pipeline_times(job.steps(2).trace())
    assert times.forward == ((0.005,), (0.005,))


def test_replicas_are_taken_together_by_the_median():
    job = Job(stages=2, dp=3)
    for rank in job.now:
        took = 30 if rank == 0 else 4  # one slow replica does not count
        for step in range(2):
            for microbatch in range(2):
                job.span(rank, step, "forward", 0, microbatch, took)
                job.span(rank, step, "backward", 0, microbatch, 2 * took)
    times = pipeline_times(job.steps(2).trace())
    assert times.forward == ((0.004,), (0.004,))
    assert times.microbatches == 2


def test_what_cannot_be_simulated_is_said():
    job = split_job()
    with pytest.raises(ValueError, match="which pipeline stage rank 0 is"):
        pipeline_times(job.trace(coordinates=False))
    without = job.trace()
    events = without.events
    empty = Trace(events.filter(pl.col("microbatch").is_null()), without.ranks, 2)
    with pytest.raises(ValueError, match="no spans of single microbatches"):
        pipeline_times(empty)
    one = events.filter(~((pl.col("rank") == 1) & (pl.col("kind") == "forward") & (pl.col("chunk") == 1)))
    with pytest.raises(ValueError, match="no forward pass of stage 1, chunk 1"):
        pipeline_times(Trace(one, without.ranks, 2))
    lost = {0: without.ranks[0], 1: RankInfo(1, coordinates=Coordinates(pp=2))}
    with pytest.raises(ValueError, match="no rank of pipeline stage 1"):
        pipeline_times(Trace(events, lost, 2))
