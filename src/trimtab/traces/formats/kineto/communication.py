"""What a communication was: its operation, bytes, type, group and peers, from what PyTorch says of it and its names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

from trimtab.events import Kind
from trimtab.traces.formats.kineto.schema import CommArgs

MOST_RANKS: Final = 1_000_000
"""Of one group; larger ones are taken for damage."""
_OPS: Final = (
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
    ("sendrecv", "send_recv"),
    ("send", "send"),
    ("recv", "recv"),
)
"""Part of a name without its separators, and the operation it means; the first that fits counts."""
_WIDTHS: Final = {
    "float": ("float32", 4), "double": ("float64", 8), "half": ("float16", 2), "bfloat16": ("bfloat16", 2),
    "byte": ("uint8", 1), "unsigned char": ("uint8", 1), "char": ("int8", 1), "signed char": ("int8", 1),
    "short": ("int16", 2), "int": ("int32", 4), "long": ("int64", 8), "long int": ("int64", 8), "bool": ("bool", 1),
    "float8_e4m3fn": ("float8_e4m3fn", 1), "float8_e5m2": ("float8_e5m2", 1), "complexfloat": ("complex64", 8),
    "complexdouble": ("complex128", 16), "uint16": ("uint16", 2), "uint32": ("uint32", 4), "uint64": ("uint64", 8),
}  # fmt: skip
"""PyTorch's names of types, in lower case and without namespace, the ones its users know, and bytes."""
_OUTPUT_COUNTS: Final = ("all_gather", "recv")
"""Of these the output is the whole message, of others the input; see :mod:`trimtab.events`."""
_TIMES_MEMBERS: Final = ("gather",)
"""Of these the input counts once for each member."""
_PEERS: Final = {"send": Kind.SEND, "recv": Kind.RECV}


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as a rank knows it: a label that is equal on all members, and who they are."""

    label: str
    ranks: tuple[int, ...]
    """Global ranks in the group's order; empty where nobody says."""


@dataclass(frozen=True, slots=True)
class Message:
    """One communication of one rank."""

    kind: Kind
    op: str
    bytes: int | None = None
    dtype: str | None = None
    group: str | None = None
    src: int | None = None
    dst: int | None = None
    seq: int | None = None


class Groups:
    """The process groups of one rank: those that the file's head lists, and those that communications name."""

    def __init__(self, metadata: dict[str, Any], rank: int, world_size: int) -> None:
        self._rank = rank
        self._world = world_size
        self._listed: dict[str, tuple[int, ...]] = {}
        self._described: dict[str, str] = {}
        self._known: dict[tuple[Any, ...], Group] = {}
        for entry in _dicts(_dict(metadata.get("distributedInfo")).get("pg_config")):
            name = str(entry.get("pg_name"))
            self._listed[name] = _ranks(entry.get("ranks"))
            self._described[name] = str(entry.get("pg_desc", ""))

    def of(self, said: CommArgs) -> Group | None:
        """The group of a communication; None where nothing names it."""
        if said.group is None and said.description is None:
            return None
        ranks = said.ranks if isinstance(said.ranks, str | None) else str(said.ranks)
        key = (said.group, said.description, ranks, said.size, said.rank_start, said.rank_stride)
        if key not in self._known:
            self._known[key] = self._meet(said)
        return self._known[key]

    def members(self, all_listed: bool) -> dict[str, tuple[int, ...]]:
        """The ranks of each group met so far, where they are known; or of each that the file lists."""
        if all_listed:
            for name, description in self._described.items():
                self.of(CommArgs(group=name, description=description))
        return {group.label: group.ranks for group in self._known.values() if group.ranks}

    def _meet(self, said: CommArgs) -> Group:
        name = str(said.group if said.group is not None else said.description)
        ranks = self._listed.get(name, ()) or _ranks(said.ranks) or _spaced(said)
        if not ranks and (said.size == self._world or said.description == "default_pg"):
            ranks = tuple(range(self._world))
        if ranks and self._rank not in ranks:
            ranks = ()
        plain = said.description in (None, "", "undefined", name)
        label = name if plain else f"{said.description}/{name}"
        return Group(f"{label}@{min(ranks)}" if ranks else label, ranks)


