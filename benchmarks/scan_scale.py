"""Scan at scale: time and peak memory from files to report, on a synthetic job.

    python benchmarks/scan_scale.py                       # 128 ranks x 20 steps, about 2.1 M events
    python benchmarks/scan_scale.py --runs 5 --steps 20

Each run is a process of its own that reads the files and scans them; the figure is that process's wall time
and peak resident memory. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trimtab.topology import Topology
from trimtab.traces.own_write import write
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate


def scan_once(directory: Path) -> None:
    """Read and scan; prints a JSON line with what was found and measured."""
    from trimtab.scan import analyze
    from trimtab.traces.read import read

    begin = time.perf_counter()
    trace = read(directory)
    middle = time.perf_counter()
    report = analyze(trace).report
    end = time.perf_counter()
    found = [[finding.kind.value, *finding.ranks] for finding in report.findings]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"read": middle - begin, "scan": end - middle, "gb": peak, "found": found}))


def main() -> None:
    """Write the job, scan it in fresh processes, print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--scan", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.scan:
        scan_once(arguments.scan)
        return
    fault = SyntheticFault("slow_compute", ranks=(77,), factor=1.3, steps=(5, None))
    topology = Topology(tp=4, pp=4, dp=8)
    job = SyntheticJob(topology, steps=arguments.steps, microbatches=16, layers=32, faults=(fault,))
    trace = generate(job)
    with tempfile.TemporaryDirectory() as folder:
        write(trace, Path(folder))
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        events = trace.events.height
        del trace
        rows = []
        for _ in range(arguments.runs):
            begin = time.perf_counter()
            command = [sys.executable, __file__, "--scan", folder]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows.append({**json.loads(out), "wall": time.perf_counter() - begin})
    middle = {key: statistics.median(row[key] for row in rows) for key in ("read", "scan", "wall", "gb")}
    print("| ranks | steps | events | files | read | scan | whole process | peak memory | found |")
    print("|---|---|---|---|---|---|---|---|---|")
    print(
        f"| {topology.world_size} | {arguments.steps} | {events:,} | {size / 1e6:.0f} MB | {middle['read']:.1f} s "
        f"| {middle['scan']:.1f} s | {middle['wall']:.1f} s | {middle['gb']:.2f} GB | {rows[0]['found']} |"
    )


if __name__ == "__main__":
    main()
