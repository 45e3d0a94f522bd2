"""What is said to be recorded: backed by tests that exist, the same in the documentation, and told by the doctor."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.doctor import State, examine
from trimtab.engines.coverage import WAYS, Aspect, Way, concerning, markdown

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_claim_has_a_test(way: Way) -> None:
    for reference in way.tests:
        file, _, function = reference.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, reference
    if way.recorded:
        assert way.tests or way.gpu, "claimed, and nothing shows it"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_row_is_well_formed(way: Way) -> None:
    named = [*way.recorded, *way.in_part, *way.not_recorded, *way.unchecked]
    assert len(named) == len(set(named)) > 0
    assert way.missing or not (way.in_part or way.not_recorded), "says that something is missing, and not what"
    assert "|" not in way.name + way.missing + way.gpu
    assert [way.word(aspect) for aspect in Aspect if aspect in way.recorded] == ["yes"] * len(way.recorded)


def test_names_are_unique() -> None:
    assert len({way.name for way in WAYS}) == len(WAYS)


def test_the_documentation_holds_the_table() -> None:
    page = (ROOT / "docs" / "recorded.md").read_text(encoding="utf-8")
    begin, end = "<!-- the table: trimtab.engines.coverage.markdown() -->\n\n", "\n<!-- end of the table -->"
    assert page.partition(begin)[2].partition(end)[0] == markdown(), "paste what markdown() gives"


def test_what_concerns_a_machine() -> None:
    def only_torch(package: str) -> bool:
        return package == "torch"

    here = list(concerning(only_torch, gpu=False))
    assert {way.package for way in here} == {"torch"}
    assert not any(way.needs_gpu for way in here)
    assert set(concerning(only_torch, gpu=True)) > set(here)
    assert list(concerning(lambda package: False, gpu=True)) == []


def test_the_doctor_tells_it() -> None:
    told = {check.name: check for check in examine().checks if check.section == "recorded"}
    ddp = told["DistributedDataParallel"]
    assert ddp.state is State.OK
    assert "recorded: steps, layers, communication" in ddp.detail
    assert "not: checkpoints" in ddp.detail
    assert "Transformer Engine, FP8" not in told, "not installed in the tests' environment"


def test_it_needs_no_framework() -> None:
    code = "import sys, trimtab.engines.coverage; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
