"""How fast files of torch.profiler become tables: trimtab, HolisticTraceAnalysis, and decompression alone.

    python benchmarks/kineto_reader.py TRACE.json.gz --rival RIVALS/bin/python

The trace is copied to as many ranks as are asked for, with the rank in its head rewritten. Each reader turns all files
into its tables, in a fresh process, with as many processes beside it as it takes of its own accord. The readers take
turns; medians are told. Memory is the largest sum of the proportional set sizes of a reader's processes (so pages that
forked processes share count once), read 10 times a second. The rival has an environment of its own:

    python -m venv RIVALS && RIVALS/bin/pip install HolisticTraceAnalysis==0.5.0
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

TRIMTAB = """
import sys, time
begin = time.perf_counter()
from pathlib import Path
from trimtab.traces import read
trace = read.read(*sys.argv[1:])
print(len(trace.events), len(trace.ranks), time.perf_counter() - begin)
"""
ONE_PROCESS = """
import sys, time
begin = time.perf_counter()
from pathlib import Path
from trimtab.traces.formats.kineto.workers import read_parts
parts = read_parts([Path(name) for name in sys.argv[1:]], 1)
print(sum(len(part.events) for part in parts), len(parts), time.perf_counter() - begin)
"""
HTA = """
import logging, sys, time
logging.disable(logging.CRITICAL)
begin = time.perf_counter()
from hta.common.trace import Trace
trace = Trace(trace_files=dict(enumerate(sys.argv[1:])), trace_dir="")
trace.parse_traces()
print(sum(map(len, trace.traces.values())), len(trace.traces), time.perf_counter() - begin)
"""
DECOMPRESS = """
import sys, time
begin = time.perf_counter()
from pathlib import Path
from trimtab.traces.blocks import Blocks
print(sum(len(block) for name in sys.argv[1:] for block in Blocks(Path(name))), len(sys.argv) - 1,
      time.perf_counter() - begin)
"""


@dataclass(frozen=True)
class Run:
    """One run of a reader."""

    seconds: float
    cpu: float
    memory_mb: float
    rows: int


def main() -> None:
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rival", type=Path, help="interpreter that has HolisticTraceAnalysis")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    jobs = {
        "trimtab": (sys.executable, TRIMTAB),
        "trimtab, one process": (sys.executable, ONE_PROCESS),
        "decompression alone (isal), one process": (sys.executable, DECOMPRESS),
    }
    if arguments.rival:
        jobs["HolisticTraceAnalysis"] = (str(arguments.rival), HTA)
    with tempfile.TemporaryDirectory() as folder:
        files, size = copies(arguments.trace, arguments.ranks, Path(folder))
        packed = sum(file.stat().st_size for file in files)
        results: dict[str, list[Run]] = {name: [] for name in jobs}
        for number in range(arguments.runs):
            for name, (python, script) in jobs.items():
                results[name].append(measure([python, "-c", script, *map(str, files)]))
                print(number, name, results[name][-1], file=sys.stderr)
    print(f"{arguments.ranks} files, {size / 1e6:.0f} MB of JSON, {packed / 1e6:.0f} MB compressed\n")
    print("| reader | rows | seconds | MB/s | CPU seconds | peak memory |\n|---|---|---|---|---|---|")
    for name, runs in results.items():
        middle = {field: statistics.median(getattr(run, field) for run in runs) for field in Run.__annotations__}
        print(
            f"| {name} | {middle['rows']:,.0f} | {middle['seconds']:.2f} | {size / 1e6 / middle['seconds']:.0f} "
            f"| {middle['cpu']:.1f} | {middle['memory_mb']:.0f} MB |"
        )


def copies(trace: Path, ranks: int, folder: Path) -> tuple[list[Path], int]:
    """The trace as if it were of ``ranks`` ranks, and the bytes of all, decompressed."""
    text = gzip.decompress(trace.read_bytes())
    files: list[Path] = []
    size = 0
    for rank in range(ranks):
        about = json.dumps({"backend": "nccl", "rank": rank, "world_size": ranks}).encode()
        mine, count = re.subn(rb'"distributedInfo":\s*\{[^{}]*\}', b'"distributedInfo": ' + about, text, count=1)
        if not count:
            raise SystemExit(f"{trace}: has no plain distributedInfo in which the rank could be rewritten")
        file = folder / f"rank{rank}.json.gz"
        file.write_bytes(gzip.compress(mine, 6))
        files.append(file)
        size += len(mine)
    return files, size


def measure(command: list[str]) -> Run:
    """Run a reader; the time is its own, from its first import to its tables."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    peak = [0]
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=(process.pid, peak, over))
    watcher.start()
    before = children_cpu()
    output, _ = process.communicate()
    over.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{command[0]}: the reader failed ({process.returncode})")
    rows, _, seconds = output.split()[-3:]
    return Run(float(seconds), children_cpu() - before, peak[0] / 1024, int(rows))


def children_cpu() -> float:
    """Processor seconds of all processes that have been waited for."""
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def watch(pid: int, peak: list[int], over: threading.Event) -> None:
    """Keep the largest sum of the memory (KiB) of a process and all below it."""
    while not over.is_set():
        peak[0] = max(peak[0], sum(memory(one) for one in tree(pid)))
        time.sleep(0.1)


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue
    return found


def memory(pid: int) -> int:
    """Proportional set size of a process, KiB."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    main()
