"""The watcher: what changes is told once, another run is left out, and a job that stands is diagnosed."""

from dataclasses import replace

import pytest
from online_jobs import Job, watch
from test_online_detect import slow
from test_online_hang import beats, collective

from trimtab.scan.online.summary import GroupProgress
from trimtab.watch.evidence import Evidence, chosen
from trimtab.watch.source import Left
from trimtab.watch.watcher import Watcher


def run(watcher, job, steps, first=0):
    """Events, step by step, a second each."""
    return [e for n in range(first, first + steps) for e in watcher.take(job.step(n), float(n))]


class FakeSource:
    """Answers at once, or refuses."""

    refused = 0

    def __init__(self, answer=b"{}", refusal=""):
        self.asked = []
        self._answer, self._refusal = answer, refusal

    def receive(self, timeout):
        return []

    def ask(self, rank, subject, body):
        from concurrent.futures import Future

        from trimtab.control.endpoint import NoReply

        self.asked.append((rank, subject, body))
        future = Future()
        if self._refusal:
            future.set_exception(NoReply(self._refusal))
        else:
            future.set_result(self._answer)
        return future


@pytest.fixture(scope="module")
def slowed():
    """A watcher of a job with a slow rank, and what it noticed."""
    watcher = Watcher()
    return watcher, run(watcher, Job(noise=0.01, disturb=slow(3, 1.3, first=40)), 50)


def test_an_alarm_is_told_once_with_the_culprit(slowed):
    watcher, events = slowed
    (event,) = events
    assert (event.kind, event.ranks) == ("alarm", (3,))
    assert event.text.startswith("Rank 3 (node-0) computes 1.")
    assert watcher.totals.alarms == {"slow_rank": 1}
    assert watcher.totals.found
    assert event.as_dict()["alarm"]["kind"] == "slow_rank"


def test_a_new_attempt_begins_anew():
    watcher = Watcher()
    run(watcher, Job(), 3)
    again = [replace(message, attempt=1) for message in Job().step(0)]
    (event,) = watcher.take(again, 4.0)
    assert event.kind == "restart"
    assert (watcher.attempt, watcher.heard) == (1, 8)
    watcher.take(Job().step(1), 5.0)  # of the first attempt, late
    assert watcher.totals.strangers == 8


def test_messages_of_another_run_are_left_out():
    watcher = Watcher()
    run(watcher, Job(), 2)
    assert watcher.take([replace(message, run_id="other") for message in Job().step(2)], 3.0) == []
    assert (watcher.run_id, watcher.totals.strangers) == ("run", 8)
    assert watcher.take([replace(Job(ranks=4).step(2)[0], attempt=0)], 3.0) == []  # another world


def stuck(step=7):
    """Heartbeats of four ranks, of which rank 2 does not come to a collective."""
    waits = collective("dp", 5, range(4))
    groups = {2: [GroupProgress("dp", 4, 4)]}
    return list(beats(4, {0: [waits], 1: [waits], 2: [], 3: [waits]}, groups, phases={2: "data"}, step=step).values())


def test_a_job_that_stands_is_told_once_and_again_when_it_moves():
    watcher = Watcher(patience=20.0)
    events = [event for second in range(60) for event in watcher.take(stuck(), float(second))]
    (event,) = events
    assert (event.kind, event.ranks) == ("hang", (2,))
    assert event.text.splitlines()[:2] == [
        "No rank has got on for 21 s.",
        "Rank 2 is missing: it is in data (step 7), and waits for nobody.",
    ]
    assert watcher.diagnosis is not None
    (event,) = watcher.take(stuck(step=8), 61.0)
    assert event.kind == "moving"
    assert watcher.diagnosis is None


def test_ranks_that_compute_for_long_do_not_hang():
    watcher = Watcher(patience=5.0)
    said = list(beats(2, {0: [], 1: []}, step=-1).values())
    assert [event for second in range(30) for event in watcher.take(said, float(second))] == []


def test_a_job_that_is_over_does_not_hang():
    watcher = Watcher(patience=5.0)
    watcher.take(stuck(), 0.0)
    assert watcher.take([Left(rank) for rank in range(4)], 1.0) == []
    assert watcher.take([], 100.0) == []
    assert watcher.progress.over


def test_an_alarm_opens_one_window_on_the_suspect_and_two_peers(slowed):
    watcher, (alarm,) = slowed
    source = FakeSource()
    evidence = Evidence(source, None, unix=lambda: 10**9)
    (text,) = evidence.ask(alarm, watcher, 100.0)
    assert text == "A profiler window of 3 steps opens on rank 3 and its peers 4, 5."
    assert [(rank, subject) for rank, subject, _ in source.asked] == [(3, "window"), (4, "window"), (5, "window")]
    assert len({body["begins_unix_ns"] for _, _, body in source.asked}) == 1
    assert source.asked[0][2]["begins_unix_ns"] >= 3 * 10**9
    assert evidence.ask(alarm, watcher, 399.0) == []
    assert evidence.ask(alarm, watcher, 401.0) != []


def test_no_window_is_opened_if_that_is_not_wanted(slowed):
    watcher, (alarm,) = slowed
    source = FakeSource()
    assert Evidence(source, None, windows=False).ask(alarm, watcher, 100.0) == []
    assert source.asked == []


def test_where_the_files_of_a_window_are_is_told(slowed, tmp_path):
    watcher, (alarm,) = slowed
    old = tmp_path / "rank00003-a0-window-000001-000003.pt.trace.json.gz"
    old.touch()
    evidence = Evidence(FakeSource(), tmp_path)
    evidence.ask(alarm, watcher, 100.0)
    assert evidence.told(101.0) == []
    new = tmp_path / "rank00003-a0-window-000060-000062.pt.trace.json.gz"
    new.touch()
    assert evidence.told(102.0) == [f"Window of rank 3: {new}"]
    assert evidence.told(103.0) == []


def test_why_there_is_no_window_is_told(slowed):
    watcher, (alarm,) = slowed
    evidence = Evidence(FakeSource(refusal="windows are switched off\x1b[31m"), None)
    evidence.ask(alarm, watcher, 100.0)
    assert evidence.told(101.0) == ["No window on ranks 3-5: windows are switched off\N{REPLACEMENT CHARACTER}[31m"]


@pytest.mark.parametrize(
    "answer", [b'{"stack": ["load (data.py:12)", "main (train.py:3)"]}', b"[", b"[]", b'{"stack": 1}']
)
def test_a_hang_asks_the_suspects_where_they_stand(answer):
    watcher = Watcher(patience=5.0)
    watcher.take(stuck(), 0.0)
    (event,) = watcher.take([], 6.0)
    source = FakeSource(answer=answer)
    evidence = Evidence(source, None)
    evidence.ask(event, watcher, 6.0)
    assert [(rank, subject) for rank, subject, _ in source.asked] == [(2, "dump")]
    told = evidence.told(7.0)
    assert told == (["Rank 2 stands in load (data.py:12), called by main (train.py:3)"] if b"load" in answer else [])


def test_peers_are_of_the_same_stage_and_of_other_hosts_first():
    detector, _ = watch(Job(ranks=16, stages=2), 3)
    (alarm,) = watch(Job(noise=0.005, disturb=slow(1, 1.5, first=30)), 36)[0].alarms
    assert chosen(alarm, detector) == (1, 4, 5)
    assert chosen(replace(alarm, ranks=(9,)), detector, blamed=[12]) == (9, 13, 14)
