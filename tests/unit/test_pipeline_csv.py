"""The CSV of torch.distributed.pipelining: to and from torch's own writer and parser, and hostile files."""

import csv
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.pipeline import torch_csv
from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.orders import ORDERS, default_chunks, make_plan, placement_of
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.shape import Placement, Shape
from trimtab.pipeline.torch_csv import read_torch_csv, write_torch_csv

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

LETTER = {Work.F: "F", Work.B: "I", Work.W: "W", Work.BW: "B"}
LOOP, V = Placement.LOOP, Placement.V
SEVERAL = {
    "Interleaved1F1B": LOOP,
    "InterleavedZeroBubble": LOOP,
    "LoopedBFS": LOOP,
    "ZBVZeroBubble": V,
    "DualPipeV": V,
}


def torchs(name: str, shape: Shape) -> Any:
    """A schedule of torch with several stages a rank; stages are what its constructors look at, nothing runs."""
    stages = [
        SimpleNamespace(
            stage_index=shape.position(0, chunk),
            num_stages=shape.positions,
            group_size=shape.stages,
            group_rank=0,
            submod=None,
            has_backward=True,
            is_last=False,
        )
        for chunk in range(shape.chunks)
    ]
    return getattr(schedules, f"Schedule{name}")(stages, shape.microbatches, loss_fn=lambda *_: None)


def computed(rows: dict[int, list[Any]]) -> list[list[str]]:
    """What each rank computes, as torch writes it, one after the other."""
    found: list[list[str]] = []
    for rank in sorted(rows):
        flat = [part for action in rows[rank] if action is not None for part in (action.sub_actions or (action,))]
        found.append([str(action) for action in flat if action.is_compute_op])
    return found


def written(plan: Plan) -> list[list[str]]:
    return [
        [f"{plan.shape.position(stage, a.chunk)}{LETTER[a.work]}{a.microbatch}" for a in row]
        for stage, row in enumerate(plan.actions)
    ]


def parsed(path: Path) -> dict[int, list[Any]]:
    """A file as torch parses it."""
    with path.open(newline="") as file:
        return {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(file))}


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("size", [(2, 4), (4, 8), (3, 9)])
@pytest.mark.parametrize("name", SEVERAL)
def test_what_torch_dumps_is_read_and_given_back(name: str, size: tuple[int, int], form: str, tmp_path: Path) -> None:
    shape = Shape(size[0], 2, size[1], SEVERAL[name])
    schedule = torchs(name, shape)
    schedule._dump_csv(str(tmp_path / "torch.csv"), form)
    plan = read_torch_csv(tmp_path / "torch.csv")
    assert plan.shape == shape
    assert plan.in_order == (name != "LoopedBFS")  # which takes backwards in falling order
    assert written(plan) == computed(schedule.pipeline_order)
    write_torch_csv(plan, tmp_path / "ours.csv")
    assert computed(parsed(tmp_path / "ours.csv")) == computed(schedule.pipeline_order)
    assert read_torch_csv(tmp_path / "ours.csv").actions == plan.actions


@pytest.mark.parametrize(
    ("theirs", "ours"), [("Interleaved1F1B", "interleaved"), ("LoopedBFS", "bfc"), ("DualPipeV", "dualpipe-v")]
)
def test_torch_orders_the_published_schedules_as_we_do(theirs: str, ours: str, tmp_path: Path) -> None:
    torchs(theirs, Shape(4, 2, 8, SEVERAL[theirs]))._dump_csv(str(tmp_path / "torch.csv"), "compute_only")
    plan = read_torch_csv(tmp_path / "torch.csv")
    # as sets where torch takes the backwards of a chunk in falling order
    key = (lambda row: sorted(row)) if theirs == "LoopedBFS" else list
    assert [key(row) for row in plan.actions] == [key(row) for row in make_plan(ours, plan.shape).actions]


