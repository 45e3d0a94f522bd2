"""Scan at scale: time and peak memory from files to report, on synthetic jobs that grow.

    python benchmarks/scan_scale.py                          # 128 ranks to 1,024
    python benchmarks/scan_scale.py --ranks 1024 --runs 5
    python benchmarks/scan_scale.py --ranks 8192 --keep /tmp/large

A job is TP4 x PP4 x as many data parallel replicas as there are ranks for, 32 layers, 20 microbatches, 10 steps; one
rank of the last replica is 1.3 times slower from step 3 on. Its files are written as the recorder writes them (of
replicas beyond the 17th see :func:`trimtab.traces.synthetic_files.write_files`). Each run is a process of its own that
does what ``trimtab scan`` does; wall and processor time are of it and its workers together, peak memory is the largest
sum of the resident sets of all of them, sampled 20 times a second. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trimtab.topology import Topology
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob
from trimtab.traces.synthetic_files import write_files

TP, PP, STEPS, MICROBATCHES, LAYERS = 4, 4, 10, 20, 32
MOST_SIMULATED = 17
"""Replicas; the others are like these."""
SAMPLE_S = 0.05


def write_job(ranks: int, directory: Path) -> tuple[int, int]:
    """Write the job of ``ranks`` ranks; returns its number of events and its slow rank."""
    dp = ranks // (TP * PP)
    simulated = min(dp, MOST_SIMULATED)
    stage, tensor = PP // 2, 1
    slow = Topology(tp=TP, pp=PP, dp=simulated).world_size // PP * stage + (simulated - 1) * TP + tensor
    fault = SyntheticFault("slow_compute", ranks=(slow,), factor=1.3, steps=(3, None))
    layout = Topology(tp=TP, pp=PP, dp=simulated)
    job = SyntheticJob(layout, steps=STEPS, microbatches=MICROBATCHES, layers=LAYERS, faults=(fault,))
    return write_files(job, directory, dp), TP * dp * stage + (dp - 1) * TP + tensor


def scan_once(directory: Path) -> None:
    """Scan; prints a JSON line with what was found and measured."""
    begin = time.perf_counter()
    from trimtab.scan import analyze
    from trimtab.scan.fold.load import load

    trace, folded = load([directory])
    middle = time.perf_counter()
    report = analyze(trace, folded=folded).report
    end = time.perf_counter()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    out = {
        "read": middle - begin,
        "scan": end - middle,
        "cpu": sum(one.ru_utime + one.ru_stime for one in used),
        "whole": trace.events.height,
        "found": [[finding.kind.value, *finding.ranks] for finding in report.findings],
    }
    print(json.dumps(out))


def measured(directory: Path) -> dict[str, object]:
    """One scan in a fresh process."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, __file__, "--scan", str(directory)], stdout=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, resident(process.pid))
        time.sleep(SAMPLE_S)
    assert process.stdout is not None
    out = process.stdout.read()
    if process.returncode:
        sys.exit(process.returncode)
    return {**json.loads(out), "wall": time.perf_counter() - begin, "gb": peak / 1e9}


def resident(pid: int) -> int:
    """Bytes of a process and its children; nought of one that is gone."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident(int(child)) for child in children)


def main() -> None:
    """Write the jobs, scan them in fresh processes, print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="Write the files here, and leave or take them as they are.")
    parser.add_argument("--scan", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.scan:
        scan_once(arguments.scan)
        return
    print("| ranks | events | files | events looked at one by one | read | scan | wall | CPU | peak memory | found |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            directory = arguments.keep / str(ranks) if arguments.keep else Path(folder)
            events, slow = (0, -1) if any(directory.glob("*")) else write_job(ranks, directory)
            size = sum(file.stat().st_size for file in directory.iterdir())
            rows = [measured(directory) for _ in range(arguments.runs)]
        middle = {
            key: statistics.median(float(str(row[key])) for row in rows)
            for key in ("read", "scan", "wall", "cpu", "gb", "whole")
        }
        found = rows[0]["found"]
        right = " (right)" if found == [["slow_rank", slow]] else ""
        print(
            f"| {ranks:,} | {events:,} | {size / 1e6:,.0f} MB | {middle['whole']:,.0f} | {middle['read']:.1f} s "
            f"| {middle['scan']:.1f} s | {middle['wall']:.1f} s | {middle['cpu']:.1f} s | {middle['gb']:.2f} GB "
            f"| {found}{right} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
