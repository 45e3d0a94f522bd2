"""What a plain PyTorch model offers to scope: its tensors by name, and how they are spread over the ranks."""

from trimtab.engines.plain.scope.points import plain_points
from trimtab.engines.plain.scope.state import plain_optimizer_points

__all__ = ["plain_optimizer_points", "plain_points"]
