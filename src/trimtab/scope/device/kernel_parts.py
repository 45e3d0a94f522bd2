"""What the kernel of statistics is made of: elements as float32, accumulators of a tile, packed counts."""

# Triton reads the source of these functions: it has no types for what they are given, and its language is not quite
# Python's.
# ruff: noqa: N803, SIM108
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
FIELDS = tl.constexpr(32)
"""Packed counters of exponents at each place of a tile."""
COUNT_ZEROS = tl.constexpr(
    "{ .reg .b32 found, nought; mov.b32 nought, 0; set.eq.f16x2.f16x2 found, $1, nought; add.f16x2 $0, $2, found; }"
)
SMALLER = tl.constexpr("min.NaN.bf16x2 $0, $1, $2;")
LARGER = tl.constexpr("max.NaN.bf16x2 $0, $1, $2;")
"""PTX, of two values in a word: counts of both zeros as float16, smaller and larger of bfloat16."""


@triton.jit
def load(
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
def nothing(BLOCK: tl.constexpr):
    """Accumulators of a tile: zeros, four sums of powers and one of magnitudes, smallest and largest value."""
    zero = tl.zeros([BLOCK], tl.float32)
    infinity = tl.full([BLOCK], INFINITY, tl.float32)
    return zero, zero, zero, zero, zero, zero, infinity, -infinity


@triton.jit
def add_tile(x, shift, unit, zeros, s1, sa, s2, s3, s4, low, high):
    """A tile into the accumulators; NaN and infinities show in the extremes."""
    inverse = inverse_of(unit)
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
def over_all(zeros, s1, sa, s2, s3, s4, low, high):
    """Accumulators over all places."""
    return (
        tl.sum(zeros, 0),
        tl.sum(s1, 0),
        tl.sum(sa, 0),
        tl.sum(s2, 0),
        tl.sum(s3, 0),
        tl.sum(s4, 0),
        tl.min(low, 0),
        tl.max(high, 0),
    )


@triton.jit
def add_folded(x, shift, unit, zeros, s1, sa, s2, s3, s4, low, high, FOLD: tl.constexpr):
    """A tile into accumulators for one of ``FOLD`` (1 or 4) places that lie side by side."""
    if FOLD == 1:
        return add_tile(x, shift, unit, zeros, s1, sa, s2, s3, s4, low, high)
    else:
        a, b, c, d = quarters(x)
        zeros, s1, sa, s2, s3, s4, low, high = add_tile(a, shift, unit, zeros, s1, sa, s2, s3, s4, low, high)
        zeros, s1, sa, s2, s3, s4, low, high = add_tile(b, shift, unit, zeros, s1, sa, s2, s3, s4, low, high)
        zeros, s1, sa, s2, s3, s4, low, high = add_tile(c, shift, unit, zeros, s1, sa, s2, s3, s4, low, high)
        return add_tile(d, shift, unit, zeros, s1, sa, s2, s3, s4, low, high)


@triton.jit
def quarters(x):
    """Every fourth place: all four are of the same thread, so nothing moves."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
    a, b = tl.split(tl.reshape(even, [even.shape[0] // 2, 2]))
    c, d = tl.split(tl.reshape(odd, [odd.shape[0] // 2, 2]))
    return a, b, c, d


@triton.jit
def add_pairs(words, shift, unit, none, s1, sa, s2, s3, s4, lows, highs, FOLD: tl.constexpr):
    """As :func:`add_folded`, of two bfloat16 in each word (``FOLD`` 1, 2 or 4 words)."""
    if FOLD == 1:
        return add_pair(words, shift, unit, none, s1, sa, s2, s3, s4, lows, highs)
    elif FOLD == 2:
        a, b = tl.split(tl.reshape(words, [words.shape[0] // 2, 2]))
        none, s1, sa, s2, s3, s4, lows, highs = add_pair(a, shift, unit, none, s1, sa, s2, s3, s4, lows, highs)
        return add_pair(b, shift, unit, none, s1, sa, s2, s3, s4, lows, highs)
    else:
        a, b, c, d = quarters(words)
        none, s1, sa, s2, s3, s4, lows, highs = add_pair(a, shift, unit, none, s1, sa, s2, s3, s4, lows, highs)
        none, s1, sa, s2, s3, s4, lows, highs = add_pair(b, shift, unit, none, s1, sa, s2, s3, s4, lows, highs)
        none, s1, sa, s2, s3, s4, lows, highs = add_pair(c, shift, unit, none, s1, sa, s2, s3, s4, lows, highs)
        return add_pair(d, shift, unit, none, s1, sa, s2, s3, s4, lows, highs)


@triton.jit
def add_pair(words, shift, unit, none, s1, sa, s2, s3, s4, lows, highs):
    """Sums in float32; zeros and extremes of both values by one instruction. A zero has the bits of one in float16,
    which all cards compare two at a time."""
    inverse = inverse_of(unit)
    offset = shift * inverse
    a = lower_half(words)
    b = upper_half(words)
    y = a * inverse - offset
    z = b * inverse - offset
    y2 = y * y
    z2 = z * z
    return (
        tl.inline_asm_elementwise(COUNT_ZEROS, "=r,r,r", [words, none], tl.int32, is_pure=True, pack=1),
        s1 + y + z,
        sa + tl.abs(a) * inverse + tl.abs(b) * inverse,
        s2 + y2 + z2,
        s3 + y2 * y + z2 * z,
        s4 + y2 * y2 + z2 * z2,
        tl.inline_asm_elementwise(
            "min.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [lows, words], tl.int32, is_pure=True, pack=1
        ),
        tl.inline_asm_elementwise(
            "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [highs, words], tl.int32, is_pure=True, pack=1
        ),
    )


@triton.jit
def lower_half(words):
    """The bfloat16 in the lower half of each word, as float32."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def upper_half(words):
    """That in the upper half."""
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def half_of(words):
    """The float16 in the lower half of each word, as float32."""
    return (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def count_exponents(x, every, upper, least):
    """A tile into the packed counters (four bits for each exponent modulo 16: of all values, and of those whose
    exponent modulo 32 is 16 and more) and the smallest magnitude but 0."""
    exponent = x.to(tl.int32, bitcast=True) >> 23
    one = tl.full(every.shape, 1, tl.int64) << ((exponent & 15) * 4).to(tl.int64)
    least = tl.minimum(least, tl.where(x == 0, INFINITY, tl.abs(x)))
    return every + one, upper + tl.where((exponent & 16) != 0, one, 0), least


@triton.jit
def unpack_counts(every, upper):
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
def exponent_of(x):
    """Exponent fields of float32s."""
    return (x.to(tl.int32, bitcast=True) >> 23) & 255


@triton.jit
def power_of_two(exponent):
    """The float32 with this exponent field, kept away from the ends so that it has an inverse."""
    return (tl.minimum(tl.maximum(exponent, 1), 253) << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(power):
    """Of a power of two, exactly."""
    return ((254 << 23) - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
