"""Tables of an SQLite file that somebody else wrote: read-only, plain tables only, whatever their values are."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import polars as pl

MAGIC: Final = b"SQLite format 3\0"
_ROWS_AT_ONCE: Final = 1 << 16
_MOST_BYTES: Final = 1 << 20
"""Of one text."""
_MOST_TEXTS: Final = 4 << 20
"""Distinct names in a file."""


class Database:
    """An open file. Its methods raise ValueError, in one line, where it is damaged."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        rows = self._ask("SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'")
        self.tables = frozenset(name for (name,) in rows if isinstance(name, str))

    def frame(self, table: str, integers: Sequence[str], texts: Sequence[str] = ()) -> pl.DataFrame:
        """Columns of ``table``: whole numbers, then texts; null where it has no such column, or a value is none."""
        known = self._columns(table)
        schema: dict[str, Any] = dict.fromkeys(integers, pl.Int64) | dict.fromkeys(texts, pl.String)
        parts = [pl.DataFrame(schema=schema)]
        if known:
            types = ["INTEGER"] * len(integers) + ["TEXT"] * len(texts)
            wanted = (
                f'CAST("{name}" AS {kind})' if name in known else "NULL"
                for name, kind in zip(schema, types, strict=True)
            )
            rows = self._batches(f'SELECT {", ".join(wanted)} FROM "{table}"')
            parts += [pl.DataFrame(batch, schema=schema, orient="row") for batch in rows]
        return pl.concat(parts)

    def texts(self, table: str, key: str, value: str) -> dict[Any, str]:
        """The texts in one column of ``table`` by the values of another."""
        if not {key, value} <= self._columns(table):
            return {}
        query = (
            f'SELECT "{key}", CAST("{value}" AS TEXT) FROM "{table}" WHERE "{value}" IS NOT NULL LIMIT {_MOST_TEXTS}'
        )
        return {number: text for rows in self._batches(query) for number, text in rows if isinstance(text, str)}

    def _columns(self, table: str) -> set[str]:
        return {str(row[1]) for row in self._ask(f'PRAGMA table_info("{table}")')} if table in self.tables else set()

    def _ask(self, query: str) -> list[tuple[Any, ...]]:
        return [row for rows in self._batches(query) for row in rows]

    def _batches(self, query: str) -> Iterator[list[tuple[Any, ...]]]:
        try:
            cursor = self._connection.execute(query)
            while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                yield rows
        except (sqlite3.Error, OverflowError, MemoryError) as error:
            raise ValueError(f"a damaged database ({error})") from None


@contextmanager
def opened(path: Path) -> Iterator[Database]:
    """The database at ``path``; nothing is written beside it, and nothing in it is run."""
    try:
        connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
    except sqlite3.Error as error:
        raise ValueError(f"cannot be opened ({error})") from None
    try:
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
        connection.execute("PRAGMA trusted_schema = OFF")
        yield Database(connection)
    except sqlite3.Error as error:
        raise ValueError(f"a damaged database ({error})") from None
    finally:
        connection.close()
