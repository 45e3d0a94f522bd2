"""Kernels are compiled when a subscription is prepared, so that the first step that needs them does not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from trimtab.scope.job.measures import Measures
from trimtab.scope.names import Tap
from trimtab.scope.subscription import Subscription


class Warming:
    """On a GPU only: for a CPU ``trimtab compile`` does it beforehand, and nothing is compiled beside the training."""

    def __init__(self, measures: Measures, failed: Callable[[str, Exception], None]) -> None:
        """``failed`` is told what went wrong; measuring may do without."""
        self._measures = measures
        self._failed = failed
        self._devices: dict[torch.device, None] = {}

    def meet(self, model: torch.nn.Module) -> None:
        """Where its parameters are, measurements will be. (Each thread has a current GPU of its own, and that of a
        thread which does not train is the first.)"""
        self._devices |= {parameter.device: None for parameter in model.parameters() if parameter.is_cuda}

    def begin(self, subscription: Subscription, taps: Sequence[Tap]) -> None:
        """Start it on a thread of its own, which takes some seconds and ends with the process."""
        devices = list(self._devices)
        if not devices:
            return
        # A loss or a router's logits are float32 where the model says bfloat16.
        names = {tap.dtype.removeprefix("torch.") for tap in taps} | {"float32"}
        dtypes = [dtype for name in sorted(names) if isinstance(dtype := getattr(torch, name, None), torch.dtype)]
        threading.Thread(
            target=self._warm, args=(subscription, devices, dtypes), name="trimtab-scope-warm", daemon=True
        ).start()

    def _warm(self, subscription: Subscription, devices: list[torch.device], dtypes: list[torch.dtype]) -> None:
        try:
            for device in devices:
                with torch.cuda.device(device):
                    self._measures.warm(subscription, device, dtypes)
        except Exception as error:
            self._failed("compiling a kernel", error)
