"""What the compiled module (communication/native.cpp) gives the recorder; each part has its like in Python.

None of it needs the GIL where it is used without Python: by threads that issue communications, and by the writer while
it turns marks into times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Counter(Protocol):
    """Numbers from 0 on, each once, from any thread."""

    def take(self) -> int:
        """The next."""
        ...

    def count(self) -> int:
        """How many were taken."""
        ...


class Store(Protocol):
    """The memory of a :class:`~trimtab.record.files.ring.Ring`; its buffer is that of all rows."""

    push: Callable[..., bool]

    def head(self) -> int:
        """Rows whose place is taken."""
        ...

    def dropped(self) -> int:
        """Rows for which there was no room."""
        ...

    def drained(self, tail: int, /) -> None:
        """All rows before ``tail`` may be written over."""
        ...


class Marks(Protocol):
    """Marks of one GPU, see :class:`~trimtab.record.cuda.CudaDevice`; streams and events are handles of CUDA."""

    mark: Callable[[], int]
    """On the calling thread's current stream."""

    def on(self, stream: int, /) -> int:
        """On a stream that is not being captured."""
        ...

    def ahead_of(self, mark: int, /) -> bool:
        """See :meth:`CudaDevice.ahead_of`."""
        ...

    def bracket(self, event: int, stream: int, limit_ns: int, /) -> tuple[int, int] | None:
        """Host times before and after an event on an idle stream; None if it takes longer than ``limit_ns``."""
        ...

    def sweep(self, anchor: int, device_ns: int, line: list[tuple[int, int]], /) -> None:
        """Finish the marks that the device has passed, oldest first. ``anchor`` is an event, ``device_ns`` its time on
        the device, ``line`` the knots of an :class:`~trimtab.record.clocks.AnchorLine`."""
        ...

    def resolve(self, times: Any, /) -> None:
        """Turn marks in a buffer of int64 into times, in place; those that the device has not passed stay."""
        ...


class Parts(Protocol):
    """The module."""

    Counter: Callable[[], Counter]
    Store: Callable[[int, int, Callable[[], object]], Store]
    """(rows, a power of two; how many of them may wait; what wakes the writer)."""
    Marks: Callable[[str, int, int, Callable[[int], int], Sequence[int]], Marks]
    """(``cuda``, or ``cpu`` for tests; index; marks that may be under way; handle of the current stream of a device;
    addresses of :data:`~trimtab.record.cuda.RUNTIME` and of a clock, a tuple)."""
