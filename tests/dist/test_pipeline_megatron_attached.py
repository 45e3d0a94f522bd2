"""trimtab attached to stock Megatron-Core with a pipeline policy: what is recorded, refused, said and put back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from harness import RankError, free_port, run_ranks
from megatron.core.pipeline_parallel import schedules
from megatron_job import Listener, change_config, keep_model, train

import trimtab
from trimtab.config import Config, PipelineConfig, TransportConfig
from trimtab.engines.megatron import MegatronEngine
from trimtab.engines.megatron_pipeline import MegatronPipeline, forward_backward_func
from trimtab.engines.patches import PIPELINE_PATCHES
from trimtab.traces.read import read

STEPS, LAYERS, MICROBATCHES = 2, 4, 8
JOB = (
    *("--num-layers", str(LAYERS), "--hidden-size", "16", "--heads", "2", "--seq-length", "16", "--data", __file__),
    *("--micro-batch-size", "1", "--global-batch-size", str(MICROBATCHES)),
)
TORCH = TransportConfig(kind="torch")


def _settings(**pipeline: Any) -> Config:
    return Config(pipeline=PipelineConfig(**pipeline), transport=TORCH)


def _attached(rank: int, folder: str, ports: list[int], record: bool, *arguments: str) -> list[Any]:
    os.environ["MASTER_PORT"] = str(ports[0])
    expected = train(*JOB, *arguments, steps=STEPS)
    os.environ["MASTER_PORT"] = str(ports[1])
    before = [getattr(schedules, patch.target.rpartition(":")[2]) for patch in PIPELINE_PATCHES]
    recording = {"dir": folder, "run_id": "job", "enabled": record}
    with trimtab.attach(record=recording, pipeline={"policy": "auto"}, transport={"kind": "torch"}):
        during = [getattr(schedules, patch.target.rpartition(":")[2]) for patch in PIPELINE_PATCHES]
        losses = train(*JOB, *arguments, steps=STEPS)
    assert all(a is not b for a, b in zip(before, during, strict=True))
    assert [getattr(schedules, patch.target.rpartition(":")[2]) for patch in PIPELINE_PATCHES] == before
    return [expected, losses]


def test_recorded_run_has_every_action_and_layer_once(tmp_path: Path) -> None:
    arguments = ("--pp", "2", "--vpp", "2")
    for expected, losses in run_ranks(2, _attached, str(tmp_path), [free_port(), free_port()], True, *arguments):
        assert losses == expected
    trace = read(tmp_path)
    assert trace.warnings == ()
    assert trace.topology is not None
    assert {k: v for k, v in trace.topology.as_dict().items() if v > 1} == {"pp": 2, "vpp": 2}
    events = trace.events.with_columns(pl.col("kind", "name", "stream").cast(pl.String))
    for rank in range(2):
        mine = events.filter(pl.col("rank") == rank)
        assert mine.filter(pl.col("name") == "step")["step"].to_list() == list(range(STEPS))
        for name in ("F", "B", "W"):
            actions = mine.filter((pl.col("name") == name) & (pl.col("stream") == "compute"))
            assert actions.height == STEPS * MICROBATCHES * 2
            assert actions.select("step", "chunk", "microbatch").n_unique() == actions.height
        layers = mine.filter(pl.col("name") == "layer")
        assert layers.height == 2 * STEPS * MICROBATCHES * 2
        assert layers.select("step", "kind", "layer", "microbatch").n_unique() == layers.height
        parents = layers.join(mine, left_on="parent_id", right_on="event_id", suffix="_of")
        assert parents.height == layers.height
        assert (parents["microbatch"] == parents["microbatch_of"]).all()
        assert (parents["chunk"] == parents["chunk_of"]).all()
        assert (parents["kind"] == parents["kind_of"]).all()
    ends = ["group", "src", "dst", "tag", "seq"]
    sent = events.filter(pl.col("kind") == "send").select(ends).sort(ends)
    received = events.filter(pl.col("kind") == "recv").select(ends).sort(ends)
    assert sent.height == STEPS * MICROBATCHES * 3 * 2
    assert sent.equals(received)


def test_without_recording_the_policy_still_runs(tmp_path: Path) -> None:
    for expected, losses in run_ranks(2, _attached, str(tmp_path), [free_port(), free_port()], False, "--pp", "2"):
        assert losses == expected
    assert not any(tmp_path.iterdir())


def _called_directly(rank: int) -> list[Any]:
    listener = Listener()
    engine = MegatronEngine(listener)
    engine.install()

    def prepare(script: Any) -> None:
        schedule = forward_backward_func(_settings(policy="hint"))
        script.get_forward_backward_func = lambda: schedule

    losses = train(*JOB, "--pp", "2", steps=STEPS, prepare=prepare)
    engine.remove()
    layers = [heard for heard in listener.heard if heard[0] == "begin" and heard[2] == "layer"]
    return [losses, listener.steps, len(layers)]


def _plain(rank: int) -> list[float]:
    return train(*JOB, "--pp", "2", steps=STEPS)


@pytest.fixture(scope="module")
def plain() -> list[list[float]]:
    """The losses of two stages without trimtab."""
    return run_ranks(2, _plain)


def test_called_directly_it_is_watched_as_well(plain: list[list[float]]) -> None:
    for (losses, steps, layers), expected in zip(run_ranks(2, _called_directly), plain, strict=True):
        assert losses == expected
        assert steps == list(range(STEPS))
        assert layers == STEPS * MICROBATCHES * (LAYERS // 2) * 2


def _laid_directly(rank: int) -> list[float]:
    schedule = forward_backward_func(_settings(policy="auto", order="zb-v"))

    def prepare(script: Any) -> None:
        script.get_forward_backward_func = lambda: schedule

    return train(*JOB, "--pp", "2", "--vpp", "2", steps=STEPS, prepare=prepare)


def test_called_directly_it_lays_the_model_as_a_v(plain: list[list[float]]) -> None:
    assert run_ranks(2, _laid_directly) == plain  # the last stage has the losses in both


def _laid_too_late(rank: int) -> str:
    def prepare(script: Any) -> None:
        built, step = script.build_model, script.train_step

        def train_step(*given: Any) -> Any:
            if not hasattr(script, "late"):
                script.late = forward_backward_func(_settings(policy="auto", order="zb-v"))
                script.get_forward_backward_func = lambda: script.late
            return step(*given)

        script.build_model, script.train_step = built, train_step

    with pytest.raises(ValueError, match="attach trimtab before the model is built") as caught:
        train(*JOB, "--pp", "2", "--vpp", "2", steps=1, prepare=prepare)
    return str(caught.value)


def test_a_model_that_is_no_v_is_refused() -> None:
    assert all("placement v" in message for message in run_ranks(2, _laid_too_late))


def _without_pipeline(rank: int) -> list[float]:
    def prepare(script: Any) -> None:
        schedule = forward_backward_func(_settings(policy="auto"))
        script.get_forward_backward_func = lambda: schedule

    return train(*JOB, steps=STEPS, prepare=prepare)


def test_one_stage_is_left_to_megatron(plain: list[list[float]]) -> None:
    assert run_ranks(1, _without_pipeline)[0] == plain[1]


def _leaves_no_trace(rank: int) -> None:
    model: list[Any] = []
    pipeline = MegatronPipeline(_settings(policy="auto"), strict=True)
    pipeline.install()
    train(*JOB, "--pp", "2", steps=1, prepare=keep_model(model))
    changed = [module for module in model[0].modules() if "_forward_impl" in vars(module)]
    assert len(changed) == 4 * LAYERS // 2 + rank  # qkv, proj, fc1 and fc2 of each layer, and the output layer
    pipeline.remove()
    assert not any("_forward_impl" in vars(module) for module in model[0].modules())
    pipeline.remove()  # once more does nothing


def test_removed_it_leaves_no_trace() -> None:
    run_ranks(2, _leaves_no_trace)


def _refused(rank: int, changes: dict[str, Any], pipeline: dict[str, Any], *arguments: str) -> str:
    replaced = MegatronPipeline(_settings(**pipeline), strict=True)
    replaced.install()
    steps: list[int] = []

    def prepare(script: Any) -> None:
        change_config(**changes)(script)
        forward = script.forward_step

        def counted(data: Any, model: Any) -> Any:
            steps.append(1)
            return forward(data, model)

        script.forward_step = counted

    with pytest.raises(ValueError, match=r"\S") as caught:
        train(*JOB, *arguments, steps=1, prepare=prepare)
    assert not steps, "it was said after training had begun"
    replaced.remove()
    return str(caught.value)


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        ({"policy": "auto", "memory_cap": "0.5"}, "memory cap 0.5 is below one microbatch"),
        ({"policy": "static", "order": "no-such"}, "there is no order 'no-such'"),
        ({"policy": "static", "order": "interleaved", "placement": "v"}, "placement"),
        ({"policy": "static", "order": "zb-v"}, "placement v needs an even number"),
        ({"policy": "static", "order": "zb-h1", "memory_cap": "1"}, "cap"),
    ],
)
def test_impossible_settings_are_said_before_training(pipeline: dict[str, Any], says: str) -> None:
    for message in run_ranks(2, _refused, {}, pipeline, "--pp", "2"):
        assert says in message
        assert "\n" not in message


def _differing(rank: int) -> str:
    return _refused(rank, {}, {"policy": "static", "order": ("1f1b", "gpipe")[rank]}, "--pp", "2")


def test_ranks_with_different_settings_are_told() -> None:
    for message in run_ranks(2, _differing):
        assert "ranks differ in their settings" in message
        assert "gpipe" in message


def _stepped_aside(rank: int, changes: dict[str, Any], pipeline: dict[str, Any]) -> list[float]:
    replaced = MegatronPipeline(_settings(**pipeline))
    replaced.install()
    return train(*JOB, "--pp", "2", steps=STEPS, prepare=change_config(**changes))


@pytest.mark.parametrize(
    ("changes", "pipeline", "says"),
    [
        ({"fp8": "hybrid"}, {"policy": "auto"}, "fp8 is on"),
        ({}, {"policy": "auto", "memory_cap": "0.5"}, "is below one microbatch"),
    ],
    ids=["fp8", "settings"],
)
def test_what_cannot_be_served_is_said_once_and_left_to_megatron(
    changes: dict[str, Any], pipeline: dict[str, Any], says: str, plain: list[list[float]]
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, _stepped_aside, changes, pipeline)
    assert str(caught.value).count("Megatron-Core's own schedule runs") == 1
    assert says in str(caught.value)
    aside = run_ranks(2, _stepped_aside, changes, pipeline, allow_warnings=True)
    assert aside == plain


def _fails(rank: int) -> str:
    pipeline = MegatronPipeline(_settings(policy="hint"), strict=True)
    pipeline.install()

    def prepare(script: Any) -> None:
        forward, calls = script.forward_step, []

        def broken(data: Any, model: Any) -> Any:
            calls.append(1)
            if rank == 1 and len(calls) == 3:
                raise ZeroDivisionError("the script's own")
            return forward(data, model)

        script.forward_step = broken

    try:
        train(*JOB, "--pp", "2", steps=1, prepare=prepare)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_of_the_script_ends_all_stages() -> None:
    first, second = run_ranks(2, _fails)
    assert second == "ZeroDivisionError: the script's own"
    assert first.startswith("PeerLost: stage 1 is lost")


def _keeps_nothing(rank: int) -> int:
    import gc
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []

    def prepare(script: Any) -> None:
        forward = script.forward_step

        def watched(data: Any, model: Any) -> Any:
            output, loss = forward(data, model)
            alive.append(weakref.ref(output))
            return output, loss

        script.forward_step = watched

    pipeline = MegatronPipeline(_settings(policy="auto"), strict=True)
    pipeline.install()
    train(*JOB, "--pp", "2", steps=1, prepare=prepare)
    gc.collect()
    assert len(alive) == MICROBATCHES
    return sum(reference() is not None for reference in alive)


def test_no_tensor_is_kept() -> None:
    assert run_ranks(2, _keeps_nothing) == [0, 0]
