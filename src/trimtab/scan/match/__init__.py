"""Which events of different ranks are one communication: by sequence numbers, or by order, and how sure that is."""

from trimtab.scan.match.matching import match, match_again
from trimtab.scan.match.model import Matches
from trimtab.scan.match.timing import Clocks, is_rooted

__all__ = ["Clocks", "Matches", "is_rooted", "match", "match_again"]
