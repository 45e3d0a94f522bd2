"""Who runs the forward of a microbatch, and how many may be under way: the same in execution and in advice."""

from __future__ import annotations

from math import ceil


def own_microbatches(microbatches: int, backwards: int, helped: float) -> frozenset[int]:
    """Microbatches of a step whose forward runs where their backward does.

    The first of each backward instance, so that none waits while the forward instances begin; the others are spread
    evenly, and none is at the end, where forward instances have nothing to do any more.

    Args:
        microbatches: of the step; microbatch j belongs to backward instance j modulo ``backwards``.
        backwards: instances that share the microbatches.
        helped: share of the microbatches, from 0 to 1, whose forward runs elsewhere; rounded down to whole ones.
    """
    count = microbatches - int(microbatches * helped + 1e-9)
    first = min(count, backwards)
    left = microbatches - first
    more = count - first
    return frozenset(range(first)) | {first + (one + 1) * left // (more + 1) for one in range(more)}


def helpers_of(microbatches: int, forwards: int, backwards: int, helped: float) -> dict[int, int]:
    """The forward instance of each microbatch that has one: they take turns. See :func:`own_microbatches`."""
    own = own_microbatches(microbatches, backwards, helped)
    others = (one for one in range(microbatches) if one not in own)
    return {microbatch: number % forwards for number, microbatch in enumerate(others)}


def partners_of(helpers: dict[int, int], backwards: int) -> int:
    """Forward instances that send to one backward instance, at most; 0: none does."""
    pairs = {(microbatch % backwards, helper) for microbatch, helper in helpers.items()}
    return max((sum(one == instance for instance, _ in pairs) for one in range(backwards)), default=0)


def ahead_of(behind: int, forwards: int, backwards: int, partners: int) -> int:
    """Microbatches that a forward instance may have sent to a backward instance and not heard back of, at least 1, so
    that the backward instance is never idle.

    In units of a backward, where both sides are equally busy, a microbatch is with it for ``behind * forwards /
    backwards`` (forwards of later stages), ``behind`` (their backwards) and 1 (its own); the next one that may begin
    then takes ``forwards / backwards`` for its forward and up to 1 to travel.

    Args:
        behind: stages after this one.
        forwards: forward instances of a cell.
        backwards: backward instances of a cell.
        partners: forward instances that share the work for one backward instance.
    """
    each = forwards / backwards
    return ceil((behind * (each + 1) + 1 + each + 1) / max(partners, 1) - 1e-9)
