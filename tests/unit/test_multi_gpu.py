"""What benchmarks/multi_gpu.py is made of, without a GPU: jobs of ranks that fail, and verdicts against the truth."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from multi_gpu import LATE, PARTS, TOTAL, shares
from multi_gpu_faults_rank import ONSET, SCENARIOS, STEPS
from multi_gpu_model import BILLION, Layout
from multi_gpu_part import JobError, Options, Report, markdown, run_job
from multi_gpu_recorder import layouts
from multi_gpu_verdicts import alarms, judged, told_by_watch

pytestmark = pytest.mark.timeout(60)
SECOND_NS = 10**9


def options(out: Path) -> Options:
    return Options(out, "cpu", 2, True, 60.0, ())


def script(folder: Path, text: str) -> str:
    path = folder / "rank.py"
    path.write_text("import os\nfrom multi_gpu_part import tell\nrank = int(os.environ['RANK'])\n" + text)
    return str(path)


def test_what_ranks_tell_comes_back_by_rank(tmp_path: Path) -> None:
    told = script(tmp_path, "tell({'first': rank})\ntell({'rank': rank, 'own': os.environ.get('OWN', '')})\n")
    found = run_job([told], options(tmp_path), timeout=50.0, per_rank=[{}, {"OWN": "yes"}])
    assert found == [{"rank": 0, "own": ""}, {"rank": 1, "own": "yes"}]


def test_a_rank_that_fails_ends_the_others_and_what_was_told_is_kept(tmp_path: Path) -> None:
    body = "tell(rank)\nif rank == 1:\n    raise ValueError('this one')\n"
    failing = script(tmp_path, body + "print('pid', os.getpid(), flush=True)\nos.read(os.pipe()[0], 1)\n")
    with pytest.raises(JobError, match="this one") as raised:
        run_job([failing], options(tmp_path), timeout=50.0)
    assert raised.value.results[1] == 1
    said = str(raised.value)
    if "pid " in said:  # it may have been ended before it came to that
        with pytest.raises(ProcessLookupError):
            os.kill(int(said.partition("pid ")[2].split()[0]), 0)


def test_a_job_that_outlasts_its_time_is_ended(tmp_path: Path) -> None:
    hanging = script(tmp_path, "os.read(os.pipe()[0], 1)\n")
    with pytest.raises(JobError, match="not done after 1 s"):
        run_job([hanging], options(tmp_path), timeout=1.0)


def test_a_report_is_on_disk_after_each_table_and_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("some", options(tmp_path))
    report.table("a table", ["x", "y"], [[1, "two"]])
    with report.attempt("a piece"):
        raise RuntimeError("went wrong")
    kept: dict[str, Any] = json.loads((tmp_path / "some.json").read_text())
    assert markdown(kept["tables"][0]).endswith("| x | y |\n|---|---|\n| 1 | two |\n")
    assert "went wrong" in kept["failures"][0]
    for rows in ([[2]], [[2], [3]]):
        report.table("it grows", ["x"], rows, grown=True)
    kept = json.loads((tmp_path / "some.json").read_text())
    assert [table["rows"] for table in kept["tables"]] == [[["1", "two"]], [["2"], ["3"]]]
    assert "Traceback" in capsys.readouterr().err


def test_pieces_are_run_as_asked_for_and_while_there_is_time(tmp_path: Path) -> None:
    asked = Options(tmp_path, "cpu", 2, True, 60.0, ("one",))
    assert Report("some", asked).wants("one")
    assert not Report("some", asked).wants("other")
    late = Report("some", Options(tmp_path, "cpu", 2, True, 0.0, ()))
    assert not late.wants("one")
    assert "time was up" in late.failures[0]


def finding(kind: str, *ranks: int) -> dict[str, Any]:
    return {"kind": kind, "ranks": list(ranks), "ratio": 1.3, "lost_ms": 5.0, "onset": 54}


@pytest.mark.parametrize(
    ("verdict", "findings", "due", "expected"),
    [
        ("healthy", [], "", "right"),
        ("healthy", [], "slow_rank", "WRONG"),
        ("inconclusive", [], "", "WRONG"),
        ("straggler", [finding("slow_rank", 1)], "slow_rank", "right"),
        ("straggler", [finding("slow_rank", 0)], "slow_rank", "WRONG"),
        ("straggler", [finding("slow_rank", 1)], "", "WRONG"),
        ("straggler", [finding("slow_link", 0, 1)], "slow_link", "right"),
        ("straggler", [finding("slow_rank", 1), finding("host_stall", 0)], "slow_rank", "right, and more"),
    ],
)
def test_a_verdict_is_right_if_it_is_the_truth_and_nothing_else(
    verdict: str, findings: list[dict[str, Any]], due: str, expected: str
) -> None:
    said = judged({"verdict": verdict, "findings": findings}, due, victim=1)
    assert said.endswith(f" - {expected}")
    assert said.startswith(verdict)


def alarm(kind: str, rank: int, step: int, seconds: float) -> dict[str, Any]:
    return {"event": "alarm", "step": step, "ranks": [rank], "unix_ns": int(seconds * 1e9), "alarm": {"kind": kind}}


def test_the_delay_of_an_alarm_counts_from_the_fault(tmp_path: Path) -> None:
    log = tmp_path / "own" / "trimtab-watch.jsonl"
    log.parent.mkdir()
    lines = [{"event": "note", "step": 1}, alarm("slow_rank", 1, 56, 101.5)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = alarms(tmp_path)
    assert told_by_watch(said, "slow_rank", 1, 100 * SECOND_NS, 54) == "slow_rank: step 3 of the fault, 1.50 s"
    assert told_by_watch(said, "host_stall", 1, 100 * SECOND_NS, 54) == "no alarm of this kind; also slow_rank"
    assert told_by_watch([alarm("slow_rank", 0, 50, 99)], "", 1, 100 * SECOND_NS, 54) == (
        "also slow_rank (1 before the onset)"
    )
    assert told_by_watch([], "", 1, 0, 54) == "no alarm"


def test_an_alarm_of_a_fault_that_was_always_there_is_not_early() -> None:
    said = [alarm("slow_rank", 1, 51, 106.0)]
    assert told_by_watch(said, "slow_rank", 1, 100 * SECOND_NS, 0) == "slow_rank: step 52 of the fault, 6.00 s"


@pytest.mark.parametrize("late", [0.0, 4.0, LATE], ids=["in time", "a little late", "as late as may be"])
def test_all_parts_together_keep_to_their_time_however_late_each_is(late: float) -> None:
    left, names = TOTAL, list(PARTS)
    for place, name in enumerate(names):
        seconds, grace = shares([PARTS[one] for one in names[place:]], left)
        assert seconds > 0.5 * PARTS[name], "a part comes to something even if those before it were late"
        left -= seconds + min(late, grace)
    assert left >= -1e-6
    assert TOTAL < 9 * 60 - 20  # to end the last one takes as long


def test_the_faults_that_were_never_measured_come_first_and_watch_has_learned_before_them() -> None:
    assert SCENARIOS[0].name == "collective"
    assert [one.name for one in SCENARIOS if one.mps] == [SCENARIOS[-1].name], "a job of its own, after the others"
    assert 50 < ONSET < STEPS - 10


def test_layouts_fit_their_worlds_and_the_model_is_large_enough() -> None:
    assert BILLION.parameters >= 1e9
    for world in (1, 2, 4, 8):
        found = layouts(world)
        assert all(layout.fits(world) for layout in found)
        assert Layout() in found
        assert len({layout.name(world) for layout in found}) == len(found)
    assert Layout(tp=2, pp=2, vpp=2).name(8) == "TP2 x PP2 x VPP2 x DP2"
