"""The demo from end to end, on two ranks: real processes, the real script, the real command line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
from attempts import Others, Outcome, until_right

from trimtab.scan.report.schema import json_schema
from trimtab.scope.server import visiting

pytest.importorskip("megatron.core")


@pytest.mark.alone
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
    _look(out / "run", done.stderr)
    report = json.loads((out / "report.json").read_text())
    jsonschema.validate(report, json_schema())
    return done.stdout, report


def _look(run: Path, said: str) -> None:
    """The link that it ends with opens the page, and what was recorded can be seen there; nothing is left."""
    server = visiting.running(run)
    assert server is not None, said
    try:
        assert f"In the browser: {server.link}\n" in said
        with httpx2.Client(base_url=server.url) as browser:
            assert browser.get(server.link, follow_redirects=True).status_code == 200
            (recorded,) = browser.get("/api/v1/runs").json()["runs"]
            assert (recorded["label"], recorded["error"]) == ("demo", "")
            assert 4 <= recorded["last_step"] <= 7
            report = browser.get(f"/api/v1/runs/{recorded['name']}/report").json()
            assert report["schema"] == "trimtab.report/1"
            taps = browser.get(f"/api/v1/runs/{recorded['name']}/taps").json()["taps"]
            assert {"layers.1.output", "layers.0.attention.map", "loss"} <= {tap["name"] for tap in taps}
    finally:
        visiting.close(run)
    assert visiting.running(run) is None
