"""What the parts of multi_gpu.py have in common: options, tables, failures told whole, jobs of one process a GPU.

A part is a script of its own. It is started with ``--device --gpus --tiny --seconds --out`` and writes
``OUT/<part>.json`` anew after each table, so that what was measured before a hard timeout is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent
SOURCE = BENCHMARKS.parent / "src"
RESULT = "RESULT "
GRACE_SECONDS = 5.0
MOST_SAID = 6000
"""Characters of a rank's output that are kept of a failure."""


class JobError(RuntimeError):
    """A job failed or outlasted its time; ``results`` are what its ranks had told until then."""

    def __init__(self, text: str, results: list[Any]) -> None:
        super().__init__(text)
        self.results = results


@dataclass(frozen=True)
class Options:
    """What a part is started with; ``gpus`` is the number of processes, on a CPU, too."""

    out: Path
    device: str
    gpus: int
    tiny: bool
    seconds: float
    only: tuple[str, ...]

    @property
    def cuda(self) -> bool:
        """On GPUs over NCCL, else on the CPU over gloo."""
        return self.device == "cuda"


@dataclass
class Report:
    """Tables, notes and failures of a part; on disk after each of them."""

    part: str
    options: Options
    tables: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    notes: list[str] = field(default_factory=list[str])
    failures: list[str] = field(default_factory=list[str])
    began: float = field(default_factory=time.monotonic)

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, grown: bool = False
    ) -> None:
        """Keep a table; cells are turned into text as they are. ``grown``: in place of the one of this title."""
        if grown:
            self.tables = [table for table in self.tables if table["title"] != title]
        self.tables.append({"title": title, "columns": list(columns), "rows": [[str(x) for x in row] for row in rows]})
        self._write()

    def note(self, text: str) -> None:
        """Keep a sentence that belongs beside the tables."""
        self.notes.append(text)
        self._write()

    def fail(self, what: str, text: str) -> None:
        """Keep and print what went wrong, whole."""
        self.failures.append(f"{what}\n{text.strip()}")
        print(f"FAILED {what}\n{text.strip()}\n", file=sys.stderr, flush=True)
        self._write()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """An exception inside is told whole, and the next attempt comes."""
        try:
            yield
        except Exception:
            self.fail(what, traceback.format_exc())

    def job(self, what: str, command: Sequence[str], **more: Any) -> list[Any]:
        """As :func:`run_job`; if it fails that is told, and what the ranks had told until then is used."""
        try:
            return run_job(command, self.options, **more)
        except JobError as error:
            self.fail(what, str(error))
            return error.results

    def left(self) -> float:
        """Seconds of the part's time that are left."""
        return self.options.seconds - (time.monotonic() - self.began)

    def wants(self, what: str) -> bool:
        """Whether this piece is asked for, and there is time for it; says so where there is none."""
        if self.options.only and what not in self.options.only:
            return False
        if self.left() <= 0:
            self.fail(what, "not run: the part's time was up")
            return False
        return True

    def _write(self) -> None:
        self.options.out.mkdir(parents=True, exist_ok=True)
        content = {"part": self.part, "tables": self.tables, "notes": self.notes, "failures": self.failures}
        target = self.options.out / f"{self.part}.json"
        beside = target.with_suffix(".tmp")
        beside.write_text(json.dumps(content))
        beside.replace(target)


def arguments_of_a_part(description: str) -> argparse.ArgumentParser:
    """The parser of a part's script; ``options_of`` reads what it found."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=0, help="processes; default: all GPUs, 2 on a CPU")
    parser.add_argument("--tiny", action="store_true", help="small sizes and few repetitions: does it run at all?")
    parser.add_argument("--seconds", type=float, default=120.0, help="of which nothing new is begun afterwards")
    parser.add_argument("--only", default="", help="pieces of the part, comma-separated")
    parser.add_argument("--out", type=Path, default=Path("multi-gpu"))
    return parser


def options_of(arguments: argparse.Namespace) -> Options:
    """As asked for, and with what is there. From now on SIGTERM ends this process in order, its ranks first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    gpus = arguments.gpus or (count_gpus() if arguments.device == "cuda" else 2)
    if arguments.device == "cuda" and gpus < 1:
        raise ValueError("--device cuda: no GPU was found; on a CPU say --device cpu --tiny")
    only = tuple(name for name in arguments.only.split(",") if name)
    return Options(arguments.out, arguments.device, gpus, arguments.tiny, arguments.seconds, only)


