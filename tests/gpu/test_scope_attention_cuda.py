"""Attention maps on a GPU: the kernels against the whole matrix in float64, and against the operators."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trimtab.scope.device.attention import AttentionState, fused, measure_attention
from trimtab.scope.device.attention.tiling import Tiling
from trimtab.scope.subscription import Subscription
from trimtab.scope.taps.points import AttentionInput

CUDA = torch.device("cuda", 0)
PATIENCE = 60.0
pytestmark = pytest.mark.timeout(280)


def inputs(
    queries: int, keys: int, width: int, heads: int, groups: int, dtype: torch.dtype, **more: Any
) -> AttentionInput:
    made = torch.Generator(CUDA).manual_seed(queries + keys)
    # As Megatron-Core has them: the sequence first, so that heads are strided.
    q = torch.randn(queries, 2, heads, width, device=CUDA, generator=made).to(dtype).permute(1, 2, 0, 3)
    k = torch.randn(keys, 2, groups, width, device=CUDA, generator=made).to(dtype).permute(1, 2, 0, 3)
    return AttentionInput(q, k, width**-0.5, **more)


KINDS: dict[str, Callable[[], AttentionInput]] = {
    "causal": lambda: inputs(300, 300, 64, 4, 2, torch.bfloat16),
    "half": lambda: inputs(300, 300, 64, 4, 4, torch.float16),
    "narrow head": lambda: inputs(130, 130, 24, 2, 1, torch.bfloat16),
    "wide head": lambda: inputs(130, 130, 192, 2, 1, torch.bfloat16),
    "bidirectional": lambda: inputs(270, 270, 64, 2, 2, torch.bfloat16, causal=False),
    "decode": lambda: inputs(1, 200, 64, 4, 1, torch.bfloat16),
    "chunked prefill": lambda: inputs(260, 300, 64, 4, 1, torch.bfloat16),
    "more rows than keys": lambda: inputs(200, 70, 64, 4, 1, torch.bfloat16),
    "window": lambda: inputs(300, 300, 64, 2, 2, torch.bfloat16, window=(40, 0)),
    "window both ways": lambda: inputs(300, 300, 64, 2, 2, torch.bfloat16, causal=False, window=(9, 33)),
    "soft cap": lambda: inputs(270, 270, 64, 2, 2, torch.bfloat16, softcap=1.5),
    "long": lambda: inputs(2048, 2048, 128, 8, 2, torch.bfloat16),
}
"""No CUDA here without a GPU: made when a test asks for them."""


def expected_of(given: AttentionInput, batch: int) -> torch.Tensor:
    """All probabilities (heads, queries, keys) in float64."""
    q, k = given.q[batch].double(), given.k[batch].double()
    scores = q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).transpose(1, 2) * given.scale
    if given.softcap is not None:
        scores = given.softcap * torch.tanh(scores / given.softcap)
    place = torch.arange(q.shape[1], device=CUDA)[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1], device=CUDA)[None, :]
    left, right = given.window or (-1, -1)
    hidden = (key > place) & given.causal
    hidden |= (key < place - left) & (left >= 0) | (key > place + right) & (right >= 0)
    return torch.nan_to_num(torch.softmax(scores.masked_fill(hidden, -torch.inf), -1))


GRIDS = [*((kind, (8, 8)) for kind in KINDS), ("causal", (5, 7)), ("causal", (1, 1)), ("long", (64, 64))]
"""Each shape of tiles is a kernel of its own, which takes seconds to compile."""


@pytest.mark.parametrize(("kind", "grid"), GRIDS, ids=str)
def test_kernels_sum_up_the_whole_matrix(kind: str, grid: tuple[int, int]) -> None:
    given = KINDS[kind]()
    assert fused.fits(given)
    expected = expected_of(given, 1)
    tiling = Tiling(given.q.shape[2], given.k.shape[2], grid, runs=1)
    chosen = list(range(given.q.shape[1]))[::-1]
    heads = torch.tensor(chosen, dtype=torch.int32, device=CUDA)
    found = fused.measure(given, 1, heads, tiling, fused.shape_of(given, tiling))
    expected = expected[chosen]
    torch.testing.assert_close(found.entropy.double(), torch.special.entr(expected).sum(-1), atol=5e-5, rtol=0)
    torch.testing.assert_close(found.received.double(), expected.sum(1), atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(found.first.double(), expected[:, :, 0], atol=5e-6, rtol=0)
    rows, columns = tiling.rows * tiling.height, tiling.columns * tiling.width
    padded = torch.zeros(len(chosen), rows, columns, dtype=torch.float64, device=CUDA)
    padded[:, : expected.shape[1], : expected.shape[2]] = expected
    tiles = padded.view(-1, tiling.rows, tiling.height, tiling.columns, tiling.width)
    torch.testing.assert_close(found.sums.double(), tiles.sum((2, 4)), atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(found.peaks.double(), tiles.amax((2, 4)), atol=5e-6, rtol=0)


def test_operators_measure_until_the_kernels_are_there_and_both_say_the_same() -> None:
    given = inputs(512, 512, 64, 4, 2, torch.bfloat16)
    fused.compiled.cache_clear()
    subscription = Subscription("**", "attention", heads=(1, 3), parameters={"batch": 1, "grid": [16, 16]})
    state = AttentionState()
    before = measure_attention(given, subscription, state)
    shape = fused.shape_of(given, Tiling(512, 512, (16, 16), runs=1))
    deadline, waited = time.monotonic() + PATIENCE, threading.Event()
    while not fused.ready(given, shape):
        assert time.monotonic() < deadline
        waited.wait(0.01)
    after = measure_attention(given, subscription, state)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = measure_attention(given, subscription, state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert before.keys() == after.keys()
    for name, expected in before.items():
        found = after[name]
        assert found.dtype == expected.dtype, name
        assert found.shape == expected.shape, name
        slack = 1 if name in ("tiles", "peaks") else 5e-5  # a level is rounded
        torch.testing.assert_close(found.double(), expected.double(), atol=slack, rtol=1e-5, msg=name)
        assert torch.equal(found, again[name]), name


@pytest.mark.parametrize("more", ["mask", "bias", "packed", "float32", "odd stride"])
def test_what_the_kernels_are_not_made_for_is_left_to_operators(more: str) -> None:
    given = inputs(64, 64, 64, 2, 2, torch.float32 if more == "float32" else torch.bfloat16)
    ends = torch.tensor([0, 64], device=CUDA)
    changes: dict[str, Any] = {
        "mask": {"mask": torch.zeros(64, 64, dtype=torch.bool, device=CUDA)},
        "bias": {"bias": torch.zeros(64, 64, device=CUDA)},
        "packed": {"packed": (ends, ends)},
        "odd stride": {"q": torch.zeros(2, 2, 64, 65, device=CUDA, dtype=torch.bfloat16)[..., :64]},
    }
    fields = {name: getattr(given, name) for name in given.__dataclass_fields__}
    assert not fused.fits(AttentionInput(**fields | changes.get(more, {})))
