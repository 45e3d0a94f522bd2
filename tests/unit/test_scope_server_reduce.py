"""Many vectors at once, against one after the other; thinning, against every value."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.scope import vector
from trimtab.scope.server import reduce
from trimtab.scope.server.answers import to_json

NUMBERS = st.one_of(st.integers(-9999, 9999).map(lambda n: n / 8), st.sampled_from([math.nan, math.inf, 0.0]))
ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(NUMBERS, max_size=5), st.sampled_from([0.0, 3.5, -2.0])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=30)
@given(ROWS)
def test_merging_and_deriving_many_is_as_one_by_one(rows: list[tuple[int, list[float], float]]) -> None:
    keys = np.array([key for key, _, _ in rows])
    vectors = np.array([vector.vector_of(x, shift) for _, x, shift in rows])
    shifts = np.array([shift for _, _, shift in rows])
    found = reduce.merge_by(keys, vectors, shifts)
    assert found.key.tolist() == sorted(set(keys.tolist()))
    for place, key in enumerate(found.key):
        of = keys == key
        merged, shift = vector.merge(list(vectors[of]), shifts[of].tolist())
        np.testing.assert_allclose(found.vector[place], merged, rtol=1e-5, atol=1e-3)
        assert math.isclose(found.shift[place], shift, rel_tol=1e-6, abs_tol=1e-6)
        for name, value in asdict(vector.derive(found.vector[place], float(found.shift[place]))).items():
            one = reduce.derive(name, found.vector[place : place + 1], found.shift[place : place + 1])
            np.testing.assert_allclose(one[0], value, rtol=1e-9, atol=1e-12, err_msg=name)


@given(
    st.dictionaries(st.integers(0, 50), NUMBERS, max_size=30),
    st.integers(0, 25),
    st.integers(0, 30),
    st.integers(1, 12),
)
def test_thinning_keeps_extremes_and_means(found: dict[int, float], first: int, length: int, buckets: int) -> None:
    steps = np.array(sorted(found), np.int64)
    values = np.array([found[step] for step in sorted(found)], np.float64)
    last = first + length
    thinned = reduce.thin(steps, values, first, last, buckets)
    width = reduce.width_of(first, last, buckets)
    assert len(thinned.first) <= buckets
    inside = [step for step in sorted(found) if first <= step <= last]
    assert thinned.steps.sum() == len(inside)
    for place, begin in enumerate(thinned.first.tolist()):
        part = np.array([found[step] for step in inside if begin <= step < begin + width])
        known = part[~np.isnan(part)]
        assert thinned.steps[place] == len(part)
        if len(known):
            assert thinned.minimum[place] == known.min()
            assert thinned.maximum[place] == known.max()
            np.testing.assert_allclose(thinned.mean[place], known.mean(), rtol=1e-9, atol=1e-9)
        else:
            assert np.isnan(thinned.mean[place])


def test_what_json_lacks_becomes_null() -> None:
    said = {"a": np.array([1.0, np.nan]), "b": math.inf, "c": [np.float64("nan"), np.int64(3)], "d": {2}, "e": "<&é"}
    assert to_json(said) == b'{"a":[1.0,null],"b":null,"c":[null,3],"d":[2],"e":"<&\\u00e9"}'
