"""Dumps of the Flight Recorder, as pickle and JSON; and pickles that want to do more than hold data."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from format_files import SHARED, flight_recorder, write_flight_recorder
from hypothesis import given
from hypothesis import strategies as st

from trimtab.traces.formats.flight_recorder import pickles
from trimtab.traces.formats.flight_recorder.pickles import load_plain
from trimtab.traces.read import read

PUBLIC = SHARED / "torch_gloo4"

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"the public traces are not at {PUBLIC}")
def test_public_dumps() -> None:
    trace = read(*sorted(PUBLIC.glob("fr_rank_*.pkl")))
    assert sorted(trace.ranks) == [0, 1, 2, 3]
    assert trace.world_size == 4
    assert trace.groups == {"1": (0, 1), "2": (2, 3), "default_pg/0@0": (0, 1, 2, 3)}
    assert len(trace.events) == 4 * 21
    numbers = trace.events.group_by("group", "op", "seq").len()
    assert sorted(numbers["len"].unique()) == [2, 4]
    assert {info.device for info in trace.ranks.values()} == {"cpu"}
    reduced = trace.events.filter((pl.col("rank") == 2) & (pl.col("bytes") == 1_052_672))
    assert reduced["dtype"].unique().to_list() == ["float32"]


@pytest.mark.parametrize("kind", ["pickle", "json"])
def test_a_job_that_hangs(tmp_path: Path, kind: str) -> None:
    dumps = {rank: flight_recorder(rank, last=3 if rank == 2 else 5) for rank in range(4)}
    trace = read(write_flight_recorder(tmp_path / "run", dumps, kind))
    assert trace.groups == {"default_pg/0@0": (0, 1, 2, 3)}
    assert any(
        "rank 2 had not yet asked for collective number 5 (nccl:all_reduce) of group default_pg/0@0, ranks 0-1, 3 had"
        in said
        for said in trace.warnings
    )
    first = trace.events.filter((pl.col("rank") == 0) & (pl.col("seq") == 1)).row(0, named=True)
    assert (first["op"], first["bytes"], first["dtype"]) == ("all_reduce", 4096, "bfloat16")
    assert (first["ready"], first["end"]) == (1_700_000_000_000_000_000, 1_700_000_000_000_500_000)
    assert json.loads(first["args"])["line"] == "/home/me/train.py:7 main"
    assert trace.events["end"].null_count() == 18 - 4


def test_messages_and_coalesced_calls(tmp_path: Path) -> None:
    sent = flight_recorder(0, 2, ranks=2, profiling_name="nccl:send 0->1", is_p2p=True, p2p_seq_id=4)
    received = flight_recorder(1, 2, ranks=2, profiling_name="nccl:recv 1<-0", is_p2p=True, p2p_seq_id=4)
    trace = read(write_flight_recorder(tmp_path / "run", {0: sent, 1: received}))
    assert set(trace.events.select("kind", "src", "dst").iter_rows()) == {("send", 0, 1), ("recv", 0, 1)}
    assert trace.events.select("rank", "seq").n_unique() == 4


def test_the_newest_dump_of_a_rank_counts(tmp_path: Path) -> None:
    folder = write_flight_recorder(tmp_path / "run", {0: flight_recorder(0, 2), 1: flight_recorder(1, 2)})
    (folder / "old_rank_0.pkl").write_bytes(pickle.dumps(flight_recorder(0, 1), protocol=2))
    trace = read(folder)
    assert len(trace.events) == 4
    assert any("nccl_trace_rank_0 is read, not old_rank_0.pkl" in warning for warning in trace.warnings)


def test_a_dump_that_does_not_tell_its_rank(tmp_path: Path) -> None:
    path = tmp_path / "dump.pkl"
    path.write_bytes(pickle.dumps(flight_recorder(0), protocol=2))
    with pytest.raises(ValueError, match="does not tell its rank: give the file a name"):
        read(path)


def test_json_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = write_flight_recorder(tmp_path / "run", {0: flight_recorder(0)}, "json")
    path = folder / "nccl_trace_rank_0"
    text = path.read_text()
    path.write_text(text[: text.index('"record_id": 3') + 20])
    trace = read(path)
    assert len(trace.events) == 3
    assert any("the 3 whole entries at its begin are read" in warning for warning in trace.warnings)


def test_entries_of_strange_types_do_no_harm(tmp_path: Path) -> None:
    dump = flight_recorder(0, 2)
    dump["entries"] += [
        None,
        {"time_created_ns": "x"},
        {"time_created_ns": 5, "profiling_name": 7},
        {**dump["entries"][0], "input_sizes": [[[1]], "a"], "input_dtypes": [None], "process_group": 3, "frames": "x"},
        {**dump["entries"][0], "input_sizes": [[-1, 10**30]], "collective_seq_id": 10**30, "state": "\x1b[31m<b>"},
        {**dump["entries"][0], "profiling_name": "nccl:\ud800", "process_group": ("\ud800", "b"), "state": "\udfff"},
        {
            **dump["entries"][0],
            "input_dtypes": ["\ud800"],
            "frames": [{"filename": "\ud800", "line": 1, "name": "\ud800"}],
        },
    ]
    dump["pg_config"]["1"] = {"ranks": "[0, 1"}
    trace = read(write_flight_recorder(tmp_path / "run", {0: dump}))
    assert any("entries do not tell what and when" in warning for warning in trace.warnings)
    assert len(trace.events) == 6


class Runs:
    """Pickled, it is a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_tries_to_run_code_is_refused(tmp_path: Path, protocol: int) -> None:
    made = tmp_path / "made"
    dump = flight_recorder(0) | {"evil": Runs(os.mkdir, str(made))}
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(dump, protocol=protocol))
    with pytest.raises(ValueError, match=r"does more than hold data \((STACK_)?GLOBAL\): refused") as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert not made.exists()


@pytest.mark.parametrize(
    "text",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"(ios\nsystem\n.",
        b"\x80\x02}\x82\x01.",
        b"\x80\x02}b.",
        b"\x80\x02}}R.",
        b"\x80\x02U\x01aQ.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    ],
)
def test_instructions_that_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"refused|not a pickle"):
        load_plain(text)


def test_a_class_is_not_even_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "_check", lambda data: None)
    with pytest.raises(ValueError, match="it asks for a class"):
        load_plain(pickle.dumps(Runs(os.mkdir, "x"), protocol=2))


def test_pickles_that_want_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="refused"):
        load_plain(b"\x80\x02}r\xff\xff\xff\x7f.")  # room for two thousand million objects
    with pytest.raises(ValueError, match="containers"):
        load_plain(b"\x80\x02" + b"]" * (pickles.MOST_CONTAINERS + 1) + b".")
    with pytest.raises(ValueError, match="MiB"):
        load_plain(b"\x80\x02" + bytes(pickles.MOST_BYTES))


@given(PLAIN, st.sampled_from([2, 3, 4, 5]))
def test_plain_values_come_back(value: Any, protocol: int) -> None:
    text = pickle.dumps(value, protocol=protocol)
    try:
        assert load_plain(text) == value
    except ValueError as error:
        assert "LONG4" in str(error) or "FROZENSET" in str(error)  # noqa: PT017


@given(st.binary(max_size=400).map(lambda text: b"\x80\x02" + text))
def test_any_bytes_are_loaded_or_refused_in_one_line(text: bytes) -> None:
    try:
        load_plain(text)
    except ValueError as error:
        assert "\n" not in str(error)  # noqa: PT017
