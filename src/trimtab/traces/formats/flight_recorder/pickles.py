"""Load a pickle that holds plain containers, texts and numbers, and refuse any other before it is loaded.

A pickle is a program: with ``GLOBAL`` and ``REDUCE`` it can call anything. PyTorch writes dumps with a few harmless
instructions, so only what consists of those is given to the unpickler, which finds no class even so.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any, Final, NoReturn

MOST_BYTES: Final = 64 << 20
MOST_CONTAINERS: Final = 4 << 20
"""A dump of 20,000 entries with their stacks has half a million."""
_CONTAINERS: Final = b"]}\x85\x86\x87t"
"""EMPTY_LIST, EMPTY_DICT, TUPLE1 to TUPLE3, TUPLE."""
_HEADER: Final = re.compile(rb"\x80[\x02-\x05]")
_FIXED: Final = (
    rb"[\]}\x85\x86\x87t)(euas]"  # containers, marks, and what fills containers
    rb"|[N\x88\x89]|K.|M..|J....|G.{8}"  # None, true and false, numbers
    rb"|[qh].|j....|\x94"  # into the memo, and out of it
    rb"|\x95.{8}"  # frames
)
"""Instructions of a fixed length."""
_SIZED: Final = {0x58: 4, 0x8C: 1, 0x8A: 1}
"""Instructions with a text or number behind them (BINUNICODE, SHORT_BINUNICODE, LONG1): bytes of its length."""
_PUT: Final = ((1 << 16, rb"r..\x00\x00"), (1 << 24, rb"r...\x00"), (1 << 32, rb"r...[\x00-\x03]"))
"""LONG_BINPUT by the size of the file: the unpickler makes room for as many objects as the number says."""
_STOP: Final = 0x2E
_WRONG: Final = (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:  # noqa: ARG002
        raise pickle.UnpicklingError("it asks for a class")


def load_plain(data: bytes) -> Any:
    """What the pickle in ``data`` holds: dicts, lists, tuples, texts and numbers.

    Raises ValueError, in one line, where it is anything else, or is damaged.
    """
    _check(data)
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except _WRONG as error:
        raise ValueError(f"a damaged pickle ({error})") from None
    except (MemoryError, OverflowError, RecursionError):
        raise ValueError("a damaged pickle (too large)") from None


def _check(data: bytes) -> None:
    """Go from one text to the next; what lies between them must be harmless instructions."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"a pickle of more than {MOST_BYTES >> 20} MiB")
    header = _HEADER.match(data)
    if header is None:
        raise ValueError("not a pickle of protocol 2 or later")
    put = next(pattern for limit, pattern in _PUT if len(data) < limit)
    run = re.compile(b"(?:" + _FIXED + b"|" + put + b")*+", re.DOTALL)
    at, containers = header.end(), 0
    while True:
        if (found := run.match(data, at)) is not None:
            containers += len(found[0]) - len(found[0].translate(None, _CONTAINERS))
            at = found.end()
        if containers > MOST_CONTAINERS:
            raise ValueError(f"a pickle of more than {MOST_CONTAINERS:,} containers")
        if at >= len(data):
            raise ValueError("a pickle that is cut off")
        code = data[at]
        if code == _STOP:
            return
        size = _SIZED.get(code)
        if size is None:
            raise ValueError(f"a pickle that does more than hold data ({_name(code)}): refused")
        at += 1 + size + int.from_bytes(data[at + 1 : at + 1 + size], "little")


def _name(code: int) -> str:
    known = next((one.name for one in pickletools.opcodes if one.code == chr(code)), None)
    return known or f"an unknown instruction, 0x{code:02x}"
