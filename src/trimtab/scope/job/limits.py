"""What a subscription may ask of a rank, as far as that is known before it is measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from trimtab.config import ScopeConfig
from trimtab.scope.names import Tap
from trimtab.scope.subscription import RAW_BYTES, Subscription

MOST_TAPS: Final = 4096
"""Of one subscription on one rank."""
_HEAD_BYTES: Final = 400
"""Of a frame."""
_VECTOR_BYTES: Final = 96
_EXPONENT_BYTES: Final = 2048
_WIDEST: Final = 8
"""Bytes of an element whose type is not known."""
_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def check_limits(subscription: Subscription, taps: Sequence[Tap], others: int, config: ScopeConfig) -> None:
    """ValueError, in one line, where there are too many subscriptions (``others`` are there), taps or bytes."""
    if others >= config.subscriptions:
        raise ValueError(f"there are {others} subscriptions already, and scope.subscriptions is {config.subscriptions}")
    if len(taps) > MOST_TAPS:
        raise ValueError(f"{subscription.pattern!r} means {len(taps)} taps of this rank, more than {MOST_TAPS}")
    wanted = sum(_HEAD_BYTES + least_bytes(subscription, tap) for tap in taps)
    if wanted > config.frame_mb << 20:
        raise ValueError(
            f"{subscription.pattern!r} asks for {wanted / (1 << 20):.1f} MB of each rank and microbatch, and "
            f"scope.frame_mb is {config.frame_mb}; choose fewer taps, or less of each"
        )


def least_bytes(subscription: Subscription, tap: Tap) -> int:
    """What one sample of ``tap`` takes, at least, without its head."""
    parameters = subscription.parameters
    what = subscription.what
    element = _BYTES.get(tap.dtype.removeprefix("torch."), _WIDEST)
    if what == "statistics":
        return _VECTOR_BYTES
    if what == "histogram":
        return _VECTOR_BYTES + _EXPONENT_BYTES
    if what == "tiles":
        return math.prod(parameters.get("grid", (64, 64)))
    if what == "attention":
        heads = tap.heads[1] if tap.heads is not None else 1
        if subscription.heads is not None:
            heads = min(heads, len(subscription.heads))
        return heads * math.prod(parameters.get("grid", (64, 64)))
    if tap.shape is None:
        return 0
    whole = math.prod(tap.shape) * element
    if what == "raw":
        return min(whole, int(parameters.get("bytes", RAW_BYTES)))
    if what == "rows":
        return min(whole, len(parameters.get("rows", (0,))) * tap.shape[-1] * element)
    if what == "tokens":
        return min(whole, len(parameters.get("tokens", (0,))) * whole // max(tap.shape[0], 1))
    return 0
