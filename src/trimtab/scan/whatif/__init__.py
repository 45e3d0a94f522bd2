"""What-if: the step time that would be, had a rank, a stage, a link or a cause been otherwise."""

from trimtab.scan.whatif.answers import answer
from trimtab.scan.whatif.questions import Question, parse

__all__ = ["Question", "answer", "parse"]
