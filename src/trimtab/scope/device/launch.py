"""Launching a compiled Triton kernel again without Triton's own way to it.

``kernel[grid](...)`` binds the arguments by name, looks at each one's type and alignment, and puts a key together as
text, some 35 us of Python; what is known of all of them beforehand need not be asked each time. The handle that a first
launch gives is called as Triton calls it itself. How that is done differs from release to release, so it is done with
those only for which it was tested.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

TESTED: Final = ("3.6",)
"""Releases of Triton whose handles are called as here."""
INT32: Final = 1 << 31
"""A handle takes integers below this (they were small when it was compiled)."""


class Launch:
    """A compiled kernel, with the constants that it was compiled for."""

    def __init__(self, kernel: Any, constants: Sequence[Any]) -> None:
        """``kernel``: what ``function[grid](...)`` gave. ``constants``: ``constexpr`` arguments, which come last."""
        self._run: Any = kernel.run
        self._function: Any = kernel.function
        self._metadata: Any = kernel.packed_metadata
        self._constants = tuple(constants)

    def __call__(self, programs: int, stream: int, *arguments: int) -> None:
        """So many programs on the stream of that handle; pointers are addresses. The device must be current."""
        self._run(
            *(programs, 1, 1, stream, self._function, self._metadata, None, None, None),
            *arguments,
            *self._constants,
        )


def offered() -> bool:
    """Is the Triton that is installed one of :data:`TESTED`?"""
    triton: Any = importlib.import_module("triton")
    return str(triton.__version__).rpartition(".")[0] in TESTED
