"""The report in a terminal: it says who, why and how much, and shows hostile text literally."""

import io

import pytest
import sample_reports
from rich.console import Console

from trimtab.scan.model import Clock, ErrorUs, FindingKind, Victim
from trimtab.scan.report import terminal, wording


def shown(report, width=100):
    out = io.StringIO()
    terminal.render(report, Console(file=out, width=width, force_terminal=False, color_system=None))
    return out.getvalue()


def test_straggler_is_named_with_its_cost_and_reason():
    text = shown(sample_reports.straggler())
    first = text.splitlines()[0]
    assert "STRAGGLER" in first
    assert "Rank 3 computes 1.50x as long as its peers" in first
    assert "41.2 ms a step, 94 % of what is lost" in text
    assert "persistent, from step 8 on" in text
    assert "forward of rank 3 took 12.0 ms a layer" in text
    assert "ranks 1-2 wait 36.0 ms to 38.0 ms a step for rank 3" in text
    assert "rank 7 waits 35.0 ms a step for ranks 3, 5" in text
    assert "rank 3 as fast as its peers" in text


def test_most_costly_finding_comes_first():
    text = shown(sample_reports.straggler())
    assert text.index("[slow_rank]") < text.index("[host_stall]")


def test_healthy_says_what_would_have_been_seen():
    text = shown(sample_reports.healthy())
    assert "HEALTHY" in text
    assert "1.04x" in text
    assert "costs " not in text.replace("costs this job", "")


def test_inconclusive_says_what_is_missing():
    text = shown(sample_reports.inconclusive())
    assert "INCONCLUSIVE" in text
    assert "no file of rank 2" in text
    assert "17 events were dropped" in text
    assert "nan" not in text.lower().split()


def test_emulated_devices_are_told():
    assert "emulated devices" in shown(sample_reports.straggler())
    assert "2 emulated durations were overrun" in shown(sample_reports.straggler(), width=200)


def test_hostile_text_is_literal_and_harmless():
    text = shown(sample_reports.hostile(), width=300)
    assert "[bold red]" in text
    assert not [c for c in text if c in "\x1b\x00\u202e"]


def test_narrow_terminals_lose_nothing():
    text = " ".join(shown(sample_reports.straggler(), width=50).split())
    assert {"stalls", "287.1"} <= set(text.split())
    assert "waited for it in 112 of 112" in text


@pytest.mark.parametrize("kind", FindingKind)
@pytest.mark.parametrize("ranks", [(), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("ratio", [1.5, float("nan")])
def test_every_kind_has_a_title(kind, ranks, ratio):
    title = wording.title(sample_reports.finding(kind, ranks=ranks, ratio=ratio))
    assert title[0].isupper()
    assert "nan" not in title
    assert ("1.50x" in title) <= (ratio == 1.5)


def test_links_and_stages_are_named_in_titles():
    link = sample_reports.finding(FindingKind.SLOW_LINK, ranks=(0, 1), link=(0, 1))
    assert wording.title(link) == "Link 0 to 1 is slow: 1.50x the time expected"
    stage = sample_reports.finding(FindingKind.SLOW_STAGE, ranks=(4, 5, 6, 7), stage=1)
    assert wording.title(stage) == "Stage 1 has 1.50x the work of the others"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0412, "41.2 ms"),
        (0.00999, "9.99 ms"),
        (1.5, "1.50 s"),
        (12.34, "12.3 s"),
        (0.0000042, "4.20 us"),
        (0.0, "0 s"),
        (3e-8, "30 ns"),
        (0.9999, "1.00 s"),
        (-0.002, "-2.00 ms"),
        (None, "unknown"),
        (float("nan"), "unknown"),
        (float("inf"), "unknown"),
    ],
)
def test_seconds(value, text):
    assert wording.seconds(value) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "3"),
        ((3, 1, 2, 7, 7), "1-3, 7"),
        (range(1000), "0-999"),
        (range(0, 40, 2), "0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
        ((), ""),
    ],
)
def test_rank_list(ranks, text):
    assert wording.rank_list(ranks) == text


def test_nearly_sure_is_not_sure():
    assert wording.sureness(0.9997) == "99.97 %"
    assert wording.sureness(1.0) == "over 99.99 %"
    assert wording.sureness(float("nan")) == "unknown"


def test_percent():
    assert [wording.percent(share) for share in (0, 0.012, 0.941, 1.0)] == ["0 %", "1.2 %", "94 %", "100 %"]


def test_victims_are_drawn_together():
    victims = [Victim(0, (3,), 0.0381), Victim(7, (3, 5), 0.05), Victim(1, (3,), 0.0394)]
    rows = [(row.ranks, row.waits_for, row.waits) for row in wording.waiting(victims)]
    assert rows == [((7,), (3, 5), "50.0 ms"), ((0, 1), (3,), "38.1 ms to 39.4 ms")]


def test_one_clock_has_no_error():
    assert wording.clocks(Clock(True, ErrorUs(0.0, 0.0), 0)) == "one clock for all ranks"
    assert wording.clocks(Clock(True, ErrorUs(0.0, 0.0), 7)) == "aligned, error 0 s median, 0 s at most, 7 anchors"


def test_long_text_is_cut():
    assert len(wording.clean("x" * 100_000)) < 2_010