def count_gpus() -> int:
    """GPUs that a process here sees, without a CUDA context in this one, which would take memory from the ranks."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name])
    return len(nvidia_smi("-L"))


def nvidia_smi(*arguments: str) -> list[str]:
    """Lines that it prints; none where it is not there."""
    if shutil.which("nvidia-smi") is None:
        return []
    found = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=False)
    return [line for line in found.stdout.splitlines() if line.strip()]


def run_job(
    command: Sequence[str],
    options: Options,
    *,
    ranks: int = 0,
    timeout: float,
    environment: dict[str, str] | None = None,
    per_rank: Sequence[dict[str, str]] = (),
) -> list[Any]:
    """Run a Python file as one process a rank; the JSON of each ``RESULT`` line by rank (None where a rank gave none).

    ``per_rank`` adds to the environment of single ranks. JobError, with all that was printed, if a rank fails or the
    time runs out; then no process is left.
    """
    ranks = ranks or options.gpus
    base = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONUNBUFFERED": "1"}
    base["PYTHONFAULTHANDLER"] = "1"
    base["PYTHONPATH"] = os.pathsep.join([str(SOURCE), str(BENCHMARKS), *os.environ.get("PYTHONPATH", "").split(":")])
    if not options.cuda:
        base |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    base |= environment or {}
    logs = [options.out / f".rank{rank}.log" for rank in range(ranks)]
    options.out.mkdir(parents=True, exist_ok=True)
    children: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            own = base | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | (dict(per_rank[rank]) if per_rank else {})
            with log.open("wb") as file:
                children.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        env=own,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        problem = _wait(children, timeout)
    except BaseException:  # this process is to end, too
        _dump(children)
        print("\n".join(log.read_text(errors="replace")[-MOST_SAID:] for log in logs if log.exists()), flush=True)
        raise
    finally:
        for child in children:
            _end(child)
    texts = [log.read_text(errors="replace") for log in logs]
    for log in logs:
        log.unlink()
    results = [_result(text) for text in texts]
    complaints = sorted({line for text in texts for line in text.splitlines() if "trimtab:" in line})
    print("\n".join(complaints), flush=True)
    if problem:
        said = (f"[rank {rank}]\n{_talk(text)[-MOST_SAID:]}" for rank, text in enumerate(texts))
        raise JobError("\n".join([problem, *said]), results)
    return results


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(children: Sequence[subprocess.Popen[bytes]], timeout: float) -> str:
    """Until all have ended well, one has failed, or the time is up; what the problem was."""
    deadline = time.monotonic() + timeout
    while True:
        codes = [child.poll() for child in children]
        failed = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
        if failed:
            return ", ".join(failed)
        if all(code == 0 for code in codes):
            return ""
        if time.monotonic() > deadline:
            _dump(children)
            return f"not done after {timeout:.0f} s"
        time.sleep(0.05)


def _dump(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that are left, so that each says where its threads stand."""
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGABRT)
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the rank and what it started."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, kind)
        except (ProcessLookupError, PermissionError):
            break
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    child.wait()


def _talk(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(RESULT))


def _result(text: str) -> Any:
    found = [line[len(RESULT) :] for line in text.splitlines() if line.startswith(RESULT)]
    return json.loads(found[-1]) if found else None


def tell(result: object) -> None:
    """In a rank: hand a result to ``run_job``."""
    sys.stdout.write(f"\n{RESULT}{json.dumps(result)}\n")
    sys.stdout.flush()


def markdown(table: dict[str, Any]) -> str:
    """A table as text."""
    head = f"**{table['title']}**\n\n| {' | '.join(table['columns'])} |\n|{'---|' * len(table['columns'])}\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in table["rows"])


def part_or_rank(description: str | None, run: Callable[[Options], object], worker: Callable[[Any], None]) -> None:
    """The main function of a part: ``run``, or in a process of its job ``worker``, with what ``--worker`` gives it."""
    parser = arguments_of_a_part((description or "").splitlines()[0])
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
    else:
        run(options_of(arguments))
