"""``trimtab scope`` by command line, in this process, beside ranks that behave as those of a job do."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from scope_job import FakeRank, connected, wait

from trimtab import cli
from trimtab.control.rendezvous import RENDEZVOUS_FILE
from trimtab.scope.collector.ending import has_ended
from trimtab.scope.commands import common, pictures
from trimtab.scope.commands.common import number, ranges, table
from trimtab.scope.frame import Frame, encode, split
from trimtab.scope.recording.recorder import Chunks
from trimtab.scope.shards import merge_frames
from trimtab.scope.vector import exponents_of, vector_of

SECRET = "a secret that is long enough"
WORLD = 4


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command; its exit code, what it wrote to stdout, and what to stderr."""
    monkeypatch.setenv("TRIMTAB_CONTROL_SECRET", SECRET)
    monkeypatch.setenv("TRIMTAB_CONTROL_TRANSPORT", "tcp")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trimtab", "scope", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return run


class Trainer(threading.Thread):
    """Ranks that join whatever hub there is, and train as long as it is there."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.ranks = [FakeRank(rank, WORLD, page=100, seconds_per_step=0.01) for rank in range(WORLD)]
        self._directory = directory
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            gone = any(rank.client is None or rank.client.ended for rank in self.ranks)
            if gone and (self._directory / RENDEZVOUS_FILE).exists():
                for rank in self.ranks:
                    rank.close()
                connected(self._directory, {"TRIMTAB_CONTROL_SECRET": SECRET}, self.ranks)
            for rank in self.ranks:
                rank.train(2)
            self._over.wait(0.002)

    def close(self) -> None:
        self._over.set()
        self.join(10)
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def trainer(tmp_path):
    found = Trainer(tmp_path)
    found.start()
    yield found
    found.close()


@pytest.fixture
def job(tmp_path, trainer):
    assert trainer.is_alive()
    return tmp_path


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_taps_and_status(command, job):
    code, out, _ = command("taps", job, "layers.**")
    assert code == 0
    assert out.splitlines() == [
        "tap                          kind        shape on a rank  dtype    cut over  heads  ranks",
        "layers.0-3.attention.output  activation  s=4 b=1 h=8      float32  tp2                0-3",
        "layers.0-3.mlp.hidden        activation  s=4 b=1 h=8      float32  tp2                0-3",
        "layers.0-3.output            activation  s=4 b=1 h=8      float32                     0-3",
    ]
    code, out, _ = command("taps", job, "layers.3.output", "--all", "--json", "-")
    (found,) = json.loads(out)
    assert (found["name"], list(found["on"])) == ("layers.3.output", ["2", "3"])
    code, out, _ = command("status", job)
    assert code == 0
    assert out.startswith("live: step ")
    assert "; 4 ranks\noverhead of scope: 0.10% at most; frames dropped: 0\n" in out


def test_stream_as_a_table_as_json_into_a_recording_and_for_numpy(command, job, tmp_path):
    npz = tmp_path / "found.npz"
    code, out, err = command("stream", job, "--tap", "layers.{0,2}.mlp.hidden", "--for", 2, "--record", "--npz", npz)
    assert code == 0, err
    head, *rows = out.splitlines()
    assert head.split() == [*("step", "mb", "tap"), *pictures.COLUMNS[:-1], "zeros"]
    assert len(rows) == 4
    assert {row.split()[2] for row in rows} == {"layers.0.mlp.hidden", "layers.2.mlp.hidden"}
    assert all(row.split()[3] == "64" for row in rows)
    assert "statistics of layers.{0,2}.mlp.hidden (2 taps) from step" in err
    steps = sorted({row.split()[0] for row in rows})
    with np.load(npz) as arrays:
        assert f"layers.0.mlp.hidden/{steps[0]}/0/vector" in arrays.files

    code, out, _ = command("show", job, "--tap", "layers.0.mlp.hidden", "--json", "-")
    shown = lines_of(out)
    assert [str(one["step"]) for one in shown][:2] == steps
    code, out, _ = command("show", job)
    assert code == 0
    assert "layers.2.mlp.hidden  statistics" in out
    code, out, _ = command("show", job, "--tap", "layers.0.*.hidden", "--steps", f"{steps[0]}-{steps[1]}", "--notices")
    assert [line.split()[0] for line in out.splitlines()[:4]] == ["layers.0.mlp.hidden", "step", *steps]

    code, out, _ = command("stream", job, "--tap", "layers.1.output", "--for", 1, "--json", "-")
    (one,) = lines_of(out)
    assert (one["tap"], one["missing"], one["statistics"]["n"]) == ("layers.1.output", [], 32)


def test_perturb_status_expire_and_audit(command, job, trainer):
    flip = ("--tap", "layers.1.output", "--kind", "bit-flip", "--bits", "14,sign", "--for", 3)
    code, out, _ = command("perturb", job, *flip, "--dry-run")
    assert code == 0
    assert "rank 0: 1 element of layers.1.output (float32)" in out
    code, out, _ = command("perturb", job, *flip, "--json", "-")
    agreed = json.loads(out)
    assert (agreed["event"], agreed["ranks"], agreed["parameters"]["bits"]) == ("agreed", [0, 1], [14, "sign"])
    wait(lambda: all(rank.active for rank in trainer.ranks[:2]), "it is in force")
    code, out, _ = command("status", job)  # another collector: it asks the ranks
    assert f"perturbation {agreed['id']}: bit-flip of layers.1.output" in out
    code, out, err = command("revert", job, agreed["id"])
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"{agreed['id']}: rank {rank}: reverted" for rank in (0, 1)]
    code, _, err = command("expire", job, "p-0000")
    assert (code, err) == (2, "trimtab: 'p-0000': no perturbation of that name; there is none\n")

    entry = {"unix_ns": 1, "rank": 0, "event": "activated", "perturbation": "p-1", "step": 120, "microbatch": 1}
    entry |= {"text": "flips bit 14", "old_bits": ["0x3f80"], "new_bits": ["0x7f80"]}
    (job / "scope" / "audit-r0.jsonl").write_text(json.dumps(entry) + "\n")
    code, out, _ = command("audit", job)
    assert out == "rank 0, step 120, microbatch 1: p-1 activated: flips bit 14 (0x3f80 to 0x7f80)\n"
    assert command("audit", job, "--id", "p-2", "--json", "-")[1] == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("stream", "RUN", "--tap", "layers.9.output"), "no tap matches 'layers.9.output'; close to it: layers.0-3."),
        (("stream", "RUN", "--tap", "layers.3.output", "--ranks", "0"), "no tap matches .* it is on rank 2, 3"),
        (("stream", "RUN", "--tap", "layers.3.output", "--steps", "1-2"), "step 2 is over: the job is at step"),
        (("perturb", "RUN", "--tap", "layers.3.output", "--kind", "zero", "--steps", "1-2"), "step 1 is over or too"),
        (("perturb", "RUN", "--tap", "x", "--kind", "zero", "--dry-run"), "no tap matches 'x'"),
        (("attention", "RUN", "--layer", "7"), "no tap matches"),
        (
            ("stream", "RUN", "--tap", "layers.3.output", "--what", "attention"),
            "layers.3.output has no attention map; --what statistics, .* can be had of it",
        ),
        (
            ("paired", "RUN", "--tap", "layers.1.output", "--kind", "zero", "--compare", "no", "--longest", 3),
            "no tap matches 'no'",
        ),
        (("unknown", "RUN"), "No such command"),
    ],
)
def test_what_a_job_refuses_is_one_line(command, job, arguments, says):
    code, _, err = command(*(job if word == "RUN" else word for word in arguments))
    assert code == 2
    *_, last = err.splitlines()
    assert last.startswith("trimtab: ")
    assert re.search(says, err), err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("taps", "NO"), "no such directory; give record.dir of the job"),
        (("taps", "RUN", "--wait", "0.1"), "no rank of a job has answered within 0.1 s; is it running, with trimtab"),
        (("taps", "RUN", "--json", "x"), "--json x: it is written as it comes, so give - and redirect stdout"),
        (("stream", "RUN", "--tap", "x", "--what", "tilez"), "--what is to be one of .*; tiles\\?"),
        (("stream", "RUN", "--tap", "x", "--grid", "8"), "--grid '8'"),
        (("stream", "RUN", "--tap", "x", "--npz", "/nowhere/x.npz"), "there is no directory /nowhere"),
        (("stream", "RUN"), r"Missing option '--tap' \(see trimtab scope stream --help\)"),
        (("perturb", "RUN", "--tap", "x", "--kind", "flip"), "--kind is to be one of .*; bit-flip\\?"),
        (("perturb", "RUN", "--tap", "x", "--kind", "zero", "--steps", "5-"), "give its last step, too"),
        (("perturb", "RUN", "--tap", "x", "--kind", "gaussian"), "std"),
        (("perturb", "RUN", "--tap", "x", "--kind", "zero", "--for", "0"), "--for 0: at least 1 step"),
        (("stream", "RUN", "--tap", "x", "--for", "0"), "--for 0: at least 1 step"),
        (("attention", "RUN", "--layer", "0", "--for", "-1"), "--for -1: at least 1 step"),
        (("probe", "RUN", "--ids", "1", "--for", "0"), "--for 0: at least 1 run"),
        (("paired", "RUN", "--tap", "x", "--kind", "zero", "--at", "9"), "step 9 is not one of the pair's"),
        (("show", "RUN"), "nothing is recorded there"),
        (("show", "NO"), "no such directory"),
        (("audit", "NO"), "no such directory"),
        (("compare", "RUN", "RUN"), "nothing is recorded there"),
    ],
)
def test_without_a_job(command, tmp_path, arguments, says):
    places = {"RUN": tmp_path, "NO": tmp_path / "no"}
    code, out, err = command(*(places.get(word, word) for word in arguments))
    assert (code, out) == (2, "")
    assert re.search(says, err), err
    assert all(line.startswith(("trimtab: ", "waiting")) for line in err.splitlines())


def failing(rank: FakeRank, why: str) -> None:
    """It measures nothing, and says why."""
    apply = rank._apply

    def applied(change):
        apply(change)
        if change["kind"] == "subscribe":
            rank.notice("error", subscription=change["body"]["id"], text=why, step=rank.step)

    rank._apply = applied
    rank._frames = list


@pytest.mark.parametrize("more", [(), ("--for", "2")])
def test_what_fails_on_all_ranks_ends_the_command(command, job, trainer, more):
    for rank in trainer.ranks:
        failing(rank, "entry 9 of the batch is not there, it has 2")
    code, out, err = command("stream", job, "--tap", "layers.1.output", *more)
    assert (code, out) == (2, "")
    agreed, last = err.splitlines()
    name = agreed.partition(":")[0]
    assert last == f"trimtab: {name}: entry 9 of the batch is not there, it has 2"
    wait(lambda: not any(rank.active or rank.due for rank in trainer.ranks), "the subscription is ended on the ranks")


def test_what_fails_on_one_rank_is_said_and_the_others_go_on(command, job, trainer):
    failing(trainer.ranks[0], "no memory")
    code, out, err = command("stream", job, "--tap", "layers.1.output", "--for", "1", "--json", "-")
    assert code == 0, err
    assert len(lines_of(out)) == 1
    assert err.splitlines()[-1] == "trimtab: rank 0: no memory"


def test_what_never_comes_is_said(command, job, trainer, monkeypatch):
    from trimtab.scope.commands import waiting

    monkeypatch.setattr(waiting, "FEWEST_SECONDS", 0.1)
    for rank in trainer.ranks:
        rank._frames = list
    code, out, err = command("stream", job, "--tap", "layers.1.output", "--what", "rows", "--rows", "90", "--for", "1")
    assert (code, out) == (2, "")
    assert re.search(r"trimtab: s-\w+: steps \d+-\d+ were due, and nothing came of rows of layers.1.output", err), err
    assert err.endswith("; is there no such row?\n")


def test_a_job_that_has_ended_is_not_waited_for(command, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "_PATIENCE_SECONDS", 0.1)
    schema = pa.schema({"step": pa.int32()})
    path = tmp_path / "rank00000-a0-000.trimtab.arrow"

    def record(said: dict) -> None:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for batch in ({"dropped": 1}, said):
                metadata = pa.KeyValueMetadata({"trimtab": json.dumps(batch)})
                writer.write_batch(pa.record_batch([pa.array([1], pa.int32())], schema), custom_metadata=metadata)

    record({"closed": True})
    assert has_ended(tmp_path)
    code, _, err = command("status", tmp_path, "--wait", 5)
    assert (code, err) == (2, f"trimtab: {tmp_path}: {common._ENDED}\n")
    whole = path.read_bytes()
    for damaged in (b"", whole[:-8], whole[: len(whole) // 2] + whole[-8:], b"\xff\xff\xff\xff\0\0\0\0"):
        path.write_bytes(damaged)
        assert not has_ended(tmp_path)
    record({})  # this file is full, and the job goes on in another one
    assert not has_ended(tmp_path)
    assert not has_ended(tmp_path / "nowhere")


def test_nothing_is_left_when_a_stream_is_interrupted(command, job, trainer, monkeypatch):
    from trimtab.scope.commands import waiting

    before = set(threading.enumerate())
    monkeypatch.setattr(waiting.Enough, "over", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    npz = job / "kept.npz"
    code, _, err = command("stream", job, "--tap", "layers.0.output", "--npz", npz)
    assert code == 130
    assert err.splitlines()[-1] == "trimtab: interrupted"
    ours = ("trimtab-scope", "trimtab-hub")
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name in ours]
    assert not (job / RENDEZVOUS_FILE).exists()
    assert not list(job.glob(".*.npz"))
    wait(lambda: not any(rank.active or rank.due for rank in trainer.ranks), "the subscription is ended on the ranks")
    assert any(body.get("kind") == "subscribe" for _, body in trainer.ranks[0].asked)


def test_two_recordings_are_compared(command, tmp_path):
    for name, factor in (("clean", 1.0), ("disturbed", 1.5)):
        folder = tmp_path / name / "scope"
        folder.mkdir(parents=True)
        chunks = Chunks(folder, "20260101-000000-aaaa", name, 1 << 30)
        for step in (3, 4):
            values = np.arange(1.0, 5.0) * (factor if step == 4 else 1.0)
            frame = Frame("layers.0.output", "statistics", "s-1", step, 0, 0, arrays={"vector": vector_of(values)})
            chunks.frame(split(encode(frame))[0])
        chunks.close()
    code, out, err = command("compare", tmp_path / "clean", tmp_path / "disturbed", "--json", "-")
    assert code == 0, err
    result = json.loads(out)
    assert (result["parts_at"]["step"], result["measure"]) == (4, "statistics")


def test_a_recording_that_was_cut_is_shown_and_it_is_said(command, tmp_path):
    (tmp_path / "scope").mkdir()
    chunks = Chunks(tmp_path / "scope", "20260101-000000-aaaa", "", 1 << 30)
    arrays = {"vector": vector_of(np.arange(1.0, 5.0))}
    chunks.frame(split(encode(Frame("parameters.w", "statistics", "s-1", 3, -1, 0, arrays=arrays)))[0])
    chunks.close()
    code, out, err = command("show", tmp_path, "--tap", "parameters.w")
    assert (code, err) == (0, "")
    assert out.splitlines()[2].split()[:2] == ["3", "-"]  # as stream has it: of no microbatch
    (path,) = (tmp_path / "scope").iterdir()
    with path.open("ab") as file:
        file.write(path.read_bytes()[-100:][:20])
    code, _, err = command("show", tmp_path)
    assert (code, err.count("\n")) == (0, 1)
    path.write_bytes(path.read_bytes()[:-60])
    code, _, err = command("show", tmp_path)
    assert (code, err) == (0, f"trimtab: {path}: ends in the middle of a record: its writer has died, or is at it\n")


def test_nothing_of_a_file_reaches_the_terminal_as_it_is(command, tmp_path):
    (tmp_path / "scope").mkdir()
    entry = {"unix_ns": 1, "rank": 0, "event": "activated", "perturbation": "p-1", "text": "\x1b[2Jgone"}
    (tmp_path / "scope" / "audit-r0.jsonl").write_text(json.dumps(entry) + "\n")
    assert "\\x1b[2Jgone" in command("audit", tmp_path)[1]


# ------------------------------------------------------------------------------ pictures


def merged_of(what: str, arrays: dict, **meta):
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    return merge_frames([Frame("layers.3.attention.map", what, "s-1", 120, 0, 2, arrays=arrays, meta=meta)])


def test_heat_maps_of_characters():
    assert pictures.heat_map(np.array([[0.0, 0.5], [1.0, np.nan]])) == ["  from 0 to 1", "  | +|", "  |@!|"]
    assert pictures.heat_map(np.full((1, 1), np.inf)) == ["  nothing in it is finite"]
    tall = pictures.heat_map(np.arange(100.0)[:, None] * np.ones(300))
    assert (len(tall), len(tall[1])) == (65, 132)
    assert tall[-1].strip() == f"|{'@' * 128}|"  # the largest of those that fall together


def test_statistics_and_histograms_as_lines():
    values = np.array([1.0, -2.0, 0.0, np.nan])
    arrays = {"vector": vector_of(values), "exponents": exponents_of(values)}
    line = pictures.line(merged_of("histogram", arrays))
    assert line.split()[:6] == ["120", "0", "layers.3.attention.map", "4", "-0.3333", "1.247"]
    assert "25.0%" in line
    assert pictures.as_json(merged_of("histogram", arrays))["statistics"]["quantiles"]["0.5"] >= 0
    assert pictures.head("histogram").split()[-2:] == ["p50", "p99"]


@pytest.mark.parametrize(
    ("kind", "bits", "values"),
    [
        ("bfloat16", np.uint16([0x3F80, 0xC000, 0x7F80, 0x0001]), [1.0, -2.0, np.inf, 2.0**-133]),
        ("float8_e4m3fn", np.uint8([0x7E, 0x01, 0xB8, 0x7F]), [448.0, 2.0**-9, -1.0, np.nan]),
        ("float8_e5m2", np.uint8([0x7B, 0x01, 0xFC, 0x7D]), [57_344.0, 2.0**-16, -np.inf, np.nan]),
    ],
)
def test_values_of_types_that_numpy_lacks(kind, bits, values):
    found = pictures.floats(merged_of("raw", {"values": bits, "shape": bits.shape}, dtypes={"values": kind}))
    np.testing.assert_array_equal(found["values"], np.float32(values))


def test_numbers_and_tables():
    assert [number(one) for one in (None, float("nan"), 3, 1234.5678, 1e-12, float("inf"))] == [
        *("-", "-", "3", "1235", "1e-12", "inf"),
    ]
    assert ranges({5, 0, 1, 2}) == "0-2,5"
    assert table(("a", "n"), [("x", "1"), ("yy", "-2.5e+03")]) == ["a          n", "x          1", "yy  -2.5e+03"]
