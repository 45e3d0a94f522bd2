"""A file system that does not answer: the start of a job does not wait for it for long."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from trimtab.record.files.opening import open_within


class _Storage:
    def __init__(self) -> None:
        self.abandoned = threading.Event()

    def abandon(self) -> None:
        self.abandoned.set()


def test_what_was_opened_comes_back() -> None:
    storage: Any = _Storage()
    assert open_within(10, lambda: storage) is storage
    assert not storage.abandoned.is_set()


def test_an_error_comes_back_as_it_is() -> None:
    def make() -> Any:
        raise PermissionError(13, "Permission denied", "somewhere")

    with pytest.raises(PermissionError, match="somewhere"):
        open_within(10, make)


def test_what_comes_too_late_is_given_up() -> None:
    storage: Any = _Storage()
    answers = threading.Event()

    def make() -> Any:
        assert answers.wait(10)
        return storage

    with pytest.raises(TimeoutError, match=r"did not answer for 0\.01 s"):
        open_within(0.01, make)
    answers.set()
    assert storage.abandoned.wait(10)