def message(said: CommArgs, name: str, groups: Groups, rank: int) -> Message:
    """What ``said`` and the ``name`` of the kernel or operator tell; both come from the file."""
    op = op_of(said.collective or "") or op_of(name) or "unknown"
    group = groups.of(said)
    members = said.size or (len(group.ranks) if group is not None else 0)
    dtype, width = width_of(said.dtype)
    elements = said.elements_out if op in _OUTPUT_COUNTS else said.elements_in
    if elements is None and said.dims is not None:
        elements, (dtype, width) = _counted(said, op)
    if elements is not None and op in _TIMES_MEMBERS:
        elements = elements * members if members else None
    size = elements * width if elements is not None and width and 0 <= elements < 1 << 56 else None
    kind = _PEERS.get(op, Kind.COLLECTIVE)
    source, target = _peers(said, kind, group, rank)
    seq = said.seq if said.seq is not None and 0 <= said.seq < 1 << 62 else None
    return Message(kind, op, size, dtype, group.label if group is not None else None, source, target, seq)


def op_of(name: str) -> str:
    """The operation that a name of a collective, operator or kernel means, as users know it; empty: none."""
    plain = re.sub(r"[^a-z]", "", name[:200].lower())
    return next((op for part, op in _OPS if part in plain), "")


def width_of(dtype: str | None) -> tuple[str | None, int]:
    """The usual name of a type and its bytes; 0 where it is not known."""
    if not dtype:
        return None, 0
    return _WIDTHS.get(dtype.lower().removeprefix("c10::"), (dtype[:40].lower(), 0))


def _counted(said: CommArgs, op: str) -> tuple[int | None, tuple[str | None, int]]:
    """Elements and type from the shapes of an operator's inputs; all but the first tensors of it are other things."""
    types = cast(list[Any], said.types) if isinstance(said.types, list) else []
    shapes = cast(list[Any], said.dims) if isinstance(said.dims, list) else []
    if op in ("all_gather", "gather", "scatter", "reduce_scatter") or not shapes:
        return None, (None, 0)
    first = shapes[0]
    tensors = cast(list[Any], first) if isinstance(first, list) else []
    if not (tensors and isinstance(tensors[0], list)):
        tensors = [tensors]
    elements = sum(_product(shape) for shape in tensors)
    named = str(types[0]) if types else None
    return elements, width_of(named)


def _product(shape: Any) -> int:
    total = 1
    for extent in cast(list[Any], shape) if isinstance(shape, list) else []:
        total *= extent if isinstance(extent, int) and 0 <= extent < 1 << 40 and total < 1 << 60 else 0
    return total if shape else 0


def _peers(said: CommArgs, kind: Kind, group: Group | None, rank: int) -> tuple[int | None, int | None]:
    """Global ranks of who sends and who receives. The file has them as ranks in the group."""
    if kind is Kind.COLLECTIVE:
        return None, None
    place = said.target if kind is Kind.SEND else said.source
    ranks = group.ranks if group is not None else ()
    others = [one for one in ranks if one != rank]
    peer = ranks[place] if place is not None and 0 <= place < len(ranks) else others[0] if len(others) == 1 else None
    return (rank, peer) if kind is Kind.SEND else (peer, rank)


def _spaced(said: CommArgs) -> tuple[int, ...]:
    """Ranks at even distances."""
    start, size, stride = said.rank_start, said.size, said.rank_stride
    if start is None or not size or not 0 <= start < MOST_RANKS or not 0 < size < MOST_RANKS:
        return ()
    if size == 1:
        return (start,)
    if stride is None or not 0 < stride < MOST_RANKS:
        return ()
    return tuple(range(start, start + size * stride, stride))


def _ranks(raw: Any) -> tuple[int, ...]:
    """Ranks as a list or its text; empty where they are cut short, or nothing of the kind."""
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError):
            return ()
    if not isinstance(raw, list):
        return ()
    ranks = cast(list[Any], raw)
    whole = len(set(map(str, ranks))) == len(ranks) <= MOST_RANKS
    if not whole or not all(isinstance(one, int) and 0 <= one < 1 << 31 for one in ranks):
        return ()
    return tuple(ranks)


def _dict(raw: Any) -> dict[str, Any]:
    return cast(dict[str, Any], raw) if isinstance(raw, dict) else {}


def _dicts(raw: Any) -> Iterable[dict[str, Any]]:
    return [_dict(one) for one in cast(list[Any], raw)] if isinstance(raw, list) else []
