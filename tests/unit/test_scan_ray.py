"""The files of a large run read by a Ray cluster: what is found is what one process finds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimtab.scan import analyze
from trimtab.scan.fold import load
from trimtab.scan.fold.engines import Inline, Ray
from trimtab.scan.fold.task import tasks_of
from trimtab.scan.fold.units import units_of
from trimtab.topology import Topology
from trimtab.traces import own
from trimtab.traces.own_write import write
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate

pytest.importorskip("ray", reason="Ray is not installed (pip install 'trimtab[ray]')")
pytestmark = pytest.mark.filterwarnings("default")  # Ray's own

LAYOUT = Topology(tp=2, dp=10)
FAULT = SyntheticFault("slow_compute", ranks=(13,), factor=1.4)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of this machine, in processes that end with the one that is started here."""
    port = free_port()
    log = (tmp_path_factory.mktemp("ray") / "log").open("w+")
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}", "--block"]
    options = ["--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000"]
    process = subprocess.Popen(
        command + options, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"RAY_TMPDIR": "/tmp"}
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "Ray runtime started" in line:
            break
    else:
        process.wait()
        log.seek(0)
        pytest.fail(f"no Ray cluster could be started: {log.read()[-2000:]}")
    yield f"127.0.0.1:{port}"
    process.terminate()
    process.wait(timeout=60)
    process.stdout.close()
    log.close()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("job")
    write(generate(SyntheticJob(LAYOUT, steps=6, microbatches=2, layers=2, faults=(FAULT,))), where)
    return where


@pytest.mark.timeout(180)
def test_a_cluster_finds_what_one_process_finds(cluster: str, job: Path) -> None:
    tasks = tasks_of(own.discover([job]), units_of(LAYOUT))
    assert sorted(Ray(cluster).run(tasks)) == sorted(Inline().run(tasks))
    reports = []
    for engine in (Ray(cluster), Inline()):
        trace, folded = load.load([job], fold_events=0, engine=engine)
        assert folded is not None
        reports.append(analyze(trace, folded=folded).report)
    assert reports[0] == reports[1]
    assert [finding.ranks for finding in reports[0].findings] == [(13,)]


@pytest.mark.timeout(180)
def test_a_file_that_a_worker_cannot_read_is_said_in_one_line(cluster: str, job: Path) -> None:
    found = own.discover([job])
    task = tasks_of(found, units_of(LAYOUT))[0]
    with pytest.raises(ValueError, match=r"^a worker of the Ray cluster failed: [^\n]*$"):
        list(Ray(cluster).run([task.replace(b'"unit": 0', b'"unit": "?", "extra"')]))


def test_without_a_cluster_one_line_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", "/nonexistent")
    with pytest.raises(ValueError, match=r"no Ray cluster answers .*start one") as caught:
        list(Ray("127.0.0.1:1").run([b""]))
    assert "\n" not in str(caught.value)
