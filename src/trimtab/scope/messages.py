"""What ranks and the collector say to each other over :mod:`trimtab.control`."""

from __future__ import annotations

from typing import Final

COLLECTOR: Final = "scope"
"""Name of the collector's endpoint."""
FRAME: Final = "scope.frame"
NOTICE: Final = "scope.notice"
BEAT: Final = "scope.beat"
"""Published by ranks."""
TAPS: Final = "scope.taps"
STATE: Final = "scope.state"
PREPARE: Final = "scope.prepare"
COMMIT: Final = "scope.commit"
CANCEL: Final = "scope.cancel"
"""Asked of ranks."""
HERE: Final = "scope.here"
"""Published by the collector, without a body: as long as it is heard, ranks hold their subscriptions and send beats."""
DO: Final = "scope.do"
"""Asked of the collector."""
BEAT_SECONDS: Final = 0.5
HERE_SECONDS: Final = 2.0
"""How often, at most, the collector says that it is there."""
NOTICE_KINDS: Final = ("applied", "expired", "reverted", "paused", "resumed", "dropped", "activated", "error")
CHANGE_KINDS: Final = ("subscribe", "unsubscribe", "perturb", "expire", "revert", "probe", "pair")


def rank_endpoint(rank: int) -> str:
    """Name of a rank's endpoint."""
    return f"scope.{rank}"
