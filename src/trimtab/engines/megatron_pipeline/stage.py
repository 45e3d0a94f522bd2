"""This rank's stage of one model: its chunks, its place among the others, and call after call of the schedule."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist

from trimtab.config import Config, ControlConfig
from trimtab.coordinator.exchange import exchange_among
from trimtab.coordinator.order import AgreedOrder
from trimtab.engines.emulated_pipeline import emulated_link, emulated_stage
from trimtab.engines.megatron_pipeline.agreement import Said, agree, first_of
from trimtab.engines.megatron_pipeline.call import ScheduleCall
from trimtab.engines.megatron_pipeline.chunk import MegatronChunk
from trimtab.engines.megatron_pipeline.gradients import GradientSync, reduces_explicitly, start_parameters
from trimtab.engines.megatron_pipeline.handover import count, packed, unpacked
from trimtab.engines.megatron_pipeline.layers import SplitLayers
from trimtab.engines.megatron_pipeline.leading import Leadership, computing_together
from trimtab.engines.megatron_pipeline.placement import (
    add_tied_gradients,
    check_embedding_group,
    check_ends,
    check_even,
)
from trimtab.engines.megatron_pipeline.randomness import MegatronRandomness, draws
from trimtab.pipeline.actions import Work
from trimtab.pipeline.execute.executor import Executor
from trimtab.pipeline.execute.hooks import Hooks, Several
from trimtab.pipeline.execute.replicas import completion_order
from trimtab.pipeline.execute.schedule import Schedule
from trimtab.pipeline.execute.settings import settings_of, shape_of
from trimtab.pipeline.memory import parse_cap
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.shape import Placement, Shape
from trimtab.record.complain import tell
from trimtab.record.pipeline import pipeline_hooks
from trimtab.transport.delayed import Delayed
from trimtab.transport.opening import group_exchange, open_transport

_LEAST_SHARE: Final = 0.25
"""Of a stage's parameters: where fewer have their gradients apart, a backward is not worth splitting."""


