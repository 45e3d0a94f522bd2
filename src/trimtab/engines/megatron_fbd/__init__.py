"""Forwards and backwards of stock Megatron-Core on processes of their own: :func:`join`, and a schedule to call."""

from __future__ import annotations

from trimtab.engines.megatron_fbd.job import FbdJob, join
from trimtab.engines.megatron_fbd.settings import Settings
from trimtab.fbd.ranks import Role

__all__ = ["FbdJob", "Role", "Settings", "join"]
