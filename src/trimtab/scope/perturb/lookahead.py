"""Batches that were read before the job has asked for them: given again to each pass, and in the end to the job."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

Read = Callable[[Any], Any]


class Ahead:
    """What was read of one iterator. Not for several threads."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self._batches: deque[Any] = deque()
        self._at = 0

    @property
    def left(self) -> int:
        """Batches that the job has yet to get."""
        return len(self._batches)

    def peek(self, read: Read) -> Any:
        """The next batch of a pass: a copy, since a job may write into what it is given. StopIteration at the end."""
        if self._at == len(self._batches):
            self._batches.append(read(self.iterator))
        batch = self._batches[self._at]
        self._at += 1
        return copied(batch)

    def rewind(self) -> None:
        """The next pass begins with the first of them again."""
        self._at = 0

    def take(self, read: Read) -> Any:
        """The next batch of the job."""
        return self._batches.popleft() if self._batches else read(self.iterator)


class Lookahead:
    """All iterators of which something was read ahead."""

    def __init__(self) -> None:
        self._known: dict[int, Ahead] = {}
        self.passing = False
        """A pass reads now, not the job."""

    @property
    def left(self) -> int:
        """Batches that the job has yet to get."""
        return sum(ahead.left for ahead in self._known.values())

    def rewind(self) -> None:
        """Of all of them."""
        for ahead in self._known.values():
            ahead.rewind()

    def of(self, iterator: Any) -> Ahead:
        """What was read of it, which may be nothing yet. The iterator is kept alive."""
        ahead = self._known.get(id(iterator))
        if ahead is None or ahead.iterator is not iterator:
            ahead = self._known[id(iterator)] = Ahead(iterator)
        return ahead

    def read(self, iterator: Any, read: Read) -> Any:
        """In the place of ``read(iterator)``."""
        if self.passing:
            return self.of(iterator).peek(read)
        ahead = self._known.get(id(iterator))
        if ahead is None or ahead.iterator is not iterator:
            return read(iterator)
        batch = ahead.take(read)
        if not ahead.left:
            del self._known[id(iterator)]
        return batch

    def wrap(self, iterator: Any) -> Any:
        """An iterator, or a list of them, that gives first what was read ahead; the same where nothing was."""
        if isinstance(iterator, list):
            return [self.wrap(one) for one in iterator]
        if iterator is None or not (self.passing or id(iterator) in self._known):
            return iterator
        return _Wrapped(iterator, self)


class _Wrapped:
    """Anything that is asked of it but the next batch goes to the job's iterator."""

    def __init__(self, iterator: Any, lookahead: Lookahead) -> None:
        self._iterator = iterator
        self._lookahead = lookahead

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._lookahead.read(self._iterator, next)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def copied(batch: Any) -> Any:
    """With new containers and tensors; what else is in it is shared."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, dict):
        return type(batch)((key, copied(value)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(copied(value) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(copied(value) for value in batch)
    return batch
