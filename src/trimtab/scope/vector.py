"""Statistics that merge: what a rank sends of a tensor, and what is made of the parts of all ranks.

A *vector* is eleven float64 numbers (:data:`FIELDS`), an *exponent histogram* 256 counts. Both are sums over elements
(but for the two extremes), so that the vectors of the shards of a tensor add up to the vector of the whole. Everything
that people look at (:class:`Statistics`, quantiles) is derived from them after they have been merged.

The four sums of powers are taken about a *shift*, because where the mean is much larger than the standard deviation
the difference of two large sums says nothing any more. Each vector has its own shift (0 where none is given), and
vectors of different shifts are merged by the binomial theorem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Vector = NDArray[np.float64]
"""(11,) in the order of :data:`FIELDS`."""
Exponents = NDArray[np.int64]
"""(256,) counts of elements."""

FIELDS: Final = (
    "n",
    "nan",
    "inf",
    "zeros",
    "sum",
    "sum_abs",
    "sum2",
    "sum3",
    "sum4",
    "min",
    "max",
)
"""``n`` counts all elements, ``nan``, ``inf`` (of either sign) and ``zeros`` are some of them. All that follows is of
finite values only: ``sum``, ``sum2``, ``sum3``, ``sum4`` are sums of (x - shift) to the power of 1 to 4, ``sum_abs`` is
the sum of |x| (never shifted), ``min`` and ``max`` are +inf and -inf where nothing is finite."""
N, NAN, INF, ZEROS, SUM, SUM_ABS, SUM2, SUM3, SUM4, MIN, MAX = range(len(FIELDS))
"""Places in a vector."""

BINS: Final = 256
TINY_BIN: Final = 0
"""Bin of the zeros, and of all that is smaller than 2^-126."""
SPECIAL_BIN: Final = 255
"""Bin of NaN and infinities."""
BIAS: Final = 127
"""Bin ``b`` from 1 to 254 counts 2^(b - 127) <= |x| < 2^(b - 126). That is the exponent field of the value as a
float32, whatever the type of the tensor: histograms of tensors of different types share one axis and merge. bfloat16
has the same field; the values of float16 and of both float8 types, their subnormals included, are normal numbers of
float32."""


class Octaves(NamedTuple):
    """Which bins the values of a type can be in."""

    smallest: int
    """Bin of the smallest subnormal."""
    normal: int
    """Bin of the smallest normal number."""
    largest: int
    """Bin of the largest finite number."""


OCTAVES: Final[dict[str, Octaves]] = {
    "float32": Octaves(0, 1, 254),
    "bfloat16": Octaves(0, 1, 254),
    "float16": Octaves(103, 113, 142),
    "float8_e4m3fn": Octaves(118, 121, 135),
    "float8_e5m2": Octaves(111, 113, 142),
}
"""By the name of the dtype. Where the bins below ``normal`` fill up, a type underflows."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What people look at. Moments are those of the finite values; NaN where there is none."""

    n: int
    nan: int
    inf: int
    zeros: int
    nan_share: float
    inf_share: float
    zero_share: float
    mean: float = math.nan
    std: float = math.nan
    """Of the values themselves (divided by n, not n - 1)."""
    rms: float = math.nan
    mean_abs: float = math.nan
    absmax: float = math.nan
    min: float = math.nan
    max: float = math.nan
    skewness: float = math.nan
    """Third central moment over std^3; NaN where all values are equal."""
    kurtosis: float = math.nan
    """Fourth central moment over std^4: 3 for a normal distribution; NaN where all values are equal."""

    def as_dict(self) -> dict[str, int | float | None]:
        """For JSON, which has no NaN: None instead."""
        return {name: None if value != value else value for name, value in asdict(self).items()}


def empty() -> Vector:
    """The vector of no elements, which changes nothing when merged."""
    vector = np.zeros(len(FIELDS))
    vector[MIN], vector[MAX] = math.inf, -math.inf
    return vector


def vector_of(values: ArrayLike, shift: float = 0.0) -> Vector:
    """The vector of an array on the CPU, in float64."""
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    finite = x[np.isfinite(x)]
    if not finite.size:
        vector = empty()
    else:
        y = finite - shift
        sums = [y.sum(), np.abs(finite).sum(), (y**2).sum(), (y**3).sum(), (y**4).sum()]
        vector = np.array([0, 0, 0, np.count_nonzero(finite == 0), *sums, finite.min(), finite.max()], dtype=np.float64)
    vector[N], vector[NAN], vector[INF] = x.size, np.count_nonzero(np.isnan(x)), np.count_nonzero(np.isinf(x))
    return vector


def exponents_of(values: ArrayLike) -> Exponents:
    """The exponent histogram of an array on the CPU. float64 values beyond float32 are in the outermost bins."""
    x = np.asarray(values).reshape(-1)
    wide = x.astype(np.float64)
    _, exponent = np.frexp(wide)
    bins = np.clip(exponent.astype(np.int64) - 1 + BIAS, 0, SPECIAL_BIN - 1)
    bins[wide == 0] = TINY_BIN
    bins[~np.isfinite(wide)] = SPECIAL_BIN
    return np.bincount(bins, minlength=BINS).astype(np.int64)


