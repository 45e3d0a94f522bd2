"""What travels from a rank: small arrays, and which tensor, step and microbatch they are of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.scope.names import Shard


@dataclass(frozen=True, slots=True)
class Frame:
    """What was measured of one tensor on one rank at one moment."""

    tap: str
    what: str
    subscription: str
    step: int
    microbatch: int
    rank: int
    shard: Shard = ()
    replica: int = 0
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[np.generic]])
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    unix_ns: int = 0
