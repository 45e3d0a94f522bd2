"""Chrome's JSON in blocks: the same events whatever the block, and of damaged files the good part."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_files import gpu_rank, write

from trimtab.traces import trace_events
from trimtab.traces.blocks import Blocks
from trimtab.traces.trace_events import TraceEvents


class Named(msgspec.Struct):
    name: str | None = ""
    ts: float | None = None


def read(path: Path, block_bytes: int = 1 << 20) -> tuple[list[str | None], TraceEvents[Named]]:
    events: TraceEvents[Named] = TraceEvents(path, Named, block_bytes)
    return [one.name for batch in events for one in batch], events


def names(count: int) -> list[dict[str, Any]]:
    return [{"name": f"event {n}", "ts": n, "args": {"n": n, "x": [{"a": "}, {"}, {"b": "]"}]}} for n in range(count)]


AWKWARD = ["}, {", '], "a": [{', '"', "\\", '\\"', "{", "}]}", "[[[[", "é\n", "\ud800", "<b>\x1b[31m"]


@given(
    st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(max_size=6)), max_size=12),
    st.integers(1, 200),
    st.sampled_from([None, 1, "\t"]),
    st.booleans(),
)
def test_any_block_size_gives_the_same_events(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], block: int, indent: Any, packed: bool
) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    events = [{"name": text, "args": {text: [{"name": text}]}} for text in texts]
    path = tmp_path_factory.mktemp("blocks") / ("a.json.gz" if packed else "a.json")
    whole = {"before": [texts], "traceEvents": events, "after": {"texts": texts}}
    write(path, json.dumps(whole, indent=indent).encode())
    found, read_ = read(path, block)
    assert found == texts
    assert read_.problems == []
    assert read_.metadata == {**whole, "traceEvents": []}


@pytest.mark.parametrize("ending", ["]", "", ",", "\n]\n"])
def test_a_plain_list_of_events_may_lack_its_end(tmp_path: Path, ending: str) -> None:
    text = json.dumps(names(50)).removesuffix("]") + ending
    found, read_ = read(write(tmp_path / "a.json", text.encode()), 100)
    assert found == [one["name"] for one in names(50)]
    assert (read_.metadata, read_.problems) == ({}, [])


def test_cut_off_json_gives_the_events_before(tmp_path: Path) -> None:
    text = json.dumps({"head": 1, "traceEvents": names(1000)}).encode()
    found, read_ = read(write(tmp_path / "a.json", text[: len(text) // 2]))
    assert found == [f"event {n}" for n in range(len(found))]
    assert 480 <= len(found) <= 510
    assert read_.metadata["head"] == 1
    (problem,) = read_.problems
    assert "ends before its list" in problem


def test_a_cut_or_damaged_gzip_gives_the_events_before(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps({"traceEvents": names(20_000)}).encode())
    path = tmp_path / "a.json.gz"
    path.write_bytes(packed[: len(packed) // 2])
    found, read_ = read(path)
    assert len(found) > 5_000
    assert found == [f"event {n}" for n in range(len(found))]
    assert "cut off" in read_.problems[0]
    path.write_bytes(packed[:4000] + b"\xff" * 200 + packed[4200:])
    found, read_ = read(path)
    assert any("damaged" in problem for problem in read_.problems)
    assert found[:100] == [f"event {n}" for n in range(100)]


def test_several_gzip_members_and_padding_are_one_file(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": names(30)}).encode()
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(text[:500]) + gzip.compress(text[500:]) + b"\0" * 512)
    found, read_ = read(path)
    assert (len(found), read_.problems) == (30, [])


@pytest.mark.parametrize(
    ("bad", "lost"),
    [
        ('{"name": "event 1", "dur": NaN}', 0),
        ('{"name": "event 1", "dur": -inf, "x": [Infinity, nan]}', 0),
        ('{"name": "event 1", "path": "C:\\new\\user"}', 0),
        ('{"name": "event 1", "text": "a\nb\tc\x01"}', 0),
        ('{"name": 17, "ts": "soon"}', 1),
        ('{"name": "event 1", "ts": }', 1),
        ("[1, 2]", 1),
        ('{"name": ' + "[" * 5000 + "]" * 5000 + "}", 1),
    ],
)
def test_damage_costs_the_event_it_is_in(tmp_path: Path, bad: str, lost: int) -> None:
    good = [json.dumps(one) for one in names(3)]
    text = '{"traceEvents": [' + ", ".join([good[0], bad, good[2]]) + '], "after": 1}'
    found, read_ = read(write(tmp_path / "a.json", text.encode()))
    assert found == (["event 0", "event 2"] if lost else ["event 0", "event 1", "event 2"])
    assert read_.damaged == lost
    assert read_.metadata["after"] == 1


def test_a_lost_quote_does_not_swallow_what_follows(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": names(200)}).replace('"event 100"', '"event 100')
    found, read_ = read(write(tmp_path / "a.json", text.encode()), 500)
    assert {f"event {n}" for n in (*range(99), *range(102, 200))} <= set(found)
    assert read_.damaged


def test_invalid_text_is_replaced(tmp_path: Path) -> None:
    text = b'{"traceEvents": [{"name": "a\xff\xfeb"}, {"name": "c"}]}'
    found, read_ = read(write(tmp_path / "a.json", text))
    assert found == ["a\ufffd\ufffdb", "c"]
    assert read_.problems == []


@pytest.mark.parametrize("text", [b"", b"   ", b"{", b'{"other": []}', b"\x00\x01", b'"traceEvents"', b"17"])
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ValueError, match="not a trace") as caught:
        read(write(tmp_path / "a.json", text))
    assert "\n" not in str(caught.value)


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read(tmp_path / "none.json")


def test_an_event_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_events, "MOST_EVENT_BYTES", 4000)
    bomb = '{"name": "' + "x" * 50_000
    text = '{"traceEvents": [' + json.dumps(names(1)[0]) + ", " + bomb + json.dumps(names(9)).removeprefix("[")
    found, read_ = read(write(tmp_path / "a.json", text.encode()), 1000)
    assert found[0] == "event 0"
    assert read_.damaged
    for hostile in (b'{"traceEvents": [' + b"{" * 100_000, b"[" * 100_000, b'{"traceEvents": [' + b"[" * 100_000):
        found, read_ = read(write(tmp_path / "b.json", hostile), 1000)
        assert found == []


def test_blocks_are_bounded_whatever_the_compression(tmp_path: Path) -> None:
    path = write(tmp_path / "zeros.gz", b" " * 3_000_000)
    blocks = Blocks(path, 1 << 16)
    assert max(len(block) for block in blocks) <= 1 << 16
    assert blocks.count == 3_000_000


def test_metadata_before_and_behind_the_events(tmp_path: Path) -> None:
    _, read_ = read(write(tmp_path / "a.json.gz", gpu_rank()), 300)
    assert read_.metadata["distributedInfo"]["rank"] == 0
    assert read_.metadata["baseTimeNanoseconds"] == 1_700_000_000_000_000_000
