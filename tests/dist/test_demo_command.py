"""The demo from end to end, on two ranks: real processes, the real script, the real command line."""

import json
import subprocess
import sys

import jsonschema
import pytest

from trimtab.scan.report.schema import json_schema

pytest.importorskip("megatron.core")


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_demo_finds_the_slow_rank(tmp_path):
    out = tmp_path / "demo"
    options = ["--layout", "dp2", "--steps", "8", "--fault", "slow_compute:rank=1,factor=2", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "demo", *options], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step     8/8 | loss" in done.stderr
    assert "Rank 1 computes" in done.stdout
    report = json.loads((out / "report.json").read_text())
    jsonschema.validate(report, json_schema())
    assert report["job"]["device"] == "emulated"
    finding = report["findings"][0]
    assert (finding["kind"], finding["ranks"]) == ("slow_rank", [1])
    assert finding["ratio"] == pytest.approx(2.0, rel=0.15)
    assert (out / "report.html").stat().st_size > 100_000
    assert (out / "trace.perfetto-trace").stat().st_size > 1_000
