"""Part 2 of multi_gpu.py: real faults in a data parallel Megatron-Core job; what scan and watch say, against the truth.

Each scenario is one run of steps, sound until the onset and at fault from there on, recorded and watched by ``trimtab
watch`` all the while; then, with the same fault and without a recorder, some steps under torch.profiler. All run in
the same processes, but for the last: there one rank has only a share of its GPU, by an MPS daemon with a pipe
directory of its own, from the start. Truth is what was injected; that a stall was hidden is asked of the device.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mps import multi_process_service
from multi_gpu_faults_rank import SCENARIOS, worker
from multi_gpu_model import ENVIRONMENT
from multi_gpu_part import SOURCE, Options, Report, part_or_rank
from multi_gpu_verdicts import alarms, judged, scanned, told_by_watch

HIDDEN = 0.9
"""Share of its stalls from which on a rank counts as one whose stalls are hidden."""
MPS_SHARE = 60
WORKERS = 8
MOST_TRACE_BYTES = 1 << 20


@contextmanager
def watchers(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """``trimtab watch`` beside each scenario; what it says is in the run's directory."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    children: list[subprocess.Popen[bytes]] = []
    try:
        for name in names:
            place = folder / name / "own"
            place.mkdir(parents=True)
            command = [sys.executable, "-m", "trimtab", "watch", str(place), "--no-window", "--json", "-"]
            with (folder / name / "watch.log").open("wb") as log:
                children.append(
                    subprocess.Popen(
                        command, env=environment, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
                    )
                )
        yield
    finally:
        for child in children:
            child.terminate()
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(5.0)
            if child.poll() is None:
                child.kill()
                child.wait()


COLUMNS = (
    "scenario",
    "truth, on the last rank",
    "step before / after, ms",
    "scan, own traces",
    "scan, torch.profiler traces",
    "watch",
)


def tables(report: Report, folder: Path, ranks: list[dict[str, Any]], names: Sequence[str], title: str) -> None:
    """Scan all traces, and compare with the truth. The table is written row by row: the time may be up meanwhile."""
    victim = len(ranks) - 1
    done = [name for name in names if all(name in rank["scenarios"] for rank in ranks)]
    for name in names:
        if name not in done:
            report.fail(f"faults: {name}", "not run, or not to its end")
    kinds = {one.name: one.kind for one in SCENARIOS}
    rows: list[list[object]] = []
    with ProcessPoolExecutor(min(WORKERS, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        scans = {(n, t): pool.submit(scanned, str(folder / n / t)) for n in done for t in ("own", "profile")}
        for name in done:
            mine = ranks[victim]["scenarios"][name]
            due = kinds[name]
            if "stalls" in mine and mine["hidden"] < HIDDEN * mine["stalls"]:
                due = "host_stall"
            truth = due or "nothing"
            if "stalls" in mine:
                truth += f" (hidden {mine['hidden']} of {mine['stalls']} times)"
            row: list[object] = [name, truth, f"{mine['before_ms']:.1f} / {mine['after_ms']:.1f}"]
            for trace in ("own", "profile"):
                try:
                    row.append(judged(scans[name, trace].result(timeout=60.0), due, victim))
                except Exception as error:
                    report.fail(f"faults: scan of {name}/{trace}", repr(error))
                    row.append("failed")
            row.append(told_by_watch(alarms(folder / name), due, victim, mine["onset_ns"], mine["onset"]))
            rows.append(row)
            report.table(title, COLUMNS, rows, grown=True)
            _tell_of(report, folder, name, scans)


def _tell_of(report: Report, folder: Path, name: str, scans: dict[tuple[str, str], Any]) -> None:
    """Evidence and warnings of scan, and complaints of watch, for the log."""
    for trace in ("own", "profile"):
        with suppress(Exception):
            found = scans[name, trace].result(timeout=1.0)
            print(f"{name}/{trace}: {found['seconds']:.1f} s to scan; warnings {found['warnings']}")
            for one in found["findings"]:
                print(f"  {one['kind']} {one['ranks']}: {' '.join(one['evidence'])}")
    for one in alarms(folder / name):
        print(f"{name}: watch, step {one['step']}: {one['says']}")
    log = folder / name / "watch.log"
    complaints = log.read_text(errors="replace") if log.exists() else ""
    complaints = complaints.replace("trimtab: interrupted", "").strip()  # that was us
    if complaints:
        print(f"{name}: watch complained: {complaints[-2000:]}")
    place = report.options.out / "traces" / name
    for file in (folder / name / "own").glob("*.arrow*"):
        if file.stat().st_size < MOST_TRACE_BYTES:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, place / file.name)


def _with_mps(report: Report, folder: Path, plan: dict[str, Any]) -> None:
    """One rank with a share of its GPU, from the start."""
    victim = report.options.gpus - 1
    with multi_process_service(True) as daemon, watchers(folder, ["mps"]):
        per_rank = [{}] * victim + [{**daemon, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(MPS_SHARE)}]
        seconds = max(report.left(), 20.0)
        command = [__file__, "--worker", json.dumps({**plan, "names": ["mps"], "seconds": seconds})]
        more: dict[str, Any] = {"per_rank": per_rank, "environment": ENVIRONMENT}
        ranks = report.job("faults: mps", command, timeout=seconds + 20.0, **more)
    if all(ranks):
        times = ", ".join(f"{rank['matmul_ms']:.3f}" for rank in ranks)
        report.note(f"MPS share {MPS_SHARE} %: a bf16 4096^3 product takes {times} ms by rank.")
        tables(report, folder, ranks, ["mps"], "Verdict against truth, MPS")


def run(options: Options) -> Report:
    """The part."""
    report = Report("faults", options)
    names = [one.name for one in SCENARIOS if not one.mps and report.wants(one.name)]
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        folder = Path(place)
        with report.attempt("faults"):
            reserve = 28.0 if options.cuda and report.wants("mps") else 0.0
            plan = {"cuda": options.cuda, "tiny": options.tiny, "folder": place, "names": names}
            if names:
                with watchers(folder, names):
                    seconds = max(report.left() - reserve - 12.0, 10.0)
                    command = [__file__, "--worker", json.dumps({**plan, "seconds": seconds})]
                    ranks = report.job("faults", command, timeout=seconds + 30.0, environment=ENVIRONMENT)
                if all(ranks):
                    tables(report, folder, ranks, names, "Verdict against truth")
        if options.cuda and report.wants("mps"):
            with report.attempt("faults: mps"):
                _with_mps(report, folder, plan)
    return report


if __name__ == "__main__":
    part_or_rank(__doc__, run, worker)
