"""Whatever a file holds, reading it gives a trace or a ValueError of one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_files import gpu_rank, said, slice_, write

from trimtab.traces.formats import kineto
from trimtab.traces.table import COLUMNS

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    1e308,
    -(2**63),
    2**70,
    "",
    "x",
    "7",
    "NaN",
    "[0, 1]",
    [],
    [[]],
    {},
    {"a": [1]},
]
VALUES = st.sampled_from(ODD) | st.integers(-5, 5) | st.text(max_size=5)
TREES = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
CATEGORIES = [
    "kernel",
    "Kernel",
    "gpu_memcpy",
    "cuda_runtime",
    "cpu_op",
    "user_annotation",
    "python_function",
    "ac2g",
    None,
    3,
]
NAMES = [
    "ncclDevKernel_SendRecv", "ProfilerStep#3", "ProfilerStep#99999999999", "gloo:all_reduce", "c10d::allreduce_",
    "record_param_comms", "Optimizer.step#A", "a\x00b", "\ud800", None, 5,
]  # fmt: skip
ARGS = ["correlation", "stream", "device", "grid", "block", "Input Dims", "Input type", *said("", 0), "Src Rank", "Seq"]
EVENTS = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "X", "X", "M", "i", "?", None])},
    optional={
        "cat": st.sampled_from(CATEGORIES),
        "name": st.sampled_from(NAMES) | TREES,
        "tid": VALUES,
        "ts": st.integers(0, 1000) | VALUES,
        "dur": st.integers(0, 100) | VALUES,
        "args": st.dictionaries(st.sampled_from(ARGS), TREES, max_size=6) | TREES,
    },
)
HEADS = st.dictionaries(
    st.sampled_from(
        ["schemaVersion", "deviceProperties", "distributedInfo", "baseTimeNanoseconds", "host_name", "trimtab"]
    ),
    TREES | st.fixed_dictionaries({}, optional={"rank": VALUES, "world_size": VALUES, "pg_config": TREES}),
)


def check(path: Path) -> None:
    said = ""
    try:
        trace = kineto.read([path])
    except ValueError as error:
        said = str(error)
        trace = None
    assert "\n" not in said
    assert len(said) < 1000
    if trace is not None:
        assert list(trace.events.columns) == list(COLUMNS)
        assert (trace.events["end"] >= trace.events["start"]).all()
        assert all("\n" not in warning for warning in trace.warnings)


@settings(max_examples=25)
@given(HEADS, st.lists(EVENTS, max_size=12), st.booleans())
def test_any_structure(tmp_path_factory: pytest.TempPathFactory, head: Any, events: Any, behind: bool) -> None:
    whole = {"traceEvents": events, **head} if behind else {**head, "traceEvents": events}
    check(write(tmp_path_factory.mktemp("fuzz") / "rank0.json", whole))


@settings(max_examples=25)
@given(st.data())
def test_any_change_of_a_good_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(json.dumps(gpu_rank()).encode())
    packed = data.draw(st.booleans())
    content = bytearray(gzip.compress(content)) if packed else content
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        change = data.draw(st.sampled_from(["byte", "cut", "drop", "double"]))
        if change == "byte":
            content[place] = data.draw(st.integers(0, 255))
        elif change == "drop":
            del content[place : place + data.draw(st.integers(1, 200))]
        elif change == "double":
            content[place:place] = content[place : place + data.draw(st.integers(1, 200))]
        else:
            del content[place:]
        content = content or bytearray(b"{")
    path = tmp_path_factory.mktemp("fuzz") / "rank0.json"
    path.write_bytes(content)
    check(path)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 50), st.integers(0, 50), TREES), max_size=8))
def test_any_communication(tmp_path_factory: pytest.TempPathFactory, calls: Any) -> None:
    """Operators and kernels of communication whose arguments are of the right names and of any type."""
    events = []
    for number, (name, start, length, odd) in enumerate(calls):
        args = {**said("send", 5), ARGS[number % len(ARGS)]: odd, "correlation": number, "stream": number % 3}
        cat = ("cpu_op", "kernel", "user_annotation")[number % 3]
        events.append(slice_(cat, str(name), start, length, number % 2, **args))
        events.append(slice_("cuda_runtime", "launch", start, 1, number % 2, correlation=number))
    check(write(tmp_path_factory.mktemp("fuzz") / "rank0.json", {"schemaVersion": 1, "traceEvents": events}))
