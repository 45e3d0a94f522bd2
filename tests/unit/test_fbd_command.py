"""``trimtab fbd advise``: from options and from a recorded run, and wrong ones refused in a line."""

import json

import pytest
from typer.testing import CliRunner

from trimtab.cli import app

pytestmark = pytest.mark.timeout(60)
MODEL = ("--layers", "8", "--hidden", "1024", "--sequence", "1024")
TIMES = ("--forward", "0.1,0.1", "--backward", "0.2,0.2", "--microbatches", "8")


def advise(*options):
    return CliRunner().invoke(app, ["fbd", "advise", *options])


def test_it_says_whether_why_and_what_else(tmp_path):
    found = advise(*MODEL, *TIMES, "--kappa", "0.5", "--tp", "2", "--svg", str(tmp_path / "a.svg"))
    assert found.exit_code == 0, found.output
    assert "does not pay" in found.output
    assert "Recommended: ordinary" in found.output
    assert "kappa 0.50" in found.output
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_json_goes_to_stdout_alone():
    said = json.loads(advise(*MODEL, *TIMES, "--helpers", "2", "--helper-speed", "0.5", "--json", "-").stdout)
    assert said["schema"] == "trimtab.fbd-advice/1"
    assert any(one["on_helpers"] for one in said["candidates"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*MODEL, "--backward", "1", "--microbatches", "4"), "--forward is missing"),
        ((*MODEL, "--forward", "1", "--backward", "1"), "--microbatches is missing"),
        ((*MODEL, *TIMES, "--forward", "a,b"), "--forward 'a,b': expected seconds"),
        ((*MODEL, *TIMES, "--memory", "lots"), "--memory 'lots': expected bytes"),
        ((*MODEL, *TIMES, "--bandwidth", "50"), "--bandwidth '50': expected bytes"),
        ((*MODEL, *TIMES, "--recompute", "some"), "--recompute some: expected one of none, selective, full"),
        ((*MODEL, *TIMES, "--kappa", "-1"), "--kappa -1: not negative"),
        ((*MODEL, *TIMES, "--helpers", "1", "--helper-speed", "0"), "with a speed above 0"),
        ((*MODEL, *TIMES, "--from", "nowhere"), "--forward and --from"),
        ((*MODEL, *TIMES, "--memory", "4GB"), "more memory than is reserved"),
    ],
)
def test_what_makes_no_sense_is_refused(options, said):
    refused = advise(*options)
    assert refused.exit_code != 0
    assert isinstance(refused.exception, ValueError)
    assert said in str(refused.exception)
    assert "\n" not in str(refused.exception)
