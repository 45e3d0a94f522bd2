"""Drills once each, of a job drawn by a fixed seed; and the runner must notice what a broken hook could do, and nothing
else. ``make test`` has those marked as everyday."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from inject import at_site
from job import JOBS, MEGATRON
from plan import ALL_JOBS, Case, Drill
from runner import Runner
from scene import Fault, Scene

from drills import DRILLS

_CHANCE = random.Random(20)
CASES = [Case(drill, _CHANCE.choice(drill.jobs), _CHANCE.randrange(1 << 31)) for drill in DRILLS]


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(long_steps=40, latest_shot=0.4)


def _each(cases: Iterable[Case], everyday: Callable[[Case], bool]) -> pytest.MarkDecorator:
    params = [
        pytest.param(case, id=f"{case.drill.name} ({case.job})", marks=() if everyday(case) else pytest.mark.slow)
        for case in cases
    ]
    return pytest.mark.parametrize("case", params)


@_each(CASES, lambda case: case.drill.everyday)
def test_the_job_takes_no_notice(runner: Runner, case: Case) -> None:
    if case.drill.possible is not None and not case.drill.possible():
        pytest.skip("this machine cannot do it")
    verdict = runner.run(case)
    assert verdict.passed, f"{verdict.problems} {verdict.told}\n{verdict.output}"


@pytest.mark.parametrize("job", ["ddp", "pp2"])
def test_the_places_to_break_lie_in_every_part_of_trimtab(runner: Runner, job: str) -> None:
    engine = "MegatronEngine" if job in MEGATRON else "PlainEngine"
    for rank in runner.sites(job, native=False):
        parts = {site.partition(".")[0] for phase in rank.values() for site in phase}
        assert {engine, "Interception", "Works", "GcWatch", "LayerHooks", "SpanObserver", "Windows"} <= parts
        assert {"Writer", "Storage", "HostReadings"} <= {site.partition(".")[0] for site in rank["writer"]}


def test_every_job_has_drills_and_no_two_have_a_name() -> None:
    assert set(JOBS) == set(ALL_JOBS) == {job for drill in DRILLS for job in drill.jobs}
    assert len({drill.name for drill in DRILLS}) == len(DRILLS)


@_each((case for case in CASES if case.drill.ends), lambda case: case.drill.name == "SIGINT twice")
def test_without_trimtab_the_job_ends_as_it_is_to_end_with_it(runner: Runner, case: Case) -> None:
    problems = runner.run_bare(case)
    assert not problems, problems


# ------------------------------------------------- hooks that do what none may


def _in_a_hook(act: Callable[[], object]) -> Fault:
    """trimtab itself does this, once, somewhere in a step."""

    def fault(scene: Scene) -> None:
        at_site(scene, ("run",), act)

    return fault


def _change_a_weight() -> None:
    import gc

    gc.unfreeze()
    for module in gc.get_objects():
        if type(module) is torch.nn.Linear:
            module.weight.data += 1e-3


def _warn_twice() -> None:
    for number in range(2):
        logging.getLogger("trimtab").warning("trimtab: warning %d", number)


def _leave_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, name="trimtab-left", daemon=True).start()


def _leave_a_process() -> None:
    subprocess.Popen(["sleep", "60"])


def _print_a_traceback() -> None:
    sys.stderr.write("Exception ignored in: something of trimtab\n")


def _another_error(scene: Scene) -> None:
    def act() -> None:
        raise FloatingPointError if scene.attached else KeyError("the job's own")

    scene.when_due(act)


def _no_error(scene: Scene) -> None:
    """trimtab keeps the job's error to itself."""
    if not scene.attached:
        _another_error(scene)


def _an_error_of_its_own(scene: Scene) -> None:
    def act() -> None:
        raise RuntimeError("trimtab's own")

    if scene.attached:
        scene.when_due(act)


def _stop_recording(scene: Scene) -> None:
    scene.when_due(lambda: scene.session.recorder.close() if scene.attached else None)


BROKEN: dict[str, tuple[Drill, str]] = {
    "changes a weight": (Drill("", _in_a_hook(_change_a_weight), sites="broken"), "another loss"),
    "waits for ever": (Drill("", _in_a_hook(threading.Event().wait), sites="broken"), "hung"),
    "warns twice": (Drill("", _in_a_hook(_warn_twice), sites="broken"), "warned 2 times"),
    "leaves a thread": (Drill("", _in_a_hook(_leave_a_thread), sites="broken"), "other threads"),
    "leaves a process": (Drill("", _in_a_hook(_leave_a_process), sites="broken"), "a process behind"),
    "prints": (Drill("", _in_a_hook(_print_a_traceback), sites="broken"), "printed"),
    "ends the job": (Drill("", _an_error_of_its_own), "the job ended with"),
    "changes the job's error": (Drill("", _another_error, ends="KeyError"), "ended with FloatingPointError"),
    "keeps the job's error": (Drill("", _no_error, ends="KeyError"), "went on after"),
    "loses steps": (Drill("", _stop_recording, files="whole"), "lacks the steps"),
    "says nothing": (Drill("", _stop_recording, warns=(1, 1)), "kept silent"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_hook_is_noticed(runner: Runner, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drill, noticed = BROKEN[name]
    if name.startswith("leaves"):  # for as long as anybody waits for it to go
        monkeypatch.setattr("scene._PATIENCE", 50)
        monkeypatch.setattr("runner._ORPHAN_SECONDS", 0.5)
    problems = runner.run(Case(drill, "ddp", 3), deadline=4 if name == "waits for ever" else None).problems
    assert any(noticed in problem for problem in problems), problems
