"""Shipments over a transport: in messages of a few tensors, put together on the other side.

The first message of a shipment is its head: how many follow, and the manifest, or the number of one that was sent
before. The others have the storages. Messages may arrive in any order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from trimtab.fbd.split.export import Shipment
from trimtab.fbd.split.manifest import Manifest
from trimtab.fbd.split.recompute import Seed
from trimtab.transport.errors import WrongMessage
from trimtab.transport.interface import Label, Message
from trimtab.transport.labels import MOST_PARTS, MOST_TENSORS

_count: Callable[[int], int] = torch._C._storage_Use_Count  # pyright: ignore
MOST_STORAGES: Final = (MOST_PARTS - 1) * MOST_TENSORS
_KEPT: Final = 8
"""Manifests of a chunk that are remembered: shapes may alternate, and messages overtake each other."""


class Sends(Protocol):
    """What is needed of a transport."""

    def send(self, to: int, label: Label, tensors: Sequence[torch.Tensor]) -> object: ...


class Sender:
    """Of one forward instance."""

    def __init__(self, transport: Sends) -> None:
        self._transport = transport
        self._known: dict[tuple[int, int], tuple[int, Manifest]] = {}
        """The last manifest that each peer was sent of each chunk, and how many there were."""

    def send(self, to: int, label: Label, shipment: Shipment, about: dict[str, Any] | None = None) -> None:
        """Queue it under ``label`` (its part counts the messages); never waits for the peer.

        Args:
            about: goes along, as JSON.

        Raises:
            RuntimeError: something was changed in place since it was saved.
            ValueError: there are more storages than messages have room for.
        """
        shipment.check()
        version, known = self._known.get((to, label.chunk), (0, None))
        is_new = known != shipment.manifest
        version += is_new
        self._known[to, label.chunk] = (version, shipment.manifest)
        manifest = shipment.manifest.to_json() if is_new else None
        self._send(to, label, shipment.tensors, {"version": version, "manifest": manifest, "about": about or {}})

    def send_seed(self, to: int, label: Label, seed: Seed, about: dict[str, Any] | None = None) -> None:
        """The same of a forward that is to be run again."""
        head = {"version": 0, "manifest": None, "inputs": len(seed.inputs), "about": about or {}}
        self._send(to, label, (*seed.inputs, *seed.states), head)

    def _send(self, to: int, label: Label, tensors: Sequence[torch.Tensor], head: dict[str, Any]) -> None:
        if len(tensors) > MOST_STORAGES:
            raise ValueError(f"{len(tensors)} storages are more than {MOST_STORAGES}; recompute more of the chunk")
        parts = [tensors[at : at + MOST_TENSORS] for at in range(0, len(tensors), MOST_TENSORS)]
        for number, part in enumerate([(_as_bytes({"parts": len(parts)} | head),), *parts]):
            self._transport.send(to, label._replace(part=number), part)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A shipment that is complete.

    :meth:`release` it after its backward. Buffers then go back to the transport, which lets the next shipments come
    into them; but not those of a message of which somebody still holds a part, such as a gradient that is what a node
    had saved: they are left to it, as in ordinary training.
    """

    source: int
    chunk: int
    microbatch: int
    iteration: int
    manifest: Manifest | None
    """None: the forward is to be run again."""
    tensors: tuple[torch.Tensor, ...]
    """Storages of the manifest; or inputs, then states of random generators."""
    inputs: int
    """How many of them are inputs."""
    about: dict[str, Any]
    release: Callable[[], None]


Key = tuple[int, int, int, int]
"""Source, chunk, iteration, microbatch."""


@dataclass(slots=True)
class _Coming:
    parts: int = -1
    """-1: its head has not come."""
    version: int = 0
    """Of the manifest; 0: there is none."""
    manifest: Manifest | None = None
    inputs: int = 0
    about: dict[str, Any] = field(default_factory=dict[str, Any])
    found: dict[int, Message] = field(default_factory=dict[int, Message])


