"""Stock Megatron-Core on the CPU shim: every parallel layout computes what one process computes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from harness import RankError, load_script, run_ranks
from megatron_job import LAYOUTS, SCRIPT, train

from trimtab.engines import cpu

STEPS = 5


def _losses(rank: int, *arguments: str) -> list[float]:
    return train(*arguments, steps=STEPS)


@pytest.fixture(scope="module")
def alone() -> list[float]:
    losses = run_ranks(1, _losses)[0]
    assert losses[-1] < losses[0] - 0.3, "it learns nothing"
    return losses


# Of pipelines, test_pipeline_megatron.py demands more every day: what one process computes, bit for bit.
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) if "pp2" in name else name for name in LAYOUTS]
)
def test_losses_are_those_of_one_process(layout: str, alone: list[float]) -> None:
    world, arguments = LAYOUTS[layout]
    results = run_ranks(world, _losses, *arguments)
    assert results[-1] == pytest.approx(alone, abs=1e-5)
    assert {len(losses) for losses in results} <= {0, STEPS}


def test_sharded_optimizer_and_overlapped_reduction(alone: list[float]) -> None:
    arguments = ("--pp", "2", "--vpp", "2", "--distributed-optimizer", "--overlap-grad-reduce")
    assert run_ranks(4, _losses, *arguments)[-1] == pytest.approx(alone, abs=1e-5)


def test_bf16_is_close(alone: list[float]) -> None:
    assert run_ranks(2, _losses, "--bf16", "--distributed-optimizer")[-1] == pytest.approx(alone, abs=0.01)


@pytest.mark.parametrize(
    ("world", "arguments"),
    [(2, ("--distributed-optimizer", "--bf16")), (2, ("--pp", "2", "--vpp", "2"))],
    ids=["sharded_bf16", "pp2_vpp2"],
)
def test_a_resumed_run_continues_exactly(world: int, arguments: tuple[str, ...], tmp_path: Path) -> None:
    whole = run_ranks(world, _losses, *arguments, "--save", str(tmp_path), "--save-interval", "2")[-1]
    (tmp_path / "latest").write_text("step_0000002")  # as if it had been stopped after step 3
    assert run_ranks(world, _losses, *arguments, "--load", str(tmp_path))[-1] == whole[2:]


@pytest.mark.parametrize(
    ("world", "arguments", "says"),
    [
        (3, ("--tp", "2"), "3 ranks do not divide"),
        (1, ("--global-batch-size", "3"), "--global-batch-size 3 is not a multiple"),
        (1, ("--data", "/no/such/file"), "--data /no/such/file: no such file"),
        (1, ("--load", "/no/such/folder"), "no complete checkpoint"),
        (2, ("--pp", "2", "--vpp", "4"), "--num-layers 4 does not divide"),
        (1, ("--heads", "3"), "--hidden-size must divide"),
    ],
)
def test_bad_arguments_give_one_line(world: int, arguments: tuple[str, ...], says: str) -> None:
    line = run_ranks(1, _exit_message, world, *arguments)[0]
    assert says in line
    assert "\n" not in line


def _exit_message(rank: int, world: int, *arguments: str) -> str:
    os.environ["WORLD_SIZE"] = str(world)
    try:
        load_script(SCRIPT).main(list(arguments))
    except SystemExit as stop:
        return str(stop)
    raise AssertionError("it ran")


def test_a_text_file_is_enough(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the same line again and again\n" * 50)
    losses = run_ranks(1, _losses, "--data", str(text), "--lr", "0.01")[0]
    assert losses[-1] < losses[0] - 1.0  # fewer bytes to choose from than in source code


def test_the_shim_is_undone() -> None:
    run_ranks(1, _shim_and_back)


def _shim_and_back(rank: int) -> None:
    cpu.install()()  # so that all modules which it looks at are loaded
    before = _everything()
    undo = cpu.install()
    during = _everything()
    changed = {key for key in before if before[key] is not during.get(key)}
    assert len(changed) > 50
    assert ("megatron.core.pipeline_parallel.schedules", "torch") in changed
    assert torch.tensor([0.0]).cuda().device.type == "cpu"
    undo()
    after = _everything()
    assert {key for key in before if after.get(key) is not before[key]} == set()
    assert set(after) == set(before)
    with pytest.raises((AssertionError, RuntimeError)):
        torch.tensor([0.0]).cuda()


def _everything() -> dict[tuple[str, str], object]:
    """Every attribute of Megatron's modules, of their classes, and of torch.Tensor."""
    found: dict[tuple[str, str], object] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron."):
            for key, value in list(vars(module).items()):
                found[name, key] = value
                if isinstance(value, type) and value.__module__ == name:
                    found |= {(f"{name}.{key}", attribute): part for attribute, part in vars(value).items()}
    return found | {("torch.Tensor", key): value for key, value in vars(torch.Tensor).items()}


def test_a_failing_rank_fails_the_test() -> None:
    with pytest.raises(RankError):
        run_ranks(2, _losses, "--tp", "3")
