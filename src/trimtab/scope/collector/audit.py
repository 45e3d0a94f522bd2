"""What ranks have written down of perturbations, from all their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

_FILES: Final = "audit-r*.jsonl"
_LONGEST_LINE: Final = 1 << 16


def read_audit(folder: Path) -> list[dict[str, Any]]:
    """All entries of RUN_DIR/scope, in order of their time; lines that are cut off or make no sense are passed over."""
    entries: list[dict[str, Any]] = []
    for path in sorted(folder.glob(_FILES)):
        with path.open("rb") as lines:
            for line in iter(lambda lines=lines: lines.readline(_LONGEST_LINE), b""):
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(entry, Mapping):
                    entries.append(dict(cast("Mapping[str, Any]", entry)))
    return sorted(entries, key=_time)


def _time(entry: Mapping[str, Any]) -> int:
    found = entry.get("unix_ns")
    return found if type(found) is int else 0
