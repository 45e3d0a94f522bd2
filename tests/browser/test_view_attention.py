"""Attention: maps, rows and columns, the text and the heads, as the API has them; and maps of many heads in tiles."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser_pages import Pages, settled
from browser_runs import ANSWER_RUN, CLEAN_RUN, HOSTILE_RUN
from browser_site import Site
from playwright.sync_api import Locator, Page, expect

from trimtab.scope.attention import levels_to_values
from trimtab.scope.device.attention import AttentionState, measure_attention
from trimtab.scope.frame import Frame, encode, split
from trimtab.scope.recording.recorder import Chunks
from trimtab.scope.subscription import Subscription
from trimtab.scope.taps.points import AttentionInput

pytestmark = pytest.mark.timeout(180)
HEADS, TOKENS, TP = 16, 512, 2
LARGE = "20260401-000000-a77e"
LARGE_RUN = f"wide.{LARGE}"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """512 tokens: layer 0 in tiles on two ranks, of which one says nothing at step 1; two heads of layer 1 exactly."""
    directory = tmp_path_factory.mktemp("wide") / "wide"
    _record(directory)
    site = Site(directory)
    yield site
    site.close()


def _record(directory: Path) -> None:
    torch.manual_seed(0)
    (directory / "scope").mkdir(parents=True)
    chunks = Chunks(directory / "scope", LARGE, "wide", 1 << 30)
    q, k = torch.randn(1, HEADS, TOKENS, 8), torch.randn(1, HEADS, TOKENS, 8)
    texts = np.frombuffer(json.dumps([f" word{at}" for at in range(TOKENS)]).encode(), np.uint8)
    tiled = Subscription("layers.0.attention.map", "attention", id="s-0001")
    exact = Subscription("layers.1.attention.map", "attention", id="s-0002", parameters={"rows": list(range(64))})
    for wish in (tiled, exact):
        note = {"kind": "subscription", "unix_ns": 10**18, "value": wish.as_dict()}
        chunks.note(json.dumps(note).encode(), wish.id)
    each = HEADS // TP
    for step in range(2):
        for rank in range(TP - step):
            part = slice(rank * each, (rank + 1) * each)
            given = AttentionInput(q[:, part], k[:, part], 0.5, head_offset=rank * each)
            arrays = measure_attention(given, tiled, AttentionState())
            meta = {"labels": ["b", "n", "s", "d"], "heads": [rank * each, each, HEADS]}
            _write(chunks, Frame(tiled.pattern, "attention", tiled.id, step, 0, rank, (("tp", rank, TP),), 0,
                                 _plain(arrays), meta, 10**18))  # fmt: skip
    arrays = _plain(measure_attention(AttentionInput(q[:, :2], k[:, :2], 0.5), exact, AttentionState()))
    meta = {"labels": ["b", "n", "s", "d"]}
    _write(chunks, Frame(exact.pattern, "attention", exact.id, 1, 0, 0, (), 0, arrays | {"texts": texts}, meta, 10**18))
    chunks.close()


def _plain(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value) for name, value in arrays.items()}


def _write(chunks: Chunks, frame: Frame) -> None:
    chunks.frame(split(encode(frame))[0])


def _map(page: Page, layer: int, head: int) -> Locator:
    return page.get_by_role("application", name=f"Attention of layer {layer}, head {head}", exact=True)


def _share(text: str) -> float:
    """What a share says: `12.3 %`, or small ones with their power of ten."""
    found = re.search(r"([\d.]+(?:e-\d+)?)( %)?$", text.strip().replace("\N{MINUS SIGN}", "-"))
    assert found, text
    return float(found[1]) / (100 if found[2] else 1)


def _readout(page: Page) -> Locator:
    return page.get_by_role("region", name=re.compile(r"^Layer \d+, head \d+")).locator("[data-readout]")


def test_a_cell_and_what_was_picked_are_those_of_the_api(pages: Pages, recorded: Site) -> None:
    (served,) = recorded.frames(f"/runs/{ANSWER_RUN}/attention", tap="layers.1.attention.map", step=0, whole=True)
    texts = json.loads(served.arrays["texts"].tobytes())
    row = served.arrays["probabilities"][2, 4]
    picked = {"attention.row": 4, "attention.key": 2}
    page = pages(recorded, view="attention", run=ANSWER_RUN, step=0, layer=1, head=2, **picked)
    shown = _readout(page).filter(has_text="query 4")
    expect(shown).to_contain_text(f"query 4 {texts[4].replace(' ', '␣')}, key 2 {texts[2].replace(' ', '␣')}")
    assert _share(shown.inner_text()) == pytest.approx(row[2], rel=1e-2)
    expect(_map(page, 1, 2)).to_have_attribute("data-rows", str(len(texts)))

    query = page.get_by_role("region", name="The picked query")
    entropy, first = re.findall(r"[\d.]+(?: %)?", query.get_by_text("entropy").inner_text())
    assert float(entropy) == pytest.approx(served.arrays["entropy"][2, 4], rel=1e-3)
    assert _share(first) == pytest.approx(served.arrays["first"][2, 4], rel=1e-2)
    expect(query).to_contain_text("Exact probabilities")
    strongest = query.get_by_role("row").first
    expect(strongest.get_by_role("button")).to_contain_text(str(int(row.argmax())))
    assert _share(strongest.get_by_role("cell").first.inner_text()) == pytest.approx(row.max(), rel=1e-2)

    column = page.get_by_role("region", name="The picked key")
    received = served.arrays["received"][2, 2] / served.arrays["queries"][0]
    assert _share(column.get_by_text("of all attention").locator("b").inner_text()) == pytest.approx(received, rel=1e-2)


def test_rows_of_earlier_tokens_stand_above_the_newest(pages: Pages, recorded: Site) -> None:
    frames = [
        recorded.frames(f"/runs/{ANSWER_RUN}/attention", tap="layers.0.attention.map", step=step)[0]
        for step in range(12)
    ]
    keys = len(frames[-1].arrays["key_position"])
    assert len(frames[-1].arrays["position"]) == 1
    page = pages(recorded, view="attention", run=ANSWER_RUN, layer=0, head=1, **{"attention.row": keys - 2})
    expect(_map(page, 0, 1)).to_have_attribute("data-rows", str(keys))
    query = page.get_by_role("region", name="The picked query")
    said = query.get_by_text("entropy").inner_text()
    assert float(re.findall(r"[\d.]+", said)[0]) == pytest.approx(frames[-2].arrays["entropy"][1, 0], rel=1e-3)
    page.get_by_label("earlier tokens").uncheck()
    expect(_map(page, 0, 1)).to_have_attribute("data-rows", "1")
    expect(query).to_contain_text("Nothing was measured of this query")


def test_layers_heads_and_parts_are_chosen_and_restored(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="attention", run=CLEAN_RUN, step=10)
    expect(page.get_by_role("heading", name="Layer 0, head 0, step 8, the last one up to 10")).to_be_visible()
    page.keyboard.press("]")
    page.keyboard.press("h")
    expect(_map(page, 1, 1)).to_be_visible()
    page.get_by_role("button", name=re.compile("^Head 3:")).click()
    page.get_by_role("combobox", name="Microbatch", exact=True).select_option(label="1")
    page.get_by_role("combobox", name="Data", exact=True).select_option(label="dp 1")
    found = recorded.frames(f"/runs/{CLEAN_RUN}/attention", tap="layers.1.attention.map", step=8, whole=True)
    served = next(one for one in found if one.microbatch == 1 and one.shard[0][1] == 1)
    cell = _map(settled(page), 1, 3)
    expect(cell).to_have_attribute("data-rows", "2")
    cell.focus()
    cell.press("ArrowLeft")
    cell.press("Enter")
    expect(page).to_have_url(re.compile(r"attention\.row=\d+&attention\.key=\d+"))
    said = _readout(page).inner_text()
    query, key = map(int, re.findall(r"query (\d+), key (\d+)", said)[0])
    rows = served.arrays["position"].tolist()
    assert _share(said) == pytest.approx(served.arrays["probabilities"][3, rows.index(query), key], rel=1e-2)
    expect(page).to_have_url(re.compile("attention.key=" + str(key)))
    page.reload()
    expect(_readout(page)).to_have_text(said)
    page.keyboard.press("Escape")
    expect(page.get_by_text("Pick a cell of the map")).to_be_visible()


def test_one_rank_shows_its_own_heads(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="attention", run=CLEAN_RUN, step=8, rank=1)
    expect(page.get_by_role("button", name=re.compile("^Head "))).to_have_count(2)
    expect(_map(page, 0, 2)).to_be_visible()
    page.get_by_role("combobox", name="Rank", exact=True).select_option(label="all")
    expect(page.get_by_role("button", name=re.compile("^Head "))).to_have_count(4)


def test_exports_hold_what_is_shown(pages: Pages, recorded: Site) -> None:
    (served,) = recorded.frames(f"/runs/{ANSWER_RUN}/attention", tap="layers.0.attention.map", step=0, whole=True)
    page = pages(recorded, view="attention", run=ANSWER_RUN, step=0, layer=0, head=3)
    expect(_map(page, 0, 3)).to_be_visible()
    files: dict[str, Path] = {}
    for kind in ("PNG", "CSV", "NPZ"):
        with page.expect_download() as download:
            page.get_by_role("group", name="Export").get_by_text(kind).click()
        files[kind] = download.value.path()
    assert files["PNG"].read_bytes().startswith(b"\x89PNG")
    _, _, *lines = files["CSV"].read_text().splitlines()
    rows = [[float(cell) if cell else 0.0 for cell in line.split(",")[2:]] for line in lines]
    assert np.allclose(rows, served.arrays["probabilities"][3], rtol=1e-6)
    with np.load(io.BytesIO(files["NPZ"].read_bytes())) as arrays:
        assert np.array_equal(arrays["rank0.microbatch0.probabilities"], served.arrays["probabilities"])


def test_the_text_shows_the_picked_tokens_attention_readably(pages: Pages, wide: Site) -> None:
    (served,) = wide.frames(f"/runs/{LARGE_RUN}/attention", tap="layers.1.attention.map", step=1, whole=True)
    page = pages(
        wide, view="attention", run=LARGE_RUN, layer=1, head=1, theme="light",
        **{"attention.mode": "text", "attention.row": 63},
    )  # fmt: skip
    tokens = page.get_by_role("listbox", name="The text, token by token")
    expect(tokens.get_by_role("option", selected=True)).to_contain_text("word63")
    shown = tokens.get_by_role("option").all()
    assert 64 < len(shown) < 400  # those in sight of 512
    label = tokens.get_by_role("option", name=re.compile(r"^7 ")).get_attribute("aria-label")
    assert label is not None
    assert _share(label) == pytest.approx(served.arrays["probabilities"][1, 63, 7], rel=1e-2)
    assert min(tokens.evaluate(_CONTRASTS)) > 4.5
    tokens.focus()
    tokens.press("ArrowLeft")
    expect(page).to_have_url(re.compile(r"attention\.row=62"))
    tokens.press("End")
    expect(tokens.get_by_role("option", selected=True)).to_be_in_viewport()
    expect(tokens.get_by_role("option", selected=True)).to_contain_text("word511")
    expect(page.get_by_text("Nothing was measured of 511 ␣word511 at this step.")).to_be_visible()


_CONTRASTS = """(box) => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(Number).map((channel) => {
      const c = channel / 255
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4
    })
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  return [...box.querySelectorAll('[role=option]')].filter((one) => one.style.background).map((one) => {
    const style = getComputedStyle(one)
    const [a, b] = [light(style.color), light(style.backgroundColor)].sort((x, y) => y - x)
    return (a + 0.05) / (b + 0.05)
  })
}"""


def test_tiles_of_many_heads_are_means_or_peaks_and_say_so(pages: Pages, wide: Site) -> None:
    (served,) = wide.frames(f"/runs/{LARGE_RUN}/attention", tap="layers.0.attention.map", step=0, whole=True)
    means = levels_to_values(served.arrays["tiles"], served.arrays["scale"])[9]
    peaks = levels_to_values(served.arrays["peaks"], served.arrays["peak_scale"])[9]
    picked = {"attention.row": 88, "attention.key": 40}
    page = pages(wide, view="attention", run=LARGE_RUN, step=0, layer=0, head=9, size=(1920, 1080), **picked)
    shown = _readout(page)
    expect(shown).to_contain_text("query 88\N{EN DASH}95, key 40\N{EN DASH}47: mean")
    assert _share(shown.inner_text()) == pytest.approx(means[11, 5], rel=1e-2)
    query = page.get_by_role("region", name="The picked query")
    expect(query).to_contain_text("From tiles: the mean of queries 88\N{EN DASH}95")
    strongest = _share(query.get_by_role("cell").first.inner_text())
    assert strongest == pytest.approx(8 * means[11].max(), rel=1e-2)
    page.keyboard.press("p")
    expect(shown).to_contain_text("at most")
    assert _share(shown.inner_text()) == pytest.approx(peaks[11, 5], rel=1e-2)
    page.get_by_role("combobox", name="Scale", exact=True).select_option(label="logarithmic")
    expect(page.get_by_text("logarithmic scale")).to_be_visible()
    expect(page.get_by_role("button", name=re.compile("^Head "))).to_have_count(HEADS)
    assert page.locator("*").count() < 1500  # no element for a cell


def test_a_part_that_is_missing_is_named(pages: Pages, wide: Site) -> None:
    page = pages(wide, view="attention", run=LARGE_RUN, step=1, layer=0)
    expect(page.get_by_text("layers.0.attention.map, step 1: without tp 1 of 2")).to_be_visible()
    expect(page.get_by_role("button", name=re.compile("^Head "))).to_have_count(HEADS // TP)


def test_all_layers_lead_to_a_head(pages: Pages, recorded: Site) -> None:
    frames = [
        recorded.frames(f"/runs/{ANSWER_RUN}/attention", tap=f"layers.{layer}.attention.map", step=0, whole=True)[0]
        for layer in range(2)
    ]
    page = pages(recorded, view="attention", run=ANSWER_RUN, step=0, layer=1, head=2)
    page.get_by_role("button", name="All layers").click()
    panel = page.get_by_role("region", name="All layers and heads")
    shown = panel.locator("[data-readout]")
    expect(shown).to_contain_text("layer 1, head 2")
    first = frames[1].arrays["first"][2]
    assert _share(shown.inner_text()) == pytest.approx(first[1:].mean(), rel=1e-2)
    grid = panel.get_by_role("application", name="Mean share of the first token")
    grid.focus()
    grid.press("ArrowUp")  # begins where one is
    grid.press("ArrowUp")
    grid.press("Enter")
    expect(_map(page, 0, 2)).to_be_visible()


def test_a_layer_that_was_not_measured_has_a_way_on(pages: Pages, recorded: Site) -> None:
    page = pages(recorded, view="attention", run=CLEAN_RUN, layer=9)
    expect(page.get_by_text("There are no attention maps of layers.9.attention.map here")).to_be_visible()
    expect(page.get_by_text(re.compile("--tap layers.9.attention.map --what attention"))).to_be_visible()
    page.keyboard.press("[")
    expect(_map(page, 3, 0)).to_be_visible()


@pytest.mark.parametrize("mode", ["map", "text"])
def test_hostile_tokens_are_text(pages: Pages, troubled: Site, mode: str) -> None:
    picked = {"attention.row": 7, "attention.key": 3, "attention.mode": mode}
    page = pages(troubled, view="attention", run=HOSTILE_RUN, **picked)
    expect(page.get_by_role("heading", name="Key 3 \\u202eright␣to␣left")).to_be_visible()
    expect(page.get_by_text("<img␣src=x␣onerror=alert(1)>").first).to_be_visible()
    assert page.locator("main img, main script").count() == 0
    assert "\u202e" not in page.locator("main").inner_text()
