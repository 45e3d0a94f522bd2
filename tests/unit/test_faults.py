"""Faults: what a specification means, whom it hits, and what the injection then does."""

from __future__ import annotations

import gc
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.events import Kind
from trimtab.record.injection.faults import Fault, FaultKind, Faults, parse_fault
from trimtab.record.injection.injection import Injection
from trimtab.record.observe import Call
from trimtab.topology import Coordinates

MS = 1_000_000


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("slow_compute:rank=3,factor=1.5,steps=10-", Fault(FaultKind.SLOW_COMPUTE, (3,), factor=1.5, first_step=10)),
        ("slow_compute:ranks=0+3", Fault(FaultKind.SLOW_COMPUTE, (0, 3))),
        ("slow_stage:stage=1,factor=2", Fault(FaultKind.SLOW_STAGE, stage=1, factor=2.0)),
        ("long_sequence:dp=1,factor=2,every=3", Fault(FaultKind.LONG_SEQUENCE, dp=1, factor=2.0, every=3)),
        ("slow_link:ranks=1+0,ms=5", Fault(FaultKind.SLOW_LINK, (0, 1), ms=5.0)),
        ("host_stall:rank=2,ms=30,steps=4", Fault(FaultKind.HOST_STALL, (2,), ms=30.0, first_step=4, last_step=4)),
        ("gc_pause:rank=1,ms=40,steps=2-5", Fault(FaultKind.GC_PAUSE, (1,), ms=40.0, first_step=2, last_step=5)),
        (" slow_data : rank = 0 , ms = 0.5 ", Fault(FaultKind.SLOW_DATA, (0,), ms=0.5)),
        ("hidden_stall:rank=2,ms=3", Fault(FaultKind.HIDDEN_STALL, (2,), ms=3.0)),
        ("none", None),
    ],
)
def test_specifications(spec: str, expected: Fault | None) -> None:
    assert parse_fault(spec) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("slow_computer:rank=3", r"did you mean 'slow_compute'\?.*choose from none, slow_compute, slow_stage"),
        ("", "no kind ''"),
        ("none:rank=3", "no kind 'none'"),
        ("slow_compute", "ranks=... is missing; slow_compute takes ranks, factor, steps"),
        ("slow_compute:rank=3,ms=5", "'ms=5' is not understood.*takes ranks, factor, steps"),
        ("slow_compute:rank=3,facto=5", "did you mean 'factor'"),
        ("slow_compute:rank", "'rank' is not understood"),
        ("slow_compute:rank=3,ranks=4", "ranks is given twice"),
        ("slow_compute:rank=-1", "ranks=-1 must be a whole number from 0 on"),
        ("slow_compute:rank=a", "must be a whole number"),
        ("slow_compute:rank=3,factor=nan", "factor=nan must be a number from 1 on"),
        ("slow_compute:rank=3,factor=0.5", "must be a number from 1 on"),
        ("slow_compute:rank=3,steps=5-4", "ends before it begins"),
        ("slow_compute:rank=3,steps=-4", "must be a whole number"),
        ("slow_stage:factor=2", "stage=... is missing"),
        ("slow_stage:stage=-1", "stage=-1 must be a whole number from 0 on"),
        ("long_sequence:dp=1,every=0", "every=0 must be a whole number from 1 on"),
        ("slow_link:rank=0,ms=5", "a link has two ends"),
        ("slow_link:ranks=0+1+2", "a link has two ends"),
        ("slow_link:ranks=1+1", "a link has two ends"),
        ("host_stall:rank=0,ms=-1", "ms=-1 must be a number from 0 on"),
    ],
)
def test_wrong_specifications_are_one_clear_line(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_fault(spec)
    assert "\n" not in str(caught.value)
    assert repr(spec) in str(caught.value)


faults = st.builds(
    Fault,
    kind=st.sampled_from([FaultKind.SLOW_COMPUTE, FaultKind.HOST_STALL, FaultKind.GC_PAUSE]),
    ranks=st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True).map(lambda r: tuple(sorted(r))),
    first_step=st.integers(0, 9),
    last_step=st.none() | st.integers(9, 20),
)


@given(faults)
def test_a_fault_written_out_reads_back_the_same(fault: Fault) -> None:
    assert parse_fault(str(fault)) == fault


