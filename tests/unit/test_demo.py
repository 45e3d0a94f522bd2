"""The demo's decisions: layout, fault, command, and what it may replace."""

import shlex
import sys
from pathlib import Path

import pytest

from trimtab import demo
from trimtab.config import load
from trimtab.demo import MARKER, Options, plan, prepare
from trimtab.topology import Topology


def arguments_of(planned):
    words = list(planned.command[planned.command.index(str(demo.example_script())) + 1 :])
    return dict(zip(words[::2], words[1::2], strict=True))


def settings_of(planned, tmp_path):
    file = tmp_path / "demo.toml"
    file.write_text(planned.config, encoding="utf-8")
    return load(file).strict()


def test_without_gpus_eight_emulated_ranks(tmp_path):
    planned = plan(Options(out=tmp_path / "demo"), gpus=0, environment={})
    config = settings_of(planned, tmp_path)
    assert planned.topology == Topology(tp=2, pp=2, dp=2)
    assert config.emulate.enabled
    assert config.engine.cpu_shim
    assert config.record.dir == str(tmp_path / "demo" / "run")
    assert planned.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert planned.environment["OMP_NUM_THREADS"] == "1"
    assert any("emulated" in line for line in demo.introduction(planned))


def test_one_gpu_is_left_alone(tmp_path):
    assert plan(Options(out=tmp_path), gpus=1, environment={}).emulated


@pytest.mark.parametrize(
    ("gpus", "topology"),
    [(2, Topology(dp=2)), (3, Topology(dp=2)), (4, Topology(tp=2, dp=2)), (8, Topology(tp=2, pp=2, dp=2))],
)
def test_gpus_are_used_one_rank_each(tmp_path, gpus, topology):
    planned = plan(Options(out=tmp_path), gpus=gpus, environment={})
    config = settings_of(planned, tmp_path)
    assert planned.topology == topology
    assert not config.emulate.enabled
    assert not config.engine.cpu_shim
    assert "CUDA_VISIBLE_DEVICES" not in planned.environment


def test_default_fault_slows_rank_3_from_the_middle_on(tmp_path):
    planned = plan(Options(out=tmp_path, steps=20), gpus=0, environment={})
    assert planned.fault == "slow_compute:rank=3,factor=1.5,steps=10-"
    assert settings_of(planned, tmp_path).faults.inject == (planned.fault,)


def test_default_fault_is_on_a_rank_that_exists(tmp_path):
    assert plan(Options(out=tmp_path), gpus=2, environment={}).fault == "slow_compute:rank=1,factor=1.5,steps=10-"


def test_steps_of_a_fault_are_kept(tmp_path):
    fault = "host_stall:rank=2,ms=30,steps=4-5"
    assert plan(Options(out=tmp_path, fault=fault), gpus=0, environment={}).fault == fault


def test_no_fault(tmp_path):
    planned = plan(Options(out=tmp_path, fault="none"), gpus=0, environment={})
    assert planned.fault is None
    assert settings_of(planned, tmp_path).faults.inject == ()
    assert any("No fault" in line for line in demo.introduction(planned))


def test_layout_is_chosen(tmp_path):
    planned = plan(Options(out=tmp_path, layout="TP1 x PP2 x VPP2 x DP2"), gpus=0, environment={})
    given = arguments_of(planned)
    assert planned.topology == Topology(pp=2, vpp=2, dp=2)
    assert (given["--tp"], given["--pp"], given["--vpp"], given["--num-layers"]) == ("1", "2", "2", "8")
    assert int(given["--global-batch-size"]) % (2 * int(given["--micro-batch-size"])) == 0


def test_script_gets_data_and_steps(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("words " * 1000)
    given = arguments_of(plan(Options(out=tmp_path, data=text, steps=9), gpus=0, environment={}))
    assert given["--data"] == str(text)
    assert given["--steps"] == "9"


def test_command_is_the_door_for_users(tmp_path):
    command = plan(Options(out=tmp_path), gpus=0, environment={}).command
    assert command[:5] == (sys.executable, "-m", "trimtab", "run", "--config")
    assert Path(command[6]).name == "pretrain_gpt.py"
    assert shlex.join(command)


def test_settings_of_the_surroundings_do_not_leak_in(tmp_path):
    surroundings = {"TRIMTAB_RECORD_ENABLED": "false", "PATH": "/bin"}
    environment = plan(Options(out=tmp_path), gpus=0, environment=surroundings).environment
    assert "TRIMTAB_RECORD_ENABLED" not in environment
    assert environment["PATH"] == "/bin"


@pytest.mark.parametrize(
    ("options", "gpus", "message"),
    [
        (Options(steps=3), 0, "--steps 3 is too few"),
        (Options(layout="tp2,banana"), 0, "expected sizes of tp, pp, vpp and dp"),
        (Options(layout="tp2,tp4"), 0, "expected sizes"),
        (Options(layout="tp0"), 0, "at least 1"),
        (Options(layout="tp4,dp2"), 4, "needs 8 GPUs, and there are 4"),
        (Options(data=Path("/does/not/exist")), 0, "no such file"),
        (Options(fault="bad_luck:rank=1"), 0, "bad_luck"),
        (Options(fault="slow_compute:rank=8,factor=2"), 0, "rank 8 is not in this job"),
        (Options(fault="slow_stage:stage=2,factor=2"), 0, "stage 2 is not in this job"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(options, gpus, message):
    with pytest.raises(ValueError, match=message) as caught:
        plan(options, gpus, {})
    assert "\n" not in str(caught.value)


def test_a_new_directory_is_made_with_its_parents(tmp_path):
    prepare(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / MARKER).is_file()


def test_an_earlier_demo_is_replaced_and_nothing_else(tmp_path):
    out = tmp_path / "demo"
    prepare(out)
    (out / "run").mkdir()
    (out / "run" / "rank00000-a0-000.trimtab.arrow").write_bytes(b"old")
    (out / "report.json").write_text("{}")
    (out / "notes.txt").write_text("mine")
    prepare(out)
    assert {path.name for path in out.iterdir()} == {MARKER, "notes.txt"}


def test_what_a_link_leads_to_is_kept(tmp_path):
    out, elsewhere = tmp_path / "demo", tmp_path / "elsewhere"
    prepare(out)
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    (out / "run").symlink_to(elsewhere)
    prepare(out)
    assert (elsewhere / "precious").read_text() == "x"
    assert not (out / "run").exists()


def test_somebody_elses_directory_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="no demo made"):
        prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        prepare(file)


def test_failed_training_shows_the_rank_and_its_last_words(tmp_path):
    talked = []
    source = "import os, sys; print('step 1/9 | loss 5.5', flush=True); sys.exit('no luck on ' + os.environ['RANK'])"
    planned = demo.Plan(Topology(), True, 9, None, "# none\n", (sys.executable, "-c", source), {})
    with pytest.raises(ValueError, match="rank 0 ended with exit code 1") as caught:
        demo.train(planned, tmp_path, talked.append)
    assert "no luck on 0" in str(caught.value)
    assert talked == ["  step 1/9 | loss 5.5"]
    assert "[rank 0] no luck on 0" in (tmp_path / "training.log").read_text()


def test_a_layout_that_would_choke_the_machine_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at most 32"):
        plan(Options(out=tmp_path, layout="tp64"), gpus=0, environment={})
