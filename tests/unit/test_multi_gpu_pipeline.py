"""What benchmarks/multi_gpu_pipeline.py compares is comparable: equal memory, equal disturbance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multi_gpu_pipeline import cases_of, compared
from multi_gpu_pipeline_disturb import CALM, CONDITIONS, HALVES, longer

from trimtab.pipeline.orders import make_plan, placement_of
from trimtab.pipeline.shape import Shape


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_caps_are_the_memory_of_static_orders(stages: int) -> None:
    peaks = {
        order: make_plan(order, Shape(stages, chunks, 4 * stages, placement_of(order))).peak()
        for order, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-v", 2))
    }
    assert peaks["1f1b"] == peaks["zb-v"] == stages
    caps = {float(case.cap) for case in cases_of(stages) if case.cap}
    assert caps == {peaks["zb-v"], peaks["interleaved"]}


@given(st.sampled_from(CONDITIONS), st.integers(0, 7), st.integers(1, 32), st.integers(0, 99))
def test_a_stage_is_disturbed_alike_whether_its_layers_are_in_one_chunk_or_in_two(
    condition: str, stage: int, count: int, seed: int
) -> None:
    whole = longer(condition, stage, 1, count, 0.003, 0.007, seed)
    halves = longer(condition, stage, HALVES, count, 0.003, 0.007, seed)
    for microbatch in range(count):
        for direction in range(2):
            expected = sum(half[direction][microbatch] for half in halves)
            assert whole[0][direction][microbatch] == pytest.approx(expected)
            assert expected >= 0
    if condition == CALM:
        assert not any(map(sum, whole[0]))


def test_what_is_said_of_gradients() -> None:
    first = {"gradients": {"head": 5}, "norms": {"head": 2.0}, "losses": [1.0, 2.0]}
    assert compared(first, first) == "equal bits"
    near = {"gradients": {"head": 6}, "norms": {"head": 2.002}, "losses": [1.0, 2.0]}
    assert compared(first, near) == "norms within 1.0e-03, losses within 0.0e+00"
    assert compared(first, {"gradients": {}, "norms": {}, "losses": []}) == "not all are there"
