"""The command: tables, files, comparisons and recorded runs; wrong input is one line and exit code 2."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab import cli
from trimtab.pipeline.orders import ORDERS
from trimtab.pipeline.policies import POLICIES
from trimtab.pipeline.shape import Placement, Shape
from trimtab.pipeline.simulate.job import Job, recut
from trimtab.topology import Topology
from trimtab.traces import own_write
from trimtab.traces.synthetic import FaultKind, SyntheticFault, SyntheticJob, generate

SMALL = ("simulate", "--stages", "4", "--microbatches", "8")


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setattr(sys, "argv", ["trimtab", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of 4 stages with 2 chunks each, of which stage 1 is slow; and one of 2 stages with one."""
    folders = {}
    slow = SyntheticFault(FaultKind.SLOW_STAGE, stage=1, factor=1.5)
    for name, topology, faults in (("four", Topology(pp=4, vpp=2), (slow,)), ("two", Topology(pp=2, dp=2), ())):
        folders[name] = tmp_path_factory.mktemp(name)
        job = SyntheticJob(topology, steps=5, layers=8, microbatches=8, faults=faults)
        own_write.write(generate(job), folders[name])
    return folders


def test_a_table_and_a_picture(command):
    code, out, err = command(*SMALL, "--transfer", "0.05")
    assert (code, err) == (0, "")
    for word in (
        "zb-v, policy hint",
        "makespan",
        "bound",
        "peak activation",
        "c_max",
        "PP window",
        "   3 ",
        "F forward",
    ):
        assert word in out