def shifted(vector: ArrayLike, shift: float, to: float) -> Vector:
    """The same vector with its sums of powers about another shift."""
    moved = check_vector(vector).copy()
    d = shift - to
    if d:
        m = finite(moved)
        s1, s2, s3, s4 = moved[SUM], moved[SUM2], moved[SUM3], moved[SUM4]
        moved[SUM] = s1 + m * d
        moved[SUM2] = s2 + d * (2 * s1 + m * d)
        moved[SUM3] = s3 + d * (3 * s2 + d * (3 * s1 + m * d))
        moved[SUM4] = s4 + d * (4 * s3 + d * (6 * s2 + d * (4 * s1 + m * d)))
    return moved


def merge(vectors: Sequence[ArrayLike], shifts: Sequence[float] | None = None) -> tuple[Vector, float]:
    """The vector of all parts together, and its shift.

    Args:
        vectors: of the parts; none gives :func:`empty`.
        shifts: of each; None: all 0.

    Returns:
        The sums as they are where all parts have one shift; otherwise the sums about the mean of all.

    Raises:
        ValueError: a vector has not 11 fields, or there are not as many shifts as vectors.
    """
    parts = [check_vector(vector) for vector in vectors]
    about = [0.0] * len(parts) if shifts is None else [float(shift) for shift in shifts]
    if len(about) != len(parts):
        raise ValueError(f"there are {len(parts)} vectors and {len(about)} shifts")
    counted = [(part, shift) for part, shift in zip(parts, about, strict=True) if finite(part)]
    to = counted[0][1] if counted else 0.0
    if any(shift != to for _, shift in counted):
        m = sum(finite(part) for part, _ in counted)
        # A shift is a choice: a float32 that is near enough keeps its digits wherever it goes.
        to = float(np.float32(sum(shift * (finite(part) / m) + part[SUM] / m for part, shift in counted)))
    total = empty()
    for part, shift in zip(parts, about, strict=True):
        moved = shifted(part, shift, to)
        total[:MIN] += moved[:MIN]
        total[MIN] = min(total[MIN], moved[MIN])
        total[MAX] = max(total[MAX], moved[MAX])
    return total, to


def merge_exponents(histograms: Sequence[ArrayLike]) -> Exponents:
    """The exponent histogram of all parts together.

    Raises:
        ValueError: one has not 256 bins.
    """
    total = np.zeros(BINS, dtype=np.int64)
    for histogram in histograms:
        total += _check_exponents(histogram)
    return total


def derive(vector: ArrayLike, shift: float = 0.0) -> Statistics:
    """What a vector says, once all parts are merged.

    Raises:
        ValueError: it has not 11 fields.
    """
    v = check_vector(vector)
    n, m = float(v[N]), finite(v)
    nan, inf, zeros = int(v[NAN]), int(v[INF]), int(v[ZEROS])
    shares = {
        "nan_share": nan / n if n else math.nan,
        "inf_share": inf / n if n else math.nan,
        "zero_share": zeros / n if n else math.nan,
    }
    if not m:
        return Statistics(int(n), nan, inf, zeros, **shares)
    low, high = float(v[MIN]), float(v[MAX])
    # Rounding must not put the mean of equal values beside them.
    mean = min(max(float(shift + v[SUM] / m), low), high)
    variance, skewness, kurtosis = _central(v, m) if low < high else (0.0, math.nan, math.nan)
    return Statistics(
        int(n),
        nan,
        inf,
        zeros,
        **shares,
        mean=mean,
        std=math.sqrt(variance),
        rms=math.sqrt(variance + mean * mean),
        mean_abs=float(v[SUM_ABS] / m),
        absmax=max(abs(low), abs(high)),
        min=low,
        max=high,
        skewness=skewness,
        kurtosis=kurtosis,
    )


def quantiles(exponents: ArrayLike, shares: ArrayLike, vector: ArrayLike | None = None) -> Vector:
    """Estimated quantiles of |x| over the finite values.

    Within a bin the density is taken to go with a power of |x| that its neighbours suggest. An estimate is in the right
    octave, so never off by more than a factor of two; for smooth distributions it is off by a few percent.

    Args:
        exponents: (256,) the histogram.
        shares: which quantiles, from 0 to 1.
        vector: of the same elements: tells zeros from other tiny values, and the extremes.

    Returns:
        One for each share; NaN where nothing is finite.

    Raises:
        ValueError: a share is not between 0 and 1.
    """
    q = np.atleast_1d(np.asarray(shares, dtype=np.float64))
    if not np.all((q >= 0) & (q <= 1)):
        raise ValueError("a quantile is between 0 and 1")
    counts = _check_exponents(exponents)[:SPECIAL_BIN].astype(np.float64)
    if not counts.sum():
        return np.full(q.shape, np.nan)
    zeros, bottom, top = counts[TINY_BIN], 0.0, math.inf
    if vector is not None:
        v = check_vector(vector)
        zeros, top = min(v[ZEROS], zeros), max(abs(v[MIN]), abs(v[MAX]))
        bottom = max(v[MIN], -v[MAX], 0.0)  # all of one sign
    counts[TINY_BIN] -= zeros
    filled = np.flatnonzero(counts)
    if not filled.size:
        return np.zeros(q.shape)
    low, high = edges(filled)
    low = np.clip(low, bottom, top)
    high = np.clip(high, low, max(top, bottom))
    # Corners of the distribution function: all zeros at 0, then one piece for each bin that holds something.
    heights = zeros + np.concatenate(([0.0], np.cumsum(counts[filled])))
    wanted = q * heights[-1]
    place = np.minimum(np.asarray(np.searchsorted(heights[1:], wanted), dtype=np.int64), filled.size - 1)
    within = np.clip((wanted - heights[place]) / counts[filled][place], 0.0, 1.0)
    values = _power_law(within, low[place], high[place], 1 + _slopes(filled, counts[filled])[place])
    return np.where((wanted <= zeros) & (zeros > 0), 0.0, values)