class MegatronStage:
    """Opened together by all ranks of a model, which run the same calls from then on. :meth:`close` it."""

    def __init__(self, config: Config, call: ScheduleCall, hooks: Hooks | None = None) -> None:
        """Raises ValueError on all ranks where the settings cannot be used, or messages cannot be exchanged."""
        self._config = config.pipeline
        self._transport = config.transport
        self._emulate = config.emulate
        self._group: Any = call.groups.pp
        self._number, self._count = self._group.rank(), self._group.size()
        self._models = [weakref.ref(model) for model in call.models]
        self._device = next((weight.device for weight in call.models[0].parameters()), torch.device("cpu"))
        self._layers = [SplitLayers(model) for model in call.models]
        self._executor: Executor | None = None
        self._chunks: list[MegatronChunk] = []
        groups = [self._group, call.groups.tp, call.groups.dp_cp]
        said = agree(self._say(lambda: self._check(call)), groups)
        self._schedule = self._make_schedule(split=self._decide_split(said, groups))
        self._leadership: Leadership | None = None
        self._order: AgreedOrder | None = None
        several = len(call.models) > 1
        self._randomness = MegatronRandomness(self._device) if several and draws(call.config, call.models) else None
        self._is_v = self._shape(1).placement is Placement.V
        self._chunks = self._make_chunks()
        try:
            agree(self._say(lambda: self._connect(call, config.control, hooks)), groups)
        except BaseException:
            self.close(failed=True)
            raise

    # --------------------------------------------------------------- opening

    def _make_chunks(self) -> list[MegatronChunk]:
        shape = self._shape(1)
        measures = bool(self._config.memory_cap) and parse_cap(self._config.memory_cap)[1]
        return [
            MegatronChunk(
                index, shape.position(self._number, index), shape.positions, layers.ledger, self._randomness, measures
            )
            for index, layers in enumerate(self._layers)
        ]

    def _say(self, attempt: Callable[[], None]) -> Said:
        """What this rank has to say after trying."""
        problem = ""
        try:
            attempt()
        except ValueError as error:
            problem = str(error)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        share = min(layers.share for layers in self._layers)
        config = self._config
        settings = f"[pipeline] {config.policy}, {config.order}, {config.placement}, split {config.split}, "
        settings += f"cap {config.memory_cap or 'none'}, [transport] {self._transport.kind}"
        return Said(problem, dist.get_rank(), share, (settings,))

    def _check(self, call: ScheduleCall) -> None:
        """Raise ValueError where the settings cannot be used, on any stage."""
        shape = self._shape(call.microbatches)
        if shape.placement is Placement.V:
            check_even(call.config)
            check_embedding_group(call.models, call.groups)
        check_ends(call.models, shape, self._number)
        for split in {False, self._config.split}:
            self._make_schedule(split).check(call.microbatches)

    def _make_schedule(self, split: bool) -> Schedule:
        """What iterations run by. Without the split an order that has one keeps it: its W have nothing to do."""
        config = self._config if split else replace(self._config, split=False)
        exchange = group_exchange(self._group)
        parts = (self._number, self._count, len(self._layers), dist.get_rank(), self._measured, exchange)
        try:
            schedule = Schedule(config, *parts)
            schedule.plan(1)
        except ValueError:
            schedule = Schedule(self._config, *parts)
        return schedule

    def _decide_split(self, said: Said, groups: Sequence[Any]) -> bool:
        if not self._config.split:
            return False
        if said.share < _LEAST_SHARE:
            fused = any(layers.fused for layers in self._layers)
            why = "gradient_accumulation_fusion is on" if fused else "too few of the model's layers are known here"
            if first_of(groups):
                tell(f"pipeline: weight gradients are not computed apart, {why}")
            return False
        for layers in self._layers:
            layers.apply()
        return True

    def _connect(self, call: ScheduleCall, control: ControlConfig, hooks: Hooks | None) -> None:
        """With the other stages, and with those that compute together with this rank."""
        if self._schedule.policy.name != "static":
            self._leadership = Leadership(control, computing_together(call.groups, call.config))
            self._schedule.policy = self._leadership.policy(self._schedule.policy)
        settings = self._transport
        exchange = group_exchange(self._group)
        opened = open_transport(settings.kind, self._number, self._count, exchange, settings, self._device)
        link = emulated_link(self._emulate)
        if link is not None:
            opened = Delayed(opened, link)
        self._executor = Executor(
            self._number,
            self._chunks,
            opened,
            settings_of(self._config, fixed_shapes=not call.config.variable_seq_lengths),
            self._all_hooks(hooks),
            device=self._device,
        )
        if self._config.reductions == "agreed" and self._schedule.policy.name != "static":
            self._order = self._open_order(call)

    def _open_order(self, call: ScheduleCall) -> AgreedOrder | None:
        """With the replicas of this stage. Ranks that compute together launch other collectives, too, and would have to
        agree on where between these a reduction comes: theirs come as planned."""
        replicas, seconds = call.groups.dp_cp, self._config.timeout_seconds
        if any(group is not None and group.size() > 1 for group in computing_together(call.groups, call.config)):
            if first_of([self._group, call.groups.tp, replicas]):
                tell("pipeline: reductions are in the planned order, as ranks compute together")
            return None
        if replicas.size() < 2 or len(call.models) < 2:
            return None
        return AgreedOrder(
            len(call.models), replicas.rank(), replicas.size(), exchange_among(replicas, seconds), seconds
        )

    def _all_hooks(self, hooks: Hooks | None) -> Hooks:
        """Those of the attached session, and those that were given."""
        recorder = pipeline_hooks(dist.get_process_group_ranks(self._group), self._number)
        emulated = emulated_stage(self._emulate, self._number, self._shape(1))
        return Several(*(one for one in (recorder, hooks, emulated) if one is not None))

    # ----------------------------------------------------------------- state

    def serves(self, call: ScheduleCall) -> bool:
        """Whether the call is for this stage's model, and the ranks are connected as they were."""
        models = [model() for model in self._models]
        same = len(models) == len(call.models) and all(a is b for a, b in zip(models, call.models, strict=True))
        return same and self._group is call.groups.pp

    @property
    def over(self) -> bool:
        """The model is gone, or an error has ended an iteration."""
        return self._executor is None or any(model() is None for model in self._models)

    def close(self, failed: bool = False) -> None:
        """Leave the others, and the model as it was. May be called again. ``failed``: because of an error."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()
        if self._leadership is not None:
            self._leadership.close()
        order, self._order = self._order, None
        if order is not None and failed:
            order.abandon()
        elif order is not None:
            with contextlib.suppress(RuntimeError):  # another replica has an error of its own
                order.close(timeout=0.0)
        for layers in self._layers:
            layers.remove()

    def _measured(self) -> list[int] | None:
        """Bytes that a microbatch holds, by chunk, once a forward has shown."""
        measured = [chunk.measured for chunk in self._chunks]
        return [one for one in measured if one is not None] if None not in measured else None

    # --------------------------------------------------------------- running

    def run(self, call: ScheduleCall) -> list[Any]:
        """One call of the schedule; returns what Megatron-Core's would."""
        embedding = call.begin()
        try:
            self._evaluate(call) if call.forward_only else self._train(call)
        except BaseException:
            self.close(failed=True)
            raise
        finally:
            for chunk in self._chunks:
                chunk.end()
        if self._is_v:
            self._hand_over(call)
        call.finish(embedding)
        if self._is_v and self._number == 0 and not call.forward_only:
            add_tied_gradients(call.models)
        return call.results

    def _hand_over(self, call: ScheduleCall) -> None:
        """From stage 0, where a V ends, to the last one, where whoever called looks for results."""
        executor, last = self._executor, self._count - 1
        assert executor is not None
        if self._number == 0:
            tensors = packed(call.results, call.tokens, self._device)
            executor.exchange([(last, number, tensor) for number, tensor in enumerate(tensors)], ())
            call.results, call.tokens = [], torch.zeros_like(call.tokens)
        elif self._number == last:
            said = executor.exchange((), (0,))[0]
            wanted = range(1, 1 + count(said))
            came = executor.exchange((), wanted)
            call.results, call.tokens = unpacked(said, [came[number] for number in wanted])

    def _evaluate(self, call: ScheduleCall) -> None:
        for chunk in self._chunks:
            chunk.begin(call, None, frozenset())
        assert self._executor is not None
        self._schedule.evaluate(self._executor, call.microbatches)

    def _train(self, call: ScheduleCall) -> None:
        plan = self._schedule.plan(call.microbatches)
        fixed = self._config.policy == "static" and not self._config.replay
        explicit = reduces_explicitly(call.config, call.models, plan, fixed)
        order = completion_order(plan, self._number) if explicit else None
        if self._randomness is not None:
            self._randomness.begin()
        with GradientSync(call.config, call.models, call.microbatches, order, self._order) as sync:
            if len(call.models) > 1:
                start_parameters(call.config, call.models)
            for index, chunk in enumerate(self._chunks):
                chunk.begin(call, sync, self._split_in(plan, index))
            assert self._executor is not None
            self._schedule.train(self._executor, call.microbatches)

    def _split_in(self, plan: Plan, chunk: int) -> frozenset[int]:
        """Microbatches whose backward in a chunk is B and W."""
        row = plan.actions[self._number]
        return frozenset(action.microbatch for action in row if action.work is Work.W and action.chunk == chunk)

    def _shape(self, microbatches: int) -> Shape:
        return shape_of(self._config, self._count, len(self._layers), microbatches)
