"""Frames, envelopes and JSON: what was sent comes out, however it is cut; anything else is refused in one line."""

from __future__ import annotations

import json

import pytest
from control_wires import reason_of
from hypothesis import given
from hypothesis import strategies as st

from trimtab.control.frames import FrameReader, frame
from trimtab.control.messages import MOST_DEPTH, PUBLISH, Envelope, checked_name, from_json, pack, to_json, unpack

NAMES = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,63}", fullmatch=True)
ENVELOPES = st.builds(
    Envelope,
    kind=st.integers(0, 6),
    subject=st.just("") | NAMES,
    peer=st.just("") | NAMES,
    number=st.integers(0, 2**64 - 1),
    body=st.binary(max_size=300),
)


@given(st.lists(st.binary(max_size=200), max_size=20), st.data())
def test_frames_come_out_however_they_are_cut(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(frame, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    reader = FrameReader(200)
    found: list[bytes] = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[begin:end])
    assert found == payloads


def test_a_frame_that_is_too_long_is_refused_by_its_length_alone() -> None:
    reader = FrameReader(100)
    assert list(reader.feed(frame(b"x" * 100))) == [b"x" * 100]
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        list(reader.feed(b"\xff\xff\xff\xff"))


def test_the_limit_may_be_raised_between_two_frames_that_come_together() -> None:
    reader = FrameReader(10)
    frames = reader.feed(frame(b"x" * 10) + frame(b"y" * 50))
    assert next(frames) == b"x" * 10
    reader.limit = 50
    assert list(frames) == [b"y" * 50]


@given(ENVELOPES)
def test_envelopes_come_back(envelope: Envelope) -> None:
    assert unpack(pack(envelope)) == envelope


@given(st.binary(max_size=200))
def test_garbage_is_an_envelope_or_a_value_error(raw: bytes) -> None:
    if not reason_of(lambda: unpack(raw)):
        assert pack(unpack(raw)) == raw


@pytest.mark.parametrize("name", ["", "A", ".hidden", "-x", "a/b", "a\n", "ä", "x" * 65, "a b"])
def test_names_are_of_few_signs(name: str) -> None:
    with pytest.raises(ValueError, match="a name is"):
        checked_name(name)


def test_names_that_are_not_ascii_are_refused_on_the_wire() -> None:
    raw = bytearray(pack(Envelope(PUBLISH, "summary")))
    raw[raw.index(b"summary")] = 0xE4
    with pytest.raises(ValueError, match="a name is"):
        unpack(bytes(raw))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_json_comes_back(value: object) -> None:
    assert from_json(to_json(value)) == value


@given(st.binary(max_size=200) | st.text(alphabet='[]{}",:\\0123eE+-.ab', max_size=200).map(str.encode))
def test_other_json_is_a_value_error_in_one_line(raw: bytes) -> None:
    if not reason_of(lambda: from_json(raw)):
        json.loads(raw)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"[" * 100_000, "nested"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested"),
        (b"[" * (MOST_DEPTH + 1) + b"]" * (MOST_DEPTH + 1), "nested"),
        (b'"\xff\xfe"', "utf-8"),
        (b"NaN", "no number"),
        (b"[1e999999, -Infinity]", "no number"),
        (b"9" * 100_000, "digits"),
        (b'{"a":', "Expecting value"),
        (b"", "Expecting value"),
    ],
)
def test_bombs_are_refused(raw: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        from_json(raw)


def test_brackets_within_texts_are_no_nesting() -> None:
    text = "[{" * 100 + '\\"' + "[" * 100
    assert from_json(to_json([text, {"a": [1] * 100}] + [[]] * 100)) == [text, {"a": [1] * 100}] + [[]] * 100


def test_what_json_cannot_hold_is_not_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        to_json([float("nan")])
