"""All ranks are about to run a probe, or none does: a rank that does not come must not leave the others waiting for it.

A change that reaches one rank too late (or is taken back too late) leaves it without a probe that the others have. The
first collective would then wait for ever, so ranks meet at the job's store before: a counter and one answer, which is
the first that is given.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Final, Protocol

import torch.distributed as dist

PATIENCE: Final = 30.0
"""Seconds for the last rank: steps begin at different times on different ranks."""
_GO: Final = "go"
_NO: Final = "no"


class Store(Protocol):
    """What is needed of a store of torch.distributed."""

    def add(self, key: str, amount: int, /) -> int: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


def all_come(store: Store, name: str, world: int, patience: float = PATIENCE) -> bool:
    """True on every rank that calls it if all ``world`` ranks do within ``patience`` seconds, else False on each.

    ``name`` is that of this meeting: no other may ever have it.
    """
    counter, answer = f"{name}/here", f"{name}/answer"
    if store.add(counter, 1) == world:
        said = store.compare_set(answer, "", _GO)
    else:
        with contextlib.suppress(Exception):  # the time is over; whatever else fails shows in the next line, too
            store.wait([answer], timedelta(seconds=patience))
        said = store.compare_set(answer, "", _NO)
    return said.decode() == _GO


def forget(store: Store, name: str) -> None:
    """A meeting that all have left: nothing of it need be kept."""
    for key in (f"{name}/here", f"{name}/answer"):
        with contextlib.suppress(Exception):  # some stores cannot; then a few bytes stay
            store.delete_key(key)


def store_of_job() -> Store | None:
    """The store of the default group; None without one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.distributed_c10d._get_default_store()
