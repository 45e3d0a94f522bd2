"""How much activation memory a stage holds, and which forwards fit under a cap without a deadlock.

A plain cap deadlocks: younger microbatches fill it, and the oldest one, whose backward would free memory, cannot finish
its forwards. So memory that the oldest microbatch still needs is kept for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from trimtab.pipeline.actions import Action, Work

_SLACK = 1e-9
"""Relative: sums of shares such as 1/3 differ in the last digits by their order."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


class MemoryGuard:
    """Counts the activations of one stage in one iteration, and admits forwards under a cap.

    Unit: any, the same for ``cap`` and ``activation``: microbatches (then ``activation`` sums to 1) or bytes.

    Of a stage's microbatches, the *oldest* is the first whose forwards have not all begun here. Its own forwards are
    admitted if they fit: used + a <= cap. One of another microbatch is admitted if, besides, what it and its like hold
    will leave room for the oldest: front + a <= cap, where front is what the oldest will hold when its forwards have
    begun, and what the younger ones hold now.

    This much is needed: none of what counts there can be given back before the oldest's forwards have begun, for
    backwards of younger ones come after them. It is enough: let j be the oldest microbatch of the whole pipeline whose
    backwards have not all run. What stages hold of earlier ones goes with their W, which need nothing from elsewhere.
    The rest leaves room for j, so its forwards and then its backwards run, and so on with the next. So an order that
    fits under the cap is admitted as it stands, and none can end in a deadlock. Microbatches of a chunk must go in
    order.

    Args:
        cap: What the stage may hold; None: only count.
        activation: By chunk, what is held from a microbatch's F on.
        kept: The share of it that is held from the end of B to the end of W.

    Raises:
        ValueError: if the cap is below one microbatch, or a figure is negative.
    """

    __slots__ = (
        "_activation",
        "_begun",
        "_front",
        "_kept",
        "_largest",
        "_limit",
        "_oldest",
        "_whole",
        "cap",
        "peak",
        "used",
    )

    def __init__(self, cap: float | None, activation: Sequence[float], kept: float = 1.0) -> None:
        if not activation or min(activation) < 0:
            raise ValueError(f"activation memory is given for each chunk and not negative, not {list(activation)}")
        if not 0 <= kept <= 1:
            raise ValueError(f"kept is a share of the activations between 0 and 1, not {kept}")
        whole = sum(activation)
        if cap is not None and cap < whole * (1 - _SLACK):
            raise ValueError(
                f"memory cap {cap:g} is below one microbatch, {whole:g}: raise it, or make microbatches smaller"
            )
        self.cap = cap
        self._activation = tuple(activation)
        self._kept = kept
        self._whole, self._largest = whole, max(activation)
        self._limit = float("inf") if cap is None else cap + whole * _SLACK
        self.peak: float = 0
        self.begin()

    @property
    def room(self) -> float | None:
        """The cap in microbatches; None: no cap, or nothing is held."""
        whole = sum(self._activation)
        return None if self.cap is None or whole <= 0 else self.cap / whole

    def begin(self) -> None:
        """A new iteration: nothing is held; the peak stays."""
        self.used: float = 0
        self._begun = [0] * len(self._activation)
        self._oldest = 0
        self._front: float = sum(self._activation)

    def admits(self, chunk: int) -> bool:
        """Whether the next microbatch's forward in this chunk may begin."""
        activation = self._activation[chunk]
        if self.used + activation > self._limit:
            return False
        return self._begun[chunk] == self._oldest or self._front + activation <= self._limit

    def admits_after_oldest(self, chunk: int) -> bool:
        """The same more strictly: what the oldest still needs must be free now, not only once earlier ones have gone.

        Keeps a policy without a plan from filling memory with forwards.
        """
        need = self.used + self._activation[chunk]
        if self._begun[chunk] != self._oldest:
            for activation, count in zip(self._activation, self._begun, strict=True):
                if count == self._oldest:
                    need += activation
        return need <= self._limit

    def admits_ahead(self, chunk: int) -> bool:
        """The same ahead of the plan: with room for a whole microbatch besides, as the plan has others first."""
        return self.used + self._activation[chunk] + self._whole <= self._limit and self.admits(chunk)

    def has_room(self, microbatches: int = 0) -> bool:
        """Whether a forward of any chunk fits and so many whole microbatches beside."""
        return self.used + self._largest + microbatches * self._whole <= self._limit

    def is_oldest(self, chunk: int) -> bool:
        """Whether the next forward in this chunk is of the stage's oldest microbatch."""
        return self._begun[chunk] == self._oldest

    def start(self, action: Action) -> None:
        """An action begins; a forward takes its memory now."""
        if action.work is not Work.F:
            return
        chunk = action.chunk
        self.used += self._activation[chunk]
        if self.used > self.peak:
            self.peak = self.used
        begun = self._begun
        begun[chunk] += 1
        oldest = self._oldest = min(begun)
        front: float = 0
        for activation, count in zip(self._activation, begun, strict=True):
            front += activation * max(1, count - oldest)
        self._front = front

    def finish(self, action: Action) -> None:
        """An action is done; a backward gives memory back."""
        work = action.work
        if work is Work.BW:
            self.used -= self._activation[action.chunk]
        elif work is Work.B:
            self.used -= self._activation[action.chunk] * (1 - self._kept)
        elif work is Work.W:
            self.used -= self._activation[action.chunk] * self._kept

    def need(self, order: Iterable[Action]) -> float:
        """The peak of running actions one after the other."""
        used = peak = 0.0
        for work, chunk, _ in order:
            activation = self._activation[chunk]
            if work is Work.F:
                used += activation
                peak = max(peak, used)
            else:
                used -= activation * {Work.BW: 1.0, Work.B: 1 - self._kept, Work.W: self._kept}[work]
        return peak

    def fits(self, amount: float) -> bool:
        """Whether an amount is within the cap."""
        return amount <= self._limit


def parse_cap(text: str) -> tuple[float, bool]:
    """A cap as users write it: ``4.5`` microbatches, or bytes with a unit: ``12GB``, ``800MiB``.

    Returns:
        The number, and whether it is bytes.

    Raises:
        ValueError: if it is neither, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:([KMGT]I?)?(B))?\s*", text.upper(), re.ASCII)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"memory cap {text!r}: give microbatches, such as 4.5, or bytes, such as 12GB")
    if match[3] is None:
        return float(match[1]), False
    return float(match[1]) * _UNITS[match[2] or ""], True
