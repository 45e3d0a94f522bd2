"""How two passes differ: sums of parts, first difference, how long it lasts; and the same of two recordings."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from trimtab.scope.differences import Tally, tally
from trimtab.scope.frame import Frame
from trimtab.scope.paired import PairedResult, compare, merge, part_row
from trimtab.scope.vector import vector_of

FIRST = 10


def part(rank: int, rows: list[list[Any]], **more: Any) -> dict[str, Any]:
    said = {"pair": "c1", "rank": rank, "first_step": FIRST, "steps": 3, "tolerance": 1e-2, "rows": rows}
    return json.loads(json.dumps(said | more, allow_nan=False))  # as it travels


def sums(clean: np.ndarray, disturbed: np.ndarray, microbatch: int = 0) -> Tally:
    return tally(clean.astype(float), disturbed.astype(float), microbatch)


def test_shards_add_up_to_the_whole_and_of_replicas_the_worst_counts() -> None:
    random = np.random.default_rng(0)
    clean, disturbed = random.standard_normal((2, 8, 6))
    halves = [
        part_row("layers.0.output", FIRST, [["tp", half, 2]], replica, sums(clean[:, columns], values[:, columns], 2))
        for half, columns in enumerate((slice(3), slice(3, 6)))
        for replica, values in enumerate((clean, disturbed))
    ]
    result = merge([part(rank, [row]) for rank, row in enumerate(halves)], 5)
    (row,) = result.rows
    assert row.l2 == pytest.approx(np.linalg.norm(disturbed - clean) / np.linalg.norm(clean))
    assert row.maximum == np.abs(disturbed - clean).max()
    assert row.relative_maximum == pytest.approx(row.maximum / np.abs(clean).max())
    assert row.microbatch == 2
    assert result.missing == (4,)


def rows(differing: dict[tuple[int, str], float]) -> list[list[Any]]:
    taps = ("layers.0.output", "layers.1.output", "layers.0.output.grad", "layers.1.output.grad")
    found: list[list[Any]] = []
    for step in range(FIRST, FIRST + 3):
        for tap in taps:
            by = differing.get((step, tap), 0.0)
            found.append(part_row(tap, step, [], 0, sums(np.ones(4), np.ones(4) + by, 1)))
    return found


@pytest.mark.parametrize(
    ("differing", "where", "alike"),
    [
        ({}, None, 0),
        ({(11, "layers.1.output"): 0.5}, (11, "layers.1.output"), 1),
        ({(10, "layers.0.output.grad"): 0.5, (10, "layers.1.output.grad"): 0.5}, (10, "layers.1.output.grad"), 1),
        ({(10, "layers.1.output"): 0.5, (10, "layers.0.output.grad"): 0.5}, (10, "layers.1.output"), 1),
        ({(10, "layers.0.output"): 0.5, (11, "layers.0.output"): 0.005}, (10, "layers.0.output"), 1),
        ({(10, "layers.0.output"): 0.5, (12, "layers.0.output"): 0.5}, (10, "layers.0.output"), None),
        ({(10, "layers.0.output"): 0.005}, (10, "layers.0.output"), 0),
        ({(11, "layers.0.output"): math.nan}, (11, "layers.0.output"), 1),
        ({(11, "layers.0.output"): math.inf}, (11, "layers.0.output"), 1),
    ],
)
def test_where_they_part_and_how_long(
    differing: dict[tuple[int, str], float], where: tuple[int, str] | None, alike: int | None
) -> None:
    result = merge([part(0, rows(differing))])
    parted = result.parts_at
    assert (None if parted is None else (parted.step, parted.tap)) == where
    assert result.alike_after == alike
    said = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert said["alike_after"] == alike
    assert (said["parts_at"] or {}).get("step") == (where[0] if where else None)


def test_a_result_in_words() -> None:
    loss = [[10, 2.0, 2.0], [11, 1.5, 1.75]]
    result = merge(
        [
            part(0, rows({(11, "layers.1.output"): 0.5}), loss=loss, perturbations=["zeroes layers.1.output, step 1"]),
            part(1, [], gradient_norm=[[11, 1.0, "nan"]]),
        ],
        3,
    )
    lines = result.text().splitlines()
    assert lines[0] == "zeroes layers.1.output, step 1"
    assert lines[1] == "they part in step 11, microbatch 1, at layers.1.output, and are within 0.01 again after 1 step"
    assert sum(line.lstrip().startswith(("10 ", "11 ", "12 ")) for line in lines) == 12 + 2 + 1
    assert "1.5 -> 1.75 (+2.500e-01)" in result.text()
    assert "1 -> nan" in result.text()
    assert lines[-1] == "nothing was heard of rank(s) 2"
    long = "layers.17.attention.probabilities.of.some.head"
    wide = merge(
        [part(0, [*rows({(11, "layers.1.output"): 0.5}), part_row(long, 11, (), 0, Tally(0.0, 1.0, 0.0, 1.0))])]
    )
    table = wide.text().splitlines()[2:]
    assert len({len(line) for line in table}) == 1
    assert [one.difference for one in result.loss] == [0.0, 0.25]


def test_losses_are_the_mean_of_those_who_have_one() -> None:
    result = merge([part(0, [], loss=[[10, 1.0, 2.0]]), part(1, [], loss=[[10, 3.0, 6.0]]), part(2, [])])
    assert [(one.clean, one.disturbed) for one in result.loss] == [(2.0, 4.0)]


@pytest.mark.parametrize("parts", [[], [{"pair": "x"}], [part(0, [["a"]])], [part(0, 3)]])  # pyright: ignore
def test_what_is_no_part_is_refused(parts: Any) -> None:
    with pytest.raises(ValueError, match=r"^pair: [^\n]+$"):
        merge(parts)


def test_what_both_have_not_as_a_number_is_alike() -> None:
    clean = np.array([np.nan, np.inf, 1.0, 2.0])
    assert sums(clean, clean).microbatch == -1
    assert sums(clean, clean).differing == 0.0
    worse = sums(clean, np.array([np.nan, np.inf, np.nan, 2.0]), 3)
    assert worse.microbatch == 3
    assert math.isnan(worse.differing)


def frames(values: np.ndarray, what: str, tap: str = "layers.0.output", cut: int = 1) -> list[Frame]:
    """Of three steps; each rank has a part of the columns."""
    found: list[Frame] = []
    for step, whole in enumerate(values):
        for rank, piece in enumerate(np.split(whole, cut, axis=1)):
            flat = piece.astype(np.float32)
            arrays = {"values": flat} if what == "raw" else {"vector": vector_of(flat)}
            shard = (("tp", rank, cut),) if cut > 1 else ()
            found.append(Frame(tap, what, "s", FIRST + step, 0, rank, shard, 0, arrays))
    return found


def test_recordings_are_compared_by_elements_or_by_statistics() -> None:
    clean = np.random.default_rng(1).standard_normal((3, 4, 6)).astype(np.float32)
    disturbed = clean.copy()
    disturbed[1] *= 2
    by_elements = compare(frames(clean, "raw", cut=2), frames(disturbed, "raw", cut=2))
    assert by_elements.measure == "elements"
    assert [row.l2 for row in by_elements.rows] == pytest.approx([0.0, 1.0, 0.0])
    by_statistics = compare(frames(clean, "statistics", cut=3), frames(disturbed, "statistics"))
    assert by_statistics.measure == "statistics"
    assert [row.l2 for row in by_statistics.rows] == pytest.approx([0.0, 1.0, 0.0], abs=1e-6)
    assert [row.relative_maximum for row in by_statistics.rows] == pytest.approx([0.0, 1.0, 0.0], abs=1e-6)
    for result in (by_elements, by_statistics):
        assert result.parts_at is not None
        assert result.alike_after == 1 or result.measure == "statistics"
    halved = [
        Frame(
            "x",
            "raw",
            "s",
            0,
            0,
            0,
            arrays={"values": np.array([0x3F80], np.uint16)},
            meta={"dtypes": {"values": "bfloat16"}},
        )
    ]
    assert compare(halved, halved).rows[0].l2 == 0.0
    with pytest.raises(ValueError, match="no tensor of the same step in common"):
        compare(frames(clean, "raw"), [])


def test_a_loss_that_was_recorded_is_one() -> None:
    losses = [frames(np.full((3, 1, 1), value), "statistics", "loss") for value in (2.0, 3.0)]
    result: PairedResult = compare(*losses)
    assert [(one.clean, one.disturbed) for one in result.loss] == [(2.0, 3.0)] * 3
    assert result.rows == ()
