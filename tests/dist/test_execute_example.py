"""examples/train_pipeline.py: the same losses in every layout and under every policy, recorded or not."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import REPOSITORY, load_script, run_ranks

import trimtab

sys.path.insert(0, str(REPOSITORY / "examples"))  # as Python does for a script; they share a module
SCRIPT = "examples/train_pipeline.py"
load_script(SCRIPT)  # before the fork
SMALL = ["--steps", "3", "--hidden-size", "16", "--seq-length", "16"]
TORCH = {"TRIMTAB_TRANSPORT_KIND": "torch"}


def losses_of(rank: int, arguments: list[str], folder: str = "", pipeline: dict[str, Any] | None = None) -> list[float]:
    """Of a run in forked ranks; recorded into ``folder`` if there is one."""
    attached: Any = contextlib.nullcontext()
    if folder:
        settings = {"pipeline": pipeline or {}, "transport": {"kind": "torch"}}
        attached = trimtab.attach(engine={"name": "torch"}, record={"dir": folder}, **settings)
    with attached, contextlib.redirect_stdout(io.StringIO()):
        return load_script(SCRIPT).main([*SMALL, *arguments])


@functools.cache
def alone() -> list[float]:
    return run_ranks(1, losses_of, [])[0]


@pytest.mark.parametrize(
    ("world", "arguments", "environment"),
    [
        (2, [], {}),
        (2, ["--chunks", "2"], {"TRIMTAB_PIPELINE_POLICY": "auto"}),
        (2, ["--chunks", "2"], {"TRIMTAB_PIPELINE_PLACEMENT": "v", "TRIMTAB_PIPELINE_POLICY": "hint"}),
        (4, [], {"TRIMTAB_PIPELINE_POLICY": "greedy"}),
    ],
)
def test_losses_are_those_of_one_rank(world: int, arguments: list[str], environment: dict[str, str]) -> None:
    found = run_ranks(world, losses_of, arguments, env=TORCH | environment)
    assert found == [alone()] * world
    assert alone()[-1] < alone()[0]


def test_replicas_see_other_data_and_have_the_same_losses_under_every_policy() -> None:
    arguments = ["--stages", "2", "--chunks", "2"]
    planned = run_ranks(4, losses_of, arguments, env=TORCH)
    greedy = run_ranks(4, losses_of, arguments, env=TORCH | {"TRIMTAB_PIPELINE_POLICY": "greedy"})
    assert planned == greedy
    assert planned[0] != alone()


def test_the_attached_session_says_how_and_records(tmp_path: Path) -> None:
    decisions = tmp_path / "decisions"
    pipeline = {"policy": "hint", "decisions": str(decisions)}
    found = run_ranks(2, losses_of, ["--chunks", "2"], str(tmp_path / "run"), pipeline)
    assert found == [alone()] * 2
    assert sorted(path.name for path in decisions.iterdir()) == [f"decisions-rank-{rank}.jsonl" for rank in range(2)]
    assert any((tmp_path / "run").iterdir())


def test_wrong_arguments_are_one_line() -> None:
    with pytest.raises(AssertionError, match="--num-layers 4 are too few for 6 parts of the model"):
        run_ranks(2, losses_of, ["--chunks", "3"], env=TORCH)
