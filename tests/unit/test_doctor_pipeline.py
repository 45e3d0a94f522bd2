"""What doctor says of pipelines."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab import doctor_pipeline
from trimtab.doctor import State, examine
from trimtab.transport.ucx import modules


def said(*settings: str, name: str = "pipeline.policy") -> tuple[State, str]:
    """State and text of one check of the section ``pipeline``."""
    checks = [
        check for check in examine(settings=settings).checks if check.section == "pipeline" and check.name == name
    ]
    (check,) = checks
    return check.state, check.detail


def test_settings_that_can_be_run_are_said_with_their_order() -> None:
    state, detail = said("pipeline.policy=auto", "pipeline.placement=v")
    assert state is State.OK
    assert "order zb-v" in detail


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("pipeline.policy=hint", "pipeline.memory_cap=0.5"), "below one microbatch"),
        (("pipeline.policy=static", "pipeline.order=zb-h1", "pipeline.split=false"), "split"),
        (("pipeline.policy=static", "pipeline.order=nonsense"), "nonsense"),
        (("pipeline.policy=static", "pipeline.placement=v", "pipeline.order=1f1b"), "placement"),
        (("pipeline.policy=static", "pipeline.replay=/nowhere"), "/nowhere"),
        (("pipeline.policy=static", "pipeline.order=/nowhere.csv"), "/nowhere.csv"),
    ],
)
def test_impossible_settings_are_a_problem_and_the_reason_is_given(settings: tuple[str, ...], reason: str) -> None:
    state, detail = said(*settings)
    assert state is State.PROBLEM
    assert reason in detail
    assert "\n" not in detail


def test_without_a_policy_nothing_is_said_of_settings() -> None:
    assert not [check for check in examine().checks if check.name == "pipeline.policy"]


def test_ucx_that_is_asked_for_and_is_not_there_is_a_problem(tmp_path: Path) -> None:
    missing = f"transport.ucx_library={tmp_path / 'libucp.so'}"
    state, detail = said("pipeline.policy=auto", "transport.kind=ucx", missing, name="UCX")
    assert state is State.PROBLEM
    assert "there is no file" in detail
    assert said(missing, name="UCX")[0] is State.NOTE


def test_ucx_that_is_not_wanted_is_not_looked_for() -> None:
    state, detail = said("transport.kind=torch", name="UCX")
    assert (state, detail) == (State.OK, "not used: transport.kind is torch")


def test_a_ucx_that_cannot_send_from_gpus_is_a_problem_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_pipeline, "_has_gpu", lambda: True)
    monkeypatch.setattr(modules, "find_modules", lambda ucx: modules.Found(Path("libucp.so"), ("cma", "cuda")))
    assert said("pipeline.policy=auto", name="UCX")[0] is State.OK
    monkeypatch.setattr(modules, "find_modules", lambda ucx: modules.Found(Path("libucp.so"), ("cma", "ib")))
    state, detail = said("pipeline.policy=auto", name="UCX")
    assert state is State.PROBLEM
    assert "by modules: cma, ib" in detail
    assert "transport.ucx_library" in detail
    monkeypatch.setattr(doctor_pipeline, "_has_gpu", lambda: False)
    assert said("pipeline.policy=auto", name="UCX")[0] is State.OK
