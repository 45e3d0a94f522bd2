"""What can go wrong between two stages, said so that one knows which."""

from __future__ import annotations

from typing import Final

LEFT: Final = "it has closed its transport"
"""Why a peer is lost that has left in good order."""


class TransportError(RuntimeError):
    """Messages can no longer be exchanged; the text names the peer and, where known, stage, chunk and microbatch."""


class PeerLost(TransportError):  # noqa: N818 (what happened, not what was wrong)
    """A rank has died, left or fallen silent."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(f"stage {peer} is lost: {why}")
        self.peer = peer
        self.why = why


class WrongMessage(TransportError):  # noqa: N818
    """A message is not of the size or the dtype that was agreed on."""
