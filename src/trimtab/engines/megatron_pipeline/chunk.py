"""A model chunk of Megatron-Core as the executor runs it, through Megatron-Core's own forward and backward steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from trimtab.engines.megatron_pipeline.call import ScheduleCall
from trimtab.engines.megatron_pipeline.gradients import GradientSync
from trimtab.engines.megatron_pipeline.randomness import MegatronRandomness
from trimtab.engines.megatron_pipeline.wgrad import Ledger

Tensors = tuple[torch.Tensor, ...]


class MegatronChunk:
    """One of a rank's model chunks; kept from call to call, told of each by :meth:`begin`.

    What it holds between forward and backward are the chunk's input and output, as Megatron-Core's schedules do.

    Attributes:
        measured: Bytes that the first forward has kept for its backward, if that is measured and there was one.
    """

    def __init__(
        self,
        index: int,
        position: int,
        positions: int,
        ledger: Ledger,
        randomness: MegatronRandomness | None,
        measures: bool = False,
    ) -> None:
        """``randomness``: for its forwards; None: they draw as they come. ``measures``: see what one keeps."""
        self._index = index
        self._position = position
        self._last = position == positions - 1
        self._ledger = ledger
        self.measured: int | None = None
        self._measures = measures
        self._randomness = randomness
        self._call: ScheduleCall | None = None
        self._sync: GradientSync | None = None
        self._split: frozenset[int] = frozenset()
        self._held: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def begin(self, call: ScheduleCall, sync: GradientSync | None, split: frozenset[int]) -> None:
        """The next microbatches belong to this call of the schedule. ``sync``: None where there is no backward;
        ``split``: microbatches whose backward is B and W."""
        self._call = call
        self._sync = sync
        self._split = split

    def end(self) -> None:
        """The call is over, in whatever way: nothing of it is kept."""
        self._call = self._sync = None
        self._held.clear()
        self._ledger.forget()

    def forward(self, microbatch: int, inputs: Tensors) -> Tensors:
        """Megatron-Core's forward step; the loss at the last position is among the results of the call."""
        call, trains = self._call, self._sync is not None
        assert call is not None
        entered = inputs[0].detach().requires_grad_(trains) if self._position else None
        randomness = self._randomness if trains else None
        self._ledger.splitting = microbatch in self._split
        try:
            with nullcontext() if randomness is None else randomness.at(self._position, microbatch), self._measuring():
                output = call.forward_step(self._index, microbatch, entered, self._last)
        finally:
            self._ledger.splitting = False
        if trains:
            self._held[microbatch] = (entered, output)
        if self._last:
            return ()
        sent = output.detach()
        if trains:
            call.free(output)
        return (sent,)

    def backward(self, microbatch: int, gradients: Tensors, whole: bool) -> Tensors:
        """Megatron-Core's backward step."""
        call, sync, ledger = self._call, self._sync, self._ledger
        assert call is not None
        assert sync is not None
        entered, output = self._held.pop(microbatch)
        ledger.splitting = not whole
        ledger.open(microbatch)
        try:
            with sync.around(self._index, microbatch):
                gradient = call.backward_step(entered, output, gradients[0] if gradients else None)
        finally:
            ledger.splitting = False
            ledger.close()
        if whole:
            self.backward_weight(microbatch)
        if entered is None:
            return ()
        return (torch.zeros_like(entered) if gradient is None else gradient,)

    def backward_weight(self, microbatch: int) -> None:
        """The gradients of the weights whose layers have left them for later."""
        sync = self._sync
        assert sync is not None
        with sync.around(self._index, microbatch):
            self._ledger.pay(microbatch)
        sync.done(self._index)

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Count what the first forward keeps, parameters apart."""
        call = self._call
        if not self._measures or self.measured is not None or self._sync is None or call is None:
            yield
            return
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, _itself):
            yield
        for weight in call.models[self._index].parameters():
            kept.pop(weight.untyped_storage().data_ptr(), None)
        self.measured = sum(kept.values())


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
