"""From the ring's rows to record batches of the event schema.

What repeats from event to event (kind, name, stream, layer, group, op, type, peers, shape) is a *site*: interned once,
written into rows as a number, and looked up again here, column by column.

Columns are made by numpy and handed to Arrow as they are: the first call of one of Arrow's own functions (``cast``,
``take``) would load its compute library into every rank, 15 MB of memory.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trimtab.events import FILE_SCHEMA
from trimtab.record.files.ring import COLUMN, FIELDS, Rows

Site = tuple[str, str, str, int, str, str, str, int, int, int, tuple[int, ...]]
"""kind, name, stream, layer, group, op, dtype, src, dst, tag, shape; -1 and empty are unknown."""

_SITE_COLUMNS: Final = ("kind", "name", "stream", "layer", "group", "op", "dtype", "src", "dst", "tag", "shape")
_ROW_COLUMNS: Final = FIELDS[2:-1]
"""All but the row's own number, its site, and whether it has args."""
_SITES_WITH_SHAPES: Final = 8_192
_SITES: Final = 2 * _SITES_WITH_SHAPES
_OTHER_NAME: Final = "(too many names)"
_UNSET: Final[Site] = ("", "", "", -1, "", "", "", -1, -1, -1, ())
_Ints = npt.NDArray[np.integer[Any]]


class Sites:
    """The interned sites of one rank. ``intern`` from any thread, everything else from the writer.

    Memory stays bounded whatever the job does: from 8,192 sites on, new ones are stored without their shape, from
    16,384 on also without their name.
    """

    def __init__(self) -> None:
        self._ids: dict[Site, int] = {}
        self._sites: dict[int, Site] = {}
        self._numbers = itertools.count()
        self._columns: dict[str, _Texts | _Numbers | _Lists] = {}
        self._known = 0

    def intern(self, site: Site) -> int:
        """Number of the site."""
        number = self._ids.get(site)
        if number is not None:
            return number
        if len(self._ids) >= _SITES_WITH_SHAPES:
            kind, name, stream, layer, group, op, dtype, src, dst, tag, _ = site
            if len(self._ids) >= _SITES:
                name = _OTHER_NAME
            site = (kind, name, stream, layer, group, op, dtype, src, dst, tag, ())
            number = self._ids.get(site)
            if number is not None:
                return number
        number = next(self._numbers)  # two threads may intern one site twice: harmless
        self._sites[number] = site
        self._ids[site] = number
        return number

    def at(self, number: int) -> Site:
        """One of them. From any thread."""
        return self._sites.get(number, _UNSET)

    def listed(self) -> list[Site]:
        """All sites by number. A number may be taken and its site not yet stored; no row can name it before it is."""
        return [self._sites.get(number, _UNSET) for number in range(max(list(self._sites), default=-1) + 1)]

    def columns(self, sites: _Ints) -> dict[str, pa.Array]:
        """The columns of a site for rows of these ``sites`` (n); texts are dictionary encoded."""
        known = len(self._sites)
        if known != self._known or not self._columns:
            every = self.listed()
            self._columns = {name: _site_column(name, [site[i] for site in every]) for i, name in _NUMBERED}
            self._known = known
        return {name: column.of(sites) for name, column in self._columns.items()}


_NUMBERED: Final = tuple(enumerate(_SITE_COLUMNS))


@dataclass(frozen=True, slots=True)
class _Texts:
    """A text for each site, as positions in a dictionary; negative: none."""

    codes: npt.NDArray[np.int32]
    words: pa.Array

    def of(self, sites: _Ints) -> pa.Array:
        return pa.DictionaryArray.from_arrays(_integers(self.codes[sites]), self.words)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A number for each site; -1: none."""

    values: npt.NDArray[np.int32]

    def of(self, sites: _Ints) -> pa.Array:
        return _integers(self.values[sites])


@dataclass(frozen=True, slots=True)
class _Lists:
    """A list for each site, all in one array; empty: none."""

    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    values: npt.NDArray[np.int64]

    def of(self, sites: _Ints) -> pa.Array:
        lengths = self.lengths[sites]
        ends = np.cumsum(lengths)
        places = np.repeat(self.starts[sites] - (ends - lengths), lengths) + np.arange(int(lengths.sum()))
        offsets = np.concatenate([[0], ends]).astype(np.int32)
        # An offset that is null makes its list null.
        missing = np.append(lengths == 0, False)
        return pa.ListArray.from_arrays(pa.array(offsets, mask=missing), pa.array(self.values[places]))


def _site_column(name: str, values: list[Any]) -> _Texts | _Numbers | _Lists:
    kind = FILE_SCHEMA.field(name).type
    if pa.types.is_dictionary(kind):
        # In order of first use, so that the dictionary of an earlier batch is a prefix of it.
        places = {text: place for place, text in enumerate(dict.fromkeys(filter(None, values)))}
        codes = np.array([places.get(value, -1) for value in values], np.int32)
        return _Texts(codes, pa.array(list(places), pa.string()))
    if pa.types.is_integer(kind):
        return _Numbers(np.array(values, np.int32))
    lengths = np.array([len(value) for value in values], np.int64)
    flat = np.array([item for value in values for item in value], np.int64)
    return _Lists(np.cumsum(lengths) - lengths, lengths, flat)


def _integers(values: _Ints) -> pa.Array:
    """An Arrow array of the same width; -1 is null."""
    return pa.array(values, mask=values == -1)


_WIDTHS: Final = {
    name: cast(Any, np.int32 if pa.types.is_int32(FILE_SCHEMA.field(name).type) else np.int64) for name in _ROW_COLUMNS
}


def to_batch(rows: Rows, sites: Sites, args: list[str | None], schema: pa.Schema) -> pa.RecordBatch:
    """A record batch of n ``rows`` (times resolved; -1 is unknown) with ``args`` as JSON text, one a row."""
    columns = {name: _integers(rows[:, COLUMN[name]].astype(_WIDTHS[name])) for name in _ROW_COLUMNS}
    columns["args"] = pa.array(args, pa.string())
    columns |= sites.columns(rows[:, COLUMN["site"]])
    return pa.record_batch([columns[field.name] for field in schema], schema=schema)
