"""Which points are connected, to what, in each step. On the training thread, at step boundaries.

Points are connected only for steps in which something is due on them, so that a subscription of every tenth step costs
nothing in the nine others. Without a subscription or a perturbation the begin of a step is one comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from trimtab.scope.job.agreement import Agreement, Change
from trimtab.scope.job.budget import Budget
from trimtab.scope.job.disturbing import Disturbing
from trimtab.scope.job.handle import Boundary, Probing
from trimtab.scope.job.measures import Measures
from trimtab.scope.job.registry import Registry
from trimtab.scope.job.relay import Mute, Relay
from trimtab.scope.job.sampling import Active, Sampler, Sampling, Source
from trimtab.scope.moment import Moment
from trimtab.scope.names import Shard
from trimtab.scope.subscription import Subscription
from trimtab.scope.taps.points import Disconnect, ModelPoints, StatePoint

Notify = Callable[..., None]
NO_MICROBATCH = -1
"""Of what is read at a boundary: a parameter, a gradient that has been accumulated, the optimizer's state."""


class Switchboard:
    """What is in force on this rank. Every method is for the training thread, unless it says otherwise."""

    def __init__(
        self,
        rank: int,
        agreement: Agreement,
        sampling: Sampling,
        budget: Budget,
        notify: Notify,
        *,
        measures: Measures | None = None,
        clock: Callable[[], int],
    ) -> None:
        """``notify(kind, text, **details)`` tells the collector. ``clock`` in nanoseconds."""
        self.registry = Registry()
        self.mute = Mute()
        self.notify = notify
        self.disturbing = Disturbing(notify)
        self.away = False
        """The collector has not been heard of for the time of a lease. Set by the session's thread."""
        self.aside = False
        """A probe or a paired run has the model now: steps that begin in it are not the job's."""
        self._rank = rank
        self._agreement = agreement
        self._sampling = sampling
        self._budget = budget
        self._measures = measures or Measures()
        self._clock = clock
        self._subscriptions: dict[str, Active] = {}
        self._boundaries: dict[str, Boundary] = {}
        self.probing: Probing | None = None
        """Once somebody has asked for a probe."""
        self._relays: dict[str, Relay] = {}
        self._began = 0
        self._aside = 0
        self._measured: tuple[str, ...] = ()
        self._state_due: list[tuple[Sampler, StatePoint]] = []
        self._busy = False
        self._told = False

    @property
    def step(self) -> int:
        """That has begun last; -1 before the first. From any thread."""
        return self._agreement.step

    @property
    def seconds_per_step(self) -> float:
        """Smoothed; 0 before the second step. From any thread."""
        return self._budget.step_ns * 1e-9

    @property
    def overhead(self) -> float:
        """Share of the training time that goes into subscriptions. From any thread."""
        return self._budget.overhead

    @property
    def subscriptions(self) -> Mapping[str, Active]:
        """In force, by id. From any thread."""
        return self._subscriptions

    @property
    def probes(self) -> list[dict[str, Any]]:
        """Probes in force, as JSON. From any thread."""
        return [] if self.probing is None else list(self.probing.active())

    @property
    def boundaries(self) -> Mapping[str, Boundary]:
        """Paired runs that are agreed on, by id. From any thread."""
        return self._boundaries

    # ------------------------------------------------------------- the model

    def meet(self, points: ModelPoints, model: object = None) -> None:
        """A model chunk offers these, as long as ``model`` is there. What was connected under the same name is not any
        more."""
        for point in (*points.points, *points.attention):
            relay = self._relays.pop(point.tap.name, None)
            if relay is not None:
                relay.first = relay.samplers = relay.listeners = ()
                relay.settle()
        self.registry.meet(points, model)

    def add_state(self, points: Iterable[StatePoint]) -> None:
        """So does an optimizer."""
        self.registry.add_state(points)

    # ------------------------------------------------------------------ steps

    def step_begin(self, step: int) -> None:
        """A training step begins: what was agreed on for it is done."""
        now = self._clock()
        duration, self._began = (now - self._began - self._aside if self._began else 0), now
        self._aside = 0
        changes = self._agreement.begin(step)
        if not (changes or self._busy):
            self._budget.idle(duration)
            return
        decisions = self._budget.step(duration, self._measured)
        for decision in decisions:
            self._obey(decision.id, decision.action, decision.share, step)
        for change in changes:
            self._apply(change, step)
        self._end_what_is_over(step)
        self._connect(step)
        probes = self.probing is not None and bool(self.probing.active())
        self._busy = bool(self._subscriptions or self._boundaries or self.disturbing.any or probes or self._connected())
        spent = self._clock() - now
        for name in self._measured:
            self._budget.spent(name, spent // len(self._measured))
        if self._boundaries or probes:
            self._run_aside(step)

    def optimizer_begin(self) -> None:
        """An optimizer is about to make its step: parameters and gradients are whole now."""
        if not self._busy or self.mute.depth:
            return
        self.disturbing.optimizer_begin(self.step)
        due, self._state_due = self._state_due, []
        moment = Moment(self.step, NO_MICROBATCH)
        for sampler, point in due:
            try:
                tensor = point.tensor()
            except Exception as error:
                self.fail(sampler.active, error)
                continue
            if tensor is not None:
                self._sampling.take(sampler, tensor, moment)

    def close(self) -> None:
        """Take everything out of the job."""
        self.disturbing.close()
        self._subscriptions = {}
        self._boundaries = {}
        self.probing = None
        for relay in self._relays.values():
            relay.first = relay.samplers = relay.listeners = ()
            relay.settle()
        self._relays = {}
        self._busy = False

    def fail(self, active: Active, error: Exception) -> None:
        """A subscription cannot be measured: it stays where it is known of, but nothing is measured for it any more.
        From any thread."""
        if not active.error:
            active.error = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self.notify("error", active.error, subscription=active.subscription.id, step=self.step)

    def listen(self, name: str, receive: Callable[[Any, Moment], Any]) -> Disconnect:
        """See :meth:`~trimtab.scope.job.handle.JobHandle.listen`; ValueError where there is no such point."""
        relay = self._relay(name)
        relay.listeners = (*relay.listeners, receive)
        relay.settle()

        def stop() -> None:
            relay.listeners = tuple(other for other in relay.listeners if other is not receive)
            relay.settle()

        return stop

    def emit(
        self,
        tap: str,
        what: str,
        subscription: str,
        arrays: Mapping[str, torch.Tensor],
        meta: Mapping[str, Any],
        shard: Shard = (),
        replica: int = 0,
        moment: Moment | None = None,
    ) -> None:
        """See :meth:`~trimtab.scope.job.handle.JobHandle.emit`."""
        source = Source(tap, what, subscription, shard, replica, meta)
        self._sampling.emit(source, arrays, moment or Moment(self.step))

    # ---------------------------------------------------------------- changes

    def _apply(self, change: Change, step: int) -> None:
        details = {"change": change.id, "step": step, "microbatch": change.at.microbatch}
        try:
            text, more = self._applied(change, step)
        except Exception as error:
            self.notify("error", f"{change.kind}: {error}", **details)
            return
        late = f"the job passed over step {change.at.step}" if change.at.step < step else ""
        self.notify("applied", "; ".join(part for part in (text, late) if part), **details, **more)

    def _applied(self, change: Change, step: int) -> tuple[str, dict[str, Any]]:
        made, name = change.made, str(change.body.get("id") or change.id)
        if change.kind == "subscribe":
            assert isinstance(made, Subscription)
            self._subscriptions = self._subscriptions | {made.id: Active(made, change.at)}
            self._budget.add(made.id, made.when.every)
            return "subscribed", {"subscription": made.id}
        if change.kind == "unsubscribe":
            active = self._subscriptions.get(name)
            if active is not None:
                active.until = change.at
            elif name in self._boundaries:
                self._boundaries = {key: found for key, found in self._boundaries.items() if key != name}
            elif self.probing is not None:
                self.probing.remove(name)
            return "unsubscribed", {"subscription": name}
        if change.kind == "probe":
            assert self.probing is not None
            self.probing.add(change.body, change.id)
            return "probed", {"subscription": name}
        if change.kind == "pair":
            self._boundaries = self._boundaries | {made.id: made}
            return "paired", {"pair": made.id}
        return self.disturbing.apply(change, step)

    def _end_what_is_over(self, step: int) -> None:
        self.disturbing.end_what_is_over(step)
        for name, active in list(self._subscriptions.items()):
            stopped = active.until is not None and Moment(step) >= active.until
            if not (stopped or active.ended(step)):
                continue
            self._subscriptions = {key: other for key, other in self._subscriptions.items() if key != name}
            self._budget.remove(name)
            if not stopped:
                self.notify("expired", "its last step is over", subscription=name, step=step)

    def _obey(self, name: str, action: str, share: float, step: int) -> None:
        active = self._subscriptions.get(name)
        if active is None:
            return
        said = f"takes {share:.2%} of the training time"
        if action == "pause":
            active.paused.add("budget")
            self.notify("paused", f"over the budget: it {said}", subscription=name, step=step, why="budget")
        elif action == "over":
            text = f"over the budget: it {said}, and cannot pause on one rank alone"
            self.notify("error", text, subscription=name, step=step, why="budget", end=True)
        else:
            active.paused.discard("budget")
            self.notify("resumed", f"within the budget: it {said}", subscription=name, step=step, why="budget")

    # ------------------------------------------------------------ connections

    def _connect(self, step: int) -> None:
        """Exactly the points that are needed in this step."""
        self._sampling.step_begin()
        measured: list[str] = []
        wanted: dict[str, list[Sampler]] = {}
        self._state_due = []
        for name, active in self._subscriptions.items():
            if active.version != self.registry.version and not active.error:
                self._look_up_or_fail(active)
            self._hold_lease(active, step)
            active.wanted = active.due(step) and self._may(name, active)
            if not active.wanted:
                continue
            measured.append(name)
            for point_name, sampler in active.samplers.items():
                state = self.registry.state.get(point_name)
                if state is not None:
                    self._state_due.append((sampler, state))
                else:
                    wanted.setdefault(point_name, []).append(sampler)
        self._measured = tuple(measured)
        receivers = self.disturbing.receivers()
        for name in wanted.keys() | receivers.keys():
            self._relay(name)
        for name, relay in list(self._relays.items()):
            relay.first = tuple(receivers.get(name, ()))
            relay.samplers = tuple(wanted.get(name, ()))
            self._settle(relay)
            if not relay.connected and name not in self.registry.points:
                del self._relays[name]  # its model is gone

    def _settle(self, relay: Relay) -> None:
        """Connect or disconnect; what cannot be had ends, and nothing else does."""
        try:
            relay.settle()
        except Exception as error:
            for sampler in relay.samplers:
                self.fail(sampler.active, error)
            for name, _ in relay.first:
                self.disturbing.fail(name, error)
            relay.first = relay.samplers = ()

    def _may(self, name: str, active: Active) -> bool:
        if active.paused - {"budget"}:
            return False
        return "budget" not in active.paused or self._budget.trial(name)

    def _hold_lease(self, active: Active, step: int) -> None:
        name = active.subscription.id
        if active.collective:
            return
        if self.away and "lease" not in active.paused:
            active.paused.add("lease")
            self.notify("paused", "the collector is away", subscription=name, step=step, why="lease")
        elif not self.away and "lease" in active.paused:
            active.paused.discard("lease")
            self.notify("resumed", "the collector is back", subscription=name, step=step, why="lease")

    def _look_up_or_fail(self, active: Active) -> None:
        try:
            self._look_up(active)
        except Exception as error:  # such as a kernel that cannot be imported
            self.fail(active, error)

    def _look_up(self, active: Active) -> None:
        """The taps of a subscription, where there are new ones; what is known of the others is kept."""
        found: dict[str, Sampler] = {}
        for point in self.registry.select(active.subscription, self._rank):
            known = active.samplers.get(point.tap.name)
            found[point.tap.name] = sampler = known or self._measures.sampler(active, point.tap)
            sampler.see = self.registry.see
            if point.tap.kind == "attention" and any(axis == "cp" for axis, _, count in point.tap.shard if count > 1):
                active.collective = True  # the keys are gathered over the ranks of a sequence
                self._budget.keep(active.subscription.id)
        active.samplers = found
        active.version = self.registry.version

    def _relay(self, name: str) -> Relay:
        relay = self._relays.get(name)
        if relay is None:
            point = self.registry.points.get(name)
            if point is None:
                raise ValueError(f"{name} is no tensor that passes by here")
            relay = self._relays[name] = Relay(
                point, self._sampling, self.mute, self._receive_failed, self.registry.see
            )
        return relay

    def _receive_failed(self, name: str, error: Exception) -> None:
        if name:
            self.disturbing.fail(name, error)
        elif not self._told:
            self._told = True
            self.notify("error", f"a paired run's look: {type(error).__name__}: {error}", step=self.step)

    def _connected(self) -> bool:
        return any(relay.connected for relay in self._relays.values())

    def _run_aside(self, step: int) -> None:
        """Probes and paired runs; their time is not the subscriptions'."""
        began = self._clock()
        self.aside = True
        try:
            self._probe_and_pair(step)
        finally:
            self.aside = False
            self._aside = self._clock() - began

    def _probe_and_pair(self, step: int) -> None:
        if self.probing is not None:
            self.probing.step_begin(step)
        for name, boundary in list(self._boundaries.items()):
            again = False
            try:
                again = boundary.at_step(step)
            except Exception as error:
                self.notify("error", f"{type(error).__name__}: {error}", pair=name, step=step)
            if not again:
                self._boundaries = {key: other for key, other in self._boundaries.items() if key != name}
