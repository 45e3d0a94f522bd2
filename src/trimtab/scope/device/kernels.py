"""The statistics of a tensor in one pass and one launch: a Triton kernel for CUDA.

:func:`tensor_statistics` reads the tensor once, each program a run of it, and writes one row of sums a program; the
program that is the last to do so adds the rows up in float64, always in the same order. Nothing but counts (integers)
is added by atomics, so the results are the same bit for bit each time.

What makes it fast: accumulators for places of a tile, so that threads need not talk to each other before the end of
a program, and few enough of them that many programs are on a multiprocessor at once; four tiles loaded before the first
is used; values that are not finite cost nothing until one turns up (then that program's run is summed a second time,
carefully); of bfloat16, two values at a time for what need not be float32 (extremes and zeros). What makes it right in
float32: each program sums about a mean of its own, if that stands clear of 0, and in units of its largest value; a
program sums few enough elements.

The histogram is counted in packed fields of four bits at each place of a tile, one for each exponent modulo 32: that
is enough wherever the values of a program, zeros aside, are within 32 octaves. A program whose values are not, or not
finite, counts a second time, with as many bins as there are.
"""

# Triton reads the source of these functions: it has no types for what they are given, and its language is not quite
# Python's.
# ruff: noqa: N803
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

import triton
import triton.language as tl

from trimtab.scope.device.kernel_parts import (
    FIELDS,
    INFINITY,
    add_folded,
    add_pairs,
    count_exponents,
    exponent_of,
    half_of,
    inverse_of,
    load,
    lower_half,
    nothing,
    over_all,
    power_of_two,
    unpack_counts,
    upper_half,
)

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
MOST = tl.constexpr(1e35)
"""Of a sum at one place of a tile: all places together stay below what a float32 holds."""
TOGETHER = tl.constexpr(4)
"""Tiles that are loaded before the first is used."""
FRONT = tl.constexpr(1024)
"""Elements by which a program chooses what to sum about, and in which unit."""
CARE = tl.constexpr(512)
"""Elements that are summed carefully at a time."""
ROWS = tl.constexpr(128)
"""Of partial results that are added up at a time."""
SHIFT_AT = tl.constexpr(12)
"""Where in a row of results the shift is."""
NO_LOW = tl.constexpr(0x7F807F80)
NO_HIGH = tl.constexpr(-8323200)
"""Two infinities and two negative ones in bfloat16, 0xFF80FF80."""
_SIZES = ("n", "repeats", "size1", "size2", "size3", "stride0", "stride1", "stride2", "stride3")
"""Arguments for whose values no kernel of their own is compiled: that would be in the midst of training."""


