"""Permanent taps are placed in whatever is given to torch.compile, just before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from trimtab.engines.patches import COMPILE_PATCH, Patches
from trimtab.engines.plain.scope.naming import spots_to_place
from trimtab.record.complain import failed
from trimtab.scope.taps.placing import CompiledTaps

_IN_CHECKPOINTS: Final = "skip_fwd_side_effects_in_bwd_under_checkpoint"
"""Setting of torch._dynamo that lets a function mode be entered in a checkpoint, which it would refuse to compile.
Where there is none, attention's tensors get no taps, as there may be checkpoints in what is compiled."""


class CompilePatch:
    """The patch of torch.compile, by way of which ``Module.compile`` goes, too."""

    def __init__(self, taps: CompiledTaps) -> None:
        self._taps = taps
        self._patches = Patches()
        self._attention = hasattr(_dynamo_config(), _IN_CHECKPOINTS)

    def install(self) -> None:
        """Raises :class:`trimtab.engines.patches.PatchError` where it cannot be."""
        self._patches.apply(COMPILE_PATCH, self._around)
        if self._attention:
            self._patches.set(COMPILE_PATCH.name, _dynamo_config(), _IN_CHECKPOINTS, True)

    def remove(self) -> None:
        """Put torch's own back. What has been compiled keeps its taps, which do nothing."""
        self._patches.undo()

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            self._place(args[0] if args else kwargs.get("model"))
            return original(*args, **kwargs)

        return compile

    def _place(self, given: Any) -> None:
        """In a module, or in that whose method is given."""
        owner = given if isinstance(given, nn.Module) else getattr(given, "__self__", None)
        if not isinstance(owner, nn.Module):
            return
        try:
            spots = spots_to_place(owner)
            self._taps.place(spots if self._attention else [spot for spot in spots if spot.side in ("input", "output")])
        except Exception as error:
            failed(f"{type(owner).__name__} is compiled without taps ({type(error).__name__}: {error})")


def _dynamo_config() -> Any:
    import torch._dynamo.config

    return torch._dynamo.config