def edges(bins: ArrayLike) -> tuple[Vector, Vector]:
    """Smallest value of each bin, and the one that it stays below; bin 0 begins at 0, bin 255 has neither."""
    b = np.asarray(bins, dtype=np.int64)
    low = np.where(b == TINY_BIN, 0.0, np.ldexp(1.0, b - BIAS))
    high = np.ldexp(1.0, np.maximum(b, 0) + 1 - BIAS)
    return np.where(b == SPECIAL_BIN, np.nan, low), np.where(b == SPECIAL_BIN, np.nan, high)


def subnormal_share(exponents: ArrayLike, dtype: str, zeros: float = 0.0) -> float:
    """Share of the elements that a type holds as subnormal numbers, or that it could not hold at all but as zero.

    Raises:
        ValueError: the type is not in :data:`OCTAVES`.
    """
    if dtype not in OCTAVES:
        raise ValueError(f"{dtype} has no exponent bins: there are {', '.join(OCTAVES)}")
    counts = _check_exponents(exponents)
    total = int(counts.sum())
    return (float(counts[: OCTAVES[dtype].normal].sum()) - zeros) / total if total else math.nan


def finite(vector: Vector) -> float:
    """How many finite values it is of."""
    return float(vector[N] - vector[NAN] - vector[INF])


def check_vector(vector: ArrayLike) -> Vector:
    """It as float64.

    Raises:
        ValueError: it has not 11 fields.
    """
    array = np.asarray(vector, dtype=np.float64)
    if array.shape != (len(FIELDS),):
        raise ValueError(f"a vector of statistics has {len(FIELDS)} fields, this one has the shape {array.shape}")
    return array


def _check_exponents(histogram: ArrayLike) -> Exponents:
    array = np.asarray(histogram, dtype=np.int64)
    if array.shape != (BINS,):
        raise ValueError(f"an exponent histogram has {BINS} bins, this one has the shape {array.shape}")
    return array


def _slopes(bins: NDArray[np.intp], counts: Vector) -> Vector:
    """By which power of |x| the density goes in each bin: the slope from neighbour to neighbour in logarithms, of the
    bins that have a direct one; 0 (even) for those without."""
    # Each bin is twice as wide as the one before.
    steps = np.where(np.diff(bins) == 1, np.diff(np.log2(counts)) - 1.0, np.nan)
    steps[bins[:-1] == TINY_BIN] = np.nan
    both = np.stack([np.concatenate(([np.nan], steps)), np.concatenate((steps, [np.nan]))])
    known = np.isfinite(both)
    return np.clip(np.where(known, both, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1), -40.0, 40.0)


def _power_law(share: Vector, low: Vector, high: Vector, power: Vector) -> Vector:
    """Where between ``low`` and ``high`` a share is reached, if the distribution function goes with x^power."""
    even = low + share * (high - low)
    usable = (low > 0) & (np.abs(power) > 1e-3)
    start = np.where(usable, low, 1.0)
    exponent = np.where(usable, power, 1.0)
    span = np.power(np.where(usable, high, 1.0) / start, exponent)
    curved = start * np.power(np.maximum(1 + share * (span - 1), np.finfo(np.float64).tiny), 1 / exponent)
    return np.clip(np.where(usable, curved, even), low, high)


def _central(v: Vector, m: float) -> tuple[float, float, float]:
    """Variance, skewness and kurtosis; they do not depend on the shift."""
    d = v[SUM] / m
    e2, e3, e4 = v[SUM2] / m, v[SUM3] / m, v[SUM4] / m
    variance = float(e2 - d * d)
    if not variance > 0:
        return 0.0, math.nan, math.nan
    if not variance**2 > 0:  # so small that its powers are lost
        return variance, math.nan, math.nan
    third = e3 - d * (3 * e2 - 2 * d * d)
    fourth = e4 - d * (4 * e3 - d * (6 * e2 - 3 * d * d))
    return variance, float(third / variance**1.5), float(fourth / variance**2)
