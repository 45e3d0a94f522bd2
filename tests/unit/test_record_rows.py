"""Rows to record batches: every value where it belongs, and memory that stays bounded."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.events import FILE_SCHEMA, Kind
from trimtab.record.files import rows as rows_module
from trimtab.record.files.ring import FIELDS, WIDTH
from trimtab.record.files.rows import Site, Sites, to_batch

small = st.integers(-1, 3)
sites_ = st.tuples(
    st.sampled_from(list(Kind)),
    st.sampled_from(["", "layer", "all_reduce", "ü"]),
    st.sampled_from(["compute", "host"]),
    small,
    st.sampled_from(["", "dp@0"]),
    st.sampled_from(["", "all_reduce"]),
    st.sampled_from(["", "float32"]),
    small,
    small,
    small,
    st.sampled_from([(), (3,), (2, 2)]),
)
in_32_bits = ("step", "microbatch", "chunk")


@given(st.lists(st.tuples(sites_, st.lists(st.integers(-1, 2**31 - 1), min_size=WIDTH - 3, max_size=WIDTH - 3))))
def test_what_goes_in_comes_out(events: list[tuple[Site, list[int]]]) -> None:
    sites = Sites()
    rows = np.array([[0, sites.intern(site), *values, 0] for site, values in events], np.int64).reshape(-1, WIDTH)
    batch = to_batch(rows, sites, [None] * len(rows), FILE_SCHEMA)
    assert batch.schema.equals(FILE_SCHEMA)
    for row, (site, values) in zip(batch.to_pylist(), events, strict=True):
        expected: dict[str, Any] = dict(zip(FIELDS[2:-1], values, strict=True))
        expected |= dict(
            zip(
                ("kind", "name", "stream", "layer", "group", "op", "dtype", "src", "dst", "tag", "shape"),
                (*site[:-1], list(site[-1]) or ""),
                strict=True,
            )
        )
        expected = {key: None if value in (-1, "") else value for key, value in expected.items()}
        assert row == expected | {"args": None}


def test_a_site_is_interned_once() -> None:
    sites = Sites()
    site: Site = (Kind.FORWARD, "layer", "compute", 1, "", "", "", -1, -1, -1, ())
    assert sites.intern(site) == sites.intern(("forward", *site[1:]))
    assert len(sites.listed()) == 1
    sites.intern((*site[:3], 2, *site[4:]))
    assert len(sites.listed()) == 2


def test_endless_shapes_and_names_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_SITES_WITH_SHAPES", 10)
    monkeypatch.setattr(rows_module, "_SITES", 20)
    sites = Sites()
    numbers = [
        sites.intern((Kind.COLLECTIVE, f"n{i // 3}", "comm", -1, "", "", "", -1, -1, -1, (i,))) for i in range(1_000)
    ]
    assert len(set(numbers)) <= 22
    columns = sites.columns(np.array([numbers[0], numbers[12], numbers[-1]]))
    assert columns["shape"].to_pylist() == [[0], None, None]
    assert columns["name"].to_pylist() == ["n0", "n4", "(too many names)"]


def test_making_a_batch_does_not_load_arrows_compute_library() -> None:
    """It would cost every rank 15 MB."""
    code = """
import sys
import numpy as np
from trimtab.events import FILE_SCHEMA
from trimtab.record.files.ring import WIDTH
from trimtab.record.files.rows import Sites, to_batch
sites = Sites()
sites.intern(("forward", "layer", "compute", 1, "", "", "", -1, -1, -1, (2, 3)))
assert to_batch(np.zeros((2, WIDTH), np.int64), sites, [None, "{}"], FILE_SCHEMA).num_rows == 2
assert "pyarrow.compute" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
