"""Pictures and figures: what they show, in any width, without colour and whatever names they are given."""

import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from rich.console import Console
from simulations import run

from trimtab.pipeline.actions import Work
from trimtab.pipeline.simulate import page, report, svg
from trimtab.pipeline.simulate.picture import cells
from trimtab.pipeline.simulate.words import Units, ticks

HOSTILE = '<script>alert(1)</script>&"\x1b[31m[bold]\u202e\n'
F = Units(f=1.0)


@pytest.fixture(scope="module")
def result():
    return run("zb-v", stages=4, microbatches=8, transfer=0.05)


def shown(result, width=80, encoding="utf-8", units=F, color=False):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(width=width, file=stream, color_system="truecolor" if color else None)
    report.show(result, units, "none", 0.25, console)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [30, 80, 200])
def test_a_row_a_stage_with_its_chunks_under_it_fits_the_terminal(result, width):
    lines = shown(result, width)
    assert all(len(line) <= width for line in lines)
    rows = [line for line in lines if re.match(r"   [0-3] [FBW·]", line)]
    assert len(rows) == 4
    if width == 80:
        assert rows[3].startswith("   3 ·····F")
        assert "1" in lines[lines.index(rows[3]) + 1]
    assert "F forward, B backward of inputs, W backward of weights" in " ".join(" ".join(lines[-6:]).split())


def test_without_unicode_idle_time_is_a_full_stop(result):
    lines = shown(result, encoding="ascii")
    assert any(line.startswith("   3 .....F") for line in lines)


def test_colours_only_add_to_what_the_letters_say(result):
    coloured = "\n".join(shown(result, color=True))
    assert "\x1b[" in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()
    assert [line.rstrip() for line in plain] == [line.rstrip() for line in shown(result)]


def test_the_figures_are_there_with_units(result):
    text = "\n".join(shown(result))
    assert re.search(rf"makespan +{result.makespan:.4g} F, {result.ratio:.4g} x the bound", text)
    assert "c_max            0.25 F" in text
    assert "4.5 microbatches" in "\n".join(shown(run("dualpipe-v", stages=4, microbatches=8)))
    seconds = "\n".join(shown(result, units=Units(microbatch=2e9)))
    assert f"{result.makespan:.4g} s" in seconds


def test_memory_in_bytes_is_told_with_the_microbatches():
    result = run("1f1b", stages=2, activation=2e9)
    assert "4 GB (2 microbatches)" in "\n".join(shown(result, units=Units(f=1.0, microbatch=2e9)))


def test_a_whole_backward_is_b_alone_and_x_beside_split_ones(result):
    lines = shown(run("1f1b", stages=2, microbatches=2))
    assert any(re.match(r"   1 ·+F+B+", line) for line in lines)
    assert not any("X whole" in line for line in lines)
    mixed = run("dualpipe-v", stages=4, microbatches=8)
    if any(one.action.work is Work.BW for row in mixed.ran for one in row):
        assert any("X whole backward" in line for line in shown(mixed))


def test_of_many_stages_some_are_shown():
    lines = shown(run("1f1b", stages=70, microbatches=2))
    assert "32 of 70 stages are shown" in lines[-1]
    assert sum(bool(re.match(r" +\d+ [FB·]", line)) for line in lines) == 32


def test_a_column_is_what_took_most_of_its_time(result):
    row = run("1f1b", stages=1, microbatches=2).ran[0]
    assert cells(row, 6.0, 6) == [(Work.F, 0), (Work.BW, 0), (Work.BW, 0), (Work.F, 0), (Work.BW, 0), (Work.BW, 0)]
    assert cells(row, 12.0, 2) == [(Work.BW, 0), None]


def hostile(result):
    return replace(result, plan=replace(result.plan, name=HOSTILE))


def test_names_of_others_do_nothing(result):
    bad = hostile(result)
    for line in shown(bad):
        assert line.isprintable()
    assert "[bold]" in "\n".join(shown(bad))
    for text in (svg.render(bad, F, HOSTILE), page.render(bad, F, HOSTILE, None)):
        assert "<script" not in text
        assert "\x1b" not in text
        assert "&lt;script&gt;" in text


def test_svg_has_a_box_an_action_with_its_title(result):
    root = ElementTree.fromstring(svg.render(result, F))
    space = "{http://www.w3.org/2000/svg}"
    titled = [box for box in root.iter(f"{space}rect") if box.find(f"{space}title") is not None]
    assert len(titled) == result.actions == 192
    said = {box.find(f"{space}title").text for box in titled}
    assert "F, chunk 0, microbatch 0: 0 F to 0.5 F" in said
    assert all(float(box.get("width")) > 0 for box in titled)
    lines = [line for line in root.iter(f"{space}line") if line.get("opacity")]
    assert len(lines) == len(result.sent)
    texts = [text.text for text in root.iter(f"{space}text")]
    assert texts.count("stage 3") == 1
    assert "backward of weights, chunk 0 1" in texts


def test_of_very_many_actions_the_first_are_drawn_and_that_is_said(result, monkeypatch):
    monkeypatch.setattr(svg, "_MOST_ACTIONS", 50)
    text = svg.render(result, F)
    assert "the first 50 actions are drawn" in text
    assert 50 <= text.count("<title>") - 1 < 60
    ElementTree.fromstring(text)


def test_the_page_is_whole_and_loads_nothing(result):
    text = page.render(result, F, "link=1@0-1", 0.25)
    assert text.startswith("<!DOCTYPE html>")
    assert text.rstrip().endswith("</html>")
    assert not re.search(r'(src|href)="', text)
    assert "disturbed: link=1@0-1" in text
    assert "c_max" in text
    assert text.count("<tr><td") == 4


def test_marks_of_the_axis_are_round():
    assert ticks(25.65, 1.0) == [0, 5, 10, 15, 20, 25]
    assert ticks(0.3, 0.03) == pytest.approx([0, 0.03, 0.06, 0.09, 0.12, 0.15, 0.18, 0.21, 0.24, 0.27, 0.3])
    assert ticks(0.0, 1.0) == [0.0]


def test_a_page_is_as_wide_as_its_numbers_need():
    dense = run("interleaved", stages=2, chunks=4, microbatches=32)
    assert "numbers are microbatches" not in svg.render(dense, F)
    text = page.render(dense, F)
    assert "numbers are microbatches" in text
    assert f'width="{svg.readable_width(dense) + 88}"' in text
    assert svg.readable_width(run("1f1b", stages=2, microbatches=2)) == svg.WIDTH
