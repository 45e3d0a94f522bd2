"""Plain PyTorch: DistributedDataParallel, fully_shard, DTensor, torch.distributed.pipelining, torch.compile."""

from trimtab.engines.plain.engine import PlainEngine

__all__ = ["PlainEngine"]
