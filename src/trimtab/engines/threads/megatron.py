"""Megatron-Core's globals for each thread: parallel_state, random generators of model parallel regions, the buffer that
all-gathered activations share, the calculator of microbatches."""

from __future__ import annotations

import sys
from typing import Any, Final

from trimtab.engines.patches import GLOBALS_PATCH

_PARALLEL_STATE: Final = "megatron.core.parallel_state"
_NAMED: Final = {
    "megatron.core.tensor_parallel.random": {
        "_CUDA_RNG_STATE_TRACKER": None,
        "_CUDA_RNG_STATE_TRACKER_INITIALIZED": False,
    },
    "megatron.core.num_microbatches_calculator": {"_GLOBAL_NUM_MICROBATCHES_CALCULATOR": None},
    "megatron.core.rerun_state_machine": {"_GLOBAL_RERUN_STATE_MACHINE": None},
}
"""Variables of modules other than parallel_state, and what they are before something is initialised."""

State = dict[str, dict[str, Any]]


class MegatronGlobals:
    """What :class:`~trimtab.fbd.threads.turns.Turns` switch for it. Threads begin with nothing initialised."""

    def __init__(self) -> None:
        """Imports Megatron-Core's parallel_state.

        Raises:
            ValueError: this Megatron-Core is not supported, or the process itself has made its groups.
        """
        problem = GLOBALS_PATCH.problem()
        if problem is not None:
            raise ValueError(f"threads as ranks: {problem}")
        from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine  # noqa: F401
        from megatron.core.tensor_parallel import random  # noqa: F401

        if parallel_state._TENSOR_MODEL_PARALLEL_GROUP is not None:
            raise ValueError("this process has initialised Megatron-Core's groups; threads have each to make their own")
        known = vars(parallel_state)
        self._variables = [
            name
            for name, value in known.items()
            if name.startswith("_") and not name.startswith("__") and not callable(value)
        ]

    def fresh(self, member: int) -> State:  # noqa: ARG002 (the same for all)
        """See :class:`~trimtab.fbd.threads.turns.Switched`."""
        state = vars(sys.modules[_PARALLEL_STATE])
        before = {name: _anew(state[name]) for name in self._variables}
        others = {
            module: {name: value for name, value in names.items() if hasattr(sys.modules[module], name)}
            for module, names in _NAMED.items()
        }
        return {_PARALLEL_STATE: before, **others}

    def swap(self, state: State) -> State:
        """See :class:`~trimtab.fbd.threads.turns.Switched`."""
        before: State = {}
        for module, values in state.items():
            held = vars(sys.modules[module])
            before[module] = {name: held[name] for name in values}
            held.update(values)
        return before


def _anew(value: Any) -> Any:
    """A container of its own, as a thread may write into it."""
    return value.copy() if isinstance(value, (dict, list, set)) else value
