"""A step of a forward rank, and of a backward rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trimtab.engines.megatron_fbd.mailing import has_result, receive_result, receive_states, send_result, send_states
from trimtab.engines.megatron_fbd.passes import Passes, Result
from trimtab.engines.megatron_pipeline.call import ScheduleCall
from trimtab.fbd.execute.backward import BackwardRank
from trimtab.fbd.execute.forward import ForwardRank
from trimtab.fbd.execute.program import Program
from trimtab.fbd.ranks import Role, VirtualRank
from trimtab.transport.interface import Transport


class ForwardSide:
    """Weights come, forwards run; what the loss function returned and the states of the generators go."""

    def __init__(self, program: Program, rank: VirtualRank, passes: Passes, transport: Transport) -> None:
        self._program, self._passes = program, passes
        self._worker = ForwardRank(program, rank, passes.module, transport)
        self.mail = self._worker.mail
        self._heard = program.layout.partners(rank)
        """Backward ranks of the same part of the model, whose microbatches come here."""
        if rank.stage == program.layout.stages - 1:
            passes.on_result = self._send_result

    def step(self, step: int, call: ScheduleCall) -> None:
        """All forwards of a step."""
        draws, given = self._passes.draws, dict[VirtualRank, Any]()
        if step == 0:
            number = len(draws.capture())
            given = {one: receive_states(self.mail, self._process(one), step, number) for one in self._heard}
        draws.begin(given)
        self._worker.step(step)
        if draws.streams:
            for one in self._heard:
                send_states(self.mail, self._process(one), step, draws.of(one.instance))
        _keep(call, [self._passes.results[one] for one in sorted(self._passes.results)])

    def _process(self, one: VirtualRank) -> int:
        return self._program.placement.process(one)

    def _send_result(self, step: int, microbatch: int, result: Result) -> None:
        layout = self._program.layout
        for one in self._heard:
            cell, place = divmod(one.instance, layout.backwards)
            if layout.instance_of(Role.BACKWARD, cell, microbatch) == cell * layout.backwards + place:
                send_result(self.mail, self._process(one), step, microbatch, result)


class BackwardSide:
    """Weights go, backwards run; then what Megatron-Core does with gradients at the end of a step."""

    def __init__(self, program: Program, rank: VirtualRank, passes: Passes, transport: Transport) -> None:
        self._program, self._rank, self._passes = program, rank, passes
        self._worker = BackwardRank(program, rank, passes.module, _nothing, transport)
        self.mail = self._worker.mail
        self._heard = program.layout.partners(rank)

    def step(self, step: int, call: ScheduleCall) -> None:
        """All backwards of a step."""
        draws, process = self._passes.draws, self._program.placement.process
        if step == 0:
            states = draws.capture()
            for one in self._heard:
                send_states(self.mail, process(one), step, states)
        else:
            self._passes.gather_parameters()
            self._worker.publish(step)
        draws.begin({})
        embedding = call.begin()
        self._worker.backwards(step)
        if self._passes.reduces_afterwards:
            call.config.grad_sync_func(self._passes.model.parameters())
        if draws.streams:
            (giver,) = self._heard
            draws.restore(receive_states(self.mail, process(giver), step, len(draws.capture())))
        layout, last = self._program.layout, self._program.layout.stages - 1
        mine = layout.microbatches(Role.BACKWARD, self._rank.instance, self._program.microbatches)
        _keep(call, [self._result(step, one) for one in mine] if self._rank.stage == last else [])
        call.finish(embedding)

    def _result(self, step: int, microbatch: int) -> Result:
        """What the loss function returned, there or, as the forward instance is gone, here."""
        cell = self._rank.instance // self._program.layout.backwards
        instance = self._program.layout.instance_of(Role.FORWARD, cell, microbatch)
        (giver,) = [one for one in self._heard if one.instance == instance]
        source = self._program.placement.process(giver)
        if source in self.mail.standing.processes and not has_result(self.mail, source, step, microbatch):
            return self._passes.results[microbatch]
        return receive_result(self.mail, source, step, microbatch)


def _keep(call: ScheduleCall, results: list[Result]) -> None:
    """As those of the call."""
    call.results = [result for result, _ in results]
    call.tokens = sum((tokens.to(call.tokens.device) for _, tokens in results), torch.zeros_like(call.tokens))


def _nothing(module: nn.Module) -> None:
    """Steps are finished by Megatron-Core and the script."""
    del module
