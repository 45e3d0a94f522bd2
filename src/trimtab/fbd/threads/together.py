"""A thread for each virtual rank of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from trimtab.fbd.threads.turns import OtherFailed, Turns

_Member = TypeVar("_Member")
_Result = TypeVar("_Result")


def together(
    members: Sequence[_Member], function: Callable[[_Member], _Result], turns: Turns | None = None
) -> list[_Result]:
    """Run ``function`` of each member in a thread of its own, in turns; what they return, in order.

    Args:
        members: virtual ranks, say; named in an error by their text.
        turns: of as many; None: of random generators of the host alone.

    Raises:
        BaseException: whatever the first thread that fails raises, with a note that names its member. The others end at
            the next thing that they wait for.
    """
    turns = turns or Turns(len(members))
    results: dict[int, _Result] = {}

    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # which threads have each their own

    def run(number: int) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        with turns.taken(number):
            try:
                results[number] = function(members[number])
            except OtherFailed:
                pass
            except BaseException as error:
                error.add_note(f"trimtab: in the thread of {members[number]}")
                turns.fail(error)

    threads = [
        threading.Thread(target=run, args=(number,), name=f"trimtab-rank-{number}", daemon=True)
        for number in range(len(members))
    ]
    try:
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    except BaseException as error:  # Ctrl-C, which the main thread alone is told of
        turns.fail(error)
        for one in threads:
            if one.ident is not None:
                one.join()
        raise
    finally:
        turns.end()
    if turns.failure is not None:
        raise turns.failure
    return [results[number] for number in range(len(members))]
