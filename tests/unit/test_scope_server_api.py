"""What the API says of recordings, against what was recorded; and its description, against what it says."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from sample_reports import plots
from scope_server_parts import RANKS, STEPS, Site, frames, record, site, values

from trimtab.scan.report import plots_json
from trimtab.scope.frame import Frame, decode_all, encode, split
from trimtab.scope.recording.format import pack_file_head
from trimtab.scope.recording.recorder import Recorder
from trimtab.scope.server.api.frames import encoded
from trimtab.scope.server.api.series import _as_frames
from trimtab.scope.server.api.table import ENDPOINTS
from trimtab.scope.server.limits import Limits
from trimtab.scope.shards import join_pieces
from trimtab.scope.vector import derive, exponents_of, merge, vector_of

RUN = "/runs/clean"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two recorded runs, and a directory in which nothing is."""
    root = tmp_path_factory.mktemp("runs")
    record(root / "clean", "clean")
    record(root / "disturbed", "disturbed", noise=1e-3)
    (root / "empty").mkdir()
    (root / "clean" / "report.json").write_text(json.dumps({"verdict": "healthy"}))
    (root / "clean" / "report-plots.json").write_text(plots_json.to_json(plots()))
    alarm = {"kind": "slow_rank", "ranks": [3]}
    lines = [{"event": "alarm", "step": 7, "alarm": alarm}, {"event": "hang", "step": 9, "says": "<script>"}]
    (root / "clean" / "trimtab-watch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half')
    return root


@pytest.fixture(scope="module")
def shown(runs: Path) -> Generator[Site]:
    with site(runs / "clean", runs / "disturbed", runs / "empty") as found:
        yield found


@pytest.fixture(scope="module")
def run(shown: Site) -> str:
    """Path of the clean run."""
    return f"/runs/{next(name for name in shown.service.runs.names() if name.startswith('clean'))}"


@pytest.fixture(scope="module")
def other(shown: Site) -> str:
    return next(name for name in shown.service.runs.names() if name.startswith("disturbed"))


def whole(tap: str, step: int, ranks: tuple[int, ...] = tuple(range(RANKS))) -> Any:
    """Statistics of the tensor at a step."""
    vectors = [vector_of(values(tap, step, rank, microbatch)) for rank in ranks for microbatch in range(2)]
    return derive(*merge(vectors))


def test_a_series_is_that_of_the_whole_tensor(shown: Site, run: str) -> None:
    for statistic in ("rms", "mean", "std", "absmax", "kurtosis", "nan", "zero_share"):
        found = shown.get(f"{run}/series", tap="layers.1.output", statistic=statistic)
        assert found["bucket_steps"] == 1
        (series,) = found["series"]
        assert series["step"] == list(range(STEPS))
        expected = [getattr(whole("layers.1.output", step), statistic) for step in range(STEPS)]
        np.testing.assert_allclose(series["mean"], expected, rtol=1e-9)
        assert series["min"] == series["max"] == series["mean"]
        assert series["nan"] == [2 if step == 5 else 0 for step in range(STEPS)]


def test_a_thinned_series_keeps_every_peak(shown: Site, run: str) -> None:
    fine = shown.get(f"{run}/series", tap="layers.0.output", first=2, last=21)["series"][0]
    found = shown.get(f"{run}/series", tap="layers.0.output", first=2, last=21, buckets=3)
    coarse = found["series"][0]
    assert found["bucket_steps"] == 7
    assert coarse["step"] == [2, 9, 16]
    assert coarse["count"] == [7, 7, 6]
    for place, begin in enumerate((0, 7, 14)):
        part = fine["mean"][begin : begin + coarse["count"][place]]
        assert coarse["min"][place] == min(part)
        assert coarse["max"][place] == max(part)
        assert coarse["mean"][place] == pytest.approx(np.mean(part))


def test_ranks_are_shown_one_by_one(shown: Site, run: str) -> None:
    found = shown.get(f"{run}/series", tap="layers.0.output", by="rank", ranks="1,3", buckets=4000)["series"]
    assert [one["rank"] for one in found] == [1, 3]
    for one in found:
        expected = [whole("layers.0.output", step, (one["rank"],)).rms for step in range(STEPS)]
        np.testing.assert_allclose(one["mean"], expected, rtol=1e-9)
    grid = shown.get(f"{run}/grid", tap="layers.1.output", statistic="max", step=5)
    assert [one["rank"] for one in grid["ranks"]] == list(range(RANKS))
    assert [one["coordinates"] for one in grid["ranks"]] == [{"tp": r % 2, "dp": r // 2} for r in range(RANKS)]
    assert [one["nan"] for one in grid["ranks"]] == [0, 0, 2, 0]
    expected = [whole("layers.1.output", 5, (rank,)).max for rank in range(RANKS)]
    np.testing.assert_allclose([one["value"] for one in grid["ranks"]], expected, rtol=1e-9)


@pytest.mark.parametrize("reduce", ["mean", "max", "min"])
def test_matrices_of_layers_and_of_ranks(shown: Site, run: str, reduce: str) -> None:
    fold = {"mean": np.mean, "max": np.max, "min": np.min}[reduce]
    found = shown.get(f"{run}/matrix", pattern="layers.*.output", buckets=6, reduce=reduce)
    assert found["rows"] == ["layers.0.output", "layers.1.output"]
    assert found["columns"] == [0, 4, 8, 12, 16, 20]
    for row, tap in enumerate(found["rows"]):
        each = [whole(tap, step).rms for step in range(STEPS)]
        np.testing.assert_allclose(found["values"][row], [fold(each[at : at + 4]) for at in range(0, STEPS, 4)])
    by_rank = shown.get(f"{run}/matrix", pattern="layers.0.output", rows="ranks", ranks="3,0", buckets=6, reduce=reduce)
    assert by_rank["rows"] == [3, 0]
    each = [whole("layers.0.output", step, (3,)).rms for step in range(STEPS)]
    np.testing.assert_allclose(by_rank["values"][0], [fold(each[at : at + 4]) for at in range(0, STEPS, 4)])
    answer = shown.client.get(
        f"/api/v1{run}/matrix",
        params={"pattern": "layers.*.output", "buckets": 6, "reduce": reduce, "format": "binary"},
        headers=shown.headers,
    )
    assert answer.headers["content-type"] == "application/x-trimtab-frames"
    (frame,) = decode_all(answer.content)
    assert frame.meta["rows"] == found["rows"]
    np.testing.assert_allclose(frame.arrays["values"], found["values"], rtol=1e-6)
    assert frame.arrays["special"].tolist() == [[1] * 6, [1, 3, 1, 1, 1, 1]]


def test_a_matrix_says_where_there_is_nothing_and_where_nan(shown: Site, run: str) -> None:
    query = {"pattern": "layers.1.output", "rows": "ranks", "first": 4, "last": STEPS, "format": "binary"}
    answer = shown.client.get(f"/api/v1{run}/matrix", params=query, headers=shown.headers)
    (frame,) = decode_all(answer.content)
    expected = np.ones((RANKS, STEPS - 4 + 1), np.uint8)
    expected[2, 1], expected[:, -1] = 3, 0
    np.testing.assert_array_equal(frame.arrays["special"], expected)
    np.testing.assert_array_equal(np.isnan(frame.arrays["values"]), expected == 0)


def test_histograms_count_every_element_once(shown: Site, run: str) -> None:
    found = shown.get(f"{run}/histogram", tap="layers.0.mlp.output", buckets=8)
    assert found["columns"] == list(range(0, STEPS, 3))
    for column, step in enumerate(range(2, STEPS, 3)):  # the last step of each column
        x = np.abs(np.concatenate([values("layers.0.output", step, rank) for rank in range(RANKS)]))
        expected = np.histogram(np.floor(np.log2(x)), np.arange(-140, 140))[0]
        first = found["exponent"]
        assert found["counts"][column] == expected[first + 140 : first + 140 + len(found["counts"][column])].tolist()
        assert sum(found["counts"][column]) == RANKS * 32


def test_frames_at_a_step_or_the_last_before_it(shown: Site, run: str) -> None:
    found = shown.get(f"{run}/rows", tap="layers.0.output", step=7, format="json")
    assert found["step"] == 4
    assert [one["rank"] for one in found["frames"]] == list(range(RANKS))
    expected = values("layers.0.output", 4, 2)[:4].astype(np.float32).reshape(2, 2).tolist()
    assert found["frames"][2]["arrays"]["values"] == {"dtype": "float32", "shape": [2, 2], "values": expected}
    url = f"/api/v1{run}/frames"
    query = {"tap": "layers.0.output", "what": "rows", "step": 7, "ranks": "2"}
    answer = shown.client.get(url, params=query, headers=shown.headers)
    (frame,) = decode_all(answer.content)
    assert answer.headers["x-trimtab-step"] == "4"
    assert (frame.rank, frame.arrays["values"].tolist()) == (2, expected)
    film = {"tap": "layers.0.output", "what": "rows", "buckets": 3, "first": 0, "ranks": "1"}
    played = decode_all(shown.client.get(f"/api/v1{run}/film", params=film, headers=shown.headers).content)
    assert [one.step for one in played] == [4, 12, 20], "the last of each eight steps"
    together = shown.get(f"{run}/frames", tap="layers.0.output", what="statistics", whole="true", format="json", step=3)
    n = [frame["arrays"]["vector"]["values"][0] for frame in together["frames"]]
    assert n == [RANKS * 32] * 2, "one for each microbatch"
    assert shown.get(f"{run}/steps", tap="layers.0.output", what="rows")["steps"] == list(range(0, STEPS, 4))
    assert shown.get(f"{run}/steps", first=20)["steps"] == [20, 21, 22, 23]


def test_two_runs_part_where_they_were_made_to(shown: Site, run: str, other: str) -> None:
    query = {"a": run.removeprefix("/runs/"), "b": other, "statistic": "mean"}
    found = shown.get("/compare", tap="layers.1.output", **query)
    assert (found["parts_at"], found["steps"], found["steps_apart"]) == (10, STEPS, STEPS - 10)
    np.testing.assert_allclose(found["difference"]["mean"][10:], 1e-3, rtol=1e-6)
    assert found["difference"]["mean"][:10] == [0.0] * 10
    assert shown.get("/compare", tap="layers.1.output", tolerance="0.9", **query)["parts_at"] is None
    taps = shown.get("/compare/taps", pattern="layers.*.output", **query)
    assert taps["parts_at"] == 10
    assert [one["parts_at"] for one in taps["taps"]] == [None, 10]
    assert taps["taps"][1]["largest"] == pytest.approx(1e-3)


def test_a_run_that_was_killed_within_a_step_is_compared_up_to_it(tmp_path: Path) -> None:
    sent = list(frames(STEPS))
    last = [frame for frame in sent if frame.step == STEPS - 1 and frame.what == "statistics"]
    gone = [frame for frame in last if frame.microbatch == 1 or frame.rank == 3]
    record(tmp_path / "full")
    record(tmp_path / "killed", others=[frame for frame in sent if not any(frame is one for one in gone)])
    with site(tmp_path / "full", tmp_path / "killed") as both:
        a, b = (run["name"] for run in both.get("/runs")["runs"])
        found = both.get("/compare", a=a, b=b, tap="layers.0.output")
        assert (found["parts_at"], found["steps"], found["last"], found["unfinished"]) == (
            None,
            STEPS - 1,
            STEPS - 2,
            1,
        )
        table = both.get("/compare/taps", a=a, b=b)
        assert table["parts_at"] is None
        unfinished = {one["tap"]: (one["steps"], one["unfinished"]) for one in table["taps"]}
        assert unfinished["layers.1.output"] == (STEPS - 1, 1)
        assert unfinished["layers.0.mlp.output"] == (STEPS, 0)  # all of it had come


def test_exports_hold_every_step(shown: Site, run: str) -> None:
    def fetch(path: str, **query: Any) -> Any:
        answer = shown.client.get(f"/api/v1{run}{path}", params=query, headers=shown.headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-disposition"].startswith('attachment; filename="clean')
        return answer

    lines = list(csv.reader(io.StringIO(fetch("/export", pattern="layers.*.output", first=3).text)))
    assert lines[0] == ["step", "layers.0.output", "layers.1.output"]
    assert [int(line[0]) for line in lines[1:]] == list(range(3, STEPS))
    assert float(lines[1][2]) == pytest.approx(whole("layers.1.output", 3).rms)
    archive = np.load(io.BytesIO(fetch("/export", pattern="layers.*.output", format="npz").content), allow_pickle=False)
    assert archive["taps"].tolist() == ["layers.0.output", "layers.1.output"]
    assert archive["values"].shape == (STEPS, 2)
    ranks = fetch("/export", pattern="layers.1.output", by="rank", ranks="1,3", statistics="max,nan", last=6)
    assert ranks.headers["content-disposition"].endswith('-layers.1.output-max-nan.csv"')
    lines = list(csv.reader(io.StringIO(ranks.text)))
    of = [f"layers.1.output {statistic}{rank}" for statistic in ("max", "nan") for rank in ("", " rank 1", " rank 3")]
    assert lines[0] == ["step", *of]
    assert len(lines) == 8
    largest = max(values("layers.1.output", 4, 3, microbatch).max() for microbatch in range(2))
    assert float(lines[5][3]) == pytest.approx(largest)
    assert [line[4] for line in lines[5:7]] == ["0.0", "2.0"]  # of both microbatches of step 5, on another rank
    assert shown.refused(f"{run}/export", pattern="**", statistics="rms,most")[0] == 400
    arrays = np.load(io.BytesIO(fetch("/export/frames", tap="layers.0.output", what="rows", step=8).content))
    np.testing.assert_array_equal(
        arrays["rank1.microbatch0.values"].ravel(), values("layers.0.output", 8, 1)[:4].astype(np.float32)
    )


def test_runs_notices_report_and_the_log_of_watch(shown: Site, run: str) -> None:
    listed = {one["name"]: one for one in shown.get("/runs")["runs"]}
    assert sorted(one["label"] for one in listed.values()) == ["", "clean", "disturbed"]
    assert listed[run.removeprefix("/runs/")]["last_step"] == STEPS - 1
    assert listed["empty"]["error"] == "nothing is recorded there yet"
    known = {one["directory"]: (one["recorded"], one["report"]) for one in listed.values()}
    assert known == {"clean": (True, True), "disturbed": (True, False), "empty": (False, False)}
    paths = [Path(one["path"]) for one in listed.values()]
    assert [path.name for path in paths] == [one["directory"] for one in listed.values()]
    assert all(path.is_dir() and path.is_absolute() for path in paths)
    assert Path(shown.get("/session")["directory"]) in paths
    assert shown.refused("/runs/empty/taps") == (422, "empty: nothing is recorded there yet")
    assert shown.get(f"{run}/notices")["notices"][0]["text"] == "<b>step</b>"
    assert shown.get(f"{run}/notices", first=4)["notices"] == []
    assert shown.get(f"{run}/report") == {"verdict": "healthy"}
    assert "trimtab scan" in shown.refused("/runs/empty/report")[1]
    watched = shown.get(f"{run}/watch")
    assert watched["alarms"] == [{"kind": "slow_rank", "ranks": [3]}]
    assert watched["hangs"]["says"] == "<script>"
    assert shown.get("/runs/empty/watch")["there"] is False
    assert shown.get(f"{run}/audit") == {"audit": []}


@pytest.mark.parametrize(
    ("path", "query", "status", "says"),
    [
        ("/series", {"tap": "layer.0.output"}, 404, "close to it"),
        ("/series", {"tap": "layers.*.output"}, 400, "no pattern"),
        ("/series", {}, 400, "tap is missing"),
        ("/series", {"tap": "layers.0.output", "statistic": "means"}, 400, "expected one of"),
        ("/series", {"tap": "layers.0.output", "bucket": 3}, 400, "buckets?"),
        ("/series", {"tap": "layers.0.output", "first": "-1"}, 400, "whole number"),
        ("/series", {"tap": "layers.0.output", "first": 9, "last": 3}, 400, "before"),
        ("/series", {"tap": "layers.0.output", "ranks": "3-1"}, 400, "ranks"),
        ("/series", {"tap": "layers.0.output", "buckets": 10**9}, 400, "from 1 to"),
        ("/series", {"tap": ["layers.0.output", "layers.1.output"]}, 400, "twice"),
        ("/tiles", {"tap": "layers.0.output"}, 404, "subscribe"),
        ("/rows", {"tap": "layers.0.output", "whole": "perhaps"}, 400, "true or false"),
        ("/matrix", {"pattern": "layers.{"}, 400, "braces"),
        ("/matrix", {"pattern": "nothing.**"}, 404, "no tap matches"),
        ("/export", {"pattern": "layers.9-0"}, 400, "ends before"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(
    shown: Site, run: str, path: str, query: dict[str, Any], status: int, says: str
) -> None:
    code, line = shown.refused(f"{run}{path}", **query)
    assert (code, says in line) == (status, True), line
    assert "\n" not in line


ODD = ("", "0", "-1", "7", "9007199254740991", "99999999999999999", "1e3", "0-4095", "**", "layers.*.output", "logits")
ODDER = (
    "layers.0.output",
    "..",
    "a b",
    "\0",
    "\ud7ff",
    "{a,b}" * 40,
    "[",
    "<b>",
    "true",
    "json",
    "binary",
    "rank",
    "٣",
    "raw",
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_nothing_that_is_asked_breaks_the_server(shown: Site, run: str, data: st.DataObject) -> None:
    """The client raises what a handler does."""
    endpoint = data.draw(st.sampled_from([one for one in ENDPOINTS if one.method == "GET" and "{run}" in one.path]))
    names = [one.name for one in endpoint.parameters if one.where == "query"]
    likely = {"tap": "layers.0.output", "pattern": "layers.**", "what": "rows"}
    usual = {name: st.just(likely.get(name, "")) for name in names}
    query = {name: data.draw(usual[name] | st.sampled_from(ODD + ODDER) | usual[name]) for name in names}
    shown.clock.now += 10.0
    answer = shown.client.get(
        f"/api/v1{endpoint.path.replace('/runs/{run}', run)}", params=query, headers=shown.headers
    )
    assert answer.status_code < 500
    if answer.status_code >= 400:
        assert list(answer.json()) == ["error"]


def test_unknown_runs_and_answers_that_would_be_too_large(runs: Path) -> None:
    with site(runs / "clean", limits=Limits(cells=100, binary_bytes=200)) as shown:
        assert shown.refused("/runs/<script>/taps")[0] == 404
        name = shown.service.runs.names()[0]
        for path, query in (
            ("series", {"tap": "layers.0.output"}),
            ("matrix", {"pattern": "layers.0.output", "rows": "ranks", "buckets": 4000, "first": 0, "last": 900}),
            ("frames", {"tap": "layers.0.output"}),
            ("export", {"pattern": "**"}),
        ):
            code, line = shown.refused(f"/runs/{name}/{path}", **query)
            assert code == 413, line
        assert shown.get(f"/runs/{name}/series", tap="layers.0.output", buckets=10)["bucket_steps"] == 3


def test_recordings_that_cannot_be_read_are_shown_as_such(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "scope"
    record(tmp_path / "run")
    (folder / "newer-00000.ttscope").write_bytes(pack_file_head({"recording": "newer"}, version=9))
    (folder / "nonsense-00000.ttscope").write_bytes(b"what is this? " * 10)
    whole_file = next(folder.glob("2*.ttscope"))
    (folder / "half-00000.ttscope").write_bytes(whole_file.read_bytes()[:-2000])
    (tmp_path / "run" / "report.json").write_text("{")
    with site(tmp_path / "run") as shown:
        found = {one["name"].removeprefix("run."): one for one in shown.get("/runs")["runs"]}
        assert "newer trimtab" in found["newer"]["error"]
        assert str(tmp_path) not in found["newer"]["error"]
        assert found["nonsense"]["error"]
        assert found["half"]["error"] == ""
        assert shown.refused("/runs/run.newer/taps")[0] == 422
        assert shown.get("/runs/run.half/taps")["taps"]
        assert shown.refused("/runs/run.half/report")[0] == 422


def test_chunk_files_may_lie_anywhere(tmp_path: Path) -> None:
    record(tmp_path / "run", steps=2)
    copies = tmp_path / "run copies"
    (tmp_path / "run" / "scope").rename(copies)
    with site(copies, tmp_path / "run") as shown:
        names = [one["name"] for one in shown.get("/runs")["runs"]]
        assert [name.partition(".")[0] for name in names] == ["run_copies", "run"]
        assert shown.get(f"/runs/{names[0]}/steps")["steps"] == [0, 1]


def test_what_is_appended_is_seen(tmp_path: Path) -> None:
    with site(tmp_path) as shown:
        name = tmp_path.name
        assert shown.get("/runs")["runs"][0]["error"]
        record(tmp_path, "first", steps=3)
        shown.clock.now += 1
        (first,) = shown.get("/runs")["runs"]
        assert (first["name"].startswith(f"{name}."), first["last_step"]) == (True, 2)
        chunk = next((tmp_path / "scope").glob("*.ttscope"))
        assert shown.get(f"/runs/{first['name']}/series", tap="layers.0.output")["last"] == 2
        record(tmp_path / "more", steps=30)
        more = next((tmp_path / "more" / "scope").glob("*.ttscope"))
        chunk.with_name(chunk.name.replace("-00000", "-00001")).write_bytes(more.read_bytes())
        shown.clock.now += 1
        found = shown.get(f"/runs/{first['name']}/series", tap="layers.0.output", first=0, last=29)
        assert found["series"][0]["step"] == list(range(30))
        assert shown.get(f"/runs/{first['name']}/steps", tap="layers.0.output")["steps"] == list(range(30))


def test_a_text_that_was_generated(tmp_path: Path) -> None:
    """What was said last counts; what makes no sense is left out."""
    (tmp_path / "scope").mkdir()
    recorder = Recorder(tmp_path / "scope", "generate", 0, lambda notice: pytest.fail(notice.text))
    with site(tmp_path) as shown:
        recorder.note("generate", {"prompt": "a b", "model": {}, "sampling": {}})
        recorder.note("tokens", {"labels": ["a", " b"], "prompt": 2})
        recorder.frame(split(encode(Frame("logits", "nexttoken", "1", 0, 0, 0, arrays={"ids": np.zeros((1, 1))})))[0])
        recorder.note("tokens", {"labels": ["a", " b", "<img>", 7], "prompt": 2})
        recorder.close()
        (run,) = shown.service.runs.names()
        found = shown.get(f"/runs/{run}/text")
        assert found == {"generated": True, "prompt": "a b", "prompt_tokens": 2, "tokens": ["a", " b", "<img>", ""]}


def test_a_run_of_a_job_has_no_text(shown: Site, run: str) -> None:
    assert shown.get(f"{run}/text") == {"generated": False, "prompt": "", "prompt_tokens": 0, "tokens": []}


def test_what_two_subscriptions_asked_for_counts_once(tmp_path: Path) -> None:
    x = values("logits", 0, 0)
    arrays = {"vector": vector_of(x), "shift": np.zeros(1)}
    counts = {"exponents": exponents_of(x)}
    asked_for = [("statistics", "s-1", arrays), ("statistics", "s-2", arrays), ("histogram", "s-3", arrays | counts)]
    record(
        tmp_path,
        others=[
            Frame("logits", what, name, step, 0, 0, (), 0, of) for step in range(3) for what, name, of in asked_for
        ],
    )
    with site(tmp_path) as shown:
        run = f"/runs/{shown.service.runs.names()[0]}"
        assert shown.get(f"{run}/series", tap="logits", statistic="n")["series"][0]["mean"] == [len(x)] * 3
        assert [cell["value"] for cell in shown.get(f"{run}/grid", tap="logits", statistic="n")["ranks"]] == [len(x)]
        found = shown.get(f"{run}/histogram", tap="logits")
        assert [sum(column) for column in found["counts"]] == [len(x)] * 3


def test_frames_that_are_too_long_come_in_pieces() -> None:
    arrays = {"tiles": np.arange(2_000_000, dtype=np.uint32).reshape(4, -1), "scale": np.ones(2, np.float32)}
    frame = Frame("layers.0.output", "tiles", "s-1", 3, 0, 0, (("dp", 1, 2),), 0, arrays, {"labels": ["s"]})
    pieces = decode_all(b"".join(encoded(frame)))
    assert len(pieces) > 8
    (whole_frame,) = join_pieces(pieces)
    assert whole_frame.meta == frame.meta
    for name, array in arrays.items():
        np.testing.assert_array_equal(whole_frame.arrays[name], array)


def test_large_matrices_come_in_several_frames() -> None:
    values = np.arange(600 * 400, dtype=np.float32).reshape(600, 400)
    special = (values % 7).astype(np.uint8)
    found = decode_all(b"".join(_as_frames({"rows": list(range(600)), "last": 9}, values, special)))
    assert len(found) > 1
    assert [one.meta["first_row"] for one in found] == [
        0,
        *np.cumsum([len(one.arrays["values"]) for one in found])[:-1],
    ]
    for name, expected in (("values", values), ("special", special)):
        np.testing.assert_array_equal(np.concatenate([one.arrays[name] for one in found]), expected)


# ------------------------------------------------------------------ the description


def asked() -> dict[str, dict[str, Any]]:
    """Queries with which every endpoint that is read from answers something, by operationId."""
    tap, pattern = {"tap": "layers.0.output"}, {"pattern": "layers.*.output"}
    return {
        "openapi": {},
        "health": {},
        "session": {},
        "status": {},
        "subscriptions": {},
        "perturbations": {},
        "pairs": {},
        "runs": {},
        "run": {},
        "recordedTaps": {},
        "recordedSubscriptions": {},
        "generatedText": {},
        "notices": {},
        "recordedAudit": {},
        "report": {},
        "reportPlots": {},
        "watchLog": {},
        "series": {**tap, "by": "rank", "buckets": 7},
        "matrix": {**pattern, "buckets": 5},
        "grid": {**tap, "step": 5},
        "steps": tap,
        "histogram": {"tap": "layers.0.mlp.output"},
        "rows": {**tap, "format": "json"},
        "frames": {**tap, "format": "json"},
        "compare": {**tap, "a": "RUN", "b": "OTHER"},
        "compareTaps": {**pattern, "a": "RUN", "b": "OTHER"},
        "export": pattern,
        "exportFrames": tap,
        "film": {**tap, "what": "rows"},
    }


NO_JOB = ("taps", "watch", "watchSteps", "audit", "paired", "tiles", "attention", "pca", "tokens", "raw", "nexttoken")
"""Answered 503 or 404 here: there is no job, and no such frames."""


def test_every_endpoint_is_described_and_says_what_it_promises(shown: Site, run: str, other: str) -> None:
    document = shown.get("/openapi.json")
    assert document["openapi"] == "3.1.0"
    read = asked()
    names = {"RUN": run.removeprefix("/runs/"), "OTHER": other}
    for endpoint in ENDPOINTS:
        operation = document["paths"][f"/api/v1{endpoint.path}"][endpoint.method.lower()]
        assert operation["operationId"] == endpoint.name
        for parameter in operation["parameters"]:
            Draft202012Validator.check_schema(parameter["schema"])
        for media in (one for answer in operation["responses"].values() for one in answer["content"].values()):
            if "$ref" not in media["schema"]:
                Draft202012Validator.check_schema(media["schema"])
        if "requestBody" in operation:
            Draft202012Validator.check_schema(operation["requestBody"]["content"]["application/json"]["schema"])
        if endpoint.method != "GET":
            assert any(one["name"] == "x-trimtab" for one in operation["parameters"])
            continue
        path = endpoint.path.replace("{run}", names["RUN"]).replace("{id}", "p-1")
        query = {
            name: names.get(value, value) for name, value in read.get(endpoint.name, {"tap": "layers.0.output"}).items()
        }
        if endpoint.name in NO_JOB:
            query = {} if "{run}" not in endpoint.path else query
            answer = shown.client.get(f"/api/v1{path}", params=query, headers=shown.headers)
            assert str(answer.status_code) in operation["responses"], endpoint.name
            Draft202012Validator(document["components"]["schemas"]["Error"]).validate(answer.json())
            continue
        answer = shown.client.get(f"/api/v1{path}", params=query, headers=shown.headers)
        assert answer.status_code == endpoint.status, (endpoint.name, answer.text)
        media = answer.headers["content-type"]
        content = operation["responses"][str(endpoint.status)]["content"]
        assert media in content, (endpoint.name, media)
        if media == "application/json":
            Draft202012Validator(content[media]["schema"]).validate(answer.json())
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert described == {(f"/api/v1{one.path}", one.method.lower()) for one in ENDPOINTS} | {("/api/v1/live", "get")}
    assert len({one.name for one in ENDPOINTS}) == len(ENDPOINTS)
