"""The picture: fits the terminal, works without colour and without Unicode, folds many ranks, and is harmless."""

import io
import re
from dataclasses import replace

import pytest
from online_jobs import Job
from rich.console import Console
from test_online_detect import slow
from test_watch_watcher import run, stuck

from trimtab.watch import view
from trimtab.watch.grid import rows_of
from trimtab.watch.watcher import Event, Watcher


def drawn(watcher, width=80, height=24, encoding="utf-8", **more):
    console = Console(
        width=width, height=height, file=io.TextIOWrapper(io.BytesIO(), encoding=encoding), no_color=True, **more
    )
    with console.capture() as capture:
        console.print(view.picture(watcher, console, "12:00:00", ("a note",)), highlight=False)
    return capture.get().splitlines()


@pytest.fixture(scope="module")
def few():
    watcher = Watcher()
    run(watcher, Job(noise=0.01, disturb=slow(3, 1.3, first=40)), 50)
    return watcher


@pytest.fixture(scope="module")
def many():
    watcher = Watcher()
    run(watcher, Job(ranks=128, noise=0.01, disturb=slow(101, 1.3, first=22)), 30)
    return watcher


def test_the_culprit_stands_out(few):
    lines = drawn(few)
    (row,) = [line for line in lines if line.startswith("> ")]
    assert row.startswith("> rank 3")
    assert "▓" * 8 in row
    assert re.search(r"\+(2|3)\d %", row)
    assert any(line.strip().startswith("ALARM  Rank 3 (node-0) computes 1.") for line in lines)
    assert lines[-1].strip() == "a note"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 16), (200, 50)])
def test_it_fits_the_terminal(few, many, width, height):
    for watcher in (few, many, Watcher()):
        lines = drawn(watcher, width, height)
        assert max(map(len, lines)) <= width
        assert len(lines) <= height + 4


def test_without_unicode_there_are_other_shades(few):
    text = "\n".join(drawn(few, encoding="ascii"))
    assert text.isascii()
    assert "*" * 8 in text


def test_many_ranks_are_folded_and_the_worst_is_shown(many):
    (row,) = [line for line in drawn(many) if line.startswith("> ")]
    assert row.rstrip().endswith("(101)")
    rows = rows_of(many.detector, 10, 48)
    assert len(rows) == 10
    assert [rank for row in rows for rank in row.ranks] == list(range(128))
    by_host = rows_of(many.detector, 40, 48)
    assert [row.label for row in by_host] == [f"node-{n}" for n in range(32)]


def test_before_anything_is_known(few):
    assert "waiting for the ranks" in drawn(Watcher())[0]
    assert view.line(Watcher()) == "waiting for the ranks to say something"
    watcher = Watcher()
    watcher.take(Job().step(0)[:3], 0.0)
    assert "3 of 8 ranks heard" in view.line(watcher)
    assert "Learning what is usual." in "\n".join(drawn(watcher))
    assert view.line(few).endswith("; rank 3 slow")


def test_a_hang_is_shown():
    watcher = Watcher(patience=5.0)
    watcher.take(stuck(), 0.0)
    watcher.take([], 10.0)
    text = " ".join(line.strip() for line in drawn(watcher))
    assert "HANGS" in text
    assert "Rank 2 is missing: it is in data" in text
    assert view.line(watcher).endswith("; the job hangs")


def test_names_are_shown_literally():
    watcher = Watcher()
    messages = [
        replace(message, run_id="\x1b[2Jrun[red]", host="\x1b]0;x\x07[bold]")
        for n in range(3)
        for message in Job().step(n)
    ]
    watcher.take(messages, 0.0)
    rows = rows_of(watcher.detector, 1, 20)
    assert rows[0].label == "ranks 0-7"
    text = "\n".join(drawn(watcher, height=10))
    assert "\x1b" not in text
    assert "[red]" in text
    assert "\x07" not in text
    told = view.told(Event("note", "[bold]x", 3))
    assert told.plain.endswith("[bold]x")
