"""Configuration: one tree of frozen dataclasses, filled from a TOML file, then the environment, then arguments.

A setting ``record.dir`` is ``[record] dir = "..."`` in the file, ``TRIMTAB_RECORD_DIR`` in the environment
and ``record.dir=...`` as an argument; the later source wins. Sections nest: ``record.window.steps`` is
``[record.window] steps = ...`` and ``TRIMTAB_RECORD_WINDOW_STEPS``. A job must not die of a typing error in its
configuration, so :func:`load` returns what it could read together with one line for each problem; commands
that watch no job turn these into an error.
"""

from __future__ import annotations

from trimtab.config.loading import ENVIRONMENT_PREFIX, Loaded, load
from trimtab.config.tree import (
    MOST_WINDOW_STEPS,
    Config,
    ControlConfig,
    EmulateConfig,
    EmulatePipelineConfig,
    EngineConfig,
    FaultsConfig,
    Granularity,
    LiveConfig,
    PipelineConfig,
    RecordConfig,
    ScanConfig,
    ScopeConfig,
    TransportConfig,
    WindowConfig,
    rank_ranges,
)

__all__ = [
    "ENVIRONMENT_PREFIX",
    "MOST_WINDOW_STEPS",
    "Config",
    "ControlConfig",
    "EmulateConfig",
    "EmulatePipelineConfig",
    "EngineConfig",
    "FaultsConfig",
    "Granularity",
    "LiveConfig",
    "Loaded",
    "PipelineConfig",
    "RecordConfig",
    "ScanConfig",
    "ScopeConfig",
    "TransportConfig",
    "WindowConfig",
    "load",
    "rank_ranges",
]
