"""Plays drills: forks the ranks of a job, sends signals, waits with a deadline, and has the outcome judged.

A job is played once without trimtab, for its losses.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import job
from harness import free_port
from inject import SiteCalls, find_sites
from judge import Played, judge_ends, judge_files, judge_leftovers, judge_losses, judge_words, warnings_in
from plan import Case, Drill, Shot
from scene import Scene, play

DEADLINE_SECONDS = 60.0
_GRACE_SECONDS = 3.0
"""What the other ranks get when one has failed, before they are ended as a launcher would end them."""
_ORPHAN_SECONDS = 3.0
"""What a process that a rank has started gets to notice its end."""
_FIND_SITES = Drill("find sites", find_sites, sites="found")
_NOTHING, _NOTHING_FOR_LONG = Drill("nothing"), Drill("nothing", long=True)


@dataclass
class Verdict:
    """What came of a case."""

    case: Case
    problems: list[str]
    seconds: float
    told: str = ""
    """What the fault said about itself: the site that it broke, for example."""
    warned: list[list[str]] = field(default_factory=list[list[str]])
    output: str = ""
    """Of the ranks, where something was wrong."""

    @property
    def passed(self) -> bool:
        """Nothing was wrong."""
        return not self.problems


class Runner:
    """Runs cases one after another."""

    def __init__(
        self, steps: int = 6, long_steps: int = 60, latest_shot: float = 0.6, deadline: float = DEADLINE_SECONDS
    ) -> None:
        """``long_steps`` are made where a signal comes from outside, up to ``latest_shot`` seconds after the start.

        Ranks that are not through after ``deadline`` seconds are said to hang.
        """
        self._deadline = deadline
        self._steps = steps
        self._long_steps = max(long_steps, steps)
        self._latest_shot = latest_shot
        self._losses: dict[tuple[str, bool], list[list[str]]] = {}
        self._sites: dict[tuple[str, bool], list[SiteCalls]] = {}

    def run(self, case: Case, deadline: float | None = None) -> Verdict:
        """The verdict on one case, within another ``deadline`` if one is given."""
        expected = self.losses(case.job, case.drill.long)
        played = self._play(case, attached=True, deadline=deadline)
        warned = [warnings_in(output) for output in played.outputs]
        problems = [f"rank {rank} hung" for rank in played.hung]
        problems += [f"rank {rank} left a process behind" for rank in played.orphans]
        if not played.hung:
            problems += judge_ends(case.drill, played, self._hit(case))
        problems += judge_losses(case.drill, played, expected, self._scene_steps(case.drill))
        problems += judge_words(case.drill, played, warned)
        problems += judge_leftovers(case.drill, played)
        problems += judge_files(case.drill, played)
        told = " ".join(dict.fromkeys(answer["told"] for answer in played.answers if answer.get("told")))
        output = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(played.outputs)) if problems else ""
        return Verdict(case, problems, played.seconds, told, warned, output)

    def run_bare(self, case: Case) -> list[str]:
        """What would be wrong with the job's end if trimtab were attached, of the job without."""
        played = self._play(case, attached=False)
        return [f"rank {rank} hung" for rank in played.hung] or judge_ends(case.drill, played, self._hit(case))

    def losses(self, name: str, long: bool) -> list[list[str]]:
        """The losses of every rank in a run without trimtab, step by step, of as many steps as a drill may make."""
        if (name, long) not in self._losses:
            played = self._play(Case(_NOTHING_FOR_LONG if long else _NOTHING, name, 0), attached=False)
            _must_have_finished(played, f"the job {name} without trimtab")
            self._losses[name, long] = [[loss for loss, _, _ in rank] for rank in played.progress]
        return self._losses[name, long]

    def sites(self, name: str, native: bool) -> list[SiteCalls]:
        """Of every rank, the places in trimtab that a run comes through, with compiled kernels or without."""
        if (name, native) not in self._sites:
            seed = next(seed for seed in itertools.count() if _draw(seed, self._steps).native == native)
            played = self._play(Case(_FIND_SITES, name, seed), attached=True)
            _must_have_finished(played, f"the job {name} with trimtab")
            self._sites[name, native] = [answer["found"] for answer in played.answers]
        return self._sites[name, native]

    def _hit(self, case: Case) -> range:
        """The ranks that the fault or the signal is meant for."""
        target = _draw(case.seed, self._steps).target
        everyone = case.drill.shot is not None and case.drill.shot.everyone
        return range(job.WORLD) if everyone else range(target, target + 1)

    def _scene_steps(self, drill: Drill) -> int:
        if not drill.long:
            return self._steps
        return (
            self._long_steps if drill.ends or drill is _NOTHING_FOR_LONG else self._long_steps // 4
        )  # else the whole of it would have to be waited for

    def _play(self, case: Case, attached: bool, deadline: float | None = None) -> Played:
        deadline = self._deadline if deadline is None else deadline
        with tempfile.TemporaryDirectory(prefix="drill-") as directory:
            folder = Path(directory)
            scenes = [self._scene(case, rank, attached, folder) for rank in range(job.WORLD)]
            began = time.monotonic()
            ranks = _fork(scenes, case.drill, deadline)
            try:
                hung, shot = _wait(ranks, scenes, case.drill.shot, self._latest_shot, deadline)
            finally:
                orphans = _end_groups(ranks)
            codes = [rank.exitcode for rank in ranks]
            return Played.collect(folder, codes, hung, orphans, shot, time.monotonic() - began)

    def _scene(self, case: Case, rank: int, attached: bool, folder: Path) -> Scene:
        drill, drawn = case.drill, _draw(case.seed, self._steps)
        return Scene(
            rank=rank,
            job=case.job,
            steps=self._scene_steps(drill),
            attached=attached,
            random=drawn.chance,
            folder=folder,
            target=drawn.target,
            leaves=drill.leaves,
            step=drawn.step,
            record={
                "dir": str(folder / "record"),
                "run_id": "drill",
                "granularity": "op",
                "flush_seconds": 0.05,
                "counter_seconds": 0.1,
                "native": drawn.native,
                "window": {"steps": 2 if drawn.window or drill.sites else 0, "start": 1, "request_seconds": 0.1},
            },
            sites=self.sites(case.job, drawn.native)[drawn.target] if drill.sites == "broken" else {},
        )


