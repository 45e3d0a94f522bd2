"""Where this rank stands, and which part of a tensor it therefore holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trimtab.scope.names import Shard

Axis = tuple[int, int]
"""This rank's index along a parallel axis, and how many there are."""
_ALONE: Axis = (0, 1)


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's place in the layout."""

    tp: Axis = _ALONE
    cp: Axis = _ALONE
    dp: Axis = _ALONE
    """Without context parallelism: other data."""
    ep: Axis = _ALONE
    expert_tp: Axis = _ALONE
    expert_dp: Axis = _ALONE

    @property
    def data(self) -> Axis:
        """Among the ranks that hold the same parameters: data and context parallel ones."""
        return self.dp[0] * self.cp[1] + self.cp[0], self.dp[1] * self.cp[1]

    def columns(self) -> tuple[Shard, int]:
        """A part of each tensor parallel rank's own, such as heads: its shard and replica."""
        return shard(("tp", *self.tp), ("cp", *self.cp), ("dp", *self.dp)), 0

    def tokens(self, sequence_parallel: bool) -> tuple[Shard, int]:
        """Hidden states between the parallel regions: cut along the sequence, or the same on tensor parallel ranks."""
        if sequence_parallel:
            return shard(("sp", *self.tp), ("cp", *self.cp), ("dp", *self.dp)), 0
        return shard(("cp", *self.cp), ("dp", *self.dp)), self.tp[0]

    def groups(self, total: int) -> tuple[Shard, int, int]:
        """Heads of keys and values, of which there may be fewer than ranks; also the number of the first."""
        rank, size = self.tp
        if total >= size:
            return *self.columns(), rank * (total // size)
        each = size // total  # ranks that hold the same
        return shard(("tp", rank // each, total), ("cp", *self.cp), ("dp", *self.dp)), rank % each, rank // each


def find_place() -> Place:
    """From Megatron-Core's groups; alone where there are none."""
    from megatron.core import parallel_state

    state: Any = parallel_state
    if not state.model_parallel_is_initialized():
        return Place()
    return Place(
        tp=(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        cp=(state.get_context_parallel_rank(), state.get_context_parallel_world_size()),
        dp=(state.get_data_parallel_rank(), state.get_data_parallel_world_size()),
        ep=(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
        expert_tp=(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
        expert_dp=(state.get_expert_data_parallel_rank(), state.get_expert_data_parallel_world_size()),
    )


def shard(*axes: tuple[str, int, int]) -> Shard:
    """Axes along which there is more than one part."""
    return tuple(axis for axis in axes if axis[2] > 1)


def unwrap(model: Any) -> Any:
    """The model inside its wrappers for data parallelism and mixed precision."""
    while getattr(model, "module", None) is not None:
        model = model.module
    return model
