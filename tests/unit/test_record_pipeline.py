"""What the executor does, as events that scan can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import MS, PAYLOAD, Rank, Run, record, times_of
from spool_files import files_of

from trimtab.events import Kind
from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.decisions import DecisionLog, Switch
from trimtab.pipeline.orders import make_plan
from trimtab.record.observe import Call
from trimtab.record.pipeline import clear_parts, pipeline_hooks, set_parts
from trimtab.scan import Report, analyze
from trimtab.traces.read import read
from trimtab.transport.errors import TransportError
from trimtab.transport.interface import Label

F0 = Action(Work.F, 0, 0)
BW0 = Action(Work.BW, 0, 0)


def unit(stage: int, action: Action, step: int) -> int:
    """10 ms for F, twice that for a whole backward."""
    del stage, step
    return 20 * MS if action.work is Work.BW else 10 * MS


def quick(source: int, destination: int, step: int) -> int:
    """A link of 0.1 ms."""
    del source, destination, step
    return MS // 10


def rows_of(directory: Path, stage: int = 0) -> list[dict[str, Any]]:
    return files_of(directory)[stage].rows


def scanned(run: Run, directory: Path) -> Report:
    record(run, directory)
    return analyze(read(directory)).report


@pytest.mark.parametrize(("order", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_every_message_of_a_run_finds_its_partner_and_the_replay_is_the_run(
    order: str, chunks: int, tmp_path: Path
) -> None:
    run = Run(make_plan(order, (4, chunks, 8)), unit, quick)
    report = scanned(run, tmp_path)
    hops = (4 * chunks - 1) * 2 * 8
    assert report.matching.unmatched == 0
    assert report.matching.matched == (hops + 1) * report.job.steps
    assert report.step_time_s.replayed == pytest.approx(report.step_time_s.actual, rel=1e-6)
    assert not report.findings


def test_the_send_window_is_from_the_producers_end_to_the_consumers_begin(tmp_path: Path) -> None:
    run = Run(make_plan("1f1b", (4, 1, 8)), unit, quick)
    windows, made = [], {}
    times = times_of(run, 0, 0)
    for stage, spans in enumerate(times):
        made.update({(stage, action): span.end for action, span in spans})
    for stage, spans in enumerate(times):
        for action, span in spans:
            if span.arrived is not None:
                source = stage - 1 if action.work is Work.F else stage + 1
                windows.append(span.begin - made[source, action])
    report = scanned(run, tmp_path)
    assert report.windows.pp_send_s == pytest.approx(sum(windows) / len(windows) / 1e9, rel=1e-6)


def test_a_stage_that_is_slow_is_found_and_its_neighbours_are_not(tmp_path: Path) -> None:
    def durations(stage: int, action: Action, step: int) -> int:
        return round(unit(stage, action, step) * (1.5 if stage == 2 else 1.0))

    report = scanned(Run(make_plan("1f1b", (4, 1, 8)), durations, quick), tmp_path)
    assert [finding.stage if finding.kind == "slow_stage" else finding.ranks for finding in report.findings] == [2]


def test_a_link_that_is_slow_is_found(tmp_path: Path) -> None:
    def transfer(source: int, destination: int, step: int) -> int:
        return quick(source, destination, step) + (15 * MS if (source, destination) == (1, 2) else 0)

    report = scanned(Run(make_plan("1f1b", (4, 1, 8)), unit, transfer), tmp_path)
    (finding,) = report.findings
    assert (finding.kind, finding.link) == ("slow_link", (1, 2))


def test_both_ends_of_a_message_say_the_same(tmp_path: Path) -> None:
    record(Run(make_plan("interleaved", (2, 2, 4)), unit, quick, steps=2), tmp_path)
    ends: dict[str, set[tuple[Any, ...]]] = {"send": set(), "recv": set()}
    for stage in range(2):
        for row in rows_of(tmp_path, stage):
            if row["kind"] in ends:
                assert row["bytes"] == PAYLOAD[0].nbytes
                assert row["stream"] == "comm"
                name = (row["group"], row["src"], row["dst"], row["tag"], row["seq"])
                assert name not in ends[row["kind"]], "no two messages have one name"
                ends[row["kind"]].add(name)
    assert ends["send"] == ends["recv"]


@pytest.mark.parametrize(
    "late", [{(0, 4), (0, 5)}, {(1, 2), (1, 4), (0, 5)}, {(s, t) for s in (0, 1) for t in range(6)}]
)
@pytest.mark.parametrize("behind", [MS // 5, 15 * MS])
def test_a_device_that_begins_its_step_behind_its_host_parts_no_message_from_its_step(
    late: set[tuple[int, int]], behind: int, tmp_path: Path
) -> None:
    """The host is ready for messages, and some of them come, before the device has got to the begin of the step."""
    plan = make_plan("zb-v", (2, 2, 6))
    run = Run(plan, unit, quick, behind=lambda stage, step: behind * ((stage, step) in late))
    report = scanned(run, tmp_path)
    assert report.matching.unmatched == 0
    assert not report.warnings
    for stage in range(2):
        rows = rows_of(tmp_path, stage)
        steps = {row["step"]: row for row in rows if row["name"] == "step"}
        messages = [row for row in rows if row["kind"] in ("send", "recv")]
        assert len(messages) == 24 * run.steps
        for row in messages:
            step = steps[row["step"]]
            assert step["start"] <= row["ready"] <= row["end"] <= step["end"]


def test_an_action_is_a_span_and_the_wait_for_its_input_is_one(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 1, 2)
    rank.clock.now = MS
    rank.observer.step_begin(0)
    rank.pipeline.iteration_begins(0, False)
    rank.clock.now = 2 * MS
    rank.receive(0, Label(False, 0, 0, 0))
    rank.clock.now = 3 * MS
    rank.pipeline.begin(F0)
    rank.clock.now = 4 * MS
    rank.pipeline.end(F0)
    rank.clock.now = 5 * MS
    rank.pipeline.begin(BW0)  # of the last position: its gradient comes from nobody
    rank.clock.now = 6 * MS
    rank.pipeline.end(BW0)
    rank.recorder.close()
    found = {(row["kind"], row["name"]): row for row in rows_of(tmp_path)}
    forward, wait, message = found["forward", "F"], found["host", "wait"], found["recv", "recv"]
    assert (forward["start"], forward["end"], forward["microbatch"], forward["chunk"]) == (3 * MS, 4 * MS, 0, 0)
    assert (wait["start"], wait["end"], wait["stream"]) == (MS, 3 * MS, "compute")
    assert wait["correlation_id"] == message["event_id"]
    assert (message["ready"], message["end"], message["src"], message["dst"]) == (MS, 2 * MS, 0, 1)
    assert found["backward", "BW"]["start"] == 5 * MS
    assert len([row for row in rows_of(tmp_path) if row["name"] == "wait"]) == 1


def test_layers_are_parts_of_their_action(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, 2)
    rank.pipeline.iteration_begins(0, False)
    rank.pipeline.begin(Action(Work.F, 1, 3))
    for name in ("layer", "elsewhere"):
        layer = Call(Kind.FORWARD, name, layer=0)  # it may not know of which chunk and microbatch it is
        rank.observer.begin(layer)
        rank.observer.end(layer)
        if name == "layer":
            rank.pipeline.end(Action(Work.F, 1, 3))
    rank.recorder.close()
    found = {row["name"]: row for row in rows_of(tmp_path)}
    assert found["layer"]["parent_id"] == found["F"]["event_id"]
    assert (found["layer"]["chunk"], found["layer"]["microbatch"]) == (1, 3)
    assert (found["elsewhere"]["chunk"], found["elsewhere"]["microbatch"]) == (None, None)


def test_an_input_that_was_there_in_time_was_not_waited_for(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 1, 2)
    rank.clock.now = MS
    rank.observer.step_begin(0)
    rank.pipeline.iteration_begins(0, False)
    rank.clock.now = 2 * MS
    rank.receive(0, Label(False, 0, 0, 0))
    rank.receive(0, Label(False, 0, 1, 0))
    rank.pipeline.begin(F0)
    rank.clock.now = 3 * MS
    rank.pipeline.end(F0)
    rank.clock.now += 10_000
    rank.receive(0, Label(False, 0, 2, 0))  # it came while F ran, and is looked at only now
    rank.clock.now += 10_000
    for microbatch in (1, 2):
        rank.pipeline.begin(F0._replace(microbatch=microbatch))
        rank.pipeline.end(F0._replace(microbatch=microbatch))
    rank.recorder.close()
    waits = [(row["start"], row["end"]) for row in rows_of(tmp_path) if row["name"] == "wait"]
    later = 3 * MS + 20_000
    assert waits[1:] == [(later, later)] * 2
    assert waits[0] == (MS, 2 * MS)


def test_a_message_of_the_next_iteration_belongs_to_it(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 1, 2)
    rank.observer.step_begin(0)
    rank.pipeline.iteration_begins(0, False)
    rank.receive(0, Label(False, 0, 0, 1))
    rank.clock.now = 5 * MS
    rank.observer.step_begin(1)
    rank.pipeline.iteration_begins(1, False)
    rank.clock.now = 6 * MS
    rank.pipeline.begin(F0)
    rank.pipeline.end(F0)
    rank.recorder.close()
    (message,) = [row for row in rows_of(tmp_path) if row["kind"] == "recv"]
    assert (message["step"], message["ready"], message["end"]) == (1, 5 * MS, 5 * MS)
    assert [row["correlation_id"] for row in rows_of(tmp_path) if row["name"] == "wait"] == [message["event_id"]]


def test_a_send_is_recorded_when_it_is_complete_and_not_if_it_fails(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, 2)
    rank.pipeline.iteration_begins(0, False)
    rank.pipeline.begin(F0)
    rank.clock.now = 2 * MS
    rank.pipeline.end(F0)
    rank.clock.now = 3 * MS
    whole, broken = rank.send(F0, 1, Label(False, 0, 0, 0)), rank.send(F0, 1, Label(False, 0, 1, 0))
    rank.clock.now = 4 * MS
    whole.finish()
    broken.finish(TransportError("gone"))
    rank.recorder.close()
    (row,) = [row for row in rows_of(tmp_path) if row["kind"] == "send"]
    assert (row["ready"], row["start"], row["end"], row["src"], row["dst"]) == (2 * MS, 3 * MS, 4 * MS, 0, 1)
    assert (row["bytes"], row["dtype"], row["microbatch"]) == (PAYLOAD[0].nbytes, "float32", 0)


def test_a_change_of_policy_is_there_with_its_reason(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, 2)
    log = DecisionLog()
    log.switched(Switch(2.5e-3, 0, "hint", "depth-first", "activations take 96 % of the cap", {"memory": 0.96}))
    rank.pipeline.decided(log)
    rank.recorder.close()
    (row,) = rows_of(tmp_path)
    assert row["start"] == row["end"] == 2_500_000
    assert (row["kind"], row["name"], row["stream"]) == ("user", "pipeline policy", "host")
    assert '"reason": "activations take 96 % of the cap"' in row["args"]


def test_evaluation_leaves_no_actions(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, 2)
    rank.pipeline.iteration_begins(0, True)
    rank.pipeline.begin(F0)
    rank.pipeline.end(F0)
    rank.send(F0, 1, Label(False, 0, 0, 0)).finish()
    rank.recorder.close()
    assert [row["kind"] for row in rows_of(tmp_path)] == ["send"]


def test_an_executor_reports_to_the_session_that_is_attached(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, 2)
    assert pipeline_hooks(range(2), 0) is None
    set_parts(rank.recorder, rank.observer, rank.clock, 2)
    hooks, second = pipeline_hooks(range(2), 0), pipeline_hooks(range(2), 0)
    clear_parts()
    assert second is not None
    second.iteration_begins(0, False)  # it counts its messages from 0, too
    assert pipeline_hooks(range(2), 0) is None
    assert hooks is not None
    hooks.iteration_begins(0, False)
    hooks.begin(F0._replace(chunk=1))
    hooks.end(F0)
    hooks.iteration_ends(0)
    rank.recorder.close()
    assert [row["name"] for row in rows_of(tmp_path)] == ["F"]
    (file,) = files_of(tmp_path)
    assert (file.merged["topology"]["pp"], file.merged["topology"]["vpp"], file.merged["coordinates"]["pp"]) == (
        2,
        2,
        0,
    )
    assert file.merged["groups"] == {"pipeline@0": [0, 1], "pipeline/1@0": [0, 1]}


def everything(rank: Rank) -> None:
    """Each of the hooks once."""
    rank.pipeline.iteration_begins(0, False)
    rank.receive(0, Label(False, 0, 0, 0))
    rank.pipeline.begin(F0)
    rank.pipeline.end(F0)
    rank.send(BW0, 0, Label(True, 0, 0, 0)).finish()
    log = DecisionLog()
    log.switched(Switch(0.0, 0, "hint", "greedy", "", {}))
    rank.pipeline.decided(log)
    rank.pipeline.iteration_ends(0)


def test_outside_sampled_steps_nothing_is_recorded(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 1, 2)
    rank.recorder.active = False
    everything(rank)
    rank.recorder.close()
    assert [row for file in files_of(tmp_path) for row in file.rows] == []


def test_what_fails_in_it_is_said_and_leaves_the_job_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(tmp_path, 1, 2)

    def broken() -> int:
        raise OSError("no clock")

    rank.pipeline._clock = broken
    everything(rank)
    rank.recorder.close()
    assert "the job goes on" in caplog.text


def test_after_the_recorder_is_closed_a_send_may_end(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, 2)
    rank.pipeline.iteration_begins(0, False)
    sending = rank.send(F0, 1, Label(False, 0, 0, 0))
    rank.recorder.close()
    sending.finish()
    everything(rank)
    assert [row for row in rows_of(tmp_path) if row["kind"] == "send"] == []


def test_the_timeline_says_stage_chunk_and_microbatch(tmp_path: Path) -> None:
    record(Run(make_plan("interleaved", (2, 2, 4)), unit, quick), tmp_path)
    labels = {segment.label for segment in analyze(read(tmp_path)).plots.timeline}
    assert "F, stage 1, chunk 1, microbatch 3" in labels
    assert "BW, stage 0, chunk 0, microbatch 0" in labels
    assert "recv, stage 1, chunk 0, microbatch 0" in labels
