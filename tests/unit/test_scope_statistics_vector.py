"""Vectors and histograms merge to those of the whole, and what is derived from them is right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trimtab.scope import vector as v

FLOATS = st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-42, 3e38])
VALUES = arrays(np.float32, st.integers(0, 60), elements=FLOATS)
SHIFTS = st.sampled_from([0.0, 1.0, -700.0, 1e5])


def moments(values: np.ndarray) -> tuple[float, float, float, float]:
    """Mean, standard deviation, skewness and kurtosis."""
    mean, std = values.mean(), values.std()
    d = (values - mean) / std
    return float(mean), float(std), float((d**3).mean()), float((d**4).mean())


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.tuples(VALUES, SHIFTS), max_size=5))
def test_parts_of_any_shift_merge_to_the_whole(parts: list[tuple[np.ndarray, float]]) -> None:
    whole = np.concatenate([values for values, _ in parts]) if parts else np.zeros(0)
    with np.errstate(over="ignore"):
        merged, shift = v.merge([v.vector_of(values, about) for values, about in parts], [about for _, about in parts])
        expected = v.vector_of(whole, shift)
    assert np.array_equal(merged[: v.SUM], expected[: v.SUM])
    assert np.array_equal(merged[v.MIN :], expected[v.MIN :])
    finite = np.asarray(whole, dtype=np.float64)[np.isfinite(whole)]
    # No sum can be better than the largest that was ever added up for it.
    far = np.concatenate([np.abs(finite) + max([abs(a) for _, a in parts] + [abs(shift)], default=0.0), [0.0]])
    for power, field in enumerate((v.SUM, v.SUM2, v.SUM3, v.SUM4), start=1):
        assert abs(merged[field] - expected[field]) <= 1e-13 * 2**power * (far**power).sum(), v.FIELDS[field]
    histogram = v.merge_exponents([v.exponents_of(values) for values, _ in parts])
    assert np.array_equal(histogram, v.exponents_of(whole))
    assert histogram.sum() == whole.size == merged[v.N]


def test_moments_survive_a_mean_that_dwarfs_the_deviation() -> None:
    values = np.random.default_rng(1).gamma(2.0, 0.1, 20_000) + 1e4
    parts = np.split(values, [100, 9_000, 15_000])
    shifts = [9_990.0, 1e4 + 0.5, 9_999.0, 1e4]
    merged, shift = v.merge([v.vector_of(p, s) for p, s in zip(parts, shifts, strict=True)], shifts)
    found = v.derive(merged, shift)
    assert abs(shift - values.mean()) < 1e-3, "none of the parts' shifts, but the mean of all"
    expected = moments(values)
    # About the rounded mean that merge chooses, to what float32 lets it come near.
    np.testing.assert_allclose((found.mean, found.std, found.skewness, found.kurtosis), expected, rtol=1e-6)
    about_zero = v.derive(v.vector_of(values))
    assert abs(about_zero.kurtosis / expected[3] - 1) > 0.1, "without a shift the fourth moment is lost"


def test_equal_shifts_are_kept_and_plainly_added() -> None:
    a, b = np.array([1.0, 2.0]), np.array([5.0])
    merged, shift = v.merge([v.vector_of(a, 3.0), v.vector_of(b, 3.0)], [3.0, 3.0])
    assert shift == 3.0
    assert merged.tolist() == (v.vector_of(np.concatenate([a, b]), 3.0)).tolist()
    # A part without finite values has no say in the shift.
    nothing = v.vector_of([math.nan], 9.0)
    merged, shift = v.merge([nothing, v.vector_of(a, 3.0)], [9.0, 3.0])
    assert (shift, merged[v.N], merged[v.NAN], merged[v.SUM]) == (3.0, 3, 1, -3.0)


def test_derived_statistics_and_their_shares() -> None:
    values = np.array([1.0, -3.0, 0.0, 0.0, math.nan, math.inf, -math.inf, 2.0])
    found = v.derive(v.vector_of(values, 0.5), 0.5)
    finite = values[np.isfinite(values)]
    assert (found.n, found.nan, found.inf, found.zeros) == (8, 1, 2, 2)
    assert (found.nan_share, found.inf_share, found.zero_share) == (1 / 8, 2 / 8, 2 / 8)
    assert (found.min, found.max, found.absmax) == (-3.0, 2.0, 3.0)
    assert found.mean_abs == pytest.approx(np.abs(finite).mean())
    assert found.rms == pytest.approx(math.sqrt((finite**2).mean()))
    np.testing.assert_allclose((found.mean, found.std, found.skewness, found.kurtosis), moments(finite), atol=1e-14)


def test_nothing_and_equal_values_have_no_moments_and_no_rounding() -> None:
    empty = v.derive(v.empty())
    assert empty.n == 0
    assert all(value is None for value in list(empty.as_dict().values())[4:])
    nans = v.derive(v.vector_of([math.nan] * 3))
    assert nans.as_dict()["nan_share"] == 1.0
    assert math.isnan(nans.mean)
    same = v.derive(v.vector_of(np.full(1000, 0.1, np.float32)))
    assert (same.mean, same.std) == (pytest.approx(0.1, rel=1e-7), 0.0)
    assert same.min == same.max == same.mean
    assert math.isnan(same.kurtosis)
    # A deviation whose powers float64 does not hold.
    close = v.derive(v.vector_of([0.0, 3.57e-146]))
    assert close.std == pytest.approx(1.785e-146)
    assert math.isnan(close.kurtosis)


@pytest.mark.parametrize("name", v.OCTAVES)
def test_types_fill_the_bins_that_their_octaves_say(name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    info = torch.finfo(dtype)
    smallest = torch.zeros(1, dtype=dtype)
    bits = smallest.view(torch.uint8 if dtype.itemsize == 1 else torch.int16 if dtype.itemsize == 2 else torch.int32)
    bits += 1
    values = [float(smallest.to(torch.float64)), info.tiny, info.max]
    found = [int(np.flatnonzero(v.exponents_of([value]))[0]) for value in values]
    assert found == list(v.OCTAVES[name])


def test_bins_are_octaves_and_the_outermost_hold_the_rest() -> None:
    values = [0.0, -0.0, 2.0**-126, 2.0**-127, 1.0, -1.999, 2.0, 3.4e38, 1e300, math.nan, -math.inf]
    bins = v.exponents_of(values)
    filled = {int(b): int(bins[b]) for b in np.flatnonzero(bins)}
    assert filled == {0: 3, 1: 1, 127: 2, 128: 1, 254: 2, 255: 2}
    low, high = v.edges([0, 1, 127, 254, 255])
    assert low[:4].tolist() == [0.0, 2.0**-126, 1.0, 2.0**127]
    assert high[:4].tolist() == [2.0**-126, 2.0**-125, 2.0, 2.0**128]
    assert np.isnan([low[4], high[4]]).all()


@pytest.mark.parametrize("kind", ["normal", "exponential", "uniform", "student", "one sign"])
def test_quantiles_are_near(kind: str) -> None:
    random = np.random.default_rng(3)
    values = {
        "normal": lambda: random.normal(0, 1e-3, 100_000),
        "exponential": lambda: random.exponential(5.0, 100_000),
        "uniform": lambda: random.uniform(-1, 1, 100_000),
        "student": lambda: random.standard_t(3, 100_000),
        "one sign": lambda: random.normal(100, 1, 100_000),
    }[kind]()
    shares = [0.05, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0]
    found = v.quantiles(v.exponents_of(values), shares, v.vector_of(values))
    np.testing.assert_allclose(found, np.quantile(np.abs(values), shares), rtol=0.035)


@settings(max_examples=50, deadline=None)
@given(values=VALUES, shares=st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_quantiles_are_in_the_right_octave_and_ordered(values: np.ndarray, shares: list[float]) -> None:
    found = v.quantiles(v.exponents_of(values), sorted(shares), v.vector_of(values))
    finite = np.sort(np.abs(values[np.isfinite(values)].astype(np.float64)))
    if not finite.size:
        assert np.isnan(found).all()
        return
    assert (np.diff(found) >= 0).all()
    for share, value in zip(sorted(shares), found, strict=True):
        near = (
            finite[max(0, math.ceil(share * finite.size) - 1)],
            finite[min(finite.size - 1, int(share * finite.size))],
        )
        assert near[0] / 2.0001 - 1.2e-38 <= value <= near[1] * 2.0001 + 1.2e-38


def test_underflow_shows_as_a_share() -> None:
    values = np.array([0.0, 2.0**-8, 2.0**-7, 2.0**-6, 1.0])
    share = v.subnormal_share(v.exponents_of(values), "float8_e4m3fn", zeros=1)
    assert share == pytest.approx(2 / 5)
    with pytest.raises(ValueError, match="int8 has no exponent bins: there are float32"):
        v.subnormal_share(v.exponents_of(values), "int8")


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has 11 fields, this one has the shape \(3,\)"):
        v.merge([np.zeros(3)])
    with pytest.raises(ValueError, match="1 vectors and 2 shifts"):
        v.merge([v.empty()], [0.0, 1.0])
    with pytest.raises(ValueError, match="256 bins"):
        v.merge_exponents([np.zeros(255)])
    with pytest.raises(ValueError, match="between 0 and 1"):
        v.quantiles(np.zeros(256), [1.5])