@dataclass(frozen=True)
class _Drawn:
    """What a case's seed decides."""

    chance: random.Random
    target: int
    step: int
    native: bool
    window: bool


def _draw(seed: int, steps: int) -> _Drawn:
    chance = random.Random(seed)
    target, step = chance.randrange(job.WORLD), chance.randrange(1, steps - 1)
    return _Drawn(chance, target, step, native=chance.random() < 0.5, window=chance.random() < 0.5)


def _must_have_finished(played: Played, what: str) -> None:
    if set(played.ended) != {"finished"}:
        raise RuntimeError(f"{what} did not run: {', '.join(played.ended)}\n" + "\n".join(played.outputs))


def _fork(scenes: list[Scene], drill: Drill, deadline: float) -> list[BaseProcess]:
    context = multiprocessing.get_context("fork")
    environment = {
        "WORLD_SIZE": str(len(scenes)),
        "LOCAL_WORLD_SIZE": str(len(scenes)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks: list[BaseProcess] = []
    gc.freeze()  # whoever goes through all objects would copy every page that the ranks share with us
    try:
        for scene in scenes:
            own = environment | {"RANK": str(scene.rank), "LOCAL_RANK": str(scene.rank)}
            process = context.Process(target=play, args=(scene, drill.fault, own, 0.9 * deadline))
            process.start()
            ranks.append(process)
    finally:
        gc.unfreeze()
    return ranks


def _wait(
    ranks: list[BaseProcess], scenes: list[Scene], shot: Shot | None, latest: float, deadline: float
) -> tuple[list[int], int | None]:
    """Return when every rank is gone: those that had to be ended at the deadline; when the first signal was sent."""
    sent: int | None = None
    chance = random.Random(scenes[0].random.random())
    deadline += time.monotonic()
    due = [] if shot is None else [(shot.number, chance.uniform(0, latest))]
    if shot is not None and shot.then is not None:
        due.append((shot.then, chance.uniform(0, 0.3)))
    armed, failed_at = scenes[0].folder / f"{scenes[0].target}.progress", 0.0
    while alive := [rank for rank in ranks if rank.is_alive()]:
        now = time.monotonic()
        if now > deadline:
            return [number for number, rank in enumerate(ranks) if rank.is_alive()], sent
        if due and armed.exists() and armed.stat().st_size > 0:
            number, delay = due.pop(0)
            time.sleep(delay)
            for process in ranks if shot is not None and shot.everyone else ranks[scenes[0].target :][:1]:
                _kill(process, number)
            sent = sent or time.perf_counter_ns()
            continue
        if not failed_at and any(rank.exitcode for rank in ranks):
            failed_at = now
        if failed_at and now > failed_at + _GRACE_SECONDS:  # as a launcher does
            for process in alive:
                _kill(process, signal.SIGTERM)
            failed_at = deadline
        wait([rank.sentinel for rank in alive], timeout=0.002 if due else 0.5)
    return [], sent


def _kill(process: BaseProcess, number: signal.Signals) -> None:
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _end_groups(ranks: list[BaseProcess]) -> list[int]:
    """Whatever a rank has started ends here; the ranks that left something running are named."""
    left: list[int] = []
    for number, rank in enumerate(ranks):
        was_alive = rank.is_alive()
        if was_alive:
            _kill(rank, signal.SIGKILL)
        rank.join()
        if not was_alive and _group_lives(rank.pid or 0):
            left.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid or 0, signal.SIGKILL)
    return left


def _group_lives(pid: int) -> bool:
    """Whether a process of the group still runs after a moment: what a rank started needs one to notice its end."""
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.01)
    return True
