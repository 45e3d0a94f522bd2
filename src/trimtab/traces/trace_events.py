"""Chrome's trace event JSON read in blocks: the events as typed batches, what stands around them as metadata.

Nothing larger than a block and its events is held, so a file may be larger than memory. The text is cut between two
events and each part decoded as a list; only where that fails is it looked at event by event, so that damage costs the
events it hit and no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from trimtab.traces.blocks import Blocks
from trimtab.traces.own_header import printable

T = TypeVar("T")

MOST_EVENT_BYTES: Final = 4 << 20
"""Of one event; what seems to be longer is damaged, as after a quote that was lost."""
MOST_AROUND_BYTES: Final = 32 << 20
"""Of what stands before the events, and of what stands behind them."""
_MOST_TRIES: Final = 256
"""To find a place between two events from behind."""
_BEGIN: Final = re.compile(rb'"traceEvents"\s*:\s*\[|\A(?:\xef\xbb\xbf)?\s*\[')
_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("|\\?\Z)|[{}\[\]]', re.DOTALL)
_START: Final = re.compile(rb'\{\s*"(?:ph|name|cat|pid|tid|ts)"\s*:')
"""How an event begins, usually."""
_END: Final = re.compile(rb'\]\s*(?:\Z|\}\s*\Z|,\s*(?:\Z|"[^"\\]{0,100}(?:\Z|"\s*(?::|\Z))))')
"""The end of the list of events: what may follow is the end of the file, or another entry of its object."""
_CONTROL: Final = bytes.maketrans(bytes(range(32)), b" " * 32)
_NO_NUMBER: Final = re.compile(rb"(?<=[:\[,\s])[-+]?(?:nan|inf|infinity)(?=\s*[,}\]])", re.IGNORECASE)
_NO_ESCAPE: Final = re.compile(rb'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')
_DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class TraceEvents(Generic[T]):
    """The events of one file in batches of type ``kind``. When they are through, ``metadata`` holds what stands around
    them, and ``problems`` says what could not be read.

    ``kind`` is anything msgspec decodes an event to. Raises ValueError, in one line, where there is nothing to read.
    """

    def __init__(self, path: Path, kind: Any, block_bytes: int | None = None) -> None:
        self.metadata: dict[str, Any] = {}
        self.damaged = 0
        """Events that could not be read."""
        self.problems: list[str] = []
        self._path = path
        self._blocks = Blocks(path) if block_bytes is None else Blocks(path, block_bytes)
        self._all: Any = msgspec.json.Decoder(cast(Any, list)[kind], strict=False)
        self._one: Any = msgspec.json.Decoder(kind, strict=False)
        self._object = True
        """The list of events stands in an object, as other lists may."""
        self._closed = False

    def __iter__(self) -> Iterator[list[T]]:
        blocks = iter(self._blocks)
        before, text = self._head(blocks)
        while not self._closed:
            block = next(blocks, None)
            end = len(text) if block is None else _last_cut(text)
            if end:
                events, used = self._decode(text, end, last=block is None)
                yield events
                text = text[used:]
            if block is None:
                break
            text += block
            if len(text) > MOST_EVENT_BYTES:  # an event never ends: what it began with is damaged
                text = self._skip(text)
        after = self._rest(text, blocks) if self._closed else b""
        self.metadata = self._around(before, after)
        self._say(text)

    def _head(self, blocks: Iterator[bytes]) -> tuple[bytes, bytes]:
        """What stands before the events, and the begin of the events."""
        text = b""
        for block in blocks:
            text += block
            found = _BEGIN.search(text)
            if found is not None:
                self._object = found[0].startswith(b'"')
                return text[: found.end()], text[found.end() :]
            if len(text) > MOST_AROUND_BYTES:
                break
        what = "it holds no list of traceEvents" if text.strip() else "it is empty"
        raise ValueError(f"{printable(self._path)}: not a trace ({self._blocks.problem or what})")

    def _decode(self, text: bytes, end: int, last: bool) -> tuple[list[T], int]:
        """Events in ``text`` up to ``end``, and how much of it is done with."""
        close = _end_of_list(text) if last else -1
        part = text[: end if close < 0 else close]
        for repaired in _repairs(part):
            try:
                events = self._all.decode(b"[" + repaired + b"]")
            except _DECODE_ERRORS:
                continue
            if close < 0:
                return events, _behind_comma(text, end)
            self._closed = True
            return events, text.index(b"]", close) + 1
        return self._one_by_one(text, last)

    def _one_by_one(self, text: bytes, last: bool) -> tuple[list[T], int]:
        """The same, where something is wrong, or the list ends, somewhere in ``text``."""
        events: list[T] = []
        begins = _Begins(text)
        done, going = 0, True
        while going:
            going, resume = False, -1
            for begin, end in _objects(text, done):
                if begin == end:
                    self._closed = True
                    return events, end + 1
                event = self._repair(text[begin:end])
                done = end
                if event is not None:
                    events.append(event)
                elif (resume := begins.after(begin)) >= 0:  # its end may be wrong, too
                    break
            else:
                brace = text.find(b"{", done) if last else -1
                if brace >= 0 and (resume := begins.after(brace)) >= 0:
                    self.damaged += 1
            if resume >= 0:
                done, going = resume, True
        return events, done

    def _repair(self, text: bytes) -> T | None:
        for repaired in _repairs(text):
            try:
                return self._one.decode(repaired)
            except _DECODE_ERRORS:
                pass
        self.damaged += 1
        return None

    def _skip(self, text: bytes) -> bytes:
        """``text`` from the next event on."""
        self.damaged += 1
        start = _START.search(text, 1)
        return text[-64:] if start is None else text[start.start() :]

    def _rest(self, text: bytes, blocks: Iterator[bytes]) -> bytes:
        """What stands behind the events."""
        for block in blocks:
            text += block
            if len(text) > MOST_AROUND_BYTES:
                self.problems.append("too much stands behind its events; that is left out")
                return b""
        return text

    def _around(self, before: bytes, after: bytes) -> dict[str, Any]:
        if not self._object:
            return {}
        before = before.removeprefix(b"\xef\xbb\xbf")
        for tail in (b"]" + after, b"]}"):
            for repaired in _repairs(before + tail):
                try:
                    return msgspec.json.decode(repaired, type=dict[str, Any])
                except _DECODE_ERRORS:
                    pass
            if tail != b"]}" and after.strip():
                self.problems.append("what stands behind its events is damaged")
        self.problems.append("what stands before its events is damaged")
        return {}

    def _say(self, text: bytes) -> None:
        if self.damaged:
            self.problems.append(f"{self.damaged} events are damaged and left out")
        if self._blocks.problem:
            self.problems.append(f"{self._blocks.problem} after {self._blocks.count:,} bytes of text; those are read")
        elif not self._closed and (self._object or text.strip(b" \t\r\n,")):
            self.problems.append(
                f"it ends before its list of events does; {self._blocks.count - len(text):,} bytes are read"
            )
        self.problems = [f"{printable(self._path)}: {problem}" for problem in self.problems]


def _repairs(text: bytes) -> Iterator[bytes]:
    """``text``, then as it is without what writers are known to get wrong."""
    yield text
    mended = _NO_NUMBER.sub(b"null", text.translate(_CONTROL))
    mended = _NO_ESCAPE.sub(lambda found: found[0] if found[1] else b"\\\\", mended)
    mended = mended.decode("utf-8", "replace").encode()
    if mended != text:
        yield mended


def _last_cut(text: bytes) -> int:
    """End of the last event that another one follows, as far as that can be seen from behind; 0: none."""
    brace = len(text)
    for _ in range(_MOST_TRIES):
        brace = text.rfind(b"{", 0, brace)
        if brace <= 0:
            return 0
        gap = text[max(0, brace - 64) : brace].rstrip()
        if gap.endswith(b",") and gap[:-1].rstrip().endswith(b"}"):
            return text.rindex(b"}", 0, brace) + 1
    return 0


def _end_of_list(text: bytes) -> int:
    """Where the last event ends, if the list of events ends in ``text`` by the look of it; else -1."""
    bracket = len(text)
    for _ in range(_MOST_TRIES):
        bracket = text.rfind(b"]", 0, bracket)
        if bracket < 0:
            return -1
        gap = text[max(0, bracket - 64) : bracket].rstrip()
        if gap.endswith(b"}") and _END.match(text, bracket):
            return text.rindex(b"}", 0, bracket) + 1
    return -1


def _behind_comma(text: bytes, end: int) -> int:
    """``end``, or behind the comma that follows it."""
    gap = text[end : end + 64]
    return end + len(gap) - len(gap.lstrip()) + 1 if gap.lstrip().startswith(b",") else end


class _Begins:
    """Where events begin, by the look of it, asked for from front to back."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._next = 0

    def after(self, position: int) -> int:
        """The first one behind ``position``; -1: none."""
        if 0 <= self._next <= position:
            found = _START.search(self._text, position + 1)
            self._next = found.start() if found else -1
        return self._next


def _objects(text: bytes, begin: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each complete event in ``text``; an empty one is the end of the list."""
    depth = 0
    for token in _TOKEN.finditer(text, begin):
        first = text[token.start()]
        if first == 0x22:  # a string
            if token[1] != b'"':
                return
        elif first in b"{[":
            begin = begin if depth else token.start()
            depth += 1
        elif depth:
            depth -= 1
            if depth == 0:
                yield begin, token.end()
        elif _END.match(text, token.start()):
            yield token.start(), token.start()
            return
