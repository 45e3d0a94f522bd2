"""What those who run the model aside or disturb it may know and ask of the job: see :class:`JobHandle`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trimtab.config import ScopeConfig
from trimtab.scope.job.relay import Mute
from trimtab.scope.moment import Moment
from trimtab.scope.names import Shard
from trimtab.scope.perturbation import Perturbation
from trimtab.scope.taps.points import AttentionPoint, Disconnect, Point, Receive, StatePoint

if TYPE_CHECKING:
    from trimtab.record.communication.collectives import Interception
    from trimtab.scope.job.switchboard import Switchboard
    from trimtab.scope.perturb.communication import Communications
    from trimtab.scope.perturb.lookahead import Lookahead


class Place(Protocol):
    """Where in a step this rank is; the engine keeps it."""

    step: int
    microbatch: int
    inside: bool
    aside: bool


@dataclass(frozen=True, slots=True)
class ScheduleCall:
    """Megatron-Core's schedule, as it is about to be called for a training step: nothing in it is trimtab's."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: dict[str, Any]


class Disturbance(Protocol):
    """A perturbation that was made for this rank."""

    perturbation: Perturbation
    matched: list[str]
    """What it disturbs here."""

    def receivers(self) -> Mapping[str, Receive]:
        """For the points that it needs, by name."""
        ...

    def step_begin(self, step: int) -> None:
        """On the training thread, at the begin of each step while it is in force."""

    def over(self, step: int) -> bool:
        """It has ended by itself."""
        ...

    def revert(self) -> dict[str, Any]:
        """Put stored values back, bit for bit; details for the notice. ValueError where that cannot be."""
        ...

    def end(self, why: str) -> None:
        """Take out everything that it has put into the job."""


class Boundary(Protocol):
    """Something that all ranks do together at the begin of an agreed step."""

    id: str

    def at_step(self, step: int) -> bool:
        """On the training thread, when the changes of this step are in force; True: call it at the next one, too."""
        ...


class Probing(Protocol):
    """Prompts that are run through the model at step boundaries; see :mod:`trimtab.scope.probe`."""

    def check(self, body: dict[str, Any]) -> None:
        """ValueError where it cannot be done here."""

    def add(self, body: dict[str, Any], change: str) -> None:
        """From this step on, on all ranks."""

    def remove(self, name: str) -> None:
        """No more of it."""

    def active(self) -> list[dict[str, Any]]:
        """Those in force, as JSON."""
        ...

    def step_begin(self, step: int) -> None:
        """Run what is due. Raises nothing."""


class JobHandle:
    """The job on this rank. Everything but :meth:`notice` and :meth:`emit` is for the training thread."""

    def __init__(self, rank: int, world_size: int, config: ScopeConfig, run_directory: Path, board: Switchboard):
        self.rank = rank
        self.world_size = world_size
        self.config = config
        self.run_directory = run_directory
        self._chunks: list[weakref.ref[torch.nn.Module]] = []  # the job may drop a model, or build another
        self._optimizers: list[weakref.ref[Any]] = []
        self.coordinates: dict[str, int] | None = None
        """Of this rank in the parallel layout, once the engine knows them."""
        self.position: Place | None = None
        """The engine's; None before there is one."""
        self.schedule: ScheduleCall | None = None
        """Megatron-Core: the call that is about to run. Only at the begin of a step."""
        self.step_function: Callable[[], Any] | None = None
        """Plain PyTorch: runs the job's own training step once more, if the job has given one."""
        self.begin_again: Callable[[int], None] | None = None
        """Plain PyTorch: a step of that number begins once more, for who runs it aside."""
        self.lookahead: Lookahead | None = None
        """Batches that a paired run has read ahead; the job gets them first."""
        self.communications: Communications | None = None
        """Perturbations of communication, once there was one."""
        self.interception: Interception | None = None
        """Where collectives pass by; None where they are not intercepted."""
        self._board = board

    @property
    def step(self) -> int:
        """That has begun last; -1 before the first."""
        return self._board.step

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """Model chunks, as the job calls them, in order."""
        return [chunk for found in self._chunks if (chunk := found()) is not None]

    @property
    def optimizers(self) -> list[Any]:
        """That have made a step."""
        return [optimizer for found in self._optimizers if (optimizer := found()) is not None]

    @property
    def points(self) -> Mapping[str, Point | AttentionPoint]:
        """That tensors pass by, by name."""
        return self._board.registry.points

    @property
    def state(self) -> Mapping[str, StatePoint]:
        """Tensors that stay, by name."""
        return self._board.registry.state

    def meet(self, chunk: int, model: torch.nn.Module | None) -> None:
        """A model chunk is there. One of a number that is known takes its place: the model was built anew."""
        if model is not None:
            del self._chunks[chunk:]
            self._chunks.append(weakref.ref(model))

    def meet_optimizer(self, optimizer: Any) -> None:
        """An optimizer has made its first step."""
        if not any(known is optimizer for known in self.optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def mute(self) -> AbstractContextManager[None]:
        """As long as the context lasts, no subscription observes and no perturbation disturbs: the model runs aside."""
        mute: Mute = self._board.mute
        return mute()

    def listen(self, name: str, receive: Receive) -> Disconnect:
        """``receive`` gets what passes by the point ``name``, muted or not, after all perturbations. Between steps."""
        return self._board.listen(name, receive)

    def emit(
        self,
        tap: str,
        what: str,
        subscription: str,
        arrays: Mapping[str, torch.Tensor],
        meta: Mapping[str, Any],
        shard: Shard = (),
        *,
        replica: int = 0,
        moment: Moment | None = None,
    ) -> None:
        """Send what was measured, as a frame of the step that runs. Copies nothing that waits for the device."""
        self._board.emit(tap, what, subscription, arrays, meta, shard, replica, moment)

    def notice(self, kind: str, text: str = "", **details: Any) -> None:
        """Tell the collector; raises nothing and waits for nobody. Known details: change, subscription, perturbation,
        step, microbatch."""
        self._board.notify(kind, text, **details)