@pytest.mark.parametrize(("theirs", "ours"), [("GPipe", "gpipe"), ("1F1B", "1f1b")])
def test_torchs_schedules_of_one_stage_a_rank(theirs: str, ours: str, tmp_path: Path) -> None:
    stage = SimpleNamespace(num_stages=4, group_size=4, group_rank=0, submod=None, has_backward=True, is_last=False)
    stage.stage_index = 0
    rows = getattr(schedules, f"Schedule{theirs}")(stage, 8, loss_fn=lambda *_: None)._get_pipeline_order()
    for row in rows.values():
        kinds = schedules._ComputationType
        forwards = [index for index, action in enumerate(row) if action and action.computation_type is kinds.FORWARD]
        first = row[forwards[0]].microbatch_index  # torch 2.13 counts those of the last rank of 1F1B from 1
        for index in forwards:
            row[index] = row[index]._replace(microbatch_index=row[index].microbatch_index - first)
    with (tmp_path / "torch.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows.values())
    assert read_torch_csv(tmp_path / "torch.csv").actions == make_plan(ours, (4, 1, 8)).actions


@pytest.mark.parametrize("size", [(4, 8), (3, 2), (1, 3)])
@pytest.mark.parametrize("name", ORDERS)
def test_torch_can_run_what_we_write(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    plan = make_plan(name, (size[0], default_chunks(name), size[1]))
    write_torch_csv(plan, tmp_path / "ours.csv")
    rows = parsed(tmp_path / "ours.csv")
    assert computed(rows) == written(plan)

    def holder(position: int) -> int:
        return plan.shape.place(position).stage

    # torch adds the communication, then simulates that no rank waits for ever
    lowered = schedules._add_send_recv(rows, holder, plan.shape.positions)
    schedules._simulate_comms_compute(lowered, holder, plan.shape.positions)
    again = read_torch_csv(tmp_path / "ours.csv")
    assert written(again) == written(plan)
    if size[0] > 1:
        assert again.shape.placement is placement_of(name)


def read_text(text: str | bytes, tmp_path: Path) -> Plan:
    path = tmp_path / "plan.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_torch_csv(path)


def test_idle_slots_spaces_and_what_fsdp_does_are_passed_over(tmp_path: Path) -> None:
    plan = read_text(
        "0UNSHARD,0F0, 0SEND_F0 ,,,0RECV_B0,0B0,0REDUCE_GRAD\n,1RECV_F0,1F0 ,1B0,1SEND_B0,1RESHARD\n\n", tmp_path
    )
    assert plan.actions == ((Action(Work.F, 0, 0), Action(Work.BW, 0, 0)),) * 2
    assert (plan.name, plan.shape) == ("plan.csv", Shape(2, 1, 1))


def test_an_order_that_is_not_in_microbatch_order_is_read(tmp_path: Path) -> None:
    assert not read_text("0F1,0F0,0B1,0B0\n", tmp_path).in_order


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no actions"),
        (",,\n\n", "has no actions"),
        ("0F0,0B0\n1F0,1X0\n", "row 2, entry 2: '1X0' is not an action"),
        ("0F0,0B\n", "row 1, entry 2: '0B' is not an action"),
        ("0F0,-1B0\n", "row 1, entry 2: '-1B0' is not an action"),
        ("0F0,0B9999999999\n", "row 1, entry 2: '0B9999999999' is not an action"),
        ("0F0,(0B0;0SEND_F0)OVERLAP_F_B\n", "row 1, entry 2: '(0B0;0SEND_F0)OVERLAP_F_B' is not an action"),
        ("0F0,()OVERLAP_F_B\n", "row 1, entry 2"),
        ("0F0," + "9" * 5000 + "\n", "row 1, entry 2: '" + "9" * 40 + "' is not an action"),
        ("0F0,0B0\n\n1F0,1B0\n", "row 2: rank 1 has 0 parts of the model, rank 0 1"),
        ("0F0,0B0\n1F0,2F0,1B0,2B0\n", "row 2: rank 1 has 2 parts of the model, rank 0 1"),
        ("0F0,0B0\n2F0,2B0\n", "the placement is neither loop nor v"),
        ("0F0,1F0,0B0,1B0\n2F0,3F0,2B0,3B0\n", "rank 0 has the parts [0, 1] of the model: the placement is neither"),
        ("0F0,0F999999999,0B0\n", "stage 0: F0.1 is missing"),
        ("0F0,0F0,0B0\n", "stage 0: F0.0 is there twice"),
        ("0B0,0F0\n", "stage 0: BW0.0 comes before F0.0"),
        ("0F0,0W0,0I0\n", "stage 0: W0.0 comes before B0.0"),
        ("0F0,0I0\n", "stage 0: W0.0 is missing"),
        ("0F0,0I0,0B0,0W0\n", "stage 0: both B0.0 and BW0.0"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "cannot run: stages wait for each other"),
        (b"0F0,0B0\n1F0,1B\xff\n", "row 2: not a CSV of torch's pipelines (a byte that is not ASCII)"),
        (b"PK\x03\x04\x00\x00", "row 1, entry 1"),
        ('0F0,"0B0\n', "unexpected end of data"),
        ('"0F0"x,0B0\n', "expected after"),
    ],
)
def test_a_bad_file_is_told_in_a_line(text: str | bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 the message is compared as it stands
        read_text(text, tmp_path)
    message = str(raised.value)
    assert says in message
    assert message.startswith(str(tmp_path / "plan.csv"))
    assert "\n" not in message
    assert len(message) < 300 + len(str(tmp_path))


def test_a_file_that_is_not_there_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.csv: cannot be read: No such file"):
        read_torch_csv(tmp_path / "absent.csv")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_torch_csv(tmp_path)


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    for name, limit, says in (
        ("MAX_ACTIONS", 7, "row 2: more than 7 actions"),
        ("MAX_ROWS", 1, "row 2: more than 1 ranks"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(torch_csv, name, limit)
            with pytest.raises(ValueError, match=says):
                read_text(text, tmp_path)
    with pytest.raises(ValueError, match="larger than 32 MiB"):
        read_torch_csv("/dev/zero")
    read_text(text, tmp_path)


CELL = st.one_of(
    st.from_regex(r"[0-3](F|B|I|W)[0-3]", fullmatch=True),
    st.sampled_from(
        ["", " ", "0SEND_F0", "1RECV_B1", "0UNSHARD", "(0F1;0B0)OVERLAP_F_B", "(;)OVERLAP_F_B", "0F999999999"]
    ),
    st.text(st.characters(codec="utf-8"), max_size=6),
)


@given(st.one_of(st.lists(st.lists(CELL, max_size=8), max_size=4), st.binary(max_size=60)))
@settings(max_examples=200)
def test_any_file_is_a_plan_that_can_run_or_one_line(tmp_path_factory: pytest.TempPathFactory, rows: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    else:
        text = io.StringIO()
        csv.writer(text).writerows(rows)
        path.write_text(text.getvalue(), encoding="utf-8", newline="")
    try:
        read_torch_csv(path).validate()
    except ValueError as error:
        said = str(error)
    else:
        return
    assert said.startswith(str(path))
    assert len(said.splitlines()) == 1
