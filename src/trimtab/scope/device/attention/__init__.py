"""Attention maps, exact, without the whole matrix and whatever kernel the model itself uses."""

from trimtab.scope.device.attention.measure import AttentionState, check_attention, measure_attention

__all__ = ["AttentionState", "check_attention", "measure_attention"]
