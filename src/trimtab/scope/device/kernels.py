"""The statistics of a tensor in one pass: Triton kernels for CUDA.

:func:`partial_statistics` reads the tensor once, each program a run of it, and writes one row of sums a program;
:func:`combine_statistics` adds the rows up in float64, always in the same order. Nothing but counts (integers) is added
by atomics, so the results are the same bit for bit each time.

What makes it fast: accumulators for each place of a tile, so that threads need not talk to each other before the end of
a program; four tiles loaded before the first is used; values that are not finite cost nothing until one turns up (then
that program's run is summed a second time, carefully). What makes it right in float32: each program sums about a mean
of its own, if that stands clear of 0, and in units of its largest value; a program sums few enough elements.

The histogram is counted in packed fields of four bits at each place of a tile, one for each exponent modulo 32: that
is enough wherever the values of a program, zeros aside, are within 32 octaves. A program whose values are not, or not
finite, counts a second time, with as many bins as there are.
"""

# Triton reads the source of these functions: it has no types for what they are given, and its language is not quite
# Python's.
# ruff: noqa: N803, SIM108
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

import triton
import triton.language as tl

N = tl.constexpr(0)
NAN = tl.constexpr(1)
INF = tl.constexpr(2)
ZEROS = tl.constexpr(3)
SUM = tl.constexpr(4)
SUM_ABS = tl.constexpr(5)
SUM2 = tl.constexpr(6)
SUM3 = tl.constexpr(7)
SUM4 = tl.constexpr(8)
LOW = tl.constexpr(9)
HIGH = tl.constexpr(10)
SHIFT = tl.constexpr(11)
UNIT = tl.constexpr(12)
"""Columns of a row of partial results: the fields of a vector (sums in units of ``UNIT``), then these two."""
INFINITY = tl.constexpr(float("inf"))
MOST = tl.constexpr(1e35)
"""Of a sum at one place of a tile: all places together stay below what a float32 holds."""
FIELDS = tl.constexpr(32)
"""Packed counters of exponents at each place of a tile."""
TOGETHER = tl.constexpr(4)
"""Tiles that are loaded before the first is used."""
_SIZES = ("n", "repeats", "size1", "size2", "size3", "stride0", "stride1", "stride2", "stride3", "programs")
"""Arguments for whose values no kernel of their own is compiled: that would be in the midst of training."""


