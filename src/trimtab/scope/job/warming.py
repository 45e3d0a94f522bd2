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

    def begin(self, subscription: Subscription, taps: Sequence[Tap]) -> None:
        """Start it on a thread of its own, which takes some seconds and ends with the process."""
        if not torch.cuda.is_initialized():
            return
        names = {tap.dtype.removeprefix("torch.") for tap in taps}
        dtypes = [dtype for name in sorted(names) if isinstance(dtype := getattr(torch, name, None), torch.dtype)]
        device = torch.device("cuda", torch.cuda.current_device())
        threading.Thread(
            target=self._warm, args=(subscription, device, dtypes), name="trimtab-scope-warm", daemon=True
        ).start()

    def _warm(self, subscription: Subscription, device: torch.device, dtypes: list[torch.dtype]) -> None:
        try:
            with torch.cuda.device(device):
                self._measures.warm(subscription, device, dtypes)
        except Exception as error:
            self._failed("compiling a kernel", error)
