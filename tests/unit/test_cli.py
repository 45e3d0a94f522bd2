"""The commands: exit codes, what goes to which stream, one-line errors, and arguments that pass through untouched."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from forked import python

import trimtab.scan
from trimtab import cli, demo, launch
from trimtab.events import FILE_SUFFIX
from trimtab.record.windows.window_files import read_request
from trimtab.scan.report import plots_json
from trimtab.scan.report.schema import json_schema
from trimtab.topology import Topology
from trimtab.traces import own_write
from trimtab.traces.synthetic import FaultKind, SyntheticFault, SyntheticJob, generate


def job(*faults):
    return SyntheticJob(Topology(tp=2, dp=2), steps=8, layers=2, microbatches=2, faults=faults)


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("slow")
    own_write.write(generate(job(SyntheticFault(FaultKind.SLOW_COMPUTE, ranks=(3,), factor=1.5))), directory)
    return directory


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["trimtab", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_no_arguments_show_the_commands(command):
    code, out, err = command()
    assert code == 0
    assert err == ""
    for name in ("demo", "run", "scan", "convert", "doctor"):
        assert f"  {name} " in out


def test_version(command):
    code, out, _ = command("--version")
    assert (code, out.split()[0]) == (0, "trimtab")


def test_starting_the_command_loads_nothing_heavy():
    script = (
        "import sys, trimtab, trimtab.cli\n"
        "heavy = {'torch', 'polars', 'numpy', 'pyarrow', 'plotly', 'scipy', 'rich', 'megatron'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scan",), "Missing argument 'DIR...' (see trimtab scan --help)"),
        (("bogus",), "No such command 'bogus'"),
        (("scan", "/does/not/exist"), "/does/not/exist: no such file or directory"),
        (("scan", ".", "--fail-on", "weather"), "'--fail-on'"),
        (("scan", ".", "--set", "scan.min_shore=1"), "did you mean 'min_share'?"),
        (("scan", ".", "--config", "/does/not/exist.toml"), "/does/not/exist.toml"),
        (("run", "/does/not/exist.py", "--flag"), "/does/not/exist.py: no such file"),
        (("convert", ".", "out.docx"), "out.docx: its ending names no known format"),
        (("convert", ".", "out.json", "--steps", "a-b"), "--steps 'a-b': expected"),
        (("demo", "--layout", "square"), "--layout 'square'"),
        (("demo", "--fault", "bad_luck:rank=1"), "bad_luck"),
    ],
)
def test_bad_usage_is_one_line_and_2(command, arguments, message):
    code, out, err = command(*arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("trimtab: ")
    assert err.count("\n") == 1


def test_every_problem_of_a_configuration_has_its_line(command, tmp_path):
    file = tmp_path / "t.toml"
    file.write_text('[record]\ndirr = "x"\n[scan]\nmin_share = "much"\n')
    code, _, err = command("scan", tmp_path, "--config", file)
    assert code == 2
    assert len(err.splitlines()) == 2
    assert all(line.startswith(f"trimtab: {file}: ") for line in err.splitlines())


def test_scan_names_the_rank(command, slow_run):
    code, out, err = command("scan", slow_run)
    assert code == 0
    assert "STRAGGLER" in out
    assert "Rank 3 computes" in out
    assert err == ""


def test_scan_answers_what_would_be(command, slow_run):
    code, out, _ = command("scan", slow_run, "--what-if", "fix rank 3", "--what-if", "rank 3 at 2x", "--json", "-")
    asked = [row for row in json.loads(out)["what_if"] if row["asked"]]
    assert code == 0
    assert [row["fix"] for row in asked] == ["fix rank 3", "rank 3 at 2x"]
    assert asked[0]["seconds_saved_per_step"] > 0 > asked[1]["seconds_saved_per_step"]


@pytest.mark.parametrize("change", ["make it fast", "fix rank 99"])
def test_scan_refuses_a_what_if_that_means_nothing(command, slow_run, change):
    code, out, err = command("scan", slow_run, "--what-if", change)
    assert (code, out) == (2, "")
    assert err.startswith("trimtab: what-if")
    assert len(err.splitlines()) == 1


def test_scan_writes_all_reports(command, slow_run, tmp_path):
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html", "perfetto-trace")}
    code, out, _ = command(
        *("scan", slow_run, "--json", files["json"], "--html", files["html"], "--perfetto", files["perfetto-trace"])
    )
    assert code == 0
    assert "STRAGGLER" in out
    report = json.loads(files["json"].read_text())
    jsonschema.validate(report, json_schema())
    assert report["findings"][0]["ranks"] == [3]
    assert "Rank 3 computes" in files["html"].read_text()
    assert files["perfetto-trace"].stat().st_size > 1_000
    assert sorted(tmp_path.iterdir()) == sorted(files.values())


def test_scan_keeps_its_result_with_the_run(command, slow_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(slow_run, run)
    before = {path.name for path in run.iterdir()}
    code, out, _ = command("scan", run)
    assert {path.name for path in run.iterdir()} == before, "a question changes nothing"
    code, again, _ = command("scan", run, "--save")
    assert (code, again) == (0, out)
    assert {path.name for path in run.iterdir()} - before == {"report.json", "report-plots.json"}
    assert json.loads((run / "report.json").read_text())["findings"][0]["ranks"] == [3]
    drawn = json.loads((run / "report-plots.json").read_text())
    jsonschema.validate(drawn, plots_json.json_schema())
    assert max(drawn["by_rank"]["lost_s"]) == drawn["by_rank"]["lost_s"][3]
    assert command("scan", run)[:2] == (0, out), "what is kept there is no trace"


def test_scan_says_where_it_cannot_keep_its_result(command, tmp_path):
    (tmp_path / "trace.json").write_text("{}")
    code, out, err = command("scan", tmp_path / "trace.json", "--save")
    assert (code, out) == (2, "")
    assert "is no directory; give the run directory" in err


def test_json_on_stdout_is_all_there_is(command, slow_run):
    code, out, _ = command("scan", slow_run, "--json", "-")
    assert code == 0
    assert json.loads(out)["verdict"] == "straggler"


def test_fail_on_finding(command, slow_run, tmp_path):
    assert command("scan", slow_run, "--fail-on", "finding")[0] == 3
    own_write.write(generate(job()), tmp_path)
    code, out, _ = command("scan", tmp_path, "--fail-on", "finding")
    assert code == 0
    assert "HEALTHY" in out


def test_settings_reach_the_scan(command, slow_run):
    code, out, _ = command("scan", slow_run, "--json", "-", "--set", "scan.warmup_steps=3")
    assert code == 0
    assert json.loads(out)["job"]["steps"] == 5


def test_where_nothing_can_be_judged_the_damage_is_told(command, tmp_path):
    files = own_write.write(generate(job()), tmp_path)
    for file in files:
        file.write_bytes(file.read_bytes()[:-2000])
    code, out, err = command("scan", tmp_path)
    assert (code, out) == (2, "")
    assert "its end is cut off or damaged" in err
    assert "no training step" in err
    assert all(line.startswith("trimtab: ") for line in err.splitlines())


def test_names_do_nothing_to_the_terminal(command, tmp_path):
    code, _, err = command("scan", tmp_path / "a\x1b[31m\u202e\x07")
    assert code == 2
    assert err.count("\n") == 1
    assert err.strip().isprintable()
    script = tmp_path / "a\x1b[31m.py"
    assert command("run", script)[2].strip().isprintable()


def test_scan_of_an_empty_directory(command, tmp_path):
    code, _, err = command("scan", tmp_path)
    assert code == 2
    assert FILE_SUFFIX in err


def test_results_are_not_written_where_there_is_no_directory(command, slow_run, tmp_path):
    code, _, err = command("scan", slow_run, "--html", tmp_path / "no" / "report.html")
    assert code == 2
    assert (
        err
        == f"trimtab: {tmp_path / 'no' / 'report.html'}: cannot be written (there is no directory {tmp_path / 'no'})\n"
    )


@pytest.mark.parametrize("name", ["t.perfetto-trace", "t.json", "t.json.gz", "t.parquet"])
def test_convert(command, slow_run, tmp_path, name):
    code, out, err = command("convert", slow_run, tmp_path / name, "--steps", "2-3")
    assert (code, out) == (0, "")
    assert "events, steps 2 to 3" in err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_failed_conversion_leaves_nothing(command, slow_run, tmp_path):
    code, _, err = command("convert", slow_run, tmp_path / "t.json", "--steps", "900-901")
    assert code == 2
    assert "900-901" in err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def launched(monkeypatch):
    calls = []
    monkeypatch.setattr(launch, "run", lambda *args, **named: calls.append((args, named)))
    return calls


def test_run_passes_the_scripts_arguments_through(command, launched, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    theirs = ["--config", "theirs.yaml", "-m", "--set=a.b=c", "--", "-h", "", "--html", "x y", "*"]
    code, out, err = command("run", "--config", "t.toml", "--set", "record.dir=x", script, *theirs)
    assert (code, out, err) == (0, "", "")
    named = {"module": False, "config": Path("t.toml"), "settings": ("record.dir=x",)}
    assert launched == [((str(script), theirs), named)]


def test_run_runs_modules(command, launched):
    assert command("run", "-m", "some.module", "--lr", "3e-4")[0] == 0
    assert launched[0][0] == ("some.module", ["--lr", "3e-4"])
    assert launched[0][1]["module"] is True


@pytest.mark.parametrize(("body", "code"), [("sys.exit(7)", 7), ("raise ValueError('theirs')", 1), ("pass", 0)])
def test_what_a_script_ends_with_is_its_own(tmp_path, body, code):
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nassert sys.argv == [{str(script)!r}, '--x']\n{body}\n")
    settings = ("--set", "record.enabled=false", "--set", "engine.name=torch")
    done = python(["-m", "trimtab", "run", *settings, script, "--x"], tmp_path)
    assert done.returncode == code, done.stderr
    assert ("Traceback" in done.stderr) == ("theirs" in body)


def test_doctor_needs_no_extra(tmp_path):
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['torch', 'megatron', 'polars', 'scipy', 'plotly', 'perfetto']))\n"
        f"sys.argv = ['trimtab', 'doctor', '--set', 'record.dir={tmp_path}']\n"
        "from trimtab import cli; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing can be recorded here" in " ".join(done.stdout.split())


def test_a_missing_extra_is_named(command, monkeypatch, slow_run):
    monkeypatch.setitem(sys.modules, "polars", None)
    monkeypatch.delitem(sys.modules, "trimtab.traces.table")
    monkeypatch.delitem(sys.modules, "trimtab.traces.read", raising=False)
    monkeypatch.delitem(sys.modules, "trimtab.traces.own", raising=False)
    monkeypatch.setattr(trimtab, "scan", trimtab.scan)  # whose attributes are its modules: put back as well
    for name in [name for name in sys.modules if name.startswith("trimtab.scan") and "report" not in name]:
        monkeypatch.delitem(sys.modules, name)
    code, _, err = command("scan", slow_run)
    assert code == 2
    assert err == "trimtab: this command needs polars, which is not installed: pip install 'trimtab[scan]'\n"


def test_an_interrupt_is_clean(command, monkeypatch, slow_run, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("trimtab.scan.report.schema.to_json", interrupt)
    code, out, err = command("scan", slow_run, "--json", tmp_path / "report.json")
    assert (code, out) == (130, "")
    assert err.strip() == "trimtab: interrupted"
    assert list(tmp_path.iterdir()) == []


def test_demo_trains_scans_and_reports(command, monkeypatch, tmp_path, slow_run):
    def train(planned, out, talk):
        assert planned.fault == "slow_compute:rank=3,factor=1.5,steps=10-"
        talk("  step 1/16 | loss 5.5")
        shutil.copytree(slow_run, out / "run", dirs_exist_ok=True)

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "count_gpus", lambda: 0)
    out_dir = tmp_path / "demo"
    code, out, err = command("demo", "--no-serve", "--out", out_dir)
    assert code == 0, err
    assert "Rank 3 computes" in out
    assert "emulated" in err
    assert "step 1/16" in err
    assert {"report.html", "report.json", "trace.perfetto-trace"} <= {path.name for path in out_dir.iterdir()}
    kept = json.loads((out_dir / "run" / "report.json").read_text())
    assert kept == json.loads((out_dir / "report.json").read_text())
    assert (out_dir / "run" / "report-plots.json").is_file()


def test_demo_refuses_a_directory_of_others(command, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "train", lambda *_: pytest.fail("trained"))
    (tmp_path / "thesis.tex").write_text("x")
    code, _, err = command("demo", "--out", tmp_path)
    assert code == 2
    assert "choose another directory with --out" in err


def test_doctor_finds_nothing_wrong(command, tmp_path):
    code, out, err = command("doctor", "--set", f"record.dir={tmp_path / 'run'}")
    assert (code, err) == (0, "")
    assert "megatron.schedule.no_pipelining" in out
    assert "can be written" in out.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def test_doctor_lists_what_is_wrapped_in_torch(command, tmp_path):
    _, out, _ = command("doctor", "--set", f"record.dir={tmp_path}", "--json", "-")
    patches = {check["name"] for check in json.loads(out)["checks"] if check["section"] == "patches"}
    wrapped = {"Work.wait", "Work.is_completed", "ProcessGroup._start_coalescing", "ProcessGroup._end_coalescing"}
    assert {f"torch.{method}" for method in wrapped} <= patches


def test_doctor_says_what_is_wrong_with_a_configuration(command, tmp_path):
    file = tmp_path / "t.toml"
    file.write_text('[record]\ngranularity = "fine"\n[faults]\ninject = ["slow_compute:rnk=3"]\n')
    code, out, err = command("doctor", "--config", file, "--json", "-")
    checks = json.loads(out)
    assert code == 2
    assert not checks["healthy"]
    wrong = [check["detail"] for check in checks["checks"] if check["state"] == "problem"]
    assert len(wrong) == 2
    assert "choose from step, layer, op" in wrong[0]
    assert "rnk" in wrong[1]
    assert len(err.splitlines()) == 2


def test_doctor_says_that_a_directory_cannot_be_written(command, tmp_path):
    (tmp_path / "file").write_text("x")
    code, _, err = command("doctor", "--set", f"record.dir={tmp_path / 'file' / 'run'}")
    assert code == 2
    assert "is not a directory" in err


def test_doctor_tells_of_faults_that_are_on(command, tmp_path):
    arguments = ("--set", "faults.inject=slow_compute:rank=3,factor=2", "--set", f"record.dir={tmp_path}")
    code, out, _ = command("doctor", *arguments, "--json", "-")
    assert code == 0
    assert "a fault will be injected" in out


def test_window_asks_the_ranks(command, slow_run):
    code, out, err = command("window", slow_run, "--steps", "2", "--ranks", "0,3", "--after", "0")
    assert (code, out) == (0, "")
    assert "2 steps of rank 0,3" in err
    request = read_request(slow_run)
    assert request is not None
    assert (request.steps, request.ranks, request.begins_unix_ns) == (2, "0,3", request.number)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--steps", "0"), "1 to 1000 steps"), (("--ranks", "x"), "expected ranks such as")],
)
def test_window_refuses_what_makes_no_sense(command, slow_run, arguments, message):
    code, out, err = command("window", slow_run, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_window_wants_a_directory_where_somebody_records(command, tmp_path):
    code, _, err = command("window", tmp_path)
    assert code == 2
    assert "no rank records here" in err