class Receiver:
    """Of one backward instance. It takes what comes: how many shipments may be on their way is the forward's affair."""

    def __init__(self) -> None:
        self._coming: dict[Key, _Coming] = {}
        self._manifests: dict[tuple[int, int], dict[int, Manifest]] = {}
        """Of each peer and chunk, the newest few by their versions."""

    def take(self, message: Message) -> list[Arrived]:
        """One more message; what is complete by it. WrongMessage for one that makes no sense."""
        label = message.label
        key = (message.source, label.chunk, label.iteration, label.microbatch)
        coming = self._coming.setdefault(key, _Coming())
        if label.part == 0:
            self._head(message, coming)
        elif label.part in coming.found:
            raise WrongMessage(f"{label} from stage {message.source} has come before")
        else:
            message.take()  # its credit goes back: a shipment has more parts than a channel has credits
            coming.found[label.part] = message
        # A new manifest may be what others of its chunk have waited for.
        alike = [one for one in self._coming if one[:2] == key[:2]] if label.part == 0 else [key]
        return [arrived for one in alike if (arrived := self._complete(one)) is not None]

    def forget(self, sources: Container[int]) -> None:
        """What has come in part from peers of which no more will."""
        for key in [one for one in self._coming if one[0] in sources]:
            for message in self._coming.pop(key).found.values():
                message.release()

    def _complete(self, key: Key) -> Arrived | None:
        coming = self._coming[key]
        if coming.version > 0 and coming.manifest is None:
            coming.manifest = self._manifests.get(key[:2], {}).get(coming.version)
        lacks_manifest = coming.version > 0 and coming.manifest is None
        if coming.parts < 0 or len(coming.found) < coming.parts or lacks_manifest:
            return None
        del self._coming[key]
        return _arrived(key, coming.manifest, coming)

    def _head(self, message: Message, coming: _Coming) -> None:
        said = _said(message)
        parts, version = said.get("parts"), said.get("version")
        if not (isinstance(parts, int) and isinstance(version, int) and parts >= 0):
            raise WrongMessage(f"{message.label} from stage {message.source} is no head of a shipment")
        coming.parts, coming.version = parts, version
        coming.inputs, coming.about = int(said.get("inputs") or 0), dict(said.get("about") or {})
        if said.get("manifest") is not None:
            known = self._manifests.setdefault((message.source, message.label.chunk), {})
            known[version] = coming.manifest = Manifest.from_json(said["manifest"])
            for old in sorted(known)[:-_KEPT]:
                del known[old]
        message.release()


def _arrived(key: Key, manifest: Manifest | None, coming: _Coming) -> Arrived:
    source, chunk, iteration, microbatch = key
    messages = [coming.found[part] for part in sorted(coming.found)]
    tensors = tuple(tensor for message in messages for tensor in message.tensors)
    held = [_holders(message) for message in messages]

    def release() -> None:
        for message, before in zip(messages, held, strict=True):
            if _holders(message) <= before:
                message.release()

    return Arrived(source, chunk, microbatch, iteration, manifest, tensors, coming.inputs, coming.about, release)


def _holders(message: Message) -> int:
    """Of the storages of a message's tensors: nobody but this module sees the tensors themselves, only views."""
    return sum([_count(one.untyped_storage()._cdata) for one in message.tensors])


def _as_bytes(head: dict[str, Any]) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(head, separators=(",", ":")).encode()), dtype=torch.uint8)


def _said(message: Message) -> dict[str, Any]:
    try:
        (tensor,) = list(message.tensors)
        said = json.loads(bytes(tensor.cpu().numpy()))
    except ValueError as error:
        raise WrongMessage(f"{message.label} from stage {message.source} is no head of a shipment ({error})") from None
    if not isinstance(said, dict):
        raise WrongMessage(f"{message.label} from stage {message.source} is no head of a shipment")
    return said
