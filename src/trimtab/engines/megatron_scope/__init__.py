"""What a Megatron-Core model offers to scope: its tensors by name, and how they are spread over the ranks."""

from trimtab.engines.megatron_scope.optimizer import megatron_optimizer_points
from trimtab.engines.megatron_scope.points import megatron_points

__all__ = ["megatron_optimizer_points", "megatron_points"]
