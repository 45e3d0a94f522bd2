"""The short way of synchronous collectives of NCCL (native_lane.hpp): when it is open, and what it is told.

Such a collective runs in the current stream, so all that is to be known is there when it has been issued: no work, no
wait and no other thread will have to do with it. Compiled kernels record it alone.
"""

from __future__ import annotations

import functools
import threading
from typing import Final

from trimtab.record.clocks import Device
from trimtab.record.communication.native import Native
from trimtab.record.communication.works import Works
from trimtab.record.cuda import CudaDevice
from trimtab.record.recorder import Recorder

_TOGETHER: Final = 1
_ANNOTATED: Final = 2
"""Reasons to go the long way."""


class Lane:
    """Opened with the first communication after the process has begun to use CUDA, closed with the interception."""

    def __init__(self, native: Native, device: CudaDevice, recorder: Recorder, works: Works) -> None:
        """Use :meth:`of`."""
        self._native = native
        self._device = device
        self._recorder = recorder
        self._works = works
        self._is_open = False
        self._annotated = False

    @classmethod
    def of(cls, native: Native | None, device: Device, recorder: Recorder | None, works: Works) -> Lane | None:
        """None where there is no short way: no compiled kernels, no CUDA, or nothing is recorded."""
        if native is None or recorder is None or not isinstance(device, CudaDevice):
            return None
        return cls(native, device, recorder, works)

    def open(self) -> None:
        """Do so, if it is time and has not been done."""
        if self._is_open:
            return
        marks, writer, ids = self._device.compiled, self._recorder.writer, self._recorder.ids
        if marks is None or writer is None or ids is None or writer.ring.store is None:
            return
        self._is_open = True
        native, works = self._native, self._works
        main = threading.main_thread().ident or 0
        native.open_lane(writer.ring.store, marks, ids, works.site_in_place, writer.wake, main)
        works.together = functools.partial(native.close_lane, _TOGETHER)
        native.close_lane(_ANNOTATED, self._annotated)
        self._recorder.told = native.lane_step
        self._recorder.tell()

    def annotated(self, annotated: bool) -> None:
        """A profiler window wants to be told of each communication, or does no more."""
        self._annotated = annotated
        self._native.close_lane(_ANNOTATED, annotated)

    def close(self) -> None:
        """The kernels are about to go."""
        self._is_open = False
        self._recorder.told = None
        self._native.lane_step(-1, False)
