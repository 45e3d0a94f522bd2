"""Frames as bytes: what was sent arrives, bit by bit, and whatever else comes is refused in one line."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trimtab.scope.frame import ALIGNMENT, HEAD, MAGIC, MOST_FRAME_BYTES, Frame, decode, decode_all, encode, pack, split

TYPES = ("uint8", "int8", "uint16", "int16", "float16", "float32", "int32", "int64", "float64", "uint64")
names = st.text("abcdefghijklmnop.-0123456789", min_size=1, max_size=20)
numbers = st.integers(0, 2**53 - 1)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    arrays = {}
    for _ in range(draw(st.integers(0, 2))):
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
        kind = np.dtype(draw(st.sampled_from(TYPES)))
        raw = draw(st.binary(min_size=1, max_size=16)) * (math.prod(shape) * kind.itemsize)
        arrays[draw(names)] = np.frombuffer(raw[: math.prod(shape) * kind.itemsize], kind).reshape(shape)
    axes = draw(st.lists(st.tuples(st.sampled_from(("tp", "sp", "dp")), st.integers(0, 3)), max_size=3))
    return Frame(
        tap=draw(names),
        what="raw",
        subscription=draw(names),
        step=draw(st.integers(-1, 2**53 - 1)),
        microbatch=draw(st.integers(-1, 2**31 - 1)),
        rank=draw(numbers),
        shard=tuple((axis, index, 4) for axis, index in axes),
        replica=draw(numbers),
        arrays=arrays,
        meta=draw(st.dictionaries(names, st.one_of(st.none(), st.booleans(), numbers, names, st.lists(numbers)))),
        unix_ns=draw(st.integers(0, 2**63 - 1)),
    )


def same(one: Frame, other: Frame) -> None:
    assert replace(one, arrays={}) == replace(other, arrays={})
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        assert array.dtype == other.arrays[name].dtype
        assert array.shape == other.arrays[name].shape
        assert array.tobytes() == other.arrays[name].tobytes()  # NaN and their payloads, too


@settings(max_examples=20, deadline=None)
@given(frames(), frames())
def test_what_is_sent_arrives(one, other):
    raw = encode(one)
    same(one, decode(raw))
    assert len(raw) % ALIGNMENT == 0
    both = decode_all(raw + encode(other))  # they follow each other without a gap
    same(one, both[0])
    same(other, both[1])


def test_arrays_lie_where_they_can_be_used_and_cannot_be_written_to():
    found = decode(encode(sample()))
    assert not found.arrays["vector"].flags.writeable
    assert found.arrays["vector"].flags.aligned


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_whatever_comes_is_a_frame_or_refused(data):
    raw = bytearray(encode(data.draw(frames())))
    change = data.draw(st.sampled_from(("cut", "byte", "insert", "noise")))
    if change == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    elif change == "byte":
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif change == "insert":
        at = data.draw(st.integers(0, len(raw)))
        raw[at:at] = data.draw(st.binary(min_size=1, max_size=16))
    else:
        raw = bytearray(data.draw(st.binary(max_size=200)))
    with contextlib.suppress(ValueError):
        decode_all(bytes(raw))


def sample(**more) -> Frame:
    arrays = {"vector": np.arange(11.0), "tiles": np.arange(6, dtype=np.uint8).reshape(2, 3)}
    return replace(Frame("layers.0.output", "statistics", "s-1", 3, 0, 1, arrays=arrays), **more)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"meta": {"x": float("nan")}}, "not JSON compliant"),
        ({"meta": {"x": [float("inf")]}}, "not JSON compliant"),
        ({"arrays": {"x": np.zeros(2, complex)}}, "arrays of 'complex128' do not travel"),
        ({"arrays": {"x": np.array(["a"])}}, "do not travel"),
        ({"arrays": {"x": np.zeros(MOST_FRAME_BYTES + 8, np.uint8)}}, "longer than 1048576|makes no sense"),
        ({"shard": (("tp", 2, 2),)}, "part 2 of 2 makes no sense"),
        ({"tap": "x" * 300}, "tap is to be a text"),
        ({"rank": -1}, "rank is to be a whole number"),
        ({"step": 2**63}, "frame"),
    ],
)
def test_what_could_not_be_read_is_not_sent(change, says):
    with pytest.raises(ValueError, match=says):
        encode(sample(**change))


def header_of(raw: bytes) -> dict:
    _, length, *_ = HEAD.unpack_from(raw)
    return json.loads(raw[HEAD.size : HEAD.size + length])


def with_header(**changed) -> bytes:
    raw = encode(sample())
    text = json.dumps(header_of(raw) | changed).encode()
    text += b" " * (-len(text) % 8)
    return pack(text, 3, 0, 0, bytes(split(raw)[0].payload))


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (with_header(arrays=[["vector", "float64", [12]], ["tiles", "uint8", [2, 3]]]), "but its header says 104"),
        (with_header(arrays=[["a", "uint8", [1]], ["a", "uint8", [1]]]), "two arrays of one name"),
        (with_header(arrays=[["a", "float64", [2**40]]]), "a shape makes no sense"),
        (with_header(arrays=[["a", "float64", [2**20, 2**20]]]), "longer than"),
        (with_header(arrays=[["a", "float64", [1] * 9]]), "a shape makes no sense"),
        (with_header(arrays=[["a", "object", [1]]]), "arrays of 'object' do not travel"),
        (with_header(arrays=[["a", "float64"]]), "three values"),
        (with_header(arrays={}), "is to be a list"),
        (with_header(shard=[["tp", 1, 1]]), "part 1 of 1"),
        (with_header(shard=[["tp", 0, True]]), "is to be \\[axis"),
        (with_header(extra=1), "'extra' is unknown"),
        (with_header(meta=[]), "meta is to be an object"),
        (encode(sample()).replace(MAGIC, b"tsf2"), "does not begin as one"),
        (encode(sample())[:-1], "cut off"),
        (b"tsf1", "cut off"),
        (encode(sample()) + encode(sample()), "expected one, not 2"),
        (b"", "expected one, not 0"),
        (HEAD.pack(MAGIC, 8, HEAD.size + 8, 0, -2, 0) + b"{}      ", "makes no sense"),
        (HEAD.pack(MAGIC, 4, HEAD.size + 4, 0, 0, 0) + b"{}  ", "its lengths make no sense"),
        (HEAD.pack(MAGIC, 8, HEAD.size + 8, 0, 0, 0) + b"[[[[[[[[", "JSON"),
    ],
)
def test_each_thing_that_is_wrong_is_said(raw, says):
    with pytest.raises(ValueError, match=says):
        decode(raw)
