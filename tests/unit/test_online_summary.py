"""What ranks say of themselves: it survives the way over JSON, stays small, and hostile messages are refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.scan.online import summary
from trimtab.scan.online.summary import (
    GroupProgress,
    Heartbeat,
    OpenCommunication,
    RankSummary,
    StepTimes,
    decode,
    encode,
    ranks_in,
    runs_of,
)
from trimtab.topology import Coordinates

NOW = 1_790_000_000_000_000_000
STEPS = tuple(StepTimes(100 + i, 1_234_567_891, 1_012_345_678, 201_234_567, 1_234_567, 12_345) for i in range(4))
SUMMARY = RankSummary(
    *("slurm-123456.0", 2, 1023, 1024, "node-0127.cluster", NOW, STEPS),
    coordinates=Coordinates(tp=7, cp=0, ep=3, dp=15, pp=7),
    load=0.87,
    sm_clock_mhz=1980,
    sm_clock_max_mhz=1980,
)
OPEN = OpenCommunication(
    *("DATA_PARALLEL_GROUP_WITH_CP/12@7", "all_reduce", 4711, 268_435_456, NOW - 10**10),
    members=runs_of(range(7, 1024, 8)),
)
BEAT = Heartbeat(
    *("slurm-123456.0", 0, 7, 1024, "node-0000", NOW, 104, NOW - 2 * 10**10),
    phase="backward",
    open=(OPEN,),
    groups=(GroupProgress(OPEN.group, 4711, 4710), GroupProgress("default", 3, 3)),
)

nanoseconds = st.integers(0, 2**63 - 1)
texts = st.text(max_size=200)
steps = st.lists(st.builds(StepTimes, *[nanoseconds] * 6, st.booleans()), max_size=8, unique_by=lambda s: s.step)
summaries = st.builds(
    RankSummary,
    *(texts, st.integers(0, 9), st.integers(0, 7), st.integers(8, 99), texts, nanoseconds),
    steps.map(lambda found: tuple(sorted(found, key=lambda step: step.step))),
    coordinates=st.none() | st.builds(Coordinates, *[st.integers(0, 99)] * 5),
    dropped_events=nanoseconds,
    load=st.none() | st.integers(0, 999_000).map(lambda n: n / 1000),
    sm_clock_mhz=st.none() | st.integers(0, 5000),
)
communications = st.builds(
    OpenCommunication,
    *(texts, texts, st.integers(-1, 9), nanoseconds, nanoseconds),
    members=st.sets(st.integers(0, 7)).map(runs_of),
    src=st.integers(-1, 7),
    dst=st.integers(-1, 7),
    tag=st.integers(-1, 9),
    blocking=st.booleans(),
)
heartbeats = st.builds(
    Heartbeat,
    *(texts, st.integers(0, 9), st.integers(0, 7), st.integers(8, 99), texts, nanoseconds),
    *(st.integers(-1, 99), nanoseconds, texts),
    open=st.lists(communications, max_size=4).map(tuple),
    groups=st.lists(st.builds(GroupProgress, texts, st.integers(-1, 9), st.integers(-1, 9)), max_size=8).map(tuple),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=10,
)


@given(summaries | heartbeats)
def test_a_message_survives_the_way_over_json(message):
    assert decode(json.loads(json.dumps(encode(message)))) == message


@given(st.lists(st.integers(0, 300), max_size=40))
def test_runs_hold_the_ranks_they_were_made_of(ranks):
    runs = runs_of(ranks)
    assert ranks_in(runs) == (tuple(sorted(set(ranks))) if runs else ())


def test_runs_of_the_usual_groups_are_short():
    assert runs_of(range(1024)) == ((0, 1023, 1),)
    assert runs_of(range(3, 1024, 8)) == ((3, 1019, 8),)
    assert runs_of([5]) == ((5, 5, 1),)
    assert runs_of(i * i for i in range(50)) == ()


@pytest.mark.parametrize("message", [SUMMARY, BEAT])
def test_a_message_takes_a_few_hundred_bytes(message):
    assert len(json.dumps(encode(message), separators=(",", ":"))) < 500


def test_long_messages_are_cut_to_what_is_taken():
    many = tuple(StepTimes(i, 1) for i in range(100))
    cut = decode(encode(replace(SUMMARY, host="h" * 999, steps=many)))
    assert isinstance(cut, RankSummary)
    assert (len(cut.host), len(cut.steps), cut.steps[-1].step) == (200, summary.MOST_STEPS, 99)
    beat = decode(encode(replace(BEAT, open=(OPEN,) * 9, groups=BEAT.groups * 9)))
    assert isinstance(beat, Heartbeat)
    assert (len(beat.open), len(beat.groups)) == (summary.MOST_OPEN, summary.MOST_GROUPS)


def test_names_that_cannot_be_printed_are_made_printable():
    said = encode(SUMMARY) | {"host": "a\ud800b"}
    assert decode(said).host == "a?b"


@given(anything)
def test_nonsense_is_refused(said):
    with pytest.raises(ValueError, match="message: "):
        decode(said)


@given(st.data())
def test_a_message_with_one_bad_field_is_refused_or_taken_whole(data):
    good = encode(data.draw(st.sampled_from([SUMMARY, BEAT])))
    name = data.draw(st.sampled_from(sorted(good)))
    refusal = ""
    try:
        taken = decode(good | {name: data.draw(anything)})
    except ValueError as error:
        refusal = str(error)
    else:
        assert decode(encode(taken)) == taken
    assert "\n" not in refusal
    assert len(refusal) < 200


@pytest.mark.parametrize(
    "changed",
    [
        {"at": [0, 8, 8, NOW]},
        {"at": [0, 0, 1 << 40, NOW]},
        {"at": [True, 0, 8, NOW]},
        {"steps": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]},
        {"steps": [[1, -1, 1, 1, 1, 1]]},
        {"steps": [[1, 1.5, 1, 1, 1, 1]]},
        {"steps": [[i, 1, 1, 1, 1, 1] for i in range(1000)]},
        {"load": float("nan")},
        {"v": 2},
        {"v": True},
        {"host": "h" * 1000},
    ],
)
def test_what_makes_no_sense_is_refused(changed):
    with pytest.raises(ValueError, match="message: "):
        decode(encode(SUMMARY) | changed)


@pytest.mark.parametrize("members", [[[0, 1 << 30, 1]], [[0, 7, 0]], [[5, 3, 1]], [[0, 1023, 1]] * 2, [[0, 1024, 1]]])
def test_groups_that_are_too_large_are_refused(members):
    said = encode(BEAT)
    said["open"][0][5] = members
    with pytest.raises(ValueError, match="message: "):
        decode(said)


def test_step_times_add_up():
    step = StepTimes(3, duration_ns=100, compute_ns=60, wait_ns=25, data_ns=5)
    assert (step.own_ns, step.rest_ns) == (75, 10)
    assert StepTimes(3, duration_ns=10, wait_ns=25).own_ns == 0
