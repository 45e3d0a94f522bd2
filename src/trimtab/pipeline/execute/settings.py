"""What follows from the configuration: the executor's settings, the plan, the policy and the cap of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from trimtab.config import PipelineConfig
from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.memory import MemoryGuard, parse_cap
from trimtab.pipeline.orders import make_plan, placement_of
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Policy, make_policy
from trimtab.pipeline.shape import Placement, Shape
from trimtab.pipeline.torch_csv import read_torch_csv

_DEVIATING: Final = ("hint", "greedy", "auto")
_ROOM: Final = 1.0
"""Microbatches that a stage may hold beyond what its order needs, where no cap is set."""


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """Settings of an executor."""

    timeout_seconds: float = 600.0
    """A stage that waits and hears nothing for so long raises an error."""
    run_ahead: int = 2
    """CUDA: actions that may be launched and not done when the next one is chosen."""
    fixed_shapes: bool = True
    """All microbatches of an iteration have one shape; another one is an error."""
    observe_seconds: float = 0.005
    """Policy ``auto`` is told of memory and links at most this often."""

    def __post_init__(self) -> None:
        if self.timeout_seconds <= 0 or self.run_ahead < 1:
            raise ValueError("timeout_seconds must be positive and run_ahead at least 1")


def settings_of(config: PipelineConfig, fixed_shapes: bool = True) -> PipelineSettings:
    """The executor's part of the configuration."""
    return PipelineSettings(timeout_seconds=config.timeout_seconds, fixed_shapes=fixed_shapes)


def order_name(config: PipelineConfig, chunks: int) -> str:
    """The order that is meant, by name or as the path of a .csv file; ``auto``: by the chunks of a stage.

    Raises:
        ValueError: if the configuration has no order for so many chunks.
    """
    if config.order != "auto":
        return config.order
    if config.placement == "v":
        if not config.split or chunks != 2:
            raise ValueError("pipeline.placement v needs pipeline.split, and 2 chunks a stage; or name an order")
        return "zb-v"
    if chunks > 1:
        return "interleaved"
    return "zb-h1" if config.split else "1f1b"


def shape_of(config: PipelineConfig, stages: int, chunks: int, microbatches: int) -> Shape:
    """The shape of an iteration. ValueError where there is none for it."""
    name = order_name(config, chunks)
    placement = read_torch_csv(name).shape.placement if name.endswith(".csv") else placement_of(name)
    if config.placement == "v" and placement is not Placement.V:
        raise ValueError(f"pipeline.order {name} is for placement loop, and pipeline.placement is v")
    return Shape(stages, chunks, microbatches, placement)


def plan_of(config: PipelineConfig, shape: Shape, costs: Costs | None = None) -> Plan:
    """The plan of a shape.

    Where the policy may deviate from it, a backward that the order leaves whole is split, too (``pipeline.split``).

    Raises:
        ValueError: if the order is not known, is not for this shape, or needs a split that is turned off.
    """
    name = order_name(config, shape.chunks)
    if name.endswith(".csv"):
        plan = read_torch_csv(name)
        if plan.shape != shape:
            raise ValueError(f"{name} is for {_spell(plan.shape)}, and the job has {_spell(shape)}")
    else:
        plan = make_plan(name, shape, costs)
    if plan.split and not config.split:
        raise ValueError(f"order {plan.name} splits the backward, and pipeline.split is off: choose another order")
    return split_plan(plan) if config.split and config.policy in _DEVIATING and not plan.split else plan


def _spell(shape: Shape) -> str:
    return (
        f"{shape.stages} stages of {shape.chunks} chunks (placement {shape.placement}), "
        f"{shape.microbatches} microbatches"
    )


def split_plan(plan: Plan) -> Plan:
    """The plan with each BW as B and then W, so that W may be left for later."""
    rows = tuple(tuple(part for action in row for part in _parts(action)) for row in plan.actions)
    return replace(plan, actions=rows)


def _parts(action: Action) -> tuple[Action, ...]:
    if action.work is not Work.BW:
        return (action,)
    return action._replace(work=Work.B), action._replace(work=Work.W)


def policy_of(config: PipelineConfig) -> Policy:
    """The policy; ``off``, where a pipeline is asked for by other means, is ``static``."""
    name = "static" if config.policy == "off" else config.policy
    if name in ("hint", "auto"):
        return make_policy(name, theta=config.theta, lookahead=config.lookahead)
    return make_policy(name)


def guard_of(config: PipelineConfig, plan: Plan, activation: Sequence[int] | None = None) -> MemoryGuard | None:
    """The guard of a stage; None where nothing can be said yet.

    Args:
        config: With the cap; empty: what the plan needs on the stage that needs most, and one microbatch more.
        plan: Of the iteration.
        activation: Bytes that a microbatch holds on this stage, by chunk; None: not measured yet. A cap in bytes
            waits for that.

    Raises:
        ValueError: if the cap is no cap, or below one microbatch.
    """
    chunks = plan.shape.chunks
    if not config.memory_cap:
        cap = plan.peak() + _ROOM if config.policy in _DEVIATING else None
        return MemoryGuard(cap, [1 / chunks] * chunks)
    cap, is_bytes = parse_cap(config.memory_cap)
    if not is_bytes:
        return MemoryGuard(cap, [1 / chunks] * chunks)
    return None if activation is None else MemoryGuard(cap, activation)
