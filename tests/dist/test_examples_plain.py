"""The examples in plain PyTorch, run as users run them, and what recording changes about them: nothing."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from attempts import Others, Outcome, until_right
from harness import REPOSITORY, load_script, run_ranks
from typer.testing import CliRunner

import trimtab
from trimtab.cli import app

sys.path.insert(0, str(REPOSITORY / "examples"))  # as Python does for a script; they share a module
DDP, FSDP = "examples/train_ddp.py", "examples/train_fsdp.py"
for script in (DDP, FSDP):
    load_script(script)  # before the fork

STEPS = 8
"""Of the runs that are scanned; the others make fewer."""
SMALL = ["--steps", "3", "--num-layers", "2"]
CONFIGURATION = """
[record]
dir = "{folder}/run"
[faults]
inject = ["{fault}"]
"""


def _losses(
    rank: int, script: str, arguments: Sequence[str], folder: str = "", faults: Sequence[str] = ()
) -> list[float]:
    """Of a run in forked ranks, recorded into ``folder`` if there is one."""
    attached: Any = contextlib.nullcontext()
    if folder:
        record = {"dir": folder, "granularity": "op"}
        attached = trimtab.attach(engine={"name": "torch"}, record=record, faults={"inject": list(faults)})
    with attached, contextlib.redirect_stdout(io.StringIO()):
        return load_script(script).main(arguments)


@functools.cache
def _unrecorded(world: int, script: str, *arguments: str) -> list[list[float]]:
    """Of each rank in a run without trimtab."""
    return run_ranks(world, _losses, script, arguments)


def _under_torchrun(script: str, folder: Path, fault: str) -> list[float]:
    """The logged losses of two ranks that torchrun starts, trimtab in between."""
    (folder / "t.toml").write_text(CONFIGURATION.format(folder=folder, fault=fault))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "trimtab", "run", "--config", "t.toml", str(REPOSITORY / script)]
    done = subprocess.run(
        [*command, "--steps", str(STEPS)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return [float(text) for text in re.findall(r"loss (\S+)", done.stdout)]


def _in_forks(script: str, folder: Path, fault: str) -> list[float]:
    """The same in two ranks that attach by themselves."""
    arguments = ["--steps", str(STEPS)]
    ranks = run_ranks(2, _losses, script, arguments, str(folder / "run"), [fault], allow_warnings=True)
    return [round(loss, 7) for loss in ranks[0]]


def _scan(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "trimtab", "scan", str(folder), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _scan_here(folder: Path) -> dict[str, Any]:
    """The same command in this process."""
    done = CliRunner().invoke(app, ["scan", str(folder), "--json", "-"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.alone
@pytest.mark.timeout(1000)  # several attempts, each with torchrun, where ranks import torch anew
@pytest.mark.parametrize(
    ("script", "slow", "recorded", "scan"),
    [(DDP, 1, _under_torchrun, _scan), (FSDP, 0, _in_forks, _scan_here)],
    ids=["ddp", "fsdp"],
)
def test_a_fault_is_found_and_the_losses_are_bitwise_those_without(
    script: str,
    slow: int,
    recorded: Callable[[str, Path, str], list[float]],
    scan: Callable[[Path], dict[str, Any]],
    tmp_path: Path,
) -> None:
    expected = run_ranks(2, _losses, script, ["--steps", str(STEPS)])[0]

    def attempt(number: int) -> Outcome:
        folder, others = tmp_path / str(number), Others()
        folder.mkdir()
        losses = recorded(script, folder, f"slow_data:rank={slow},ms=250")
        busy = others.share()
        assert losses == [round(loss, 7) for loss in expected], "seven digits tell all float32 of this size apart"
        report = scan(folder / "run")
        assert report["matching"]["unmatched"] == 0
        found = [(finding["kind"], finding["ranks"]) for finding in report["findings"]]
        right = report["verdict"] == "straggler" and found[:1] == [("data_loading", [slow])]
        return Outcome([] if right else [f"{report['verdict']}, {found}"], busy)

    until_right(attempt)


LAYOUTS: dict[str, tuple[int, str, list[str]]] = {
    "ddp": (2, DDP, ["--bucket-mb", "0.1", "--accumulate", "3"]),
    "ddp_bf16_workers": (2, DDP, ["--bf16", "--workers", "1"]),
    "fsdp_kept": (2, FSDP, ["--keep-gathered"]),
    "fsdp_bf16": (2, FSDP, ["--bf16", "--accumulate", "1"]),
    "fsdp2_tp2": (4, FSDP, ["--tp", "2"]),
}


@pytest.mark.parametrize("layout", [*list(LAYOUTS)[:-1], pytest.param("fsdp2_tp2", marks=pytest.mark.slow)])
def test_recording_changes_no_bit(layout: str, tmp_path: Path) -> None:
    world, script, arguments = LAYOUTS[layout]
    expected = _unrecorded(world, script, *SMALL, *arguments)
    assert run_ranks(world, _losses, script, [*SMALL, *arguments], str(tmp_path)) == expected
    assert len(list(tmp_path.glob("rank*"))) == world


def test_every_way_computes_the_same() -> None:
    ddp = _unrecorded(2, DDP, *SMALL)[0]
    assert _unrecorded(2, FSDP, *SMALL)[0] == pytest.approx(ddp, abs=1e-5)
    assert _unrecorded(4, FSDP, *SMALL, "--tp", "2")[0] == pytest.approx(ddp, abs=1e-5)
    assert ddp[-1] < ddp[0] - 0.3, "it learns nothing"


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        (DDP, ["--heads", "5"], "--hidden-size must be a multiple of twice --heads 5"),
        (DDP, ["--data", "/no/such/file"], "--data /no/such/file: no such file"),
        (FSDP, ["--tp", "2"], "1 ranks do not divide into --tp 2"),
    ],
)
def test_bad_arguments_give_one_line(script: str, arguments: list[str], says: str) -> None:
    line = run_ranks(1, _exit_message, script, arguments)[0]
    assert says in line
    assert "\n" not in line


def _exit_message(rank: int, script: str, arguments: list[str]) -> str:
    try:
        _losses(rank, script, arguments)
    except SystemExit as stop:
        return str(stop)
    raise AssertionError("it ran")