def test_parsing_needs_no_torch() -> None:
    import subprocess

    code = "import trimtab.record.injection.faults, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_factors_by_rank_step_kind_and_place() -> None:
    two = Faults.parse(["slow_compute:rank=3,factor=1.5,steps=2-4", "slow_stage:stage=1,factor=2"])
    here, there = Coordinates(pp=1), Coordinates(pp=0)
    assert two.compute_factor(Kind.FORWARD, 3, 2, 0, here) == 3.0
    assert two.compute_factor(Kind.FORWARD, 3, 1, 0, here) == 2.0
    assert two.compute_factor(Kind.FORWARD, 3, 5, 0, there) == 1.0
    assert two.compute_factor(Kind.OPTIMIZER, 3, 4, -1, here) == 1.5
    assert two.compute_factor(Kind.BACKWARD, 2, 4, 0, here) == 2.0
    assert two.compute_factor(Kind.BACKWARD, 2, 4, 0, None) == 1.0


def test_long_sequences_are_some_microbatches_of_one_replica() -> None:
    long = Faults.parse(["long_sequence:dp=1,factor=2,every=3"])
    at = Coordinates(dp=1)
    factors = [long.compute_factor(Kind.FORWARD, 0, 7, microbatch, at) for microbatch in range(-1, 6)]
    assert factors == [1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 1.0]
    assert long.compute_factor(Kind.OPTIMIZER, 0, 7, 0, at) == 1.0
    assert long.compute_factor(Kind.FORWARD, 0, 7, 0, Coordinates(dp=0)) == 1.0


def test_a_slow_link_needs_both_ends() -> None:
    link = Faults.parse(["slow_link:ranks=1+3,ms=5,steps=1-"])
    assert link.link_delay_ns((3, 1), 1) == 5 * MS
    assert link.link_delay_ns((0, 1, 2, 3), 9) == 5 * MS
    assert link.link_delay_ns((1, 2), 1) == 0
    assert link.link_delay_ns((1, 3), 0) == 0


def test_stalls_pauses_and_delays_by_rank_and_step() -> None:
    several = Faults.parse(
        ["host_stall:rank=2,ms=30", "host_stall:ranks=1+2,ms=1", "gc_pause:rank=1,ms=4,steps=3", "slow_data:rank=0"]
    )
    assert several.host_stall_ns(2, 0) == 31 * MS
    assert several.host_stall_ns(1, 0) == MS
    assert several.gc_pause_ns(1, 3) == 4 * MS
    assert several.gc_pause_ns(1, 4) == 0
    assert several.data_delay_ns(0, 0) == 30 * MS
    assert several.hidden_stall_ns(0, 0) == 0


def test_faults_outside_the_world_are_named() -> None:
    (line,) = Faults.parse(["slow_compute:ranks=3+8"]).problems(world_size=8)
    assert "rank 8 is not in a world of 8" in line
    assert not Faults.parse(["none"])


class Rig:
    """An injection on a rank whose clock moves only by sleeping and working."""

    def __init__(self, *specs: str, rank: int = 0, kind: str = "emulated", queued_ns: int = 0) -> None:
        self.now = 0
        self.kind = kind
        self.name = ""
        self.queued = queued_ns
        self.injection = Injection(Faults.parse(specs), rank, clock=lambda: self.now, sleep=self.sleep)
        self.injection.use(self)

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)

    def mark(self) -> int:
        return self.now

    def drain(self) -> None:
        pass

    def resolve(self, mark: int) -> int | None:
        return mark

    def queued_ns(self) -> int:
        return self.queued

    def call(self, kind: Kind, work: int, waited: int = 0, microbatch: int = 0) -> int:
        """Time a call takes which works and waits for a communication."""
        start = self.now
        call = Call(kind, "layer", microbatch=microbatch)
        self.injection.begin(call)
        self.now += work
        self.injection.blocked(self.now, self.now + waited)
        self.now += waited
        self.injection.end(call)
        return self.now - start


def test_a_host_stall_happens_once_a_step_at_the_first_forward() -> None:
    rig = Rig("host_stall:rank=0,ms=30,steps=1-")
    rig.injection.forward_launch()
    for step, expected in ((0, 0), (1, 30 * MS), (2, 30 * MS)):
        rig.injection.step_begin(step)
        before = rig.now
        rig.injection.forward_launch()
        rig.injection.forward_launch()
        assert rig.now - before == expected