@triton.jit(do_not_specialize=_SIZES)
def partial_statistics(
    x,
    partials,
    histogram,
    n,
    repeats,
    size1,
    size2,
    size3,
    stride0,
    stride1,
    stride2,
    stride3,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Row ``program`` of the partial results: sums over ``repeats * TILES * BLOCK`` elements of ``x``."""
    program = tl.program_id(0).to(tl.int64)
    length = repeats * TILES * BLOCK
    begin = program * length
    whole = begin + length <= n

    # 1. From the first tile: about what to sum, and in which unit.
    at = begin + tl.arange(0, BLOCK)
    first = _load(x, at, at < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, False)
    finite = tl.abs(first) < INFINITY
    unit = _power_of_two(tl.max(tl.where(finite, _exponent(first), 0), 0))
    scaled = tl.where(finite, first * _inverse(unit), 0.0)
    seen = tl.maximum(tl.sum(finite.to(tl.float32), 0), 1.0)
    mean = tl.sum(scaled, 0) / seen
    square = tl.sum(scaled * scaled, 0) / seen
    shift = tl.where(mean * mean > 0.8 * square, mean * unit, 0.0)

    # 2. All tiles, as if every value were finite.
    nan = 0.0
    inf = 0.0
    zeros, s1, sa, s2, s3, s4, low, high = _nothing(BLOCK)
    least = high - high
    counted = tl.zeros([FIELDS], tl.int32)
    if HISTOGRAM:
        least = tl.full([BLOCK], INFINITY, tl.float32)
    if whole:
        for repeat in range(repeats):
            every = tl.zeros([BLOCK], tl.int64)
            upper = tl.zeros([BLOCK], tl.int64)
            for step in range(0, TILES, TOGETHER):
                at = begin + (repeat * TILES + step) * BLOCK + tl.arange(0, BLOCK)
                a = _load(x, at, at < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, True)
                at += BLOCK
                b = _load(x, at, at < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, True)
                at += BLOCK
                c = _load(x, at, at < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, True)
                at += BLOCK
                d = _load(x, at, at < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, True)
                zeros, s1, sa, s2, s3, s4, low, high = _add(a, shift, unit, zeros, s1, sa, s2, s3, s4, low, high)
                zeros, s1, sa, s2, s3, s4, low, high = _add(b, shift, unit, zeros, s1, sa, s2, s3, s4, low, high)
                zeros, s1, sa, s2, s3, s4, low, high = _add(c, shift, unit, zeros, s1, sa, s2, s3, s4, low, high)
                zeros, s1, sa, s2, s3, s4, low, high = _add(d, shift, unit, zeros, s1, sa, s2, s3, s4, low, high)
                if HISTOGRAM:
                    every, upper, least = _count(a, every, upper, least)
                    every, upper, least = _count(b, every, upper, least)
                    every, upper, least = _count(c, every, upper, least)
                    every, upper, least = _count(d, every, upper, least)
            if HISTOGRAM:
                counted += _unpack(every, upper)

    # 3. Where a value was not finite, where the unit was far too small, and at the end of the tensor: once more.
    fine = whole & (low > -INFINITY) & (high < INFINITY) & (s4 < MOST)
    careful = tl.sum((fine == 0).to(tl.int32), 0) > 0
    if careful:
        largest = tl.zeros([BLOCK], tl.int32)
        for i in range(repeats * TILES):
            at = begin + i * BLOCK + tl.arange(0, BLOCK)
            e = _load(x, at, at < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, False)
            largest = tl.maximum(largest, tl.where(tl.abs(e) < INFINITY, _exponent(e), 0))
        unit = _power_of_two(tl.max(largest, 0))
        zeros, s1, sa, s2, s3, s4, low, high = _nothing(BLOCK)
        nans = tl.zeros([BLOCK], tl.float32)
        infs = tl.zeros([BLOCK], tl.float32)
        for i in range(repeats * TILES):
            at = begin + i * BLOCK + tl.arange(0, BLOCK)
            e = _load(x, at, at < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, False)
            isnan = e != e
            isinf = tl.abs(e) == INFINITY
            nans += (isnan & (at < n)).to(tl.float32)
            infs += isinf.to(tl.float32)
            usual = (isnan | isinf) == 0
            y = tl.where(usual, e * _inverse(unit) - shift * _inverse(unit), 0.0)
            zeros += (e == 0).to(tl.float32)
            s1 += y
            sa += tl.where(usual, tl.abs(e) * _inverse(unit), 0.0)
            s2 += y * y
            s3 += y * y * y
            s4 += (y * y) * (y * y)
            low = tl.minimum(low, tl.where(usual, e, INFINITY))
            high = tl.maximum(high, tl.where(usual, e, -INFINITY))
        nan = tl.sum(nans, 0)
        inf = tl.sum(infs, 0)

    zero = tl.sum(zeros, 0)
    lowest = tl.min(low, 0)
    highest = tl.max(high, 0)
    if HISTOGRAM:
        counts = histogram + (program % COPIES) * 256
        top = _exponent(tl.maximum(tl.abs(lowest), tl.abs(highest)))
        bottom = tl.min(_exponent(least), 0)
        if careful | (bottom + FIELDS <= top):
            bins = tl.zeros([256], tl.int32)
            for i in range(repeats * TILES):
                at = begin + i * BLOCK + tl.arange(0, BLOCK)
                e = _load(x, at, at < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, False)
                bins += tl.histogram(_exponent(e), 256)
            # Zeros, and what is not finite or not there, are counted elsewhere.
            bins = tl.where(tl.arange(0, 256) == 0, bins - zero.to(tl.int32), bins)
            bins = tl.where(tl.arange(0, 256) == 255, 0, bins)
            tl.atomic_add(counts + tl.arange(0, 256), bins, mask=bins != 0, sem="relaxed")
        else:
            field = tl.arange(0, FIELDS)
            counted = tl.where(field == 0, counted - zero.to(tl.int32), counted)
            tl.atomic_add(counts + (top - ((top - field) & (FIELDS - 1))), counted, mask=counted != 0, sem="relaxed")

    row = partials + program * COLUMNS
    tl.store(row + N, tl.maximum(tl.minimum(n - begin, length), 0).to(tl.float32))
    tl.store(row + NAN, nan)
    tl.store(row + INF, inf)
    tl.store(row + ZEROS, zero)
    tl.store(row + SUM, tl.sum(s1, 0))
    tl.store(row + SUM_ABS, tl.sum(sa, 0))
    tl.store(row + SUM2, tl.sum(s2, 0))
    tl.store(row + SUM3, tl.sum(s3, 0))
    tl.store(row + SUM4, tl.sum(s4, 0))
    tl.store(row + LOW, lowest)
    tl.store(row + HIGH, highest)
    tl.store(row + SHIFT, shift)
    tl.store(row + UNIT, unit)


@triton.jit(do_not_specialize=_SIZES)
def combine_statistics(
    partials,
    histogram,
    programs,
    n,
    vector,
    shift_out,
    exponents,
    HISTOGRAM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COPIES: tl.constexpr,
):
    """The vector of all rows, about the shift of the first; the histogram of all copies, which are left zero."""
    shift = tl.load(partials + SHIFT).to(tl.float64)
    nan = tl.zeros([ROWS], tl.float64)
    inf = tl.zeros([ROWS], tl.float64)
    zeros = tl.zeros([ROWS], tl.float64)
    sum1 = tl.zeros([ROWS], tl.float64)
    sum_abs = tl.zeros([ROWS], tl.float64)
    sum2 = tl.zeros([ROWS], tl.float64)
    sum3 = tl.zeros([ROWS], tl.float64)
    sum4 = tl.zeros([ROWS], tl.float64)
    low = tl.full([ROWS], INFINITY, tl.float32)
    high = tl.full([ROWS], -INFINITY, tl.float32)
    for begin in range(0, programs, ROWS):
        r = begin + tl.arange(0, ROWS)
        there = r < programs
        row = partials + r * COLUMNS
        unit = tl.load(row + UNIT, there, 1.0).to(tl.float64)
        unit2 = unit * unit
        row_nan = tl.load(row + NAN, there, 0.0).to(tl.float64)
        row_inf = tl.load(row + INF, there, 0.0).to(tl.float64)
        m = tl.load(row + N, there, 0.0).to(tl.float64) - row_nan - row_inf
        s1 = tl.load(row + SUM, there, 0.0).to(tl.float64) * unit
        s2 = tl.load(row + SUM2, there, 0.0).to(tl.float64) * unit2
        s3 = tl.load(row + SUM3, there, 0.0).to(tl.float64) * unit2 * unit
        s4 = tl.load(row + SUM4, there, 0.0).to(tl.float64) * unit2 * unit2
        # The sums about the row's own shift, moved to the common one.
        d = tl.where(there, tl.load(row + SHIFT, there, 0.0).to(tl.float64) - shift, 0.0)
        sum1 += s1 + m * d
        sum2 += s2 + d * (2 * s1 + m * d)
        sum3 += s3 + d * (3 * s2 + d * (3 * s1 + m * d))
        sum4 += s4 + d * (4 * s3 + d * (6 * s2 + d * (4 * s1 + m * d)))
        sum_abs += tl.load(row + SUM_ABS, there, 0.0).to(tl.float64) * unit
        nan += row_nan
        inf += row_inf
        zeros += tl.load(row + ZEROS, there, 0.0).to(tl.float64)
        low = tl.minimum(low, tl.load(row + LOW, there, INFINITY))
        high = tl.maximum(high, tl.load(row + HIGH, there, -INFINITY))
    nans = tl.sum(nan, 0)
    infs = tl.sum(inf, 0)
    zero = tl.sum(zeros, 0)
    tl.store(vector + N, n.to(tl.float64))
    tl.store(vector + NAN, nans)
    tl.store(vector + INF, infs)
    tl.store(vector + ZEROS, zero)
    tl.store(vector + SUM, tl.sum(sum1, 0))
    tl.store(vector + SUM_ABS, tl.sum(sum_abs, 0))
    tl.store(vector + SUM2, tl.sum(sum2, 0))
    tl.store(vector + SUM3, tl.sum(sum3, 0))
    tl.store(vector + SUM4, tl.sum(sum4, 0))
    tl.store(vector + LOW, tl.min(low, 0).to(tl.float64))
    tl.store(vector + HIGH, tl.max(high, 0).to(tl.float64))
    tl.store(shift_out, shift)
    if HISTOGRAM:
        bins = tl.arange(0, 256)
        counted = tl.zeros([256], tl.int64)
        for copy in range(COPIES):
            place = histogram + copy * 256 + bins
            counted += tl.load(place).to(tl.int64)
            tl.store(place, tl.zeros([256], tl.int32))
        counted += tl.where(bins == 0, zero.to(tl.int64), 0)
        counted += tl.where(bins == 255, (nans + infs).to(tl.int64), 0)
        tl.store(exponents + bins, counted)


@triton.jit
def _load(
    x,
    index,
    mask,
    size1,
    size2,
    size3,
    stride0,
    stride1,
    stride2,
    stride3,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Elements as float32, NaN where ``mask`` is False (which ``WHOLE`` rules out). Without gaps if ``GROUP`` is 0,
    else by sizes and strides (outermost first), which count groups of so many elements."""
    if GROUP == 0:
        place = index
    else:
        # Groups of elements that lie side by side: their place is computed once, and they are loaded together.
        group = index // GROUP
        rest = group // size3
        place = (group - rest * size3) * stride3
        row = rest // size2
        place += (rest - row * size2) * stride2
        outer = row // size1
        place = (place + (row - outer * size1) * stride1 + outer * stride0) * GROUP + index % GROUP
    if FORMAT == 0:
        if WHOLE:
            return tl.load(x + place).to(tl.float32)
        return tl.load(x + place, mask, float("nan")).to(tl.float32)
    elif FORMAT == 3:  # bfloat16: the upper half of a float32
        if WHOLE:
            raw = tl.load(x + place)
        else:
            raw = tl.load(x + place, mask, 0x7FC0)
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        if WHOLE:
            raw = tl.load(x + place).to(tl.uint16)
        else:
            raw = tl.load(x + place, mask, 0x7F).to(tl.uint16)
        if FORMAT == 1:  # e4m3fn: the fields of a float16 in its own places, the bias is 8 less; one NaN, no infinity
            half = ((raw & 0x80) << 8) | ((raw & 0x7F) << 7)
            value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
            return tl.where((raw & 0x7F) == 0x7F, float("nan"), value)
        else:  # e5m2: the upper half of a float16
            return (raw << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _nothing(BLOCK: tl.constexpr):
    """Accumulators of a tile: zeros, four sums of powers and one of magnitudes, smallest and largest value."""
    zero = tl.zeros([BLOCK], tl.float32)
    infinity = tl.full([BLOCK], INFINITY, tl.float32)
    return zero, zero, zero, zero, zero, zero, infinity, -infinity


@triton.jit
def _add(x, shift, unit, zeros, s1, sa, s2, s3, s4, low, high):
    """A tile into the accumulators; NaN and infinities show in the extremes."""
    inverse = _inverse(unit)
    y = x * inverse - shift * inverse
    y2 = y * y
    return (
        zeros + (x == 0).to(tl.float32),
        s1 + y,
        sa + tl.abs(x) * inverse,
        s2 + y2,
        s3 + y2 * y,
        s4 + y2 * y2,
        tl.minimum(low, x, propagate_nan=tl.PropagateNan.ALL),
        tl.maximum(high, x, propagate_nan=tl.PropagateNan.ALL),
    )


@triton.jit
def _count(x, every, upper, least):
    """A tile into the packed counters (four bits for each exponent modulo 16: of all values, and of those whose
    exponent modulo 32 is 16 and more) and the smallest magnitude but 0."""
    exponent = x.to(tl.int32, bitcast=True) >> 23
    one = tl.full(every.shape, 1, tl.int64) << ((exponent & 15) * 4).to(tl.int64)
    least = tl.minimum(least, tl.where(x == 0, INFINITY, tl.abs(x)))
    return every + one, upper + tl.where((exponent & 16) != 0, one, 0), least


@triton.jit
def _unpack(every, upper):
    """(FIELDS,) what the packed counters of all places hold together."""
    field = tl.arange(0, FIELDS)
    total = tl.zeros([FIELDS], tl.int32)
    # Every fourth counter at a time: 16 bits hold the sum over a tile of what four bits held at one place.
    for part in tl.static_range(4):
        mask = 0x000F000F000F000F
        high = tl.sum((upper >> (4 * part)) & mask, 0)
        low = tl.sum((every >> (4 * part)) & mask, 0) - high
        word = tl.where(field < 16, low, high)
        count = (word >> (((field & 15) // 4) * 16).to(tl.int64)) & 0xFFFF
        total += tl.where(field % 4 == part, count.to(tl.int32), 0)
    return total


@triton.jit
def _exponent(x):
    """Exponent fields of float32s."""
    return (x.to(tl.int32, bitcast=True) >> 23) & 255


@triton.jit
def _power_of_two(exponent):
    """The float32 with this exponent field, kept away from the ends so that it has an inverse."""
    return (tl.minimum(tl.maximum(exponent, 1), 253) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _inverse(power):
    """Of a power of two, exactly."""
    return ((254 << 23) - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
