"""One dump of the Flight Recorder: its entries, and the process groups that it tells of."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from trimtab.traces.blocks import Blocks
from trimtab.traces.formats.flight_recorder.pickles import MOST_BYTES, load_plain
from trimtab.traces.own_header import MAX_WORLD, printable

PICKLE: Final = b"\x80"
_MOST_RANKS: Final = 1 << 20
_RANK: Final = re.compile(r"rank[_-]?(\d{1,8})(?!\d)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"(?<!\d)(\d{1,8})(?=\D*$)")
_ENTRIES: Final = re.compile(r'"entries"\s*:\s*\[')
_CONFIG: Final = re.compile(r'"pg_config"\s*:\s*(?=\{)')


@dataclass(frozen=True, slots=True)
class Dump:
    """What is in one file."""

    path: Path
    rank: int
    entries: list[dict[str, Any]]
    groups: dict[str, tuple[int, ...]]
    """Global ranks by the name of the process group, where they are known."""
    problem: str = ""
    """What could not be read of it."""

    @property
    def newest(self) -> int:
        """When the last of its entries was made."""
        times = (integer(entry.get("time_created_ns")) for entry in self.entries)
        return max((time for time in times if time is not None), default=0)


def read_dump(path: Path) -> Dump:
    """The dump at ``path``; ValueError, in one line, where there is none."""
    content = _content(path)
    problem = ""
    try:
        if content.startswith(PICKLE):
            document = load_plain(content)
        else:
            document, problem = _load_json(content)
    except ValueError as error:
        raise ValueError(f"{printable(path)}: {printable(error)}") from None
    entries = document.get("entries") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{printable(path)}: not a dump of the Flight Recorder: it has no list of entries")
    rank = rank_of(path)
    if rank is None:
        raise ValueError(
            f"{printable(path)}: a dump of the Flight Recorder does not tell its rank: give the file a name that ends "
            "in it, as in nccl_trace_rank_3"
        )
    found = [cast(dict[str, Any], entry) for entry in cast(list[Any], entries) if isinstance(entry, dict)]
    return Dump(path, rank, found, _groups(cast(dict[str, Any], document).get("pg_config")), problem)


def rank_of(path: Path) -> int | None:
    """The rank in a file's name: behind the word ``rank``, or else the last number."""
    stem = path.name.split(".", 1)[0]
    found = _RANK.search(path.name) or _NUMBER.search(stem)
    rank = int(found[1]) if found is not None else None
    return rank if rank is not None and rank < MAX_WORLD else None


def integer(value: Any, most: int = 1 << 62) -> int | None:
    """``value`` if it is a whole number from 0 to ``most``, also if it is one as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None


def _content(path: Path) -> bytes:
    blocks = Blocks(path)
    parts: list[bytes] = []
    for block in blocks:
        parts.append(block)
        if blocks.count > MOST_BYTES:
            raise ValueError(f"{printable(path)}: a dump of more than {MOST_BYTES >> 20} MiB")
    return b"".join(parts)


def _load_json(content: bytes) -> tuple[Any, str]:
    """The document, as far as it goes, and what is wrong with it."""
    text = content.decode("utf-8", "replace")
    try:
        return msgspec.json.decode(text), ""
    except (msgspec.DecodeError, RecursionError):
        pass
    entries: list[Any] = []
    begin = _ENTRIES.search(text)
    end = begin.end() if begin is not None else 0
    while begin is not None and (after := _value(text, end)) is not None:
        entry, end = after
        entries.append(entry)
        comma = text.find(",", end, end + 64)
        end = comma + 1 if comma >= 0 and not text[end:comma].strip() else len(text)
    if not entries:
        raise ValueError("damaged JSON without a single whole entry")
    config = _CONFIG.search(text)
    groups = _value(text, config.end()) if config is not None else None
    document = {"entries": entries, "pg_config": groups[0] if groups is not None else None}
    return document, f"damaged or cut off; the {len(entries)} whole entries at its begin are read"


def _value(text: str, begin: int) -> tuple[Any, int] | None:
    """The JSON value at ``begin`` and where it ends."""
    begin += len(text[begin : begin + 64]) - len(text[begin : begin + 64].lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None


def _groups(config: Any) -> dict[str, tuple[int, ...]]:
    groups: dict[str, tuple[int, ...]] = {}
    for name, said in cast(dict[Any, Any], config).items() if isinstance(config, dict) else ():
        ranks = _ranks(cast(dict[str, Any], said).get("ranks") if isinstance(said, dict) else said)
        if ranks and isinstance(name, str) and name:
            groups[name] = ranks
    return groups


def _ranks(said: Any) -> tuple[int, ...]:
    """Ranks as a list, or as its text."""
    if isinstance(said, str):
        try:
            said = json.loads(said)
        except (ValueError, RecursionError):
            return ()
    if not isinstance(said, list | tuple) or len(cast(list[Any], said)) > _MOST_RANKS:
        return ()
    ranks = [integer(rank, MAX_WORLD) for rank in cast(list[Any], said)]
    return tuple(rank for rank in ranks if rank is not None) if None not in ranks else ()
