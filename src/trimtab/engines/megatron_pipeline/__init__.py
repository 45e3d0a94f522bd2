"""Dynamic pipeline schedules for stock Megatron-Core: a drop-in for what ``get_forward_backward_func()`` returns."""

from __future__ import annotations

from trimtab.engines.megatron_pipeline.schedule import MegatronPipeline, forward_backward_func

__all__ = ["MegatronPipeline", "forward_backward_func"]
