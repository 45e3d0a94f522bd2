"""A whole emulated job: what its files say about compute, waits, communication and faults holds exactly."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from flight import mismatches
from harness import run_ranks
from megatron_job import train

import trimtab
from trimtab.events import STREAM_COMM, STREAM_COMPUTE, STREAM_HOST
from trimtab.traces.read import read
from trimtab.traces.table import Trace

MS = 1_000_000
EMULATE = {
    "enabled": "true",
    "layer_forward_ms": "4",
    "backward_ratio": "2",
    "embedding_ms": "1",
    "output_ms": "1",
    "optimizer_ms": "4",
}
TARGETS = {
    ("forward", "layer"): 4 * MS,
    ("backward", "layer"): 8 * MS,
    ("forward", "embedding"): 1 * MS,
    ("backward", "embedding"): 2 * MS,
    ("forward", "output"): 1 * MS,
    ("backward", "output"): 2 * MS,
    ("optimizer", "optimizer"): 4 * MS,
}
STEPS = 3
JOB = ("--num-layers", "4", "--hidden-size", "16", "--seq-length", "16", "--global-batch-size", "8", "--data", __file__)
FAULTS: tuple[tuple[str, dict[str, set[int]]], ...] = (
    (
        "--tp",
        {
            "slow_compute:rank=3,factor=2,steps=1-": {3},
            "gc_pause:rank=1,ms=40,steps=1-": {1},
            "slow_data:rank=0,ms=12,steps=1-": {0},
        },
    ),
    ("--tp", {"long_sequence:dp=1,factor=2,every=3,steps=1-": {2, 3}, "host_stall:rank=1,ms=100,steps=1-": {1}}),
    ("--pp", {"slow_stage:stage=1,factor=2,steps=1-": {2, 3}, "slow_link:ranks=1+3,ms=30,steps=1": {1, 3}}),
)
"""Of each job its layout, and faults whose marks are not alike, with the ranks on which each leaves its own."""


def _job(rank: int, folder: str, faults: list[str], layout: list[str]) -> list[float]:
    with trimtab.attach(record={"dir": folder, "run_id": "emulated"}, emulate=EMULATE, faults={"inject": faults}):
        return train(*layout, *JOB, steps=STEPS)


def _run(folder: Path, faults: list[str], *layout: str) -> tuple[Trace, dict[int, list[dict[str, Any]]]]:
    """The trace, and each rank's events in the order of their starts."""
    run_ranks(4, _job, str(folder), faults, list(layout), allow_warnings=bool(faults))
    trace = read(folder)
    texts = trace.events.with_columns(pl.col("kind", "name", "stream", "group", "op", "dtype").cast(pl.String))
    return trace, {rank: texts.filter(rank=rank).sort("start").to_dicts() for rank in range(4)}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, dict[int, list[dict[str, Any]]]]:
    return _run(tmp_path_factory.mktemp("healthy"), [], "--tp", "2", "--pp", "2", "--distributed-optimizer")


def _is_call(event: dict[str, Any]) -> bool:
    return (event["kind"], event["name"]) in TARGETS


