"""A job of Megatron-Core whose forwards and backwards run on processes of their own."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import torch.distributed as dist

from trimtab.engines.megatron_fbd.settings import Settings
from trimtab.engines.megatron_fbd.support import check_call, check_place, difference, microbatches_of_all, said_of
from trimtab.engines.megatron_fbd.work import Work
from trimtab.engines.megatron_fbd.worlds import World, divide, leave_word, store_exchange
from trimtab.fbd.ranks import Role, VirtualRank
from trimtab.transport.errors import LEFT, PeerLost
from trimtab.transport.interface import Transport

_OPENING: Final = "opening"
_LOOK_SECONDS: Final = 0.05


class Seat(NamedTuple):
    """The place of a rank that has met the others already, as one of several threads of a process."""

    world: World
    transport: Transport
    """Whose world are all ranks."""


class FbdJob:
    """This process's part of it: :attr:`role`, and :meth:`schedule` in the place of Megatron-Core's.

    Make it, or call :func:`join`, before torch.distributed is initialised; :meth:`close` it when all is trained, in a
    ``with`` statement for example.
    """

    def __init__(self, settings: Settings, seat: Seat | None = None) -> None:
        """Meets all processes of the launcher, unless it is given its ``seat``.

        Raises:
            ValueError: the job cannot be laid out so, was not started by a launcher, or has begun.
        """
        self.settings = settings
        """As given."""
        self._seat = seat
        self._world: World = divide(settings.layout, settings.opening) if seat is None else seat.world
        self._layout = self._world.placement.layout
        self._rank = self._world.rank
        self._work: Work | None = None
        self._closed = self._has_met = False

    @property
    def role(self) -> Role:
        """Whether this process runs forwards or backwards. A forward rank needs no optimizer and no gradients."""
        return self._rank.role

    @property
    def rank(self) -> VirtualRank:
        """Its stage, its instance (the data parallel rank) and its tensor parallel rank."""
        return self._rank

    @property
    def tp(self) -> int:
        """Tensor parallel degree of this process's role."""
        return self._layout.tp(self._rank.role)

    def schedule(self, **keywords: Any) -> list[Any]:
        """One step, with the keywords and the results of Megatron-Core's forward_backward_func.

        On backward ranks gradients are complete and finalised afterwards, and results are those that the forward ranks
        had of this rank's microbatches. New weights leave at the begin of the next call. With ``forward_only`` each
        role runs Megatron-Core's own, for itself.

        Raises:
            ValueError: the model or the call cannot be served, before anything is trained; or forward and backward do
                not fit each other.
            TransportError: something has not come in time; PeerLost: a process has died.
        """
        from megatron.core.pipeline_parallel import schedules

        if keywords.get("forward_only"):
            return schedules.get_forward_backward_func()(**keywords)
        if self._work is None:
            self._work = self._opened(keywords)
        return self._work.step(keywords)

    def _opened(self, keywords: dict[str, Any]) -> Work:
        """All processes meet once more; what one of them finds is an error on all."""
        from megatron.core.utils import get_model_config

        models = keywords["model"]
        model = models[0] if isinstance(models, (list, tuple)) else models
        config = get_model_config(model)
        exchange = store_exchange(self._world.store, self._world.process, self._world.size, _OPENING)
        everything, problem = 0, ""
        try:
            check_call(keywords, config)
            check_place(self._layout, self._rank)
            everything = microbatches_of_all(self._layout, self._rank.role, keywords["num_microbatches"])
        except ValueError as error:
            problem = str(error)
        said = said_of(self.settings, config, everything)
        self._has_met = True
        answers = [json.loads(one) for one in exchange(json.dumps([problem, said]).encode())]
        problem = next((one for one, _ in answers if one), "") or difference([one for _, one in answers])
        if problem:
            raise ValueError(f"fbd: {problem}")
        device = next(model.parameters()).device
        transport = (
            self._seat.transport if self._seat is not None else self._world.open(self.settings, exchange, device)
        )
        try:
            return Work(self.settings, self._layout, self._rank, model, everything, transport)
        except BaseException:
            transport.close()
            raise

    def close(self) -> None:
        """Wait until all others have come here, too, and leave. Again: nothing."""
        if self._closed:
            return
        self._closed = True
        if self._work is not None:
            self._work.transport.drain(self.settings.patience)
            self._meet(self._work)
        self._leave()

    def _meet(self, work: Work) -> None:
        """All others that are still there have come here, too: what they were sent has arrived."""
        world = self._world
        world.store.set(f"closing/{world.process}", b"")
        while True:
            others = set(range(world.size)) - work.lost
            try:
                if all(world.store.check([f"closing/{one}"]) for one in others):
                    return
            except dist.DistNetworkError:
                return  # process 0 has the store, and leaves when it has seen all others come
            try:
                work.transport.wait(_LOOK_SECONDS)
            except PeerLost as error:
                if error.why != LEFT:
                    raise
                return  # who leaves has seen all others come

    def _leave(self) -> None:
        self._closed = True
        if self._work is not None:
            self._work.transport.close()
        self._world.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After an error nobody is waited for; who waits for this process is told."""
        if error is None:
            self.close()
            return
        if not self._has_met:
            said = json.dumps([f"process {self._world.process} failed: {error}", {}])
            leave_word(self._world.store, self._world.process, _OPENING, said.encode())
        if not self._closed:
            self._leave()


def join(settings: Settings | None = None, **options: Any) -> FbdJob:
    """Make this process a forward or a backward rank. ``options``: fields of :class:`Settings`, in its place."""
    return FbdJob(settings or Settings(**options))
