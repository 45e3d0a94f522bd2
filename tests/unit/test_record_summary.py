"""Summaries: whatever the rounds, they say what the events said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_runs import MS, Rank, site

from trimtab.record.files import summary
from trimtab.record.files.ring import COLUMN, WIDTH, Rows
from trimtab.record.files.rows import Sites
from trimtab.record.files.summary import EVENTS_PER_ROW, LONGEST_SECONDS, Summaries, covered

intervals = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 30)), max_size=30)


@given(intervals)
def test_covered_is_the_length_of_the_union(found: list[tuple[int, int, int]]) -> None:
    group, start, length = (np.array(column, np.int64) for column in (zip(*found, strict=True) if found else ((),) * 3))
    expected = [len({t for g, s, n in found if g == at for t in range(s, s + n)}) for at in range(4)]
    assert covered(group, start, start + length, 4).tolist() == expected


def make_rows(events: list[tuple[int, int, int, int, int]]) -> Rows:
    rows = np.full((len(events), WIDTH), -1, np.int64)
    for row, (number, step, wait, start, length) in zip(rows, events, strict=True):
        row[COLUMN["site"]], row[COLUMN["step"]] = number, step
        row[COLUMN["start"]], row[COLUMN["end"]] = start, start + length
        row[COLUMN["ready"]] = start - wait
        row[COLUMN["bytes"]] = 8
    return rows


events_ = st.lists(
    st.tuples(
        st.integers(0, 5), st.integers(-1, 9), st.integers(0, 99), st.integers(10**6, 10**7), st.integers(0, 10**6)
    ),
    min_size=1,
    max_size=60,
)


@given(events_, st.integers(1, 60))
def test_sums_do_not_depend_on_the_rounds(events: list[tuple[int, int, int, int, int]], size: int) -> None:
    sites = Sites()
    for layer in range(6):
        sites.intern(site("forward", "layer", layer=layer))
    summaries = Summaries(sites)
    for first in range(0, len(events), size):
        part = events[first : first + size]
        summaries.add(make_rows(part), [None] * len(part))
    rows, args = summaries.take(0.0, everything=True)
    found = {int(row[COLUMN["site"]]): (row, json.loads(text or "")) for row, text in zip(rows, args, strict=True)}
    assert set(found) == {number for number, *_ in events}
    for number, (row, said) in found.items():
        mine = [event for event in events if event[0] == number]
        lengths = [event[4] for event in mine]
        assert row[COLUMN["step"]] == min(event[1] for event in mine)
        assert row[COLUMN["start"]] == min(event[3] for event in mine)
        assert row[COLUMN["end"]] == max(event[3] + event[4] for event in mine)
        assert row[COLUMN["bytes"]] == 8 * len(mine)
        assert row[COLUMN["event_id"]] == -1
        slowest = said.pop("max_step")
        assert (slowest, max(lengths)) in {(event[1], event[4]) for event in mine}
        waits = [event[2] for event in mine]
        expected = {"count": len(mine), "total_ns": sum(lengths), "min_ns": min(lengths), "max_ns": max(lengths)}
        expected |= {"last_step": max(event[1] for event in mine)}
        expected |= {"wait_ns": sum(waits), "max_wait_ns": max(waits)} if max(waits) else {}
        assert said == expected


def test_a_step_says_what_its_time_went_into() -> None:
    sites = Sites()
    step, layer, inside, reduce, wait, data, beside = (
        sites.intern(found)
        for found in (
            site("host", "step", "host"),
            site("forward", "layer"),
            site("collective", "all_gather", group="tp", op="all_gather"),
            site("collective", "all_reduce", group="dp", op="all_reduce"),
            site("host", "wait"),
            site("data", "next", "host"),
            site("collective", "reduce_scatter", "comm", group="dp", op="reduce_scatter"),
        )
    )
    summaries = Summaries(sites)
    events = [
        (data, 7, 0, 0, 5),
        (layer, 7, 0, 10, 100),
        (inside, 7, 0, 20, 30),  # in place, within the layer
        (reduce, 7, 0, 120, 40),
        (beside, 7, 0, 100, 80),
        (wait, 7, 0, 150, 20),  # overlaps the reduction by 10
        (step, 7, 0, 0, 200),
    ]
    summaries.add(make_rows(events), [None] * len(events))
    for later in (8, 9):
        summaries.add(make_rows([(step, later, 0, 200, 10)]), [None])
    rows, args = summaries.take(0.0)
    assert rows[:, COLUMN["step"]].tolist() == [7]  # the last two may not be complete yet
    expected = {"compute_ns": 70, "comm_ns": 80, "beside_ns": 80, "data_ns": 5, "events": 6}
    assert json.loads(args[0] or "") == expected


def test_rare_events_stay_and_counters_thin_out() -> None:
    sites = Sites()
    collect, host = sites.intern(site("gc", "gc", "host")), sites.intern(site("counter", "host", "host"))
    summaries = Summaries(sites)
    kept: list[tuple[int, str | None]] = []
    for second in range(180):
        now = (1 + second) * 1_000 * MS
        rows = make_rows([(collect, 0, 0, now, 2 * MS), (collect, 0, 0, now, MS // 2), (host, 0, 0, now, 0)])
        summaries.add(rows, ['{"generation":2}', '{"generation":0}', f'{{"load":{second}}}'])
        taken, args = summaries.take(0.0)
        kept += [(int(row[COLUMN["site"]]), text) for row, text in zip(taken, args, strict=True)]
    assert [text for number, text in kept if number == host] == ['{"load":0}', '{"load":60}', '{"load":120}']
    long = [text for number, text in kept if number == collect and "count" not in (text or "")]
    assert long == ['{"generation":2}'] * 180


def test_memory_is_bounded_where_nothing_is_rare_and_no_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "_OPEN_STEPS", 20)
    monkeypatch.setattr(summary, "_CROWD", 100)
    sites = Sites()
    span, layer = sites.intern(site("user", "mine", "host")), sites.intern(site("forward", "layer"))
    summaries = Summaries(sites)
    crowded = 0
    for step in range(100):
        events = [(span, step, 0, MS, 2 * MS)] * 50 + [(layer, step, 0, MS, 5)]
        summaries.add(make_rows(events), [None] * len(events))
        if summaries.crowded:
            crowded += 1
            assert len(summaries.take(0.0)[0]) < 150
    assert crowded > 5
    assert len(summaries._spent) <= 20  # pyright: ignore[reportPrivateUsage]


def test_a_stretch_ends_with_many_events_or_after_long() -> None:
    sites = Sites()
    layer = sites.intern(site("forward", "layer"))
    summaries = Summaries(sites)
    one: Any = make_rows([(layer, 0, 0, 5, 5)])
    for _ in range(EVENTS_PER_ROW - 1):
        summaries.add(one, [None])
    assert len(summaries.take(0.0)[0]) == 0
    summaries.add(one, [None])
    assert len(summaries.take(0.0)[0]) == 1
    summaries.add(one, [None])
    assert len(summaries.take(LONGEST_SECONDS)[0]) == 1


def test_a_summary_takes_less_than_two_percent(tmp_path: Path) -> None:
    rank = Rank(tmp_path, layers=300)
    for step in range(120):
        rank.step(step, compute_ms=1.0 + step % 7 / 10, seconds=10.0)
    rank.close()
    detail = sum(path.stat().st_size for path in tmp_path.glob("*.trimtab.arrow"))
    summary = sum(path.stat().st_size for path in tmp_path.glob("*.summary.arrow"))
    assert 0 < summary < 0.02 * detail
