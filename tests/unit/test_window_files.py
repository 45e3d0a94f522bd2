"""Names, packing and requests of profiler windows."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.config import load, rank_ranges
from trimtab.record.files.ledger import Entry, Ledger
from trimtab.record.windows.window_files import (
    Request,
    includes,
    pack,
    read_request,
    scratch,
    window_name,
    write_request,
)

RANK_PARTS = st.tuples(st.integers(0, 99), st.integers(0, 99))


@given(st.lists(RANK_PARTS, min_size=1, max_size=5), st.integers(0, 99))
def test_ranks_are_those_that_the_text_names(parts: list[tuple[int, int]], rank: int) -> None:
    text = ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)
    assert includes(text, rank) == any(first <= rank <= last for first, last in parts)
    assert includes("all", rank)


@pytest.mark.parametrize("text", ["", "x", "1,", "-1", "1-", "1-2-3", "all,1", "0;1", "1.5", "²"])
def test_what_names_no_ranks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected ranks such as"):
        rank_ranges(text)
    (problem,) = load(arguments=[f"record.window.ranks={text}"]).problems
    assert "record.window.ranks" in problem


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("[record.window]\nstep = 3", r"record\.window\.step is not a setting \(did you mean 'steps'\?\)"),
        ("[record]\nwindow = 3", r"\[record\.window\] must be a table"),
        ("[record.window]\nsteps = 1001", "must be at most 1000"),
        ("[record.window]\nranks = 'some'", "expected ranks such as"),
        ("[record.window]\nrequest_seconds = 1e9", "must be at most 3600"),
    ],
)
def test_mistakes_in_the_section_are_one_line_and_the_rest_is_used(tmp_path: Path, toml: str, problem: str) -> None:
    file = tmp_path / "t.toml"
    file.write_text(toml)
    loaded = load(file, {"TRIMTAB_RECORD_WINDOW_START": "7"}, ["record.window.every=9", "record.rotate_mb=5"])
    assert len(loaded.problems) == 1
    with pytest.raises(ValueError, match=problem):
        loaded.strict()
    window = loaded.config.record.window
    assert (window.start, window.every, window.steps, window.ranks) == (7, 9, 0, "0")
    assert loaded.config.record.rotate_mb == 5


def test_sources_of_the_section_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text('[record.window]\nsteps = 1\nranks = "0,8-15"\nevery = 4\n[record]\ndir = "x"\n')
    config = load(file, {"TRIMTAB_RECORD_WINDOW_STEPS": "2"}, ["record.window.steps=3"]).strict().record
    assert (config.window.steps, config.window.ranks, config.window.every, config.dir) == (3, "0,8-15", 4, "x")


def test_a_window_file_may_go_when_the_disk_budget_is_spent(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, 3)
    ledger.add(Entry("job", 0, "window", window_name(3, 0, 10, 12), 5))
    assert [entry.name for entry in ledger.entries] == ["rank00003-a0-window-000010-000012.pt.trace.json.gz"]


def test_packing_leaves_the_whole_file_and_nothing_else(tmp_path: Path) -> None:
    text = b'{"traceEvents": [' + b'{"name": "a"},' * 200_000 + b"{}]}\n"
    target = tmp_path / "out" / "x.json.gz"
    target.parent.mkdir()
    assert pack(io.BytesIO(text), target) == target.stat().st_size < len(text) / 10
    assert gzip.decompress(target.read_bytes()) == text
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("text", [b"", b'{"traceEvents": [{"name": "a'])
def test_what_is_cut_off_is_not_kept(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(OSError, match="no room"):
        pack(io.BytesIO(text), tmp_path / "x.json.gz")
    assert list(tmp_path.iterdir()) == []


def test_scratch_is_empty_and_ones_own() -> None:
    with scratch() as first, scratch() as second:
        assert first != second
        assert Path(first).stat().st_mode & 0o077 == 0
        assert not list(Path(first).iterdir())


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(1, 1000))
def test_a_request_arrives_as_it_was_made(number: int, begins: int, steps: int) -> None:
    with scratch() as name:
        request = Request(number, begins, steps, "0,8-15")
        path = write_request(Path(name), request)
        assert read_request(Path(name)) == request
        path.unlink()
        assert read_request(Path(name)) is None


@pytest.mark.parametrize(("steps", "ranks"), [(0, "0"), (1001, "0"), (1, "everyone")])
def test_a_request_has_to_make_sense(steps: int, ranks: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        Request(1, 1, steps, ranks)
