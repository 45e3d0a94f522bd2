"""Everybody can use it: by keyboard alone, in both themes, with a screen reader; and what is shown can be linked."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from browser_pages import Pages, settled
from browser_runs import ANSWER_RUN, CLEAN_RUN, DISTURBED_RUN
from browser_site import Site
from playwright.sync_api import Page, expect

from trimtab.scope.commands.open import VIEWS

AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
CONTROLS = "main select, main input, footer input"
"""What is chosen on the page."""
CHECK = """async (rules) => {
    const found = await axe.run(document, {
        runOnly: { type: 'tag', values: rules },
        // Of an experimental rule a value that is said with more digits than it is shown with is another.
        rules: { 'label-content-name-mismatch': { enabled: false } },
    })
    return found.violations.flatMap((rule) => rule.nodes.map((node) =>
        `${rule.id}: ${node.target.join(' ')}: ${node.failureSummary.replace(/\\s+/g, ' ')}`))
}"""
WIDE = (
    "[document.documentElement, document.querySelector('main')]"
    ".filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.tagName)"
)
LINKS: dict[str, dict[str, Any]] = {
    "ranks": {"run": CLEAN_RUN, "tap": "layers.1.output", "step": 8, "stat": "absmax"},
    "layers": {"run": DISTURBED_RUN, "step": 30, "stat": "std"},
    "histogram": {"run": CLEAN_RUN, "tap": "layers.2.output", "step": 12},
    "scan": {"run": CLEAN_RUN},
    "tensors": {"run": CLEAN_RUN, "layer": 1, "step": 8},
    "attention": {"run": CLEAN_RUN, "layer": 2, "head": 1, "step": 16},
    "text": {"run": ANSWER_RUN, "step": 5},
    "pca": {"run": CLEAN_RUN, "tap": "layers.3.output", "step": 20},
    "compare": {"run": CLEAN_RUN, "other": DISTURBED_RUN, "step": 22},
    "disturb": {"run": DISTURBED_RUN},
}
"""Of each view, one."""
RESTORED = ("ranks", "layers", "tensors", "attention", "text", "pca", "compare")
"""The tests of these views open a link, too."""


def asked(page: Page) -> dict[str, str]:
    return dict(parse_qsl(urlsplit(page.url).query))


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_contrast_labels_and_roles_and_nothing_wider_than_the_window(pages: Pages, recorded: Site, turn: int) -> None:
    """Each view in one of the themes, the next one in the other; and in the other one each, where there is time."""
    page = pages(recorded, "about")
    faults: list[str] = []
    for at, view in enumerate(VIEWS):
        theme, size = (("dark", (1280, 720)), ("light", (1920, 1080)))[(at + turn) % 2]
        page.emulate_media(color_scheme=theme)
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.goto(recorded.link(view=view, **LINKS[view]))
        settled(page)
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
        page.evaluate(AXE.read_text(encoding="utf-8"))
        faults += [f"{view}, {theme}: {fault}" for fault in page.evaluate(CHECK, RULES)]
        faults += [f"{view}: {name} is wider than {size[0]} pixels" for name in page.evaluate(WIDE)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("view", [pytest.param(view, marks=[pytest.mark.slow] * (view in RESTORED)) for view in VIEWS])
def test_a_link_shows_what_was_shown(pages: Pages, recorded: Site, view: str) -> None:
    first = settled(pages(recorded, view=view, **LINKS[view]))
    wanted = {"view": view} | {name: str(value) for name, value in LINKS[view].items()}
    assert wanted.items() <= asked(first).items()
    if "step" in wanted:
        expect(first.get_by_role("spinbutton", name="Step", exact=True)).to_have_value(wanted["step"])
    other = first.context.new_page()
    pages.watched(other).goto(first.url)
    settled(other)
    assert asked(other) == asked(first)
    chosen, same = first.locator(CONTROLS), other.locator(CONTROLS)
    expect(same).to_have_count(chosen.count())
    for at in range(chosen.count()):
        expect(same.nth(at)).to_have_value(chosen.nth(at).input_value())
        if chosen.nth(at).get_attribute("type") == "checkbox":
            expect(same.nth(at)).to_be_checked(checked=chosen.nth(at).is_checked())


def test_all_views_are_reached_by_keyboard_and_focus_is_seen(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="layers", run=CLEAN_RUN, step=8))
    for key, view in zip("1234567890", VIEWS, strict=True):
        page.keyboard.press(key)
        expect(page.locator("nav a[aria-current=page]")).to_have_count(1)
        page.wait_for_url(f"**view={view}**")
        settled(page)
        assert asked(page)["step"] == "8", "the step stays"
        seen = tabbed(page)
        assert len(seen) > 12, view
        hidden = [name for name, outlined in seen if not outlined]
        assert not hidden, f"{view}: the focus does not show on {hidden}"


def tabbed(page: Page) -> list[tuple[str, bool]]:
    """What Tab comes to, once around: a name for each, and whether one can see that it has the focus."""
    page.evaluate(BEGIN_TABBING)
    for _ in range(20):
        for _ in range(8):
            page.keyboard.press("Tab")
        if page.evaluate("tabbed.around"):
            break
    return page.evaluate(END_TABBING)


BEGIN_TABBING = """() => {
    document.activeElement?.blur()
    const seen = new Set()
    const see = ({ target: one }) => {
        window.tabbed.around ||= seen.has(one)
        if (seen.has(one)) return
        seen.add(one)
        const style = getComputedStyle(one)
        const ring = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0
        const name = `${one.tagName} ${one.ariaLabel ?? one.textContent.trim().slice(0, 40)}`
        window.tabbed.found.push([name, ring || style.boxShadow !== 'none'])
    }
    document.addEventListener('focusin', see)
    window.tabbed = { found: [], around: false, end: () => document.removeEventListener('focusin', see) }
}"""
END_TABBING = """() => {
    tabbed.end()
    document.activeElement?.blur() // fields keep keys for themselves
    return tabbed.found
}"""


@pytest.mark.slow  # test_time_recorded.py uses it
def test_the_list_of_keys_opens_and_closes(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="layers", run=CLEAN_RUN))
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Live edge")
    page.keyboard.press("1")
    assert asked(page)["view"] == "layers", "keys below a dialog do nothing"
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


def test_the_theme_is_kept(pages: Pages, recorded: Site) -> None:
    page = settled(pages(recorded, view="layers", run=CLEAN_RUN, theme="dark"))
    page.keyboard.press("t")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.reload()
    expect(settled(page).locator("html")).to_have_attribute("data-theme", "light")
