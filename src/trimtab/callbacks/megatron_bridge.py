"""Megatron-Bridge: ``pretrain(config, forward_step, callbacks=[TrimtabCallback("trimtab.toml")])``.

Import ``megatron.bridge`` before this module. What Megatron-Core runs (steps, microbatches, layers, the optimizer,
checkpoints) is recorded as in any job of its; the callback adds where evaluation begins and ends.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from trimtab.callbacks.held import HeldSession, careful
from trimtab.config import Config
from trimtab.events import Kind


def _base() -> Any:
    if "megatron.bridge" not in sys.modules:
        raise ImportError("import megatron.bridge before trimtab.callbacks.megatron_bridge")
    return importlib.import_module("megatron.bridge.training.callbacks").Callback


class TrimtabCallback(_base()):
    """Attaches trimtab to the training of a ``pretrain`` or ``finetune``, and tells it of evaluations."""

    def __init__(self, config: str | os.PathLike[str] | Config | None = None, **overrides: Any) -> None:
        """Attach, with the arguments of :func:`trimtab.attach`.

        Here and not in a hook: training picks its schedule before it calls ``on_train_start``, and a callback that has
        ``on_data_init_start``, the only earlier one, is refused together with ``num_epochs``. Where trimtab is attached
        already the arguments are ignored, and the callback leaves that session attached.
        """
        self.held = HeldSession(config, overrides)
        self.held.attach()

    @careful
    def on_train_step_start(self, context: Any) -> None:
        """A step begins; Megatron-Core's schedule tells it better where that is hooked, and the session knows."""
        del context
        if self.held.session is not None:
            self.held.session.step()

    @careful
    def on_train_end(self, context: Any) -> None:
        """Detach. What comes after (a last checkpoint, a last evaluation) is no training."""
        del context
        self.held.detach()

    @careful
    def on_eval_start(self, context: Any) -> None:
        """Evaluation begins."""
        del context
        self.held.begin(Kind.EVALUATION)

    @careful
    def on_eval_end(self, context: Any) -> None:
        """Evaluation ends."""
        del context
        self.held.end(Kind.EVALUATION, "validation")

    @careful
    def on_test_start(self, context: Any) -> None:
        """Evaluation of the test data begins."""
        del context
        self.held.begin(Kind.EVALUATION)

    @careful
    def on_test_end(self, context: Any) -> None:
        """It ends."""
        del context
        self.held.end(Kind.EVALUATION, "test")
