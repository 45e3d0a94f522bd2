"""Attention maps in two passes over the scores, of which no more than a tile is ever there: Triton kernels for CUDA.

:func:`row_sums` goes along the keys of some rows: largest score, sum of exponentials, entropy (as online softmax does,
Milakov and Gimelshein, arXiv:1805.02867). :func:`tile_sums` goes along the rows of a column of tiles, with the scores
computed again: sum and peak of each tile, what each key receives, what the first key gets. Nothing is added by
atomics, so the results are the same bit for bit each time.
"""

# Triton reads the source of these functions: it has no types for what they are given, and its language is not quite
# Python's.
# ruff: noqa: N803
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
EIGHT = tl.constexpr(8)
"""Strides are given in so many elements: then the compiler knows that it may load them together."""
_SIZES = ("rows", "keys", "width", "left", "right", "q_head", "q_row", "k_head", "k_row", "group", "tile_width")
_SIZES += ("tile_height", "tile_rows", "columns", "subs")
"""Arguments for whose values no kernel of their own is compiled: that would be in the midst of training."""


@triton.jit(do_not_specialize=_SIZES)
def row_sums(
    q,
    k,
    heads,
    largest,
    inverse,
    entropy,
    scale,
    softcap,
    rows,
    keys,
    width,
    left,
    right,
    q_head,
    q_row,
    k_head,
    k_row,
    group,
    CAPPED: tl.constexpr,
    WHOLE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Of ``BM`` rows of one head: largest score, inverse of the sum of exponentials (0 where nothing is seen), entropy.

    A query sees the keys from ``left`` before its own place to ``right`` behind it. Pointers of q and k are those of
    the chosen entry of the batch, strides in eights; ``width`` of a head, and whether that is ``WHOLE`` ``BD``.
    """
    head = tl.load(heads + tl.program_id(1))
    first = tl.program_id(0) * BM
    row = first + tl.arange(0, BM)
    d = tl.arange(0, BD)
    queries = tl.load(
        q + head.to(tl.int64) * q_head * EIGHT + row.to(tl.int64)[:, None] * q_row * EIGHT + d[None, :],
        _within(row < rows, d, width, WHOLE),
        0.0,
    )
    of_group = k + (head // group).to(tl.int64) * k_head * EIGHT
    place = row + keys - rows
    m = tl.full([BM], -INFINITY, tl.float32)
    total = tl.zeros([BM], tl.float32)
    weighted = tl.zeros([BM], tl.float32)
    begin = tl.maximum(first + keys - rows - left, 0) // BN * BN
    end = tl.minimum(first + BM + keys - rows + right, keys)
    for block in range(begin, end, BN):
        key = block + tl.arange(0, BN)
        turned = _keys(of_group, key, keys, width, k_row, WHOLE, BD)
        score = _scores(queries, turned, place, key, keys, left, right, scale, softcap, CAPPED)
        new = tl.maximum(m, tl.max(score, 1))
        about = tl.where(new == -INFINITY, 0.0, new)
        before = tl.where(m == -INFINITY, 0.0, m - about)
        kept = tl.where(m == -INFINITY, 0.0, tl.exp(before))
        share = tl.exp(score - about[:, None])
        weighted = kept * (weighted + total * before)
        weighted += tl.sum(tl.where(score == -INFINITY, 0.0, share * (score - about[:, None])), 1)
        total = total * kept + tl.sum(share, 1)
        m = new
    seen = total > 0
    some = tl.where(seen, total, 1.0)
    at = tl.program_id(1).to(tl.int64) * rows + row
    tl.store(largest + at, tl.where(seen, m, 0.0), row < rows)
    tl.store(inverse + at, tl.where(seen, 1.0 / some, 0.0), row < rows)
    tl.store(entropy + at, tl.where(seen, tl.log(some) - weighted / some, 0.0), row < rows)


@triton.jit(do_not_specialize=_SIZES)
def tile_sums(
    q,
    k,
    heads,
    largest,
    inverse,
    sums,
    peaks,
    received,
    to_first,
    scale,
    softcap,
    rows,
    keys,
    width,
    left,
    right,
    q_head,
    q_row,
    k_head,
    k_row,
    group,
    tile_width,
    tile_height,
    tile_rows,
    columns,
    subs,
    CAPPED: tl.constexpr,
    WHOLE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Of ``BN`` keys, which are all or a part (one of ``subs``) of a column of tiles: sum and peak (head, tile row,
    column, part) of each tile's probabilities; ``received`` (head, key), ``to_first`` (head, row)."""
    index = tl.program_id(1).to(tl.int64)
    head = tl.load(heads + tl.program_id(1))
    column = tl.program_id(0) // subs
    sub = tl.program_id(0) % subs
    first = column * tile_width + sub * BN
    behind = tl.minimum(tl.minimum((column + 1) * tile_width, first + BN), keys)
    key = first + tl.arange(0, BN)
    d = tl.arange(0, BD)
    turned = _keys(k + (head // group).to(tl.int64) * k_head * EIGHT, key, behind, width, k_row, WHOLE, BD)
    of_head = q + head.to(tl.int64) * q_head * EIGHT
    gets = tl.zeros([BN], tl.float32)
    # Rows that may see any of these keys, whole tiles of them.
    begin = tl.maximum(first - right - (keys - rows), 0) // tile_height
    end = tl.minimum(tl.cdiv(tl.maximum(tl.minimum(behind + left - (keys - rows), rows), 0), tile_height), tile_rows)
    for tile in range(begin, end):
        total = tl.zeros([BM], tl.float32)
        peak = tl.zeros([BM], tl.float32)
        above = tl.minimum((tile + 1) * tile_height, rows)
        for start in range(tile * tile_height, above, BM):
            row = start + tl.arange(0, BM)
            there = row < above
            at = of_head + row.to(tl.int64)[:, None] * q_row * EIGHT + d[None, :]
            queries = tl.load(at, _within(there, d, width, WHOLE), 0.0)
            place = row + keys - rows
            score = _scores(queries, turned, place, key, behind, left, right, scale, softcap, CAPPED)
            m = tl.load(largest + index * rows + row, there, 0.0)
            part = tl.load(inverse + index * rows + row, there, 0.0)
            found = tl.exp(score - m[:, None]) * part[:, None]
            total += tl.sum(found, 1)
            peak = tl.maximum(peak, tl.max(found, 1))
            gets += tl.sum(found, 0)
            if first == 0:
                tl.store(to_first + index * rows + row, tl.sum(tl.where((key == 0)[None, :], found, 0.0), 1), there)
        cell = ((index * tile_rows + tile) * columns + column) * subs + sub
        tl.store(sums + cell, tl.sum(total, 0))
        tl.store(peaks + cell, tl.max(peak, 0))
    tl.store(received + index * keys + key, gets, key < behind)


@triton.jit
def _keys(k, key, behind, width, k_row, WHOLE: tl.constexpr, BD: tl.constexpr):
    """(BD, BN) keys of a head; 0 from ``behind`` on."""
    d = tl.arange(0, BD)
    at = k + key.to(tl.int64)[:, None] * k_row * EIGHT + d[None, :]
    return tl.trans(tl.load(at, _within(key < behind, d, width, WHOLE), 0.0))


@triton.jit
def _scores(queries, turned, place, key, behind, left, right, scale, softcap, CAPPED: tl.constexpr):
    """(BM, BN) in float32; minus infinity where a query does not see a key, or it is none (``behind`` the last)."""
    score = tl.dot(queries, turned, input_precision="ieee") * scale
    if CAPPED:
        # tanh by the exponential: 1 - 2 / (e^2x + 1)
        score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
    apart = key[None, :] - place[:, None]
    seen = (key < behind)[None, :] & (apart <= right) & (apart >= -left)
    return tl.where(seen, score, -INFINITY)


@triton.jit
def _within(there, d, width, WHOLE: tl.constexpr):
    """Which elements of rows there are; ``WHOLE``: all features of each."""
    if WHOLE:
        return there[:, None] & (d >= 0)[None, :]
    else:
        return there[:, None] & (d < width)[None, :]
