"""The way to the hub of a run, kept up: a hub is opened where there is none, and of several processes one collects."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trimtab.config import ControlConfig
from trimtab.control.client import Client, Offer
from trimtab.control.endpoint import Complaints
from trimtab.control.opening import OpenHub, find_hub, limits_of, open_hub, read_offer
from trimtab.run_directory import check_directory
from trimtab.scope.messages import COLLECTOR

FOLDER: Final = "scope"
"""In the run directory."""
_LOCK: Final = "collector.lock"
_JOIN_SECONDS: Final = 3.0
_ANSWER_SECONDS: Final = 0.5
_QUEUE_BYTES: Final = 64 << 20
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def scope_folder(run_directory: Path) -> Path:
    """RUN_DIR/scope, made where it is missing; ValueError, in one line, where there is no RUN_DIR or it cannot be."""
    check_directory(run_directory, "give record.dir of the job")
    folder = run_directory / FOLDER
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be made ({error.strerror})") from None
    return folder


class Seat:
    """Who collects: at most one process holds it, and it is free when that process ends, however that is."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _LOCK
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Is it ours? ValueError where its file cannot be made."""
        if self._descriptor is not None:
            return True
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ValueError(f"{self._path}: cannot be written ({error.strerror})") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # else the file system knows none, and whoever comes last collects
                os.close(descriptor)
                return False
        self._descriptor = descriptor
        return True

    def leave(self) -> None:
        """Give it up."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Place:
    """Which hub, and how it is found."""

    run_directory: Path
    config: ControlConfig
    environment: Mapping[str, str]


class Connection:
    """A client of the hub. :meth:`keep` is to be called about twice a second, always on the same thread."""

    def __init__(self, place: Place, prepare: Callable[[Client, bool], None]) -> None:
        """``prepare`` subscribes, and answers, on a client that is new; it is told whether this process collects.
        ValueError, in one line, where there can be no connection."""
        self._place = place
        self._prepare = prepare
        self._seat = Seat(scope_folder(place.run_directory))
        self._hub: OpenHub | None = None
        self.leads = False
        """This process collects."""
        self._client = self._connect()

    @property
    def client(self) -> Client:
        """As it is now."""
        return self._client

    def keep(self) -> bool:
        """Come back where the hub has gone, and take the seat where it is free. Is the client another one now?

        ValueError where that cannot be; it is to be tried again.
        """
        if not self._client.ended and (self.leads or not self._seat.take()):
            return False
        self._client.close()
        self._close_hub()
        self._client = self._connect()
        return True

    def close(self) -> None:
        """Leave nothing."""
        self._client.close()
        self._close_hub()
        self._seat.leave()

    def _connect(self) -> Client:
        self.leads = self._seat.take()
        place = self._place
        try:
            offer = read_offer(place.config, place.run_directory, place.environment)
            if offer is not None:
                client = self._join()
                busy = _JOIN_SECONDS + 2 * place.config.poll_seconds
                if client.wait_connected(_ANSWER_SECONDS) or (not _is_dead(offer) and client.wait_connected(busy)):
                    return client
                client.close()
            self._hub = open_hub(place.config, place.run_directory, place.environment)
            client = self._join()
            if not client.wait_connected(_JOIN_SECONDS):
                client.close()
                raise ValueError(f"{place.run_directory}: the hub that was opened cannot be reached")
        except BaseException:
            self._close_hub()
            self._seat.leave()
            raise
        return client

    def _join(self) -> Client:
        name = COLLECTOR if self.leads else f"{COLLECTOR}-{os.getpid()}-{secrets.token_hex(3)}"
        place = self._place
        quiet = Complaints(lambda _text: None)  # what matters is said by whoever waits for an answer
        limits = limits_of(place.config)
        room = max(limits.queue, place.config.connections)  # all ranks are asked at the same time
        client = Client(
            name,
            lambda: find_hub(place.config, place.run_directory, place.environment),
            limits=replace(limits, queue=room, queue_bytes=max(limits.queue_bytes, _QUEUE_BYTES)),
            complaints=quiet,
        )
        self._prepare(client, self.leads)
        client.start()
        return client

    def _close_hub(self) -> None:
        if self._hub is not None:
            hub, self._hub = self._hub, None
            with contextlib.suppress(OSError):
                hub.close()


def _is_dead(offer: Offer) -> bool:
    """Has the hub been killed, so that its file is still there? Then the system refuses connections at once."""
    if not offer.addresses:
        return False
    for address in offer.addresses:
        try:
            socket.create_connection(address, _ANSWER_SECONDS).close()
        except ConnectionRefusedError:
            continue
        except OSError:
            return False
        return False
    return True