def _in_place(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the compute stream waited for."""
    return [e for e in events if e["stream"] == STREAM_COMPUTE and not _is_call(e)]


def _compute(call: dict[str, Any], waits: list[dict[str, Any]]) -> int:
    """Time of a call less the waits inside it."""
    inside = (min(w["end"], call["end"]) - max(w["start"], call["start"]) for w in waits)
    return call["end"] - call["start"] - sum(ns for ns in inside if ns > 0)


def test_the_padded_compute_of_every_call_is_its_target_or_was_overrun(healthy: Any) -> None:
    _, ranks = healthy
    exact = overrun = 0
    for events in ranks.values():
        waits = _in_place(events)
        for call in filter(_is_call, events):
            over = _compute(call, waits) - TARGETS[call["kind"], call["name"]]
            assert over > -MS // 1000
            exact += over < MS // 100
            overrun += over >= MS // 100
    calls_a_step = 4 * 4 * 2 * 2 + 4 * 2 * 2 * 2 + 4  # layers, embedding and output, optimizer; 4 microbatches
    assert exact + overrun == STEPS * calls_a_step
    assert exact > 0


def test_on_the_compute_stream_one_thing_happens_at_a_time(healthy: Any) -> None:
    _, ranks = healthy
    for events in ranks.values():
        for kind in (_in_place(events), list(filter(_is_call, events))):
            assert all(before["end"] <= after["start"] for before, after in pairwise(kind))
        steps = [e for e in events if e["name"] == "step"]
        assert [e["step"] for e in steps] == list(range(STEPS))
        assert all(before["end"] == after["start"] for before, after in pairwise(steps))


def test_communications_match_and_end_after_their_last_member_came(healthy: Any) -> None:
    trace, ranks = healthy
    groups = {name: list(members) for name, members in trace.groups.items()}
    logs = [
        {"events": [e | {"nbytes": e["bytes"]} for e in events if e["seq"] is not None], "groups": groups}
        for events in ranks.values()
    ]
    assert mismatches(logs) == []
    came: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for event in (e for log in logs for e in log["events"] if e["kind"] == "collective" and e["op"] != "broadcast"):
        came.setdefault((event["group"], event["seq"]), []).append((event["start"], event["end"], event["step"] or 0))
    for members in came.values():
        assert min(end for _, end, _ in members) >= max(start for start, _, _ in members)
        assert len({step for *_, step in members}) == 1


def test_every_wait_belongs_to_a_communication_beside_the_compute(healthy: Any) -> None:
    _, ranks = healthy
    for events in ranks.values():
        beside = {e["event_id"]: e for e in events if e["stream"] == STREAM_COMM}
        waits = [e for e in events if e["name"] == "wait"]
        assert Counter(wait["correlation_id"] for wait in waits) == Counter(beside.keys())
        for wait in waits:
            work = beside[wait["correlation_id"]]
            assert work["start"] <= wait["start"]
            assert work["end"] <= wait["end"]


@pytest.mark.parametrize(
    ("layout", "faults"),
    FAULTS,
    ids=lambda given: given if isinstance(given, str) else "+".join(f.partition(":")[0] for f in given),
)
def test_a_fault_leaves_its_mark_where_it_was_injected_and_nowhere_else(
    layout: str, faults: dict[str, set[int]], tmp_path: Path
) -> None:
    trace, ranks = _run(tmp_path, list(faults), layout, "2")
    later = {rank: [e for e in events if (e["step"] or 0)] for rank, events in ranks.items()}
    for fault, expected in faults.items():
        kind = fault.partition(":")[0]
        assert {rank for rank, events in ranks.items() if _shows(kind, events, later[rank])} == expected, kind
    assert {rank for rank, info in trace.ranks.items() if info.faults} == set().union(*faults.values())


def _shows(fault: str, events: list[dict[str, Any]], later: list[dict[str, Any]]) -> bool:
    """Do the events of a rank after its first step show the fault? Bounds that contention for cores cannot cross."""
    calls, waits = list(filter(_is_call, later)), _in_place(events)
    if fault in ("slow_compute", "slow_stage", "long_sequence"):
        stretched = [c for c in calls if c["kind"] == "backward" and c["microbatch"] in (0, 3)]
        ratios = [_compute(c, waits) / TARGETS[c["kind"], c["name"]] for c in stretched]
        return min(ratios) > 1.999
    if fault == "slow_link":
        durations = [e["end"] - e["start"] for e in later if e["kind"] in ("send", "recv") and e["step"] == 1]
        return min(durations) >= 30 * MS
    if fault == "gc_pause":
        pauses = Counter(e["step"] for e in later if e["kind"] == "gc" and e["end"] - e["start"] >= 40 * MS)
        return set(pauses) == set(range(1, STEPS))
    if fault == "slow_data":
        reads = [e for e in later if e["kind"] == "data" and e["stream"] == STREAM_HOST]
        return min(e["end"] - e["start"] for e in reads) >= 12 * MS
    starts = {e["step"]: e["start"] for e in later if e["name"] == "step"}
    first = {step: min(c["start"] for c in calls if c["step"] == step) for step in starts}
    return all(first[step] - starts[step] >= 100 * MS for step in starts)
