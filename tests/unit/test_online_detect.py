"""Online detection: who became slow is named, soon and with the reason; what nobody is to blame for is so told."""

import json
from dataclasses import replace

import numpy as np
import pytest
from online_jobs import Job, watch

from trimtab.scan.model import FindingKind
from trimtab.scan.online.alarm import sentence
from trimtab.scan.online.detect import Detector

ONSET = 60


def slow(rank, factor, first=ONSET, last=10**9):
    def disturb(who, step, took):
        if who == rank and first <= step <= last:
            took["compute"] *= factor

    return disturb


def more(rank, what, milliseconds, first=ONSET, every=1):
    def disturb(who, step, took):
        if who == rank and step >= first and step % every == 0:
            took[what] += milliseconds * 1e6

    return disturb


def raised(changes):
    return [change.alarm for change in changes if not change.over]


@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_a_slow_rank_is_named_within_three_steps(noise):
    delays = []
    for seed in range(3):
        _, changes = watch(Job(noise=noise, seed=seed, disturb=slow(3, 1.15)), ONSET + 6)
        (alarm,) = raised(changes)
        assert (alarm.kind, alarm.ranks, alarm.host) == (FindingKind.SLOW_RANK, (3,), "node-0")
        assert abs(alarm.since - ONSET) <= 1
        assert alarm.ratio == pytest.approx(1.15, abs=0.05)
        assert alarm.seconds_per_step == pytest.approx(0.03, abs=0.012)
        delays.append(alarm.step - ONSET + 1)
    assert sorted(delays)[1] <= 3
    assert max(delays) <= 5


def test_the_sentence_has_the_figures():
    detector, _ = watch(Job(noise=0.01, disturb=slow(3, 1.5)), ONSET + 10)
    (alarm,) = detector.alarms
    text = sentence(alarm)
    assert text.startswith(f"Rank 3 (node-0) computes 1.{round(alarm.ratio * 100) % 100:02d}x as long as its peers")
    assert f"since step {alarm.since}" in text
    slower = sentence(replace(alarm, clock_mhz=(1200, 1980), load=3.0, host="\x1b[31mred"))
    assert "1200 MHz" in slower
    assert "load of 3.0" in slower
    assert "\x1b" not in slower
    assert json.loads(json.dumps(alarm.as_dict()))["says"] == text


@pytest.mark.parametrize("seed", range(2))
def test_a_healthy_job_raises_nothing(seed):
    detector, changes = watch(Job(noise=0.02, seed=seed), 200)
    assert changes == []
    assert detector.ready


def test_peers_are_those_of_the_stage():
    detector, changes = watch(Job(ranks=8, stages=2, noise=0.01, disturb=slow(5, 1.2)), ONSET + 8)
    (alarm,) = raised(changes)
    assert (alarm.ranks, alarm.stage) == ((5,), 1)
    assert detector.ready