def test_the_command_of_the_documentation(command):
    code, out, err = command(
        *("simulate", "--stages", 8, "--chunks", 2, "--microbatches", 32, "--order", "zb-v", "--policy", "hint"),
        *("--transfer", 0.05, "--disturb", "link=1.0", "--cap", 10, "--seed", 3, "--json", "-"),
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["schema"] == "trimtab.simulation/1"
    assert found["bound"] == pytest.approx(96, rel=1e-6)
    assert found["ratio"] == pytest.approx(found["makespan"] / found["bound"])
    assert 1.05 < found["ratio"] < 1.15
    assert found["peak_activation"] <= 10
    assert found["windows"]["pp"] > 0
    assert 0.05 < found["c_max"] < 1
    assert found["disturbance"] == "link=1@3-4"
    assert (found["order"], found["policy"], found["cap"], found["seed"]) == ("zb-v", "hint", 10, 3)


def test_files_are_written_and_a_plan_can_be_read_back(command, tmp_path):
    files = {name: tmp_path / f"plan.{name}" for name in ("svg", "html", "json", "csv")}
    options = [part for name, path in files.items() for part in (f"--{name}", path)]
    code, out, _ = command(*SMALL, "--policy", "static", *options)
    assert code == 0
    assert "makespan" in out
    assert files["svg"].read_text(encoding="utf-8").startswith("<svg")
    assert "<svg" in files["html"].read_text(encoding="utf-8")
    first = json.loads(files["json"].read_text(encoding="utf-8"))
    code, out, _ = command("simulate", "--order", files["csv"], "--policy", "static", "--json", "-")
    assert code == 0
    again = json.loads(out)
    assert again["order"] == "plan.csv"
    assert (again["makespan"], again["placement"]) == (first["makespan"], "v")


def test_equal_seeds_give_equal_results_and_others_others(command):
    def makespan(seed):
        return json.loads(command(*SMALL, "--disturb", "jitter=0.2", "--seed", seed, "--json", "-", "--no-c-max")[1])

    assert makespan(1) == makespan(1)
    assert makespan(1)["makespan"] != makespan(2)["makespan"]


def test_a_comparison_ranks_what_is_possible_and_says_why_the_rest_is_not(command):
    code, out, err = command(*SMALL, "--transfer", "0.05", "--cap", "4", "--compare", "--json", "-")
    assert (code, err) == (0, "")
    rows = json.loads(out)["compared"]
    assert {(row["order"], row["policy"]) for row in rows} == {(o, p) for o in ORDERS for p in POLICIES}
    done = [row for row in rows if row["problem"] is None]
    assert [row["makespan"] for row in done] == sorted(row["makespan"] for row in done)
    assert all(row["peak_activation"] <= 4 for row in done)
    assert rows[: len(done)] == done
    gpipe = next(row for row in rows if (row["order"], row["policy"]) == ("gpipe", "static"))
    assert "order gpipe needs 8" in gpipe["problem"]
    code, out, _ = command(*SMALL, "--cap", "4", "--compare")
    assert code == 0
    assert "not gpipe static: order gpipe needs 8" in out
    assert out.split("\n")[1].split()[1] in POLICIES


def test_a_comparison_with_c_max_and_pictures_of_the_fastest(command, tmp_path):
    svg = tmp_path / "best.svg"
    arguments = ("simulate", "--stages", 2, "--microbatches", 4, "--compare")
    code, out, _ = command(*arguments, "--c-max", "--svg", svg)
    assert code == 0
    assert "c_max" in out
    order, policy = out.split("\n")[1].split()[:2]
    assert f"{order}, policy {policy}" in svg.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --stages and --microbatches, or --from"),
        (("--stages", "4"), "give --stages and --microbatches"),
        ((*SMALL[1:], "--order", "zbv"), "there is no order 'zbv'; did you mean zb-v?"),
        ((*SMALL[1:], "--order", "xyz"), "choose from gpipe, 1f1b"),
        ((*SMALL[1:], "--policy", "hnt"), "there is no policy 'hnt'; did you mean hint?"),
        (("--stages", "4", "--microbatches", "0"), "--microbatches must be at least 1, not 0"),
        (("--stages", "-1", "--microbatches", "4"), "--stages must be at least 1, not -1"),
        ((*SMALL[1:], "--chunks", "0"), "--chunks must be at least 1, not 0"),
        ((*SMALL[1:], "--order", "zb-v", "--chunks", "3"), "order zb-v has 2 model chunks a stage, not 3"),
        ((*SMALL[1:], "--order", "1f1b", "--chunks", "2"), "order 1f1b has 1 model chunk a stage, not 2"),
        ((*SMALL[1:], "--cap", "0.5"), "--cap 0.5 is below one microbatch"),
        ((*SMALL[1:], "--cap", "lots"), "memory cap 'lots'"),
        ((*SMALL[1:], "--cap", "12GB"), "--activation must say"),
        ((*SMALL[1:], "--activation", "2", "--cap", "12GB"), "--activation '2': give bytes"),
        ((*SMALL[1:], "--policy", "static", "--cap", "2"), "order zb-v needs 4"),
        ((*SMALL[1:], "--disturb", "lnk=1"), "did you mean link?"),
        ((*SMALL[1:], "--disturb", "slow-stage=2@4"), "there is no stage 4 of 4"),
        ((*SMALL[1:], "--transfer", "nan"), "--transfer must be at least 0 and finite"),
        ((*SMALL[1:], "--transfer", "-1"), "--transfer must be at least 0 and finite"),
        ((*SMALL[1:], "--sync", "inf"), "--sync must be at least 0 and finite"),
        ((*SMALL[1:], "--kept", "1.5"), "--kept is a share from 0 to 1"),
        ((*SMALL[1:], "--forward", "1,2"), "--forward has 2 values for 4 stages"),
        ((*SMALL[1:], "--backward", "x"), "--backward: 'x' is not a number"),
        ((*SMALL[1:], "--forward", "0"), "forward: it must take some time"),
        (("--stages", "100", "--microbatches", "100000"), "more than 2,000,000 actions"),
        ((*SMALL[1:], "--order", "missing.csv"), "missing.csv: cannot be read"),
        (("--from", "missing"), "missing: no such file"),
        (("--from", ".", "--stages", "4"), "--stages and --from"),
        ((*SMALL[1:], "--json", "no/such/folder.json"), "cannot be written"),
        ((*SMALL[1:], "--csv", "no/such/plan.csv"), "cannot be written"),
        ((*SMALL[1:], "--csv", "-"), "--csv -: a plan is written to a file"),
        ((*SMALL[1:], "--nonsense"), "No such option"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(command, arguments, said):
    code, out, err = command("simulate", *arguments)
    assert code == 2
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("trimtab: ")


def test_a_csv_file_says_its_shape_itself(command, tmp_path):
    path = tmp_path / "p.csv"
    assert command(*SMALL, "--order", "1f1b", "--csv", path, "--json", tmp_path / "x")[0] == 0
    code, _, err = command("simulate", "--order", path, "--stages", 5)
    assert (code, "has 4 stages, not 5" in err) == (2, True)


def test_times_may_differ_by_stage_and_caps_be_bytes(command):
    code, out, _ = command(
        *(*SMALL, "--forward", "1,1,2,1", "--backward", "1.5", "--wgrad", ".5"),
        *("--activation", "2GB", "--cap", "9GB", "--json", "-"),
    )
    found = json.loads(out)
    assert code == 0
    assert found["unit"] == pytest.approx(1.25)
    assert found["loads"] == pytest.approx([24, 24, 32, 24], rel=1e-6)
    assert found["peak_activation"] <= 9e9


def test_no_cap_and_synchronous_sends(command):
    free = json.loads(command(*SMALL, "--policy", "greedy", "--cap", "none", "--json", "-")[1])
    assert free["cap"] is None
    arguments = (
        *SMALL,
        "--order",
        "interleaved",
        "--policy",
        "static",
        "--transfer",
        "0.5",
        "--json",
        "-",
        "--no-c-max",
    )
    blocked = json.loads(command(*arguments, "--blocking")[1])
    assert blocked["makespan"] > json.loads(command(*arguments)[1])["makespan"]
    assert max(blocked["blocked"]) > 0
    assert blocked["c_max"] is None


def test_a_recorded_run_says_stages_chunks_microbatches_and_times(command, recorded):
    code, out, err = command(
        "simulate", "--from", recorded["four"], "--order", "interleaved", "--policy", "static", "--json", "-"
    )
    assert code == 0
    assert "W was not recorded apart: it is taken to be 0.5" in err
    found = json.loads(out)
    assert (found["stages"], found["chunks"], found["microbatches"]) == (4, 2, 8)
    ideal = 8 * 2 * 0.008 * 3
    assert found["loads"] == pytest.approx([ideal, 1.5 * ideal, ideal, ideal], rel=0.05)
    code, out, _ = command("simulate", "--from", recorded["four"], "--microbatches", 16)
    assert code == 0
    assert "2 chunks each, 16 microbatches" in out
    assert "a step of the recorded run took" in out
    assert " ms" in out


def test_a_recorded_run_is_cut_anew_for_other_orders(command, recorded):
    code, out, _ = command("simulate", "--from", recorded["two"], "--compare", "--transfer", "0.1", "--json", "-")
    assert code == 0
    rows = {(row["order"], row["policy"]): row for row in json.loads(out)["compared"]}
    assert rows["zb-v", "static"]["chunks"] == 2
    assert rows["1f1b", "static"]["chunks"] == 1
    assert rows["zb-v", "static"]["makespan"] < rows["1f1b", "static"]["makespan"]
    assert rows["zb-v", "static"]["bound"] == pytest.approx(rows["1f1b", "static"]["bound"], rel=0.03)


def test_a_run_without_stages_or_microbatches_cannot_be_simulated(command, tmp_path):
    job = SyntheticJob(Topology(pp=2), steps=4, layers=4, microbatches=2, granularity="step")
    own_write.write(generate(job), tmp_path)
    code, _, err = command("simulate", "--from", tmp_path)
    assert (code, err.count("\n")) == (2, 1)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.integers(1, 24))
def test_cutting_a_model_anew_keeps_its_load(values, parts):
    shares = recut(values, parts)
    assert len(shares) == parts
    assert sum(shares) == pytest.approx(sum(values), abs=1e-9)
    assert all(share >= -1e-12 for share in shares)


def test_parts_are_cut_and_merged_evenly():
    assert recut([1, 2], 4) == pytest.approx((0.5, 0.5, 1, 1))
    assert recut([1, 2, 3, 4], 2) == pytest.approx((3, 7))
    assert recut([3, 6], 3) == pytest.approx((2, 3, 4))


def test_the_load_of_a_part_goes_where_the_part_goes():
    job = Job(2, 2, 4, (1.0, 1.0, 1.0, 5.0), (1.0,) * 4, (1.0,) * 4, by_stage=False)
    assert job.costs(Shape(2, 2, 4)).forward == ((1.0, 1.0), (1.0, 5.0))
    assert job.costs(Shape(2, 2, 4, Placement.V)).forward == ((1.0, 5.0), (1.0, 1.0))


def test_a_plan_can_be_made_anew_for_what_lasts(command, tmp_path):
    arguments = (*SMALL, "--transfer", "0.05", "--disturb", "link=1", "--policy", "auto", "--cap", "5.5", "--json", "-")
    before = json.loads(command(*arguments, "--no-c-max")[1])
    after = json.loads(command(*arguments, "--no-c-max", "--replan", "--csv", tmp_path / "plan.csv")[1])
    assert after["order"] == "zb-v re-planned"
    assert after["makespan"] < before["makespan"]
    options = ("--order", tmp_path / "plan.csv", *arguments[3:], "--no-c-max")
    code, out, _ = command("simulate", *options)
    assert code == 0
    assert json.loads(out)["makespan"] == after["makespan"]


def test_a_comparison_plans_anew_for_auto_alone(command):
    arguments = ("simulate", "--stages", 2, "--microbatches", 4, "--disturb", "link=1", "--compare", "--json", "-")
    before = {(row["order"], row["policy"]): row for row in json.loads(command(*arguments)[1])["compared"]}
    after = {(row["order"], row["policy"]): row for row in json.loads(command(*arguments, "--replan")[1])["compared"]}
    assert before.keys() == after.keys()
    for (order, policy), row in after.items():
        was = before[order, policy]["makespan"]
        assert row["makespan"] <= was if policy == "auto" else row["makespan"] == was