def test_slow_data_delays_every_read() -> None:
    rig = Rig("slow_data:rank=0,ms=3,steps=1")
    for step, expected in ((0, 0), (1, 6 * MS), (2, 0)):
        rig.injection.step_begin(step)
        before = rig.now
        rig.injection.delay_data()
        rig.injection.delay_data()
        assert rig.now - before == expected


def test_a_call_within_a_call_is_slowed_once() -> None:
    """As a part of a layer, or what is recomputed in its backward."""
    rig = Rig("slow_compute:rank=0,factor=2", kind="cpu")
    rig.injection.step_begin(0)
    outer = Call(Kind.BACKWARD, "layer")
    rig.injection.begin(outer)
    rig.now += 10 * MS
    assert rig.call(Kind.RECOMPUTE, 5 * MS, waited=3 * MS) == 13 * MS
    rig.injection.end(outer)
    assert rig.now == 2 * (10 + 5) * MS + 3 * MS


def test_a_real_device_is_slowed_in_proportion_to_its_own_work() -> None:
    rig = Rig("slow_compute:rank=0,factor=1.5", kind="cpu")
    rig.injection.step_begin(0)
    assert rig.call(Kind.FORWARD, work=10 * MS, waited=100 * MS) == 115 * MS
    healthy = Rig("slow_compute:rank=1,factor=1.5", kind="cpu")
    healthy.injection.step_begin(0)
    assert healthy.call(Kind.FORWARD, work=10 * MS) == 10 * MS


def test_an_emulated_device_is_slowed_by_its_target_only() -> None:
    rig = Rig("slow_compute:rank=0,factor=1.5")
    rig.injection.step_begin(0)
    assert rig.call(Kind.FORWARD, work=10 * MS) == 10 * MS
    assert rig.injection.factor(Call(Kind.FORWARD, "layer")) == 1.5


def test_a_hidden_stall_stays_within_the_queue() -> None:
    rig = Rig("hidden_stall:rank=0,ms=3", queued_ns=2 * MS)
    rig.injection.step_begin(0)
    slept = [rig.call(Kind.FORWARD, work=0) for _ in range(4)]
    assert all(0 <= ns < 2 * MS for ns in slept)
    assert sum(slept) == 3 * MS
    idle = Rig("hidden_stall:rank=0,ms=3", kind="cpu")
    idle.injection.step_begin(0)
    assert idle.call(Kind.FORWARD, work=MS) == MS


def test_a_slow_collection_is_real_and_leaves_no_callback() -> None:
    rig = Rig("gc_pause:rank=0,ms=40")
    before, callbacks = gc.get_stats()[1]["collections"], list(gc.callbacks)
    rig.injection.step_begin(0)
    rig.injection.forward_launch()
    assert rig.now == 40 * MS
    assert gc.get_stats()[1]["collections"] == before + 1
    assert gc.callbacks == callbacks


class Notes:
    """Stands in for a recorder."""

    def __init__(self) -> None:
        self.metadata: list[dict[str, object]] = []

    def describe(self, **metadata: object) -> None:
        self.metadata.append(metadata)


def test_an_active_fault_is_loud_where_it_acts(caplog: pytest.LogCaptureFixture) -> None:
    specs = ["slow_compute:rank=3", "slow_stage:stage=1"]
    notes = Notes()
    injection = Injection(Faults.parse(specs), rank=3)
    with caplog.at_level(logging.WARNING, "trimtab"):
        injection.announce(notes)  # type: ignore[arg-type]
        assert notes.metadata == [{"faults": ["slow_compute:ranks=3,factor=1.5"]}]
        injection.coordinates = Coordinates(pp=1)
        injection.coordinates = Coordinates(pp=1)
    assert notes.metadata[1:] == [{"faults": ["slow_compute:ranks=3,factor=1.5", "slow_stage:stage=1,factor=1.5"]}]
    assert [record.getMessage().count("FAULT INJECTED") for record in caplog.records] == [1, 1]
    caplog.clear()
    Injection(Faults.parse(specs), rank=2).announce(notes)  # type: ignore[arg-type]
    assert not caplog.records
