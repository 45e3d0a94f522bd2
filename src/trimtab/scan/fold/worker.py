"""``python -m trimtab.scan.fold.worker``: does the tasks that come on its standard input until that ends.

A message is its length (8 bytes, big-endian) and its bytes. A process of its own, and not one of multiprocessing's,
so that nothing of the program that asks is imported or run a second time.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import IO

LENGTH = 8


def send(to: IO[bytes], message: bytes) -> None:
    """Write one message."""
    to.write(len(message).to_bytes(LENGTH, "big"))
    to.write(message)
    to.flush()


def receive(source: IO[bytes]) -> bytes | None:
    """Read one message; None at the end, also in the middle of one."""
    head = source.read(LENGTH)
    if len(head) < LENGTH:
        return None
    size = int.from_bytes(head, "big")
    message = source.read(size)
    return message if len(message) == size else None


def main() -> None:
    """Until the asking process closes its end, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks; it ends this one
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not come between the messages
    from trimtab.scan.fold.task import perform

    try:
        while (task := receive(sys.stdin.buffer)) is not None:
            send(out, perform(task))
    except BrokenPipeError:  # nobody is there any more to hear the answer
        os._exit(0)


if __name__ == "__main__":
    main()