def test_a_rank_that_was_slow_from_the_start_is_named():
    _, changes = watch(Job(noise=0.01, disturb=slow(2, 1.2, first=0)), 40)
    assert [alarm.ranks for alarm in raised(changes)] == [(2,)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_few_ranks(ranks):
    _, changes = watch(Job(ranks=ranks, noise=0.01, disturb=slow(1, 1.3)), ONSET + 30)
    assert [alarm.ranks for alarm in raised(changes)] == [(1,)]


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("factor", [1.15, 1.4])
def test_of_two_peers_the_one_that_is_slow_from_the_start_is_named(ranks, stages, factor):
    job = Job(ranks=ranks, stages=stages, noise=0.01, disturb=slow(1, factor, first=0))
    _, changes = watch(job, ONSET)
    (alarm,) = raised(changes)
    assert (alarm.kind, alarm.ranks) == (FindingKind.SLOW_RANK, (1,))
    assert alarm.ratio == pytest.approx(factor, rel=0.05)
    assert alarm.step <= 2 + 48 + 5


def test_of_two_peers_the_alarm_ends_when_the_slow_one_is_as_fast_as_the_other():
    _, changes = watch(Job(ranks=2, noise=0.01, disturb=slow(1, 1.4, first=0, last=ONSET)), ONSET + 40)
    assert [(change.alarm.ranks, change.over) for change in changes] == [((1,), False), ((1,), True)]


def test_of_two_peers_neither_is_slow_if_none_waits_for_the_other():
    """One computes longer, the other reads data meanwhile; from the start, so that may be how the job is."""

    def disturb(rank, step, took):
        took["compute" if rank == 1 else "data"] += 60e6

    _, changes = watch(Job(ranks=2, noise=0.01, disturb=disturb), ONSET + 60)
    assert raised(changes) == []


def test_two_ranks_of_which_nobody_knows_whether_they_are_peers_are_not_compared():
    detector, job = Detector(2), Job(ranks=2, noise=0.01, disturb=slow(1, 1.4, first=0))
    for number in range(ONSET + 30):
        for summary in job.step(number):
            assert detector.add(replace(summary, coordinates=None)) == []


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("first", [0, ONSET])
def test_what_is_not_recorded_takes_longer_on_a_slow_device_and_is_no_stall(ranks, first):
    def disturb(rank, step, took):
        took["rest"] += 60e6
        if rank == 1 and step >= first:
            took["compute"] *= 1.5
            took["rest"] *= 1.5

    _, changes = watch(Job(ranks=ranks, noise=0.01, disturb=disturb), ONSET + 30)
    assert {(alarm.kind, alarm.ranks) for alarm in raised(changes)} == {(FindingKind.SLOW_RANK, (1,))}


def test_one_rank_alone_is_compared_with_its_past():
    _, changes = watch(Job(ranks=1, noise=0.01, disturb=slow(0, 1.6)), ONSET + 20)
    assert {alarm.kind for alarm in raised(changes)} <= {FindingKind.SLOW_RANK, FindingKind.GLOBAL_SLOWDOWN}
    assert raised(changes)


def test_what_slows_all_is_blamed_on_nobody():
    def disturb(who, step, took):
        if step >= 100:
            took["compute"] *= 1.3

    _, changes = watch(Job(noise=0.01, disturb=disturb), 140)
    (alarm,) = raised(changes)
    assert (alarm.kind, alarm.ranks) == (FindingKind.GLOBAL_SLOWDOWN, ())
    assert sentence(alarm).startswith("All ranks alike are slower since step ")


def test_a_slow_rank_explains_that_the_job_is_slower():
    _, changes = watch(Job(noise=0.01, disturb=slow(3, 1.5, first=100)), 140)
    assert [alarm.kind for alarm in raised(changes)] == [FindingKind.SLOW_RANK]


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("data", FindingKind.DATA_LOADING),
        ("gc", FindingKind.GARBAGE_COLLECTION),
        ("rest", FindingKind.HOST_STALL),
    ],
)
@pytest.mark.parametrize("every", [1, 4])
def test_the_reason_is_told(what, kind, every):
    _, changes = watch(Job(disturb=more(6, what, 50, every=every)), ONSET + 80)
    found = raised(changes)
    assert {(alarm.kind, alarm.ranks) for alarm in found} == {(kind, (6,))}
    assert found[0].repeated is (every > 1)
    assert ("again and again" in sentence(found[0])) is (every > 1)


def test_ranks_of_one_host_are_one_alarm():
    def disturb(who, step, took):
        if who // 4 == 1 and step >= ONSET:
            took["compute"] *= 1.4

    _, changes = watch(Job(ranks=16, noise=0.005, disturb=disturb), ONSET + 6)
    assert {alarm.host for alarm in raised(changes)} == {"node-1"}
    assert {rank for alarm in raised(changes) for rank in alarm.ranks} == {4, 5, 6, 7}
    assert len(raised(changes)) <= 2


def test_an_alarm_ends_when_the_rank_has_recovered():
    detector, changes = watch(Job(disturb=slow(3, 1.3, last=ONSET + 19)), ONSET + 60)
    assert [change.over for change in changes] == [False, True]
    assert ONSET + 20 <= changes[1].step <= ONSET + 26
    assert detector.alarms == ()


def test_steps_set_aside_and_ranks_that_say_nothing_are_passed_over():
    job, detector = Job(noise=0.01), Detector(8)
    for number in range(120):
        for summary in job.step(number):
            if summary.rank == 5 and number > 40:  # killed
                continue
            (step,) = summary.steps
            if number % 10 == 7 and summary.rank == 2:  # a profiler window
                step = replace(step, compute_ns=step.compute_ns * 3, aside=True)
            assert detector.add(replace(summary, steps=(step,))) == []
    detector.finish()
    assert detector.step == 119
    assert np.isnan(detector.last_steps[5]).all()


def test_summaries_may_come_in_any_order_and_several_steps_at_once():
    job = Job(noise=0.01, disturb=slow(3, 1.3))
    said = [job.step(number) for number in range(ONSET + 20)]
    straight, expected = watch(Job(noise=0.01, disturb=slow(3, 1.3)), ONSET + 20)
    detector = Detector(8)
    changes = []
    for first in range(0, len(said), 5):
        for rank in (3, 1, 7, 0, 2, 6, 5, 4):
            steps = tuple(step for row in said[first : first + 5] for step in row[rank].steps)
            changes += detector.add(replace(said[first][rank], steps=steps))
            changes += detector.add(replace(said[first][rank], steps=steps))  # told twice
    assert raised(changes) == raised(expected)
    assert detector.step == straight.step


def test_memory_does_not_grow_with_the_steps():
    detector, _ = watch(Job(), 60)
    lone = Job(ranks=8)
    for number in range(60, 400):  # only one rank still speaks
        detector.add(lone.step(number)[0])
    assert detector.step > 300
    assert len(detector.history) <= 120
    assert len(detector._assembly._open) <= 80
