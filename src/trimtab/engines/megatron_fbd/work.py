"""Call after call of the schedule on one rank, once its model is there."""

from __future__ import annotations

from typing import Any

from torch import nn

from trimtab.engines.megatron_fbd.microbatches import Microbatches
from trimtab.engines.megatron_fbd.passes import Passes, layers_of
from trimtab.engines.megatron_fbd.randomness import Draws
from trimtab.engines.megatron_fbd.settings import Settings
from trimtab.engines.megatron_fbd.sides import BackwardSide, ForwardSide
from trimtab.engines.megatron_fbd.support import microbatches_of_all
from trimtab.engines.megatron_pipeline.call import ScheduleCall
from trimtab.fbd.execute.program import Program
from trimtab.fbd.ranks import Layout, Role, VirtualRank
from trimtab.transport.interface import Transport


class Work:
    """Of a forward or a backward rank."""

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        rank: VirtualRank,
        model: nn.Module,
        microbatches: int,
        transport: Transport,
    ) -> None:
        """``model``: as the schedule is given it. ``microbatches``: of a step, over all replicas.

        Raises:
            ValueError: the model cannot be trained so.
        """
        self.transport = transport
        self._layout, self._rank, self._model = layout, rank, model
        self._microbatches = microbatches
        self._next = 0
        draws = Draws(settings.draws, layout, rank, next(model.parameters()).device)
        self._passes = Passes(layout, rank, model, draws)
        program = Program(
            layout,
            microbatches // layout.cells,
            self._passes.stage,
            self._passes.batch,
            settings.mode,
            ahead=settings.ahead,
            patience=settings.patience,
            random=draws,
            hooks=self._passes,
            order=settings.order,
            when_lost=settings.when_lost,
            equal_backwards=True,  # Megatron-Core sees to it, and the optimizer has copies of them already
            memory=settings.memory,
            optimizer_bytes=settings.optimizer_bytes,
            cores=layers_of if settings.in_layers else None,
        )
        side = ForwardSide if rank.role is Role.FORWARD else BackwardSide
        self._side = side(program, rank, self._passes, transport)

    def step(self, keywords: dict[str, Any]) -> list[Any]:
        """One call of the schedule; its results.

        Raises:
            ValueError: it has another number of microbatches than the first, or another model.
        """
        self._check(keywords)
        # the loss is divided by the number that a backward rank has, which is what ordinary training would have
        number = self._microbatches // self._layout.instances(Role.BACKWARD)
        (data,) = _several(keywords["data_iterator"])
        microbatches = Microbatches(keywords["forward_step_func"], self._model, data)
        changed = {"num_microbatches": number, "data_iterator": microbatches.replay, "model": self._model}
        call = ScheduleCall(keywords | changed, interleaved=False)
        self._passes.begin(call, microbatches)
        step, self._next = self._next, self._next + 1
        self._side.step(step, call)
        return call.results

    @property
    def lost(self) -> set[int]:
        """Processes that are gone and may be."""
        self._side.mail.until(lambda: True, "what has come")
        return self._side.mail.standing.processes

    def _check(self, keywords: dict[str, Any]) -> None:
        everything = microbatches_of_all(self._layout, self._rank.role, keywords["num_microbatches"])
        if everything != self._microbatches:
            raise ValueError(
                f"fbd: a step has {everything} microbatches now and had {self._microbatches}; their number cannot "
                "change with forwards and backwards apart (no batch size rampup)"
            )
        if _several(keywords["model"]) != [self._model]:
            raise ValueError("fbd: the schedule was called with another model than before; each job trains one")


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]
