"""Array helpers against plain Python."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.scan.arrays import composite, factorize, medians, reach, split, sums
from trimtab.scan.measure import others

times = st.integers(-(10**12), 10**14)


@given(st.lists(st.tuples(st.integers(0, 16_383), times), min_size=1, max_size=50))
def test_composite_keys_sort_like_pairs_and_split_again(pairs: list[tuple[int, int]]) -> None:
    rank, time = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    keys = composite(rank, time, 16_384)
    assert [pairs[i] for i in np.argsort(keys, kind="stable")] == sorted(pairs)
    again = split(keys, 16_384)
    assert (again[0] == rank).all()
    assert (again[1] == time).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 128, 10_000])
@given(data=st.data())
def test_no_time_makes_a_key_of_another_rank(ranks: int, data: st.DataObject) -> None:
    rank = np.array([data.draw(st.integers(0, ranks - 1))])
    time = np.array([data.draw(st.integers(-(2**63), 2**63 - 1))])
    keys = composite(rank, time, ranks)
    assert 0 <= int(keys[0]) < 2**62
    again = split(keys, ranks)
    assert again[0] == rank
    assert again[1] == np.clip(time, -reach(ranks), reach(ranks) - 1)


def test_keys_hold_runs_of_months() -> None:
    assert reach(128) > 200 * 86_400 * 10**9


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-1e6, 1e6)), max_size=60))
def test_medians_and_sums_by_index(rows: list[tuple[int, float]]) -> None:
    index = np.array([row[0] for row in rows], dtype=np.int64)
    values = np.array([row[1] for row in rows], dtype=np.float64)
    got, total = medians(index, values, 6), sums(index, values, 6)
    for key in range(6):
        mine = [value for at, value in rows if at == key]
        if mine:
            assert got[key] == statistics.median(mine)
        else:
            assert np.isnan(got[key])
        assert np.isclose(total[key], sum(mine), atol=1e-6)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40))
def test_factorize_gives_equal_rows_one_dense_id(rows: list[tuple[int, int]]) -> None:
    a = np.array([row[0] for row in rows], dtype=np.int64)
    b = np.array([row[1] for row in rows], dtype=np.int64)
    ids, first = factorize(a, b)
    assert len(first) == len(set(rows))
    for i, row in enumerate(rows):
        assert rows[first[ids[i]]] == row


@given(st.integers(2, 9), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_others_is_the_median_without_oneself(ranks: int, steps: int, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(ranks, steps))
    got = others(x, np.zeros(ranks, dtype=np.int64))
    for rank in range(ranks):
        assert np.allclose(got[rank], np.median(np.delete(x, rank, axis=0), axis=0))


def test_others_of_a_rank_without_peers_is_unknown() -> None:
    assert np.isnan(others(np.ones((2, 3)), np.array([0, 1]))).all()
