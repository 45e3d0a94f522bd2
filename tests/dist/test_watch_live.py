"""trimtab watch on live jobs: a rank that becomes slow is named and profiled; one that does not come is missing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from plain_job import Decoder, loss_of, tokens
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.control.rendezvous import RENDEZVOUS_FILE

WORLD = 4
ONSET = 45
ATTEMPTS = 3
"""A machine that is busy with other things slows ranks down for real."""
DEADLINE = 40.0


def _job(rank: int, folder: str, steps: int, faults: list[str], missed: str) -> None:
    dist.init_process_group("gloo")
    times = {"layer_forward_ms": "6", "embedding_ms": "1", "output_ms": "1", "optimizer_ms": "4"}
    with trimtab.attach(
        engine={"name": "torch"},
        record={"dir": folder, "run_id": "job", "flush_seconds": "0.1"},
        live={"look_seconds": "0.1", "heartbeat_seconds": "0.5"},
        emulate={"enabled": "true"} | times,
        faults={"inject": faults},
    ):
        torch.manual_seed(0)
        model = DistributedDataParallel(Decoder(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps + 1):
            while step == steps and rank == 2 and missed and not Path(missed).exists():
                time.sleep(0.02)  # the fault: it does not come to the collective before somebody has missed it
            batch = tokens(step)
            loss_of(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@contextmanager
def _watching(folder: Path, *arguments: str) -> Iterator[list[dict[str, Any]]]:
    """The command, beside the job; the objects that it has written until the job was over."""
    folder.mkdir()
    said: list[dict[str, Any]] = []
    command = [sys.executable, "-m", "trimtab", "watch", str(folder), "--json", "-", "--every", "1", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        stdout = process.stdout
        assert stdout is not None
        reader = threading.Thread(target=lambda: said.extend(json.loads(line) for line in stdout))
        reader.start()
        try:
            until = time.monotonic() + DEADLINE
            while not (folder / RENDEZVOUS_FILE).exists():
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.02)
            yield said
        finally:
            process.terminate()
            process.wait(DEADLINE)
            reader.join(DEADLINE)


@pytest.mark.alone
@pytest.mark.timeout(200)
def test_a_rank_that_becomes_slow_is_named_and_profiled(tmp_path: Path) -> None:
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        fault = f"slow_compute:rank=3,factor=2,steps={ONSET}-"
        with _watching(folder) as said:
            run_ranks(WORLD, _job, str(folder), ONSET + 45, [fault], "", allow_warnings=True)  # it is announced
        alarms = [line["alarm"] for line in said if line["event"] == "alarm"]
        if [(alarm["kind"], alarm["ranks"]) for alarm in alarms] == [("slow_rank", [3])]:
            assert alarms[0]["ratio"] == pytest.approx(2.0, rel=0.25)
            assert ONSET - 2 <= alarms[0]["since"] <= ONSET + 2
            assert alarms[0]["step"] <= ONSET + 4
            windows = {path.name[:9] for path in folder.glob("*-window-*")}
            assert windows == {"rank00003", "rank00002", "rank00001"}
            return
    pytest.fail(f"not found: {alarms}")


def _let_it_come(said: list[dict[str, Any]], missed: Path) -> None:
    """When all has been said of it, or would have been long ago."""
    until = time.monotonic() + DEADLINE
    while not any("Rank 2 stands in" in line.get("says", "") for line in said) and time.monotonic() < until:
        time.sleep(0.02)
    missed.write_text("")


@pytest.mark.timeout(100)
def test_a_rank_that_does_not_come_is_missing(tmp_path: Path) -> None:
    folder, missed = tmp_path / "run", tmp_path / "missed"
    with _watching(folder, "--patience", "3") as said:
        threading.Thread(target=_let_it_come, args=(said, missed)).start()
        run_ranks(WORLD, _job, str(folder), 10, [], str(missed))
    hangs = [line for line in said if line["event"] == "hang"]
    assert [line["ranks"] for line in hangs] == [[2]]
    assert "Rank 2 is missing" in hangs[0]["says"]
    assert "Ranks 0-1, 3 wait for" in hangs[0]["says"]
    assert any(line["event"] == "note" and "Rank 2 stands in " in line["says"] for line in said)
