"""The examples in plain PyTorch, run as users run them, and what recording changes about them: nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import REPOSITORY, load_script, run_ranks

import trimtab

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


def _losses(rank: int, script: str, arguments: list[str], folder: str = "") -> list[float]:
    """Of a run in forked ranks, recorded into ``folder`` if there is one."""
    attached: Any = contextlib.nullcontext()
    if folder:
        attached = trimtab.attach(engine={"name": "torch"}, record={"dir": folder, "granularity": "op"})
    with attached, contextlib.redirect_stdout(io.StringIO()):
        return load_script(script).main(arguments)


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


def _scan(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "trimtab", "scan", str(folder), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(240)  # torchrun and its ranks import torch anew
@pytest.mark.parametrize(("script", "slow"), [(DDP, 1), (FSDP, 0)], ids=["ddp", "fsdp"])
def test_a_fault_is_found_and_the_losses_are_bitwise_those_without(script: str, slow: int, tmp_path: Path) -> None:
    expected = run_ranks(2, _losses, script, ["--steps", str(STEPS)])[0]
    losses = _under_torchrun(script, tmp_path, f"slow_data:rank={slow},ms=400")
    assert losses == [round(loss, 7) for loss in expected], "seven digits tell all float32 of this size apart"
    report = _scan(tmp_path / "run")
    assert report["verdict"] == "straggler"
    assert (report["findings"][0]["kind"], report["findings"][0]["ranks"]) == ("data_loading", [slow])
    assert report["matching"]["unmatched"] == 0


LAYOUTS: dict[str, tuple[int, str, list[str]]] = {
    "ddp": (2, DDP, ["--bucket-mb", "0.1", "--accumulate", "3"]),
    "ddp_bf16_workers": (2, DDP, ["--bf16", "--workers", "1"]),
    "fsdp_kept": (2, FSDP, ["--keep-gathered"]),
    "fsdp_bf16": (2, FSDP, ["--bf16", "--accumulate", "1"]),
    "fsdp2_tp2": (4, FSDP, ["--tp", "2"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recording_changes_no_bit(layout: str, tmp_path: Path) -> None:
    world, script, arguments = LAYOUTS[layout]
    expected = run_ranks(world, _losses, script, [*SMALL, *arguments])
    assert run_ranks(world, _losses, script, [*SMALL, *arguments], str(tmp_path)) == expected
    assert len(list(tmp_path.glob("rank*"))) == world


def test_every_way_computes_the_same() -> None:
    ddp = run_ranks(2, _losses, DDP, SMALL)[0]
    assert run_ranks(2, _losses, FSDP, SMALL)[0] == pytest.approx(ddp, abs=1e-5)
    assert run_ranks(4, _losses, FSDP, [*SMALL, "--tp", "2"])[0] == pytest.approx(ddp, abs=1e-5)
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
