"""What is demanded after a drill. Each function returns its complaints, none where all is well."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from plan import Drill
from scene import NOT_REACHED

from trimtab.traces.read import read
from trimtab.traces.table import Trace

_LAST_SECOND_NS = 1_000_000_000
"""What a killed rank may lose."""
_NOTICED_NS = 500_000_000
"""Within which a signal is noticed: a step that begins later has not been told of it."""
_LOST_ANOTHER = re.compile(r"Error: .*(gloo|TCPStore|[Ss]ocket|[Cc]onnection|[Pp]eer)", re.DOTALL)
_NOISE = re.compile(
    r"Exception ignored|Exception in thread|Fatal Python error|Error in sys\.|Logging error|terminate called"
    r"|[/.]trimtab[/.].*Warning"
)
Progress = list[tuple[str, int, int]]
"""Of each step that was finished: its loss, when it began and when it ended (``perf_counter_ns``)."""


@dataclass
class Played:
    """One run of a job, seen from outside."""

    ended: list[str]
    """Of each rank: ``finished``, ``signal 9``, or the exception that ended it."""
    answers: list[dict[str, Any]]
    progress: list[Progress]
    outputs: list[str]
    hung: list[int]
    orphans: list[int]
    shot: int | None
    """When the first signal was sent (``perf_counter_ns``), None where none was."""
    seconds: float
    trace: Trace | None
    unreadable: str
    """Why there is no trace."""
    strays: list[str]
    """Files that nobody asked for."""

    @classmethod
    def collect(
        cls,
        folder: Path,
        codes: list[int | None],
        hung: list[int],
        orphans: list[int],
        shot: int | None,
        seconds: float,
    ) -> Played:
        """From what the ranks have written into the drill's folder."""
        answers: list[dict[str, Any]] = []
        ended: list[str] = []
        for rank, code in enumerate(codes):
            path = folder / f"{rank}.ended"
            answer: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
            answer["told"] = _text(folder / f"{rank}.told")
            answers.append(answer)
            exited = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            ended.append(exited if code is None or code < 0 or "ended" not in answer else answer["ended"])
        trace, unreadable = None, ""
        try:
            trace = read(folder / "record")
        except ValueError as error:
            unreadable = str(error)
        ranks = range(len(codes))
        own = re.compile(r"record|\d+\.(ended|partial|progress|out|told)|scratch.*")
        return cls(
            ended=ended,
            answers=answers,
            progress=[_progress(folder / f"{rank}.progress") for rank in ranks],
            outputs=[_text(folder / f"{rank}.out") for rank in ranks],
            hung=hung,
            orphans=orphans,
            shot=shot,
            seconds=seconds,
            trace=trace,
            unreadable=unreadable,
            strays=[path.name for path in folder.iterdir() if not own.fullmatch(path.name)],
        )

    def end_of(self, rank: int) -> str:
        """How a rank ended, in words, with the text of its exception."""
        said = self.answers[rank].get("said")
        return f"{self.ended[rank]}: {said}" if said else self.ended[rank]

    def never_came(self) -> bool:
        """Whether the fault says of itself that it has not happened."""
        return any(answer["told"].endswith(NOT_REACHED) for answer in self.answers)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _progress(path: Path) -> Progress:
    found: Progress = []
    for line in _text(path).splitlines():
        parts = line.split()
        if len(parts) == 4:
            found.append((parts[1], int(parts[2]), int(parts[3])))
    return found


def warnings_in(output: str) -> list[str]:
    """The lines that trimtab said on stderr."""
    return [line for line in output.splitlines() if line.startswith("trimtab")]


