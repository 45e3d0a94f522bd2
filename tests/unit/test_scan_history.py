"""Months later: which step was slow, on which rank, and was it computation, communication or data?"""

from __future__ import annotations

from pathlib import Path

import pytest
from long_runs import Rank

from trimtab import cli
from trimtab.scan import analyze
from trimtab.scan.history import history
from trimtab.traces.read import read
from trimtab.traces.summaries import read_summaries

STEPS = 40


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks; step 10: rank 2 computes longer; 20: rank 1 waits for data; 30: all communicate longer."""
    folder = tmp_path_factory.mktemp("run")
    for number in range(4):
        rank = Rank(folder, number, 4, rotate_minutes=60, started=5)
        for step in range(STEPS):
            slow = {10: number == 2, 20: number == 1, 30: True}.get(step, False)
            compute, data, comm = 1.0, 0.5, 2.0
            if slow:
                compute, data, comm = {10: (5.0, data, comm), 20: (compute, 32.5, comm), 30: (compute, data, 34.0)}[
                    step
                ]
            elif step in (10, 20):
                comm += 32.0  # waits for the slow one
            rank.step(step, compute_ms=compute, data_ms=data, comm_ms=comm, seconds=301.0)
        rank.close()
    return folder


def without_detail(run: Path, target: Path, keep: int = 0) -> Path:
    """A copy with the last ``keep`` files of each rank's detail."""
    target.mkdir()
    of_rank = {rank: sorted(run.glob(f"rank{rank:05d}-*.trimtab.arrow")) for rank in range(4)}
    kept = [path for paths in of_rank.values() for path in paths[len(paths) - keep :]]
    for path in (*kept, *run.glob("*.summary.arrow")):
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_slow_steps_are_told_with_their_reason(run: Path) -> None:
    found = history(read_summaries(read(run).summaries))
    assert (found.steps, found.count) == ((0, STEPS - 1), STEPS)
    assert found.median_s == pytest.approx(0.0105)
    assert {(slow.step, slow.what, slow.ranks) for slow in found.slowest} == {
        (10, "compute", (2,)),
        (20, "data", (1,)),
        (30, "communication", ()),
    }
    assert all(slow.seconds == pytest.approx(0.0425) for slow in found.slowest)
    assert found.slow_ranks == ()


def test_a_rank_that_is_always_slow(tmp_path: Path) -> None:
    for number in range(3):
        rank = Rank(tmp_path, number, 3, started=5)
        for step in range(10):
            rank.step(step, compute_ms=1.5 if number == 1 else 1.0, comm_ms=2.0 if number == 1 else 6.0, seconds=301.0)
        rank.close()
    found = history(read_summaries(read(tmp_path).summaries))
    assert found.slowest == ()
    assert found.slow_ranks == ((1, pytest.approx(1.5)),)
    assert found.lines()[-1] == "rank 1 computes 1.50 times as long as the median rank"


def test_summaries_do_not_change_what_detail_says(run: Path, tmp_path: Path) -> None:
    detail = tmp_path / "detail"
    detail.mkdir()
    for path in run.glob("*.trimtab.arrow"):
        (detail / path.name).write_bytes(path.read_bytes())
    with_summaries, without = read(run), read(detail)
    assert with_summaries.events.equals(without.events)
    assert with_summaries.warnings == without.warnings == ()
    assert analyze(with_summaries).report.findings == analyze(without).report.findings


def test_a_thinned_run_says_which_steps_are_left(run: Path, tmp_path: Path) -> None:
    trace = read(without_detail(run, tmp_path / "thin", keep=2))
    first = trace.events["step"].min()
    assert isinstance(first, int)
    assert 10 < first < STEPS
    assert trace.warnings == (f"ranks 0-3: of the steps before {first} only summaries are left (scan --summaries)",)
    assert trace.events["event_id"].null_count() == 0
    report = analyze(trace).report
    assert report.job.steps >= 3
    assert trace.warnings[0] in report.warnings


def test_where_only_summaries_are_left_scan_says_so_and_what_they_say(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = without_detail(run, tmp_path / "all")
    trace = read(folder)
    assert trace.world_size == 4
    assert sorted(trace.ranks) == [0, 1, 2, 3]
    assert trace.groups == {"dp": (0, 1, 2, 3)}
    assert trace.warnings == ("ranks 0-3: only summaries are here, no events (scan --summaries)",)
    with pytest.raises(
        ValueError, match=r"^only summaries are left: .*steps 0 to 39 .*; step 10: 0.0425 s, for compute"
    ):
        analyze(trace)
    monkeypatch.setattr("sys.argv", ["trimtab", "scan", str(folder), "--summaries"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "steps 0 to 39 (40 recorded): a step took 0.0105 s in the median"
    assert "step 20: 0.0425 s, for data on rank 1" in out.splitlines()
    assert "only summaries" in err


def test_a_run_without_summaries_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = Rank(tmp_path)
    rank.step(0)
    rank.close()
    monkeypatch.setattr("sys.argv", ["trimtab", "scan", str(tmp_path), "--summaries"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "no summaries here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--json", "-"], ["--html", "x.html"], ["--perfetto", "x.json"], ["--save"], ["--what-if", "fix rank 1"]]
)
def test_what_takes_a_report_is_refused_beside_summaries(
    option: list[str], run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["trimtab", "scan", str(run), "--summaries", *option])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"trimtab: {option[0]} takes a scan's report")
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_sums_by_site(run: Path) -> None:
    trace = read(run)
    sites = read_summaries(trace.summaries).sites
    layers = sites.filter(kind="backward", layer=3, rank=2).sort("step").to_dicts()
    assert sum(row["count"] for row in layers) == STEPS
    assert max(row["max_ns"] for row in layers) == 5_000_000
    assert {row["max_step"] for row in layers if row["max_ns"] == 5_000_000} == {10}
    reduces = sites.filter(kind="collective", rank=0)
    assert reduces["group"].unique().to_list() == ["dp"]
    assert reduces["bytes"].sum() == STEPS * 4_096
    assert reduces["max_wait_ns"].max() == 1_000


def test_hostile_summaries_cost_a_line(run: Path, tmp_path: Path) -> None:
    folder = without_detail(run, tmp_path / "all")
    first, second, *_ = sorted(folder.iterdir())
    first.write_bytes(b"not arrow")
    second.write_bytes(second.read_bytes()[:6_000])
    trace = read(folder)
    assert sorted(trace.ranks) == [1, 2, 3]
    found = read_summaries((first, *trace.summaries))
    assert [text.count("\n") for text in found.warnings] == [0] * len(found.warnings)
    assert any("cannot be read" in text for text in found.warnings)
    assert history(found).count > 0


def test_no_steps_at_all() -> None:
    with pytest.raises(ValueError, match="hold no step"):
        history(read_summaries(()))
