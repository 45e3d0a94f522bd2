"""From a tensor that passes by to a sample: whether it is wanted, the measurement, and what that took."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from trimtab.scope.job.device import Accelerator, Cuda, odd_type
from trimtab.scope.job.outbox import Outbox, Sample
from trimtab.scope.moment import Moment
from trimtab.scope.names import Shard, Tap
from trimtab.scope.subscription import Subscription

Tensors = Mapping[str, torch.Tensor]
Measure = Callable[[Any, Subscription, Any], Tensors]


class Source:
    """What the frames of one tap and subscription have in common."""

    __slots__ = ("headers", "meta", "replica", "shard", "subscription", "tap", "what")

    def __init__(
        self, tap: str, what: str, subscription: str, shard: Shard, replica: int, meta: Mapping[str, Any]
    ) -> None:
        self.tap = tap
        self.what = what
        self.subscription = subscription
        self.shard = shard
        self.replica = replica
        self.meta = dict(meta)
        self.headers: dict[Any, bytes] = {}
        """Of frames, by their arrays: the same from step to step."""


class Active:
    """A subscription that is in force on this rank."""

    __slots__ = (
        "collective",
        "error",
        "paused",
        "samplers",
        "since",
        "subscription",
        "until",
        "version",
        "wanted",
    )

    def __init__(self, subscription: Subscription, since: Moment) -> None:
        self.subscription = subscription
        self.since = since
        self.until: Moment | None = None
        """It ends there."""
        self.samplers: dict[str, Sampler] = {}
        self.version = -1
        """Of the registry that the samplers are from."""
        self.paused: set[str] = set()
        """Why: ``budget``, ``lease``."""
        self.error = ""
        self.collective = False
        """Measuring takes several ranks together: this one must not stop by itself."""
        self.wanted = False
        """Something is to be measured in the step that runs."""

    @property
    def state(self) -> str:
        """``active``, or why it is not."""
        if self.error:
            return "error"
        return min(self.paused, default="active")

    def due(self, step: int) -> bool:
        """In the whole step ``step``, but for what its microbatches say."""
        when = self.subscription.when
        if step < when.first or (when.last is not None and step > when.last):
            return False
        return (step - when.first) % when.every == 0 and not self.error

    def ended(self, step: int) -> bool:
        """Nothing can come any more."""
        last = self.subscription.when.last
        return last is not None and step > last

    def wants(self, moment: Moment) -> bool:
        """Is this moment to be measured, given that its step is?"""
        if moment.recompute or not self.wanted:
            return False
        if moment.microbatch < 0:  # what is read at a boundary
            return True
        microbatches = self.subscription.when.microbatches
        if microbatches is not None and moment.microbatch not in microbatches:
            return False
        begun = moment.step > self.since.step or moment.microbatch >= self.since.microbatch
        return begun and (self.until is None or moment < self.until)


class Sampler:
    """One tap of one subscription."""

    __slots__ = ("active", "measure", "see", "source", "state", "tap", "told")

    def __init__(self, active: Active, tap: Tap, measure: Measure, state: Any) -> None:
        subscription = active.subscription
        meta: dict[str, Any] = {"labels": list(tap.labels)}
        if tap.heads is not None:
            meta["heads"] = list(tap.heads)
        self.active = active
        self.tap = tap
        self.measure = measure
        self.state = state
        self.source = Source(tap.name, subscription.what, subscription.id, tap.shard, tap.replica, meta)
        self.see: Callable[[str, tuple[int, ...], str], None] | None = None
        """Is told of the shape and the type of the first tensor."""
        self.told = False
        """What is known only when the first tensor has come is in the source."""

    def describe(self, x: Any, tensors: Tensors) -> None:
        """Complete what all frames have in common, with the first of them."""
        meta = self.source.meta
        if isinstance(x, torch.Tensor):
            meta["shape"] = list(x.shape)
            meta["dtype"] = str(x.dtype).removeprefix("torch.")
            if self.see is not None:
                self.see(self.tap.name, tuple(x.shape), meta["dtype"])
        meta.update(getattr(self.state, "meta", None) or {})
        odd = {name: kind for name, tensor in tensors.items() if (kind := odd_type(tensor)) is not None}
        if odd:
            meta["dtypes"] = odd
        self.told = True


class Spending(Protocol):
    """Keeps account; see :class:`~trimtab.scope.job.budget.Budget`."""

    def spent(self, name: str, ns: int) -> None:
        """So much went into the subscription of that name."""


class Sampling:
    """Measures, and puts the samples into the outbox. On the threads that compute."""

    def __init__(
        self,
        outbox: Outbox,
        spending: Spending,
        frame_bytes: int,
        *,
        failed: Callable[[Active, Exception], None],
        accelerator: Callable[[torch.Tensor], Accelerator | None] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        unix: Callable[[], int] = time.time_ns,
    ) -> None:
        """``frame_bytes``: most of one step. ``failed`` is told of a subscription that has to end. ``accelerator`` of
        the device that a tensor is on; None for the CPU. ``clock`` and ``unix`` in nanoseconds."""
        self._outbox = outbox
        self._spending = spending
        self._most = frame_bytes
        self._failed = failed
        self._accelerator = accelerator or Accelerators()
        self._clock = clock
        self._unix = unix
        self._pid = os.getpid()
        self._bytes = 0
        self.over_limit = 0
        """Samples that were not taken because the step had its share."""

    def step_begin(self) -> None:
        """The bytes of a step count from 0 again."""
        self._bytes = 0

    def take(self, sampler: Sampler, x: Any, moment: Moment) -> None:
        """A tensor (for attention: its input) is there. Raises nothing."""
        active = sampler.active
        try:
            if active.wants(moment) and os.getpid() == self._pid:  # a forked child has no sender
                began = self._clock()
                self._measure(sampler, x, moment)
                self._spending.spent(active.subscription.id, self._clock() - began)
        except Exception as error:
            self._failed(active, error)

    def emit(self, source: Source, tensors: Tensors, moment: Moment) -> None:
        """What somebody else has measured, at the moment of a step boundary. May raise what a copy raises."""
        probe = next(iter(tensors.values()))
        accelerator = self._accelerator(probe)
        odd = {name: kind for name, tensor in tensors.items() if (kind := odd_type(tensor)) is not None}
        if odd:
            source.meta["dtypes"] = odd
        ready = None if accelerator is None else accelerator.begin()
        kept = _kept(tensors, None if accelerator is None else probe)
        self._outbox.put(Sample(source, moment, kept, self._unix(), None, ready))

    def _measure(self, sampler: Sampler, x: Any, moment: Moment) -> None:
        if self._bytes >= self._most and not sampler.active.collective:
            self.over_limit += 1
            return
        example = x if isinstance(x, torch.Tensor) else x.q
        accelerator = self._accelerator(example)
        began = None if accelerator is None else accelerator.begin()
        if accelerator is not None and began is None:
            return  # a CUDA graph is captured: what is measured now would be a part of it
        tensors = sampler.measure(_local(x), sampler.active.subscription, sampler.state)
        if not tensors:
            return
        if not sampler.told:
            sampler.describe(x, tensors)
        kept = _kept(tensors, None if accelerator is None else example)
        ready = None if accelerator is None else accelerator.begin()
        sample = Sample(sampler.source, moment, kept, self._unix(), began, ready)
        self._bytes += sample.bytes
        self._outbox.put(sample)


class Accelerators:
    """One for each device of this process, made when it is needed first."""

    def __init__(self) -> None:
        self._made: dict[torch.device, Accelerator] = {}

    def __call__(self, x: torch.Tensor) -> Accelerator | None:
        if not x.is_cuda:
            return None
        found = self._made.get(x.device)
        if found is None:
            found = self._made[x.device] = Cuda(x.device.index)
        return found


def _kept(tensors: Tensors, on_device: torch.Tensor | None) -> Tensors:
    """What can be read later: the next operation may write where ``tensors`` lie. On a device that is so only for views
    of the tensor itself, ``on_device``; the memory of others is held until the sender has copied them."""
    if on_device is None:
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    storage = on_device.untyped_storage().data_ptr()
    return {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() == storage else tensor
        for name, tensor in tensors.items()
    }


def _local(x: Any) -> Any:
    """Without its history and, of a DTensor, this rank's part."""
    if isinstance(x, torch.Tensor):
        x = x.detach()
        return x if type(x) is torch.Tensor else getattr(x, "to_local", lambda: x)()
    return replace(x, q=_local(x.q), k=_local(x.k))