def judge_ends(drill: Drill, played: Played, hit: Collection[int]) -> list[str]:
    """Each rank ended as it could have without trimtab, the ranks that were hit by what hit them.

    A rank that has lost another one says so, or waits until the launcher ends it; whatever it had to do without the
    other it may finish. Where all are hit, one of them may lose another before it has noticed what hit itself.
    """
    if not drill.ends:
        ends = [played.end_of(rank) for rank, ended in enumerate(played.ended) if ended != "finished"]
        return [f"the job ended with {', '.join(ends)}"] if ends else []
    failed = {rank for rank in hit if played.ended[rank] == drill.ends}
    problems: list[str] = []
    for rank, ended in enumerate(played.ended):
        lost_another = ended == "signal SIGTERM" or _LOST_ANOTHER.search(played.end_of(rank)) is not None
        if rank in failed or (lost_another and failed):
            continue
        if ended != "finished":
            problems.append(f"rank {rank} ended with {played.end_of(rank)}; {drill.ends} was to end {sorted(hit)}")
        elif rank in hit and not _too_late(drill, played, rank):
            problems.append(f"rank {rank} went on after what was to end it with {drill.ends}")
    return problems


def _too_late(drill: Drill, played: Played, rank: int) -> bool:
    """Whether a rank that is hit may have come through."""
    if drill.shot is None:
        return played.never_came()
    last_began = played.progress[rank][-1][1]
    return played.shot is None or last_began < played.shot + _NOTICED_NS


def judge_losses(drill: Drill, played: Played, expected: list[list[str]], steps: int) -> list[str]:
    """Bit for bit those of a run without trimtab, as far as the job came."""
    problems: list[str] = []
    for rank, (progress, right) in enumerate(zip(played.progress, expected, strict=True)):
        losses = [loss for loss, _, _ in progress]
        wrong = [step for step, (loss, other) in enumerate(zip(losses, right, strict=False)) if loss != other]
        if wrong:
            problems.append(f"rank {rank} has another loss from step {wrong[0]} on")
        if not drill.ends and len(losses) != steps:
            problems.append(f"rank {rank} made {len(losses)} of {steps} steps")
    return problems


def judge_words(drill: Drill, played: Played, warned: list[list[str]]) -> list[str]:
    """One line at most, and nothing that escaped into stderr by itself."""
    problems: list[str] = []
    least, most = drill.warns
    for rank, lines in enumerate(warned):
        hit = played.answers[rank].get("hit", True)
        if len(lines) > (most if hit else 1):
            problems.append(f"rank {rank} warned {len(lines)} times: {lines}")
        if hit and len(lines) < least and "ended" in played.answers[rank]:
            problems.append(f"rank {rank} kept silent about it")
        noise = _NOISE.search(played.outputs[rank])
        if noise is not None:
            start = played.outputs[rank].rfind("\n", 0, noise.start()) + 1
            problems.append(f"rank {rank} printed {played.outputs[rank][start:][:300]!r}")
    return problems


def judge_leftovers(drill: Drill, played: Played) -> list[str]:
    """A process that ended in order is, but for the job, as it was."""
    problems = [f"files were left: {', '.join(played.strays)}"] if played.strays else []
    for rank, answer in enumerate(played.answers):
        left = [what for what in answer.get("left", ()) if what not in drill.leaves]
        if left:
            problems.append(f"rank {rank} is left with other {', '.join(left)}")
    return problems


def judge_files(drill: Drill, played: Played) -> list[str]:
    """What was recorded can be read, as much of it as the drill allows to demand."""
    if drill.files == "any":
        return []
    if played.trace is None:
        return [f"the trace cannot be read: {played.unreadable}"] if any(played.progress) else []
    problems: list[str] = []
    events = played.trace.events.with_columns(pl.col("name").cast(pl.String))
    if (events["end"] < events["start"]).any():
        problems.append("events end before they start")
    for rank, progress in enumerate(played.progress):
        if drill.files == "readable":
            continue
        recorded = set(events.filter((pl.col("rank") == rank) & (pl.col("name") == "step"))["step"])
        last = progress[-1][2] if progress else 0
        due = len(progress) if drill.files == "whole" else sum(end < last - _LAST_SECOND_NS for _, _, end in progress)
        # The step under way when trimtab is taken off, before the job's last, ends there.
        missing = set(range(due - 1 if drill.files == "whole" else due)) - recorded
        if missing:
            problems.append(f"rank {rank} lacks the steps {sorted(missing)} of {due}")
        info = played.trace.ranks.get(rank)
        if drill.files == "whole" and not (info is not None and info.closed):
            problems.append(f"rank {rank}'s file does not end in order")
    return problems
