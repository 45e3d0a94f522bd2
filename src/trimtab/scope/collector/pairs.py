"""What ranks have said of paired runs, put together when all have."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, cast

from trimtab.scope.collector.interface import Notice
from trimtab.scope.paired import PairedResult, merge

_MOST: Final = 32


class Pairs:
    """From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: OrderedDict[str, dict[int, dict[str, Any]]] = OrderedDict()

    def take(self, notice: Notice) -> None:
        """A rank's part."""
        part = notice.details.get("part")
        if not isinstance(part, Mapping):
            return
        said = dict(cast("Mapping[str, Any]", part))
        with self._lock:
            self._parts.setdefault(str(said.get("pair")), {})[notice.rank] = said
            while len(self._parts) > _MOST:
                self._parts.popitem(last=False)

    def merged(self, pair: str, world_size: int) -> PairedResult | None:
        """Of all ranks; None until all have said theirs. ValueError where one makes no sense."""
        with self._lock:
            parts = dict(self._parts.get(pair, {}))
        return merge(parts.values(), world_size) if parts and len(parts) >= world_size else None

    def result(self, pair: str, world_size: int) -> dict[str, Any] | None:
        """The same as JSON."""
        found = self.merged(pair, world_size)
        return None if found is None else found.as_dict()
