"""The example with forwards and backwards apart, run as users run it."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from typing import Any

import pytest
from harness import REPOSITORY, load_script, run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]
sys.path.insert(0, str(REPOSITORY / "examples"))  # as Python does for a script; they share modules
SCRIPT = "examples/fbd_plain.py"
load_script(SCRIPT)  # before the fork
SMALL = ["--steps", "3", "--num-layers", "2", "--seq-length", "16", "--hidden-size", "32", "--check"]


def _said(rank: int, arguments: list[str]) -> list[Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        losses = load_script(SCRIPT).main([*SMALL, *arguments])
    return [losses, out.getvalue()]


@pytest.mark.parametrize(
    ("world", "arguments"),
    [
        pytest.param(2, ["--bf16"], id="bf16"),
        pytest.param(6, ["--stages", "2", "--forwards", "2", "--mode", "auto"], id="2:1-auto"),
        pytest.param(4, ["--stages", "2", "--order", "dynamic"], id="dynamic", marks=pytest.mark.slow),
        pytest.param(3, ["--backwards", "2"], id="1:2", marks=pytest.mark.slow),
        pytest.param(6, ["--backwards", "2", "--accumulate", "2"], id="1:2-dp2", marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_ordinary_training_does(world: int, arguments: list[str]) -> None:
    (losses, said), *_ = run_ranks(world, _said, arguments)
    assert losses[-1] < losses[0] - 0.05, "it learns nothing"
    (difference,) = re.findall(r"check: weights differ from ordinary training by at most (\S+)", said)
    assert float(difference) < 1e-5


def _page(rank: int) -> list[float]:
    (block,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/fbd-running.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "fbd-running.md", "exec"), names)
    return [float(one) for one in names.get("losses", [])]


def test_the_program_of_the_page_runs_as_written() -> None:
    *_, losses = run_ranks(3, _page)
    assert len(losses) == 4


def _exit_message(rank: int, arguments: list[str]) -> str:
    try:
        _said(rank, arguments)
    except SystemExit as stop:
        return str(stop)
    raise AssertionError("it ran")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--stages 1 of --forwards 1 and --backwards 1 take a multiple of 2 processes; there are 1"),
        (["--forwards", "0"], "forwards is at least 1, not 0"),
        (["--stages", "0"], "stages is at least 1, not 0"),
    ],
)
def test_a_layout_that_does_not_fit_gives_one_line(arguments: list[str], says: str) -> None:
    (line,) = run_ranks(1, _exit_message, arguments)
    assert says in line
    assert "\n" not in line
