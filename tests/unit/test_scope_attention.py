"""Attention maps against the whole matrix in float64, for every kind of attention; parts against the whole."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.scope.attention import levels_to_values, merge_attention
from trimtab.scope.device.attention import AttentionState, check_attention, measure, measure_attention
from trimtab.scope.device.attention.tiling import Tiling
from trimtab.scope.names import Tap
from trimtab.scope.subscription import Subscription
from trimtab.scope.taps.points import AttentionInput

Q, K, D = 37, 37, 8
ALL = Subscription("layers.0.attention.map", "attention", parameters={"grid": [5, 7]})


def _inputs(queries: int = Q, keys: int = K, heads: int = 6, groups: int = 2, **details: Any) -> AttentionInput:
    made = torch.Generator().manual_seed(queries * 131 + keys)
    q = torch.randn(2, heads, queries, D, generator=made)
    k = torch.randn(2, groups, keys, D, generator=made)
    return AttentionInput(q, k, details.pop("scale", 0.7), **details)


@functools.cache
def _expected(kind: str, batch: int = 0) -> torch.Tensor:
    return _reference(KINDS[kind], batch)


def _reference(inputs: AttentionInput, batch: int = 0) -> torch.Tensor:
    """All probabilities (heads, queries, keys) in float64, by the book."""
    q, k = inputs.q[batch].double(), inputs.k[batch].double()
    k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
    found = q @ k.transpose(1, 2) * inputs.scale
    if inputs.softcap is not None:
        found = inputs.softcap * torch.tanh(found / inputs.softcap)
    queries, keys = found.shape[1:]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    for row in range(queries):
        for key in range(keys):
            at, other = row + keys - queries, key
            if inputs.packed is not None:
                mine = int((inputs.packed[0] <= row).sum()) - 1
                theirs = int((inputs.packed[1] <= key).sum()) - 1
                at = row - int(inputs.packed[0][mine]) + _longer(inputs.packed, mine)
                other = key - int(inputs.packed[1][theirs])
                if mine != theirs:
                    seen[row, key] = False
            if inputs.causal and other > at:
                seen[row, key] = False
            if inputs.window is not None:
                left, right = inputs.window
                if (left >= 0 and other < at - left) or (right >= 0 and other > at + right):
                    seen[row, key] = False
    if inputs.bias is not None:
        found = found + inputs.bias.double()
    if inputs.mask is not None:
        seen = seen & ~inputs.mask
    found = found.masked_fill(~seen, -torch.inf)
    return torch.nan_to_num(torch.softmax(found, -1))


def _longer(packed: tuple[torch.Tensor, torch.Tensor], sequence: int) -> int:
    of_queries, of_keys = (ends[sequence + 1] - ends[sequence] for ends in packed)
    return int(of_keys - of_queries)


PACKED = (torch.tensor([0, 5, 20, 37]), torch.tensor([0, 5, 20, 37]))
KINDS: dict[str, AttentionInput] = {
    "causal": _inputs(),
    "multi-head": _inputs(heads=4, groups=4),
    "multi-query": _inputs(heads=4, groups=1),
    "bidirectional": _inputs(causal=False),
    "decode": _inputs(queries=1),
    "chunked prefill": _inputs(queries=9),
    "window": _inputs(window=(6, 0)),
    "window both ways": _inputs(causal=False, window=(3, 5)),
    "soft cap": _inputs(softcap=1.5, scale=3.0),
    "mask": _inputs(causal=False, mask=torch.rand(Q, K, generator=torch.Generator().manual_seed(1)) < 0.4),
    "rows that see nothing": _inputs(mask=(torch.arange(Q) % 5 == 2)[:, None].expand(Q, K)),
    "bias": _inputs(bias=torch.linspace(-2, 2, K).expand(Q, K)),
    "packed": _inputs(packed=PACKED),
    "packed, other keys": _inputs(queries=12, packed=(torch.tensor([0, 2, 7, 12]), PACKED[1])),
}


def _measured(inputs: AttentionInput, subscription: Subscription = ALL) -> dict[str, np.ndarray[Any, Any]]:
    return {name: value.numpy() for name, value in measure_attention(inputs, subscription, AttentionState()).items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workspace", [1 << 30, 20_000], ids=["at once", "in pieces"])
def test_summed_up_as_the_whole_matrix_would_be(kind: str, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_WORKSPACE_BYTES", workspace)
    inputs = KINDS[kind]
    expected, found = _expected(kind), _measured(inputs)
    np.testing.assert_allclose(found["entropy"], torch.special.entr(expected).sum(-1), atol=2e-5)
    np.testing.assert_allclose(found["received"], expected.sum(1), atol=2e-5)
    assert found["queries"].tolist() == [expected.shape[1]]
    begins = torch.zeros(expected.shape[1], dtype=torch.long)
    if inputs.packed is not None:
        mine = [int((inputs.packed[0] <= row).sum()) - 1 for row in range(expected.shape[1])]
        begins = inputs.packed[1][mine]
    np.testing.assert_allclose(found["first"], expected[:, torch.arange(expected.shape[1]), begins], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workspace", [1 << 30, 20_000], ids=["at once", "in pieces"])
def test_tiles_are_means_and_peaks(kind: str, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_WORKSPACE_BYTES", workspace)
    expected, found = _expected(kind), _measured(KINDS[kind])
    keys = [*found["tile_key"], expected.shape[2]]
    height = 1 if expected.shape[1] == 1 else -(-expected.shape[1] // min(5, expected.shape[1]))
    means, peaks = np.zeros(found["tiles"].shape), np.zeros(found["tiles"].shape)
    for row in range(means.shape[1]):
        for key in range(means.shape[2]):
            tile = expected[:, row * height : (row + 1) * height, keys[key] : keys[key + 1]].numpy()
            means[:, row, key], peaks[:, row, key] = tile.mean((1, 2)), tile.max((1, 2))
    for levels, scale, whole in (("tiles", "scale", means), ("peaks", "peak_scale", peaks)):
        np.testing.assert_allclose(found[scale], whole.max((1, 2)), rtol=1e-5)
        error = np.abs(np.sqrt(levels_to_values(found[levels], found[scale])) - np.sqrt(whole))
        assert (error <= np.sqrt(found[scale])[:, None, None] * 0.502 / 255 + 1e-5).all()
    assert len(found["tile_row"]) == means.shape[1]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_exact(kind: str) -> None:
    inputs = KINDS[kind]
    expected = _expected(kind, 1)
    wanted = [0, expected.shape[1] - 1, 999]
    asked = Subscription(ALL.pattern, "attention", heads=(1, 3), parameters={"rows": wanted, "batch": 1})
    found = _measured(inputs, asked)
    rows = wanted[:2]
    np.testing.assert_allclose(found["probabilities"], expected[[1, 3]][:, rows], atol=1e-6)
    np.testing.assert_allclose(found["entropy"], torch.special.entr(expected[[1, 3]][:, rows]).sum(-1), atol=2e-5)
    assert found["heads"].tolist() == [1, 3]
    assert "tiles" not in found


def test_half_precision_is_summed_in_float() -> None:
    inputs = KINDS["causal"]
    half = replace(inputs, q=inputs.q.bfloat16(), k=inputs.k.bfloat16())
    found = _measured(half, replace(ALL, parameters={"rows": list(range(Q))}))
    np.testing.assert_allclose(found["probabilities"], _reference(half), atol=1e-6)


def test_what_is_not_there() -> None:
    inputs = KINDS["causal"]
    assert _measured(inputs, replace(ALL, heads=(9,))) == {}
    assert _measured(inputs, replace(ALL, parameters={"rows": [99]})) == {}
    with pytest.raises(ValueError, match="entry 2 of the batch is not there, it has 2"):
        _measured(inputs, replace(ALL, parameters={"batch": 2}))
    with pytest.raises(ValueError, match="may travel; ask for fewer"):
        _measured(_inputs(queries=3000, keys=3000), replace(ALL, parameters={"rows": list(range(3000))}))
    with pytest.raises(ValueError, match="packed sequences under context parallelism"):
        _measured(replace(KINDS["packed"], context=(0, 1, "zigzag")))
    tap = Tap(ALL.pattern, "attention", heads=(0, 2, 6))
    check_attention(replace(ALL, heads=(5,)), tap)
    with pytest.raises(ValueError, match="head 6 is not there, they count from 0 to 5"):
        check_attention(replace(ALL, heads=(0, 6)), tap)


@pytest.mark.parametrize("parameters", [{"grid": [5, 7]}, {"rows": [0, 7, 36]}], ids=["tiles", "rows"])
def test_heads_of_several_ranks(parameters: dict[str, Any]) -> None:
    inputs = KINDS["causal"]
    asked = replace(ALL, parameters=parameters)
    parts = [
        _measured(replace(inputs, q=inputs.q[:, 3 * r : 3 * r + 3], k=inputs.k[:, r : r + 1], head_offset=3 * r), asked)
        for r in (1, 0)
    ]
    merged, whole = merge_attention(parts), _measured(inputs, asked)
    assert merged.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(merged[name], value, atol=1e-6, err_msg=name)
    with pytest.raises(ValueError, match="overlap in their heads"):
        merge_attention([parts[0], {**parts[0], "heads": np.array([0, 4, 5])}])


@pytest.mark.parametrize("cut", ["zigzag", "contiguous"])
@pytest.mark.parametrize("parameters", [{"grid": [8, 5]}, {"rows": [1, 17, 30]}], ids=["tiles", "rows"])
def test_rows_of_several_ranks(cut: str, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _inputs(queries=32, keys=32)
    asked = replace(ALL, parameters=parameters)
    halves = [0, 3], [1, 2]
    if cut == "contiguous":
        halves = [0, 1], [2, 3]
    own = [torch.cat([torch.arange(8) + 8 * part for part in half]) for half in halves]

    def gather(parts: list[torch.Tensor], _mine: torch.Tensor, group: Any) -> None:
        assert group == "the group"
        for part, places in zip(parts, own, strict=True):
            part.copy_(whole.k[0][:, places])

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    parts = [
        _measured(
            replace(whole, q=whole.q[:, :, at], k=whole.k[:, :, at], context=(rank, 2, cut), group="the group"), asked
        )
        for rank, at in enumerate(own)
    ]
    merged, expected = merge_attention(parts), _measured(whole, asked)
    for name in ("heads", "position", "entropy", "first", "received", "queries", "probabilities"):
        if name in expected:
            np.testing.assert_allclose(merged[name], expected[name], atol=1e-5, err_msg=name)
    if "tiles" in expected:
        assert merged["tile_row"].tolist() == expected["tile_row"].tolist() == list(range(0, 32, 4))
        for levels, scale in (("tiles", "scale"), ("peaks", "peak_scale")):
            np.testing.assert_allclose(merged[scale], expected[scale], rtol=1e-5)
            assert np.abs(merged[levels].astype(int) - expected[levels]).max() <= 1


@given(
    queries=st.integers(1, 70),
    keys=st.integers(1, 70),
    rows=st.integers(1, 80),
    columns=st.integers(1, 80),
    most=st.integers(1, 90),
)
@settings(max_examples=200, deadline=None)
def test_batches_cover_each_row_once_and_never_a_part_of_two_tiles(
    queries: int, keys: int, rows: int, columns: int, most: int
) -> None:
    tiling = Tiling(queries, keys, (rows, columns), 1)
    assert tiling.rows <= rows
    assert tiling.columns <= columns
    seen: list[int] = []
    for begin, end in tiling.batches(most):
        seen.extend(range(begin, end))
        assert end - begin <= max(most, 1)
        parts = begin // tiling.height, (end - 1) // tiling.height
        assert parts[0] == parts[1] or begin % tiling.height == 0
        assert parts[0] == parts[1] or end % tiling.height == 0 or end == queries
    assert seen == list(range(queries))
    assert int(tiling.lengths(torch.device("cpu")).sum()) == queries * keys
