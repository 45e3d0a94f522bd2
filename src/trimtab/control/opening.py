"""From the configuration to a hub, or to a client of the one that is there."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from trimtab.config import ControlConfig
from trimtab.control.client import Client, Offer
from trimtab.control.endpoint import Complaints, Endpoint
from trimtab.control.hub import Hub, allow_descriptors
from trimtab.control.link import Limits
from trimtab.control.rendezvous import (
    Rendezvous,
    read_rendezvous,
    remove_rendezvous,
    this_host,
    write_rendezvous,
)
from trimtab.control.secret import find_secret, make_secret
from trimtab.control.sockets import is_loopback, parse_address, show_address

FOLDER: Final = "trimtab-control"
"""In the run directory: the shared directory, unless ``control.directory`` names another."""
_ANY: Final = ("0.0.0.0", "::", "")
_JOIN_SECONDS: Final = 3.0

Prepare = Callable[[Endpoint], None]
"""What is to be done with an endpoint before it is used."""


def _nothing(_endpoint: Endpoint) -> None:
    """There is nothing to prepare."""


class OpenHub:
    """A running hub, and the files by which it is found. A context manager."""

    def __init__(self, hub: Hub, run_directory: Path, token: str, secret: bytes, made: Path | None) -> None:
        """Use :func:`open_hub`."""
        self.hub = hub
        self._run_directory = run_directory
        self._token = token
        self._secret = secret
        self._made = made
        self._pid = os.getpid()

    def close(self) -> None:
        """End the hub, and remove its files, a secret made for it included."""
        if os.getpid() != self._pid:
            return
        remove_rendezvous(self._run_directory, self._token, self._secret)
        self.hub.close()
        if self._made is not None:
            with contextlib.suppress(OSError):
                self._made.unlink(missing_ok=True)

    def __enter__(self) -> Hub:
        return self.hub

    def __exit__(self, *_: object) -> None:
        self.close()


def open_hub(
    config: ControlConfig, run_directory: Path, environment: Mapping[str, str], prepare: Prepare = _nothing
) -> OpenHub:
    """A running hub for the job that records into ``run_directory``, which ranks find there.

    ``prepare`` subscribes and promises answers before anybody can connect: what the first rank says is heard, too.

    Raises ValueError, in one line, where it cannot be had: no secret, an address that cannot be bound, or a directory
    that cannot be written. A hub that is there already loses the clients that come from now on, see :func:`meet`.
    """
    secret, made = make_secret(environment, config.secret_file, run_directory)
    if config.secret_file:
        made = None  # it is to stay
    try:
        hub = _hub(config, run_directory, secret)
        try:
            prepare(hub)
            token = secrets.token_hex(16)
            write_rendezvous(run_directory, _rendezvous(hub, config, token), secret)
            hub.start()
        except BaseException:
            hub.close()
            raise
    except OSError as error:
        _forget(made)
        where = error.filename or config.bind
        raise ValueError(f"{where}: the hub cannot be opened there ({error.strerror or error})") from None
    except BaseException:
        _forget(made)
        raise
    return OpenHub(hub, run_directory, token, secret, made)


@contextlib.contextmanager
def meet(
    name: str,
    config: ControlConfig,
    run_directory: Path,
    environment: Mapping[str, str],
    prepare: Prepare = _nothing,
) -> Iterator[Endpoint]:
    """An endpoint for a program that watches or steers the job: a client of the hub that is there, else a new hub.

    ``prepare`` gets the endpoint first: of a new hub before anybody can connect.
    Raises ValueError as :func:`open_hub` does.
    """
    if read_offer(config, run_directory, environment) is not None:
        client = join(name, config, run_directory, environment, complaints=Complaints(_say_nothing))
        try:
            if client.wait_connected(_JOIN_SECONDS + 2 * config.poll_seconds):
                prepare(client)
                yield client
                return
        finally:
            client.close()
    with open_hub(config, run_directory, environment, prepare) as hub:
        yield hub


def find_hub(config: ControlConfig, run_directory: Path, environment: Mapping[str, str]) -> Offer | None:
    """Where a client has to look for the hub; None where there is none, or no secret to meet it with.

    Raises ValueError, in one line, where there is one that cannot be believed or reached.
    """
    secret = find_secret(environment, config.secret_file, run_directory)
    if secret is None:
        if config.address:
            raise ValueError("control.address is set, and there is no secret; set control.secret_file")
        return None
    found = read_rendezvous(run_directory, secret)
    if config.address and config.transport != "directory":
        return Offer(
            secret, (parse_address(config.address),), _folder(config, run_directory, found), config.poll_seconds
        )
    if found is None:
        return None
    addresses = () if config.transport == "directory" else found.reachable(this_host())
    folder = None if config.transport == "tcp" else _folder(config, run_directory, found)
    if not addresses and folder is None:
        raise ValueError(
            f"the hub on {ascii(found.host)[:80]} listens on loopback only; set control.bind where it runs"
        )
    return Offer(secret, addresses, folder, config.poll_seconds)


def read_offer(config: ControlConfig, run_directory: Path, environment: Mapping[str, str]) -> Offer | None:
    """As :func:`find_hub`, but None for whatever cannot be used either."""
    with contextlib.suppress(ValueError):
        return find_hub(config, run_directory, environment)
    return None


def join(
    name: str,
    config: ControlConfig,
    run_directory: Path,
    environment: Mapping[str, str],
    *,
    periodic: Callable[[], None] | None = None,
    complaints: Complaints | None = None,
) -> Client:
    """A client that has begun to connect to the hub of the job, as often as there is one."""
    client = Client(
        name,
        lambda: find_hub(config, run_directory, environment),
        limits=limits_of(config),
        periodic=periodic,
        complaints=complaints,
    )
    client.start()
    return client


def limits_of(config: ControlConfig) -> Limits:
    """Of each connection."""
    return Limits(body_bytes=config.message_kb << 10, heartbeat_seconds=config.heartbeat_seconds)


def _hub(config: ControlConfig, run_directory: Path, secret: bytes) -> Hub:
    allow_descriptors(config.connections)
    tcp, directory = config.transport != "directory", config.transport != "tcp"
    return Hub(
        secret,
        address=parse_address(config.bind) if tcp else None,
        directory=_shared(config, run_directory) if directory else None,
        poll_seconds=config.poll_seconds,
        limits=limits_of(config),
        most=config.connections,
    )


def _rendezvous(hub: Hub, config: ControlConfig, token: str) -> Rendezvous:
    return Rendezvous(this_host(), _advertised(hub.address, config.address), hub.stream, token)


def _advertised(bound: tuple[str, int] | None, configured: str) -> tuple[str, ...]:
    """Under which addresses a hub that listens at ``bound`` can be reached."""
    if bound is None:
        return ()
    if configured:
        return (configured,)
    host, port = bound
    if host not in _ANY:
        return (show_address(host, port),)
    names = [this_host()]
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(this_host(), None, type=socket.SOCK_STREAM)
        names += [str(entry[4][0]) for entry in found if not is_loopback(str(entry[4][0]))]
    return tuple(dict.fromkeys(show_address(name, port) for name in names))


def _shared(config: ControlConfig, run_directory: Path) -> Path:
    return Path(config.directory) if config.directory else run_directory / FOLDER


def _folder(config: ControlConfig, run_directory: Path, found: Rendezvous | None) -> Path | None:
    if found is None or not found.stream:
        return None
    return _shared(config, run_directory) / f"hub-{found.stream}"


def _forget(made: Path | None) -> None:
    if made is not None:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)


def _say_nothing(_text: str) -> None:
    """In the place of a complaint."""
