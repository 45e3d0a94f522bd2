"""Whatever a file of another program holds, reading it gives a trace or a ValueError of one line."""

from __future__ import annotations

import copy
import functools
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from fuzzed_formats import FUZZED, Fuzzed
from hypothesis import given, settings
from hypothesis import strategies as st

ODD: list[Any] = [
    None, True, False, -1, 0, 1.5, 1e308, -(2**63), 2**63, 2**70, "", "x", "7", "NaN", "[0, 1]", "a\nb", "\x1b[31m<b>",
    [], [[]], {}, {"a": [1]}, [1, "x"],
]  # fmt: skip
BY_NAME = {one.name: one for one in FUZZED}
IN_JSON = [one.name for one in FUZZED if one.name not in ("bytedance", "flight-recorder", "nsight")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples: to make thousands takes longer than to read what is in them."""
    return tmp_path_factory.mktemp("fuzz")


@functools.cache
def seed(name: str) -> bytes:
    return BY_NAME[name].seed()


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """``content`` with some of it changed, removed, doubled or cut off."""
    text = bytearray(content)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(text) - 1)))
        length = draw(st.integers(1, 40))
        how = draw(st.sampled_from(["change", "remove", "insert", "double", "cut"]))
        if how == "change":
            text[at : at + 4] = draw(st.binary(min_size=1, max_size=4))
        elif how == "remove":
            del text[at : at + length]
        elif how == "insert":
            text[at:at] = draw(
                st.binary(max_size=8) | st.sampled_from([b"NaN", b"1e999", b"[" * 200, b'"', b"\\u0000"])
            )
        elif how == "double":
            text[at:at] = text[at : at + length]
        else:
            del text[at:]
    return bytes(text)


@pytest.mark.parametrize("one", FUZZED, ids=lambda one: one.name)
def test_the_seeds_are_read(one: Fuzzed, tmp_path: Path) -> None:
    path = tmp_path / one.file
    path.write_bytes(seed(one.name))
    assert len(one.read([path]).events) > 0


@pytest.mark.parametrize("name", list(BY_NAME))
@settings(max_examples=25)
@given(st.data())
def test_damaged_files(folder: Path, name: str, data: st.DataObject) -> None:
    content = data.draw(damaged(seed(name)))
    BY_NAME[name].try_on(content, folder)


@pytest.mark.parametrize("name", IN_JSON)
@settings(max_examples=25)
@given(st.data())
def test_values_of_any_type(folder: Path, name: str, data: st.DataObject) -> None:
    """Valid JSON in which some values are not what they should be."""
    whole = [json.loads(line) for line in seed(name).splitlines()]
    for _ in range(data.draw(st.integers(1, 8))):
        place: Any = whole
        while isinstance(place, list | dict) and len(place):
            key = data.draw(st.sampled_from(sorted(place, key=str) if isinstance(place, dict) else range(len(place))))
            within = place[key]
            if not isinstance(within, list | dict) or not within or data.draw(st.integers(0, 9)) == 0:
                place[key] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
                break
            place = within
    content = b"\n".join(json.dumps(line).encode() for line in whole)
    BY_NAME[name].try_on(content, folder)


@pytest.mark.parametrize("name", IN_JSON)
def test_deep_nesting_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    for bomb in (b"[" * 20_000, b'{"a":' * 20_000, b'[{"ph":"X","args":' + b"[" * 20_000):
        BY_NAME[name].try_on(bomb, tmp_path)
        text = seed(name)
        half = text.index(b"{", len(text) // 2)
        BY_NAME[name].try_on(text[:half] + bomb + text[half:], tmp_path)


@pytest.mark.parametrize("name", IN_JSON)
def test_gzip_that_is_cut_off_or_damaged(tmp_path: Path, name: str) -> None:
    packed = gzip.compress(seed(name))
    for content in (packed[: len(packed) // 2], packed[:40] + b"\xff" * 20 + packed[60:], packed + b"behind it"):
        BY_NAME[name].try_on(content, tmp_path)