@triton.jit(do_not_specialize=_SIZES)
def tensor_statistics(
    x,
    partials,
    histogram,
    done,
    result,
    exponents,
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
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    FOLD: tl.constexpr,
    COLUMNS: tl.constexpr,
    COPIES: tl.constexpr,
):
    """The vector of ``x`` and its shift into ``result``, and its histogram into ``exponents``.

    Each program sums ``repeats * TILES * BLOCK`` elements. ``done`` counts the programs that have; it is left zero, as
    all copies of the histogram are. ``PACKED``: of bfloat16 without gaps, two values at a time.
    """
    program = tl.program_id(0).to(tl.int64)
    length = repeats * TILES * BLOCK
    begin = program * length
    whole = begin + length <= n

    # 1. From the first tile: about what to sum, and in which unit.
    front = begin + tl.arange(0, FRONT)
    first = load(x, front, front < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, False)
    finite = tl.abs(first) < INFINITY
    unit = power_of_two(tl.max(tl.where(finite, exponent_of(first), 0), 0))
    scaled = tl.where(finite, first * inverse_of(unit), 0.0)
    seen = tl.maximum(tl.sum(finite.to(tl.float32), 0), 1.0)
    mean = tl.sum(scaled, 0) / seen
    square = tl.sum(scaled * scaled, 0) / seen
    shift = tl.where(mean * mean > 0.8 * square, mean * unit, 0.0)

    # 2. All tiles, as if every value were finite.
    least = tl.zeros([BLOCK], tl.float32)
    counted = tl.zeros([FIELDS], tl.int32)
    if PACKED:
        zeros, s1, sa, s2, s3, s4, low, high = nothing(BLOCK // FOLD // 2)
        if whole:
            words = x.to(tl.pointer_type(tl.int32), bitcast=True) + begin // 2
            lows = tl.full([BLOCK // FOLD // 2], NO_LOW, tl.int32)
            highs = tl.full([BLOCK // FOLD // 2], NO_HIGH, tl.int32)
            for repeat in range(repeats):
                none = tl.zeros([BLOCK // FOLD // 2], tl.int32)
                for step in range(0, TILES, TOGETHER):
                    word = (repeat * TILES + step) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
                    a = tl.load(words + word)
                    b = tl.load(words + word + BLOCK // 2)
                    c = tl.load(words + word + 2 * (BLOCK // 2))
                    d = tl.load(words + word + 3 * (BLOCK // 2))
                    none, s1, sa, s2, s3, s4, lows, highs = add_pairs(
                        a, shift, unit, none, s1, sa, s2, s3, s4, lows, highs, FOLD
                    )
                    none, s1, sa, s2, s3, s4, lows, highs = add_pairs(
                        b, shift, unit, none, s1, sa, s2, s3, s4, lows, highs, FOLD
                    )
                    none, s1, sa, s2, s3, s4, lows, highs = add_pairs(
                        c, shift, unit, none, s1, sa, s2, s3, s4, lows, highs, FOLD
                    )
                    none, s1, sa, s2, s3, s4, lows, highs = add_pairs(
                        d, shift, unit, none, s1, sa, s2, s3, s4, lows, highs, FOLD
                    )
                zeros += half_of(none) + half_of(none >> 16)  # no more than a float16 counts exactly
            low = tl.minimum(lower_half(lows), upper_half(lows), propagate_nan=tl.PropagateNan.ALL)
            high = tl.maximum(lower_half(highs), upper_half(highs), propagate_nan=tl.PropagateNan.ALL)
    else:
        zeros, s1, sa, s2, s3, s4, low, high = nothing(BLOCK // FOLD)
        if HISTOGRAM:
            least = tl.full([BLOCK], INFINITY, tl.float32)
        if whole:
            for repeat in range(repeats):
                every = tl.zeros([BLOCK], tl.int64)
                upper = tl.zeros([BLOCK], tl.int64)
                for step in range(0, TILES, TOGETHER):
                    at = begin + (repeat * TILES + step) * BLOCK + tl.arange(0, BLOCK)
                    a = load(
                        x, at, at < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, True
                    )
                    at += BLOCK
                    b = load(
                        x, at, at < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, True
                    )
                    at += BLOCK
                    c = load(
                        x, at, at < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, True
                    )
                    at += BLOCK
                    d = load(
                        x, at, at < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, True
                    )
                    zeros, s1, sa, s2, s3, s4, low, high = add_folded(
                        a, shift, unit, zeros, s1, sa, s2, s3, s4, low, high, FOLD
                    )
                    zeros, s1, sa, s2, s3, s4, low, high = add_folded(
                        b, shift, unit, zeros, s1, sa, s2, s3, s4, low, high, FOLD
                    )
                    zeros, s1, sa, s2, s3, s4, low, high = add_folded(
                        c, shift, unit, zeros, s1, sa, s2, s3, s4, low, high, FOLD
                    )
                    zeros, s1, sa, s2, s3, s4, low, high = add_folded(
                        d, shift, unit, zeros, s1, sa, s2, s3, s4, low, high, FOLD
                    )
                    if HISTOGRAM:
                        every, upper, least = count_exponents(a, every, upper, least)
                        every, upper, least = count_exponents(b, every, upper, least)
                        every, upper, least = count_exponents(c, every, upper, least)
                        every, upper, least = count_exponents(d, every, upper, least)
                if HISTOGRAM:
                    counted += unpack_counts(every, upper)

    # 3. Where a value was not finite, where the unit was far too small, and at the end of the tensor: once more.
    fine = whole & (low > -INFINITY) & (high < INFINITY) & (s4 < MOST)
    careful = tl.sum((fine == 0).to(tl.int32), 0) > 0
    nan = 0.0
    inf = 0.0
    if careful:
        last = tl.minimum(begin + length, n)
        largest = tl.zeros([CARE], tl.int32)
        for start in range(begin, last, CARE):
            there = start + tl.arange(0, CARE)
            e = load(x, there, there < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, False)
            largest = tl.maximum(largest, tl.where(tl.abs(e) < INFINITY, exponent_of(e), 0))
        unit = power_of_two(tl.max(largest, 0))
        czeros, c1, ca, c2, c3, c4, clow, chigh = nothing(CARE)
        nans = tl.zeros([CARE], tl.float32)
        infs = tl.zeros([CARE], tl.float32)
        for start in range(begin, last, CARE):
            there = start + tl.arange(0, CARE)
            e = load(x, there, there < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, False)
            isnan = e != e
            isinf = tl.abs(e) == INFINITY
            nans += (isnan & (there < n)).to(tl.float32)
            infs += isinf.to(tl.float32)
            usual = (isnan | isinf) == 0
            y = tl.where(usual, e * inverse_of(unit) - shift * inverse_of(unit), 0.0)
            czeros += (e == 0).to(tl.float32)
            c1 += y
            ca += tl.where(usual, tl.abs(e) * inverse_of(unit), 0.0)
            c2 += y * y
            c3 += y * y * y
            c4 += (y * y) * (y * y)
            clow = tl.minimum(clow, tl.where(usual, e, INFINITY))
            chigh = tl.maximum(chigh, tl.where(usual, e, -INFINITY))
        nan = tl.sum(nans, 0)
        inf = tl.sum(infs, 0)
        zero, t1, ta, t2, t3, t4, lowest, highest = over_all(czeros, c1, ca, c2, c3, c4, clow, chigh)
    else:
        zero, t1, ta, t2, t3, t4, lowest, highest = over_all(zeros, s1, sa, s2, s3, s4, low, high)

    if HISTOGRAM:
        counts = histogram + (program % COPIES) * 256
        top = exponent_of(tl.maximum(tl.abs(lowest), tl.abs(highest)))
        bottom = tl.min(exponent_of(least), 0)
        if careful | (bottom + FIELDS <= top):
            bins = tl.zeros([256], tl.int32)
            for start in range(begin, tl.minimum(begin + length, n), BLOCK):
                place = start + tl.arange(0, BLOCK)
                e = load(
                    x, place, place < n, size1, size2, size3, stride0, stride1, stride2, stride3, FORMAT, GROUP, False
                )
                bins += tl.histogram(exponent_of(e), 256)
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
    tl.store(row + SUM, t1)
    tl.store(row + SUM_ABS, ta)
    tl.store(row + SUM2, t2)
    tl.store(row + SUM3, t3)
    tl.store(row + SUM4, t4)
    tl.store(row + LOW, lowest)
    tl.store(row + HIGH, highest)
    tl.store(row + SHIFT, shift)
    tl.store(row + UNIT, unit)

    # 4. What all threads of this program have written is there for whoever counts on from here.
    tl.debug_barrier()
    programs = tl.num_programs(0)
    if tl.atomic_add(done, 1, sem="acq_rel") == programs - 1:
        tl.store(done, 0)
        _combine(partials, histogram, programs, n, result, exponents, HISTOGRAM, COLUMNS, COPIES)


@triton.jit
def _combine(
    partials,
    histogram,
    programs,
    n,
    result,
    exponents,
    HISTOGRAM: tl.constexpr,
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
    tl.store(result + N, n.to(tl.float64))
    tl.store(result + NAN, nans)
    tl.store(result + INF, infs)
    tl.store(result + ZEROS, zero)
    tl.store(result + SUM, tl.sum(sum1, 0))
    tl.store(result + SUM_ABS, tl.sum(sum_abs, 0))
    tl.store(result + SUM2, tl.sum(sum2, 0))
    tl.store(result + SUM3, tl.sum(sum3, 0))
    tl.store(result + SUM4, tl.sum(sum4, 0))
    tl.store(result + LOW, tl.min(low, 0).to(tl.float64))
    tl.store(result + HIGH, tl.max(high, 0).to(tl.float64))
    tl.store(result + SHIFT_AT, shift)
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
