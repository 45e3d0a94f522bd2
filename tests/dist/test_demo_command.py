"""The demo from end to end, on two ranks: real processes, the real script, the real command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from attempts import Others, Outcome, until_right

from trimtab.scan.report.schema import json_schema

pytest.importorskip("megatron.core")


@pytest.mark.timeout(1200)  # several attempts
def test_demo_finds_the_slow_rank(tmp_path: Path) -> None:
    def attempt(number: int) -> Outcome:
        out, others = tmp_path / str(number), Others()
        said, report = _demo(out)
        busy = others.share()
        assert report["job"]["device"] == "emulated"
        assert (out / "report.html").stat().st_size > 100_000
        assert (out / "trace.perfetto-trace").stat().st_size > 1_000
        found = [(finding["kind"], finding["ranks"]) for finding in report["findings"][:1]]
        right = found == [("slow_rank", [1])] and report["findings"][0]["ratio"] == pytest.approx(2.0, rel=0.15)
        return Outcome([] if right and "Rank 1 computes" in said else [said], busy)

    until_right(attempt)


def _demo(out: Path) -> tuple[str, dict[str, Any]]:
    """What it says on stdout, and its report."""
    options = ["--layout", "dp2", "--steps", "8", "--fault", "slow_compute:rank=1,factor=2", "--out", str(out)]
    command = [sys.executable, "-m", "trimtab", "demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "step     8/8 | loss" in done.stderr
    report = json.loads((out / "report.json").read_text())
    jsonschema.validate(report, json_schema())
    return done.stdout, report
