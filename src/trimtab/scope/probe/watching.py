"""What else is measured while a probe's prompts run: its own subscriptions, on its own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trimtab.scope.job.measures import Measures
from trimtab.scope.job.sampling import Active, Sampler
from trimtab.scope.moment import Moment
from trimtab.scope.names import Pattern, Tap
from trimtab.scope.probe.spec import ProbeSpec
from trimtab.scope.subscription import Subscription

if TYPE_CHECKING:
    from trimtab.scope.job.handle import JobHandle


class Watch:
    """A context in which the points that a probe wants are connected. On the training thread, between steps."""

    def __init__(self, spec: ProbeSpec, job: JobHandle, moment: Moment, speaks: bool) -> None:
        """``speaks``: this rank is one of those that tell what all of their kind see."""
        self._spec = spec
        self._job = job
        self._moment = moment
        self._speaks = speaks
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Watch:
        if self._speaks:
            for number, subscription in enumerate(self._spec.also):
                self._connect(number, subscription)
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()

    def _connect(self, number: int, subscription: Subscription) -> None:
        pattern = Pattern(subscription.pattern)
        if subscription.ranks is not None and self._job.rank not in subscription.ranks:
            return
        for name, point in list(self._job.points.items()):
            tap = point.tap
            layers = subscription.layers
            fits = (tap.kind == "attention") == (subscription.what == "attention") and tap.kind != "gradient"
            if fits and tap.replica == 0 and pattern.matches(name) and (layers is None or tap.layer in layers):
                self._undo.append(self._job.listen(name, self._receiver(number, subscription, tap)))

    def _receiver(self, number: int, subscription: Subscription, tap: Tap) -> Callable[[Any, Moment], None]:
        sampler: Sampler = Measures().sampler(Active(subscription, Moment(0)), tap)
        # prompts are the same on all data parallel ranks, so this is all of it
        shard = tuple(part for part in tap.shard if part[0] not in ("dp", "fsdp"))

        def receive(x: Any, _moment: Moment) -> None:
            tensors = sampler.measure(x, subscription, sampler.state)
            if not tensors:
                return
            sampler.describe(x, tensors)
            meta = sampler.source.meta | {"probe": self._spec.id}
            name = f"{self._spec.id}.{number}"
            self._job.emit(
                tap.name, subscription.what, name, tensors, meta, shard, replica=tap.replica, moment=self._moment
            )

        return receive
