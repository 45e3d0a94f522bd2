"""From the ring's rows to record batches of the event schema.

What repeats from event to event (kind, name, stream, layer, group, op, type, peers, shape) is a *site*: interned once,
written into rows as a number, and looked up again here, column by column.
"""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np
import pyarrow as pa

from trimtab.events import FILE_SCHEMA
from trimtab.record.ring import COLUMN, FIELDS, Rows

Site = tuple[str, str, str, int, str, str, str, int, int, int, tuple[int, ...]]
"""kind, name, stream, layer, group, op, dtype, src, dst, tag, shape; -1 and empty are unknown."""

_SITE_COLUMNS: Final = ("kind", "name", "stream", "layer", "group", "op", "dtype", "src", "dst", "tag", "shape")
_ROW_COLUMNS: Final = FIELDS[2:-1]
"""All but the row's own number, its site, and whether it has args."""
_SITES_WITH_SHAPES: Final = 8_192
_SITES: Final = 2 * _SITES_WITH_SHAPES
_OTHER_NAME: Final = "(too many names)"
_UNSET: Final[Site] = ("", "", "", -1, "", "", "", -1, -1, -1, ())


class Sites:
    """The interned sites of one rank. ``intern`` from any thread, :meth:`columns` from the writer.

    Memory stays bounded whatever the job does: from 8,192 sites on, new ones are stored without their shape, from
    16,384 on also without their name.
    """

    def __init__(self) -> None:
        self._ids: dict[Site, int] = {}
        self._sites: dict[int, Site] = {}
        self._numbers = itertools.count()
        self._columns: dict[str, pa.Array] = {}
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

    def columns(self) -> dict[str, pa.Array]:
        """One array for each column of a site, indexed by site number; texts are dictionary encoded."""
        known = len(self._sites)
        if known != self._known or not self._columns:
            # A number may be taken and its site not yet stored; no row can name it before it is.
            sites = [self._sites.get(number, _UNSET) for number in range(max(list(self._sites), default=-1) + 1)]
            self._columns = {
                name: _site_column(name, [site[i] for site in sites]) for i, name in enumerate(_SITE_COLUMNS)
            }
            self._known = known
        return self._columns


def _site_column(name: str, values: list[object]) -> pa.Array:
    kind = FILE_SCHEMA.field(name).type
    unknown = -1 if pa.types.is_integer(kind) else ()
    known = [None if value == unknown or value == "" else value for value in values]
    if pa.types.is_dictionary(kind):
        # In order of first use, so that the dictionary of an earlier batch is a prefix of it.
        texts = list(dict.fromkeys(value for value in known if value is not None))
        places = {text: place for place, text in enumerate(texts)}
        indices = pa.array([None if v is None else places[v] for v in known], pa.int32())
        return pa.DictionaryArray.from_arrays(indices, pa.array(texts, pa.string()))
    return pa.array(known, kind)


def to_batch(rows: Rows, sites: Sites, args: list[str | None], schema: pa.Schema) -> pa.RecordBatch:
    """A record batch of n ``rows`` (times resolved; -1 is unknown) with ``args`` as JSON text, one a row."""
    columns: dict[str, pa.Array] = {}
    for name in _ROW_COLUMNS:
        values = rows[:, COLUMN[name]]
        columns[name] = pa.array(values, type=pa.int64(), mask=values == -1).cast(schema.field(name).type)
    columns["args"] = pa.array(args, pa.string())
    places = pa.array(np.ascontiguousarray(rows[:, COLUMN["site"]]))
    for name, values in sites.columns().items():
        columns[name] = values.take(places)
    return pa.record_batch([columns[field.name] for field in schema], schema=schema)
