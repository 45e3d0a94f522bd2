"""What is measured of a tensor on the device never asks for a value on the host, which would wait for the device.

On fake tensors, which have shapes and no values, such a question is an error. Statistics and histograms have kernels of
their own on GPUs, and ask on the CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trimtab.scope.device.measure import MeasureState, measure
from trimtab.scope.subscription import Subscription


@pytest.mark.parametrize("what", ["tiles", "rows", "tokens", "raw", "pca"])
def test_no_value_is_asked_for(what: str) -> None:
    subscription = Subscription.from_dict({"pattern": "**", "what": what})
    with FakeTensorMode():
        state = MeasureState()
        state.labels = ("s", "b", "h")
        x = torch.randn(128, 2, 64).to(torch.bfloat16)
        for _ in range(3):
            assert measure(x, subscription, state)
