"""Counters of the GPU that this rank computes on, from the moment it does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from trimtab.record.counters.nvml import GpuReadings, Library, find_gpu, load_nvml

_LOG = logging.getLogger("trimtab")


class CudaReadings:
    """Reads NVML once the rank uses its GPU; CUDA is never initialised for that."""

    def __init__(self, cuda: Any, index: Callable[[], int | None], load: Callable[[], Library] = load_nvml) -> None:
        """``cuda`` is ``torch.cuda``; ``index`` says which of its devices the rank uses, None while unknown."""
        self._cuda = cuda
        self._index = index
        self._load = load
        self._tried = False
        self._readings: GpuReadings | None = None

    def read(self) -> dict[str, Any]:
        """Empty before the rank uses a GPU, and where NVML cannot be used."""
        if not self._tried:
            index = self._index()
            if index is None or not self._cuda.is_initialized():
                return {}
            self._tried = True
            self._readings = self._open(index)
        return {} if self._readings is None else self._readings.read()

    def close(self) -> None:
        """Give NVML back."""
        if self._readings is not None:
            self._readings.close()

    def _open(self, index: int) -> GpuReadings | None:
        try:
            library = self._load()
        except Exception as error:  # not installed, no driver, another vendor
            _LOG.debug("trimtab: no counters of the GPU: NVML cannot be used (%s)", error)
            return None
        try:
            return GpuReadings(library, find_gpu(library, self._cuda.get_device_properties(index)))
        except Exception as error:
            _LOG.debug("trimtab: no counters of the GPU: NVML does not know this one (%s)", error)
            library.nvmlShutdown()
            return None
