from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.decisions import DecisionLog, Header, Switch, decision_lines, header_line, read_decisions
from trimtab.pipeline.shape import Placement, Shape

HEADER = Header.of("zb-v", "auto", Shape(4, 2, 3, Placement.V))


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


def log() -> DecisionLog:
    log = DecisionLog()
    for stage in (1, 0):
        for action in (Action(Work.F, 0, 0), Action(Work.B, 0, 0), Action(Work.W, 0, 0), Action(Work.BW, 1, 2)):
            log.began(stage, action)
    log.switched(Switch(1.5, 1, "hint", "depth", "memory is tight", {"memory": 0.97, "cap": 8}))
    return log


def test_what_is_written_is_read(tmp_path: Path):
    path = written(tmp_path / "d", header_line(HEADER), *decision_lines(0, log()), *decision_lines(7, log()))
    decisions = read_decisions(path)
    assert decisions.header == HEADER
    assert list(decisions.iterations) == [0, 7]
    assert decisions.iterations[7].orders == log().orders
    assert decisions.iterations[7].switches == log().switches
    assert decisions.orders(7)[1] == tuple(log().orders[1])
    with pytest.raises(ValueError, match="iteration 3 is not among"):
        decisions.orders(3)


def test_a_last_line_cut_short_is_left_out(tmp_path: Path):
    lines = [header_line(HEADER), *decision_lines(0, log())]
    path = written(tmp_path / "d", *lines[:-1], lines[-1][:-9])
    assert read_decisions(path).iterations[0].switches == []


ORDER = {"iteration": 0, "stage": 1, "microbatches": 3, "actions": "F0.0"}
SWITCH = {"iteration": 0, "stage": 1, "time": 1, "from": "a", "to": "b", "reason": "c", "readings": {}}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([], "not a JSON object"),
        ({}, "iteration"),
        (ORDER | {"stage": 4}, "stage"),
        (ORDER | {"stage": True}, "stage"),
        (ORDER | {"iteration": -1}, "iteration"),
        (ORDER | {"iteration": 1.0}, "iteration"),
        (ORDER | {"microbatches": 2**40}, "microbatches"),
        (ORDER | {"actions": ["F0.0"]}, "actions"),
        (ORDER | {"actions": "F0.0 X1.1"}, "X1.1"),
        (ORDER | {"actions": "F2.0"}, "outside"),
        (ORDER | {"actions": "F0.3"}, "outside"),
        (ORDER | {"actions": "F0.0 F0.0"}, "twice"),
        (ORDER | {"actions": "F0." + "9" * 100}, "not an action"),
        (SWITCH | {"time": None}, "time"),
        (SWITCH | {"time": 10**400}, "time"),
        (SWITCH | {"time": float("nan")}, "time"),
        (SWITCH | {"reason": 5}, "reason"),
        (SWITCH | {"reason": "x" * 5000}, "reason"),
        (SWITCH | {"readings": {"a": "b"}}, "a is missing"),
        (SWITCH | {"readings": {str(i): i for i in range(100)}}, "too many"),
    ],
)
def test_hostile_lines_name_file_and_line(tmp_path: Path, values: object, says: str):
    path = written(tmp_path / "d.jsonl", header_line(HEADER), json.dumps(values) + "\n")
    with pytest.raises(ValueError, match=f"d.jsonl:2: .*{says}"):
        read_decisions(path)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "{}\n", "\0\xff\n", "[" * 10**5 + "\n", header_line(HEADER).replace("/1", "/2"), '{"schema": 1}\n']
    + [header_line(HEADER).replace(*change) for change in (('"v"', '"w"'), ('"stages": 4', '"stages": 0'))],
)
def test_files_that_are_none(tmp_path: Path, text: str):
    with pytest.raises(ValueError, match=r"d.jsonl:\d|is empty"):
        read_decisions(written(tmp_path / "d.jsonl", text))


def test_a_second_order_of_a_stage_is_refused(tmp_path: Path):
    line = json.dumps(ORDER) + "\n"
    with pytest.raises(ValueError, match=r":3: stage 1 has a second order"):
        read_decisions(written(tmp_path / "d", header_line(HEADER), line, line))


@given(st.binary(max_size=300))
def test_bytes_of_any_kind_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes):
    path = tmp_path_factory.getbasetemp() / "decisions"
    path.write_bytes(header_line(HEADER).encode() + content)
    with contextlib.suppress(ValueError):
        assert read_decisions(path).header == HEADER
