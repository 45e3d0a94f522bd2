"""How each kind of subscription is measured. Where that is, is imported with the first subscription that needs it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, Final

import torch

from trimtab.scope.job.sampling import Active, Measure, Sampler
from trimtab.scope.names import Tap
from trimtab.scope.subscription import Subscription

_DEVICE: Final = "trimtab.scope.device.measure"
_AHEAD: Final = "trimtab.scope.device.ahead"
_ATTENTION: Final = "trimtab.scope.device.attention"


class Measures:
    """Makes samplers."""

    def sampler(self, active: Active, tap: Tap) -> Sampler:
        """For one tap of a subscription."""
        measure, state = self._measure(active.subscription)
        for name, value in (("labels", tap.labels), ("tap", tap)):
            if hasattr(state, name):
                setattr(state, name, value)
        return Sampler(active, tap, measure, state)

    def check(self, subscription: Subscription, tap: Tap) -> None:
        """ValueError where this cannot be measured of that tap."""
        if subscription.what == "attention":
            importlib.import_module(_ATTENTION).check_attention(subscription, tap)
        else:
            importlib.import_module(_DEVICE).check(subscription, tap)

    def warm(self, subscription: Subscription, device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
        """Have compiled what measuring will need on ``device``. Takes seconds; not for a thread that trains."""
        if subscription.what != "attention":
            warm = importlib.import_module(_DEVICE).warm
            for dtype in dtypes:
                if device.type == "cuda" and subscription.what in ("statistics", "histogram"):
                    importlib.import_module(_AHEAD).compile_ahead(device, dtype, subscription.what == "histogram")
                warm(subscription, device, dtype)

    def _measure(self, subscription: Subscription) -> tuple[Measure, Any]:
        if subscription.what == "attention":
            attention = importlib.import_module(_ATTENTION)
            return attention.measure_attention, attention.AttentionState()
        device = importlib.import_module(_DEVICE)
        return device.measure, device.MeasureState()
