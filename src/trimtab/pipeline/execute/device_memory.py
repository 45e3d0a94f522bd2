"""What a device has really allocated during an iteration, for the policy that watches it."""

from __future__ import annotations

from collections.abc import Callable

from trimtab.pipeline.execute.hooks import NoHooks


class DeviceMemory(NoHooks):
    """Allocated since the iteration began, and its cap: activations, and in the first iteration gradients, too.

    Args:
        cap: In bytes.
        allocated: Bytes allocated now, such as ``torch.cuda.memory_allocated``.
    """

    def __init__(self, cap: float, allocated: Callable[[], int]) -> None:
        self._cap = cap
        self._allocated = allocated
        self._before = 0

    def iteration_begins(self, iteration: int, forward_only: bool) -> None:
        """Weights, gradients and the optimizer's state are there already."""
        del iteration, forward_only
        self._before = self._allocated()

    def __call__(self) -> tuple[float, float | None]:
        """Used now, and the cap."""
        return float(max(self._allocated() - self._before, 0)), self._cap
